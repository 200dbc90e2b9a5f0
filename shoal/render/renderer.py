"""The renderer: images of many views of many scenes in one call, written where the policy reads them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import warp as wp

from shoal.core.errors import ShoalError, unknown
from shoal.core.launch import Plan, init_warp
from shoal.core.store import full_device
from shoal.render.kernel import (
    BLOCK,
    CHANNELS,
    DEFAULT_TYPES,
    WARP_TYPES,
    Recipe,
    find_movers,
    render_kernel,
)
from shoal.render.movers import Movers
from shoal.scene.memory import SceneMemory
from shoal.scene.pack import PackedScene, pack_scene
from shoal.scene.scene import Scene
from shoal.scene.sources import prepare

KINDS = {
    "depth": (torch.uint8, torch.float16, torch.float32),
    "rgb": (torch.uint8, torch.float16, torch.float32),
    "semantic": (torch.uint8, torch.int32),
    "instance": (torch.uint8, torch.int32),
    "normal": (torch.uint8, torch.float16, torch.float32),
}
"""The element types that each kind of image can have; the first of RGB's, 0 to 255, is its default."""

WRITTEN_IN_PLACE = ("position", "rotation", "slope", "scene", "env", "hidden")
"""Tensors of a renderer that stay what they are; assigning to one writes into it."""

SKY = (0.62, 0.74, 0.88)


class Renderer:
    """Renders `views` images at once. Write `position`, `rotation`, `slope` and `scene`, or give poses; call `render`.

    A camera that is not turned looks along x; y is to its left, z up (meters). Depth is measured along the view axis.

    | output | channels | types | holds |
    |---|---|---|---|
    | depth | 1 | float32, float16, uint8 | meters, at most `max_depth`; as bytes 255 is `max_depth` |
    | rgb | 3 | uint8, float16, float32 | 0 to 255, or 0 to 1 |
    | semantic | 1 | int32, uint8 | index into the scene's labels, 0 for none |
    | instance | 1 | int32, uint8 | number of the object, 0 for none |
    | normal | 3 | float32, float16, uint8 | towards the camera, world axes; as bytes 128 is 0 |
    """

    def __init__(
        self,
        scenes: SceneMemory | Sequence[Scene | PackedScene | str] | Scene | PackedScene | str,
        views: int,
        size: tuple[int, int] = (64, 64),
        outputs: Sequence[str] | Mapping[str, torch.dtype] | str = ("depth", "rgb"),
        *,
        fov: float = 90.0,
        far: float = 1000.0,
        max_depth: float | None = None,
        light: bool = True,
        movers: Movers | None = None,
        device: str | torch.device = "cpu",
        own_images: bool = True,
        scene: torch.Tensor | None = None,
        position: torch.Tensor | None = None,
        rotation: torch.Tensor | None = None,
    ):
        """`scene`, `position` and `rotation` are read in place of tensors of the renderer's own."""
        init_warp()
        self.memory = scenes if isinstance(scenes, SceneMemory) else _load(scenes, device)
        self.device = self.memory.device
        self.num_views, (self.width, self.height) = views, size
        names = [outputs] if isinstance(outputs, str) else outputs
        kinds = dict(names) if isinstance(names, Mapping) else {name: DEFAULT_TYPES.get(name) for name in names}
        check_settings(views, size, kinds, fov, far, max_depth)
        # Nothing but depth is wanted: what lies beyond its greatest value need not be found.
        self.max_depth = far if max_depth is None else max_depth
        self.far = min(far, self.max_depth) if set(kinds) == {"depth"} else far
        self.movers = movers

        def make(*shape: int, dtype: torch.dtype = torch.float32, value: float = 0) -> torch.Tensor:
            return torch.full((views, *shape), value, dtype=dtype, device=self.device)

        self.position = make(3) if position is None else position
        """float32 [views, 3], meters."""
        self.rotation = make(4) if rotation is None else rotation
        """float32 [views, 4], quaternion x, y, z, w."""
        if rotation is None:
            self.rotation[:, 3] = 1.0
        self.slope = make(value=math.tan(math.radians(fov) / 2))
        """float32 [views]: tangent of half the horizontal field of view."""
        self.scene = make(dtype=torch.int32) if scene is None else scene
        """int32 [views]: row of the scene memory."""
        self.env = torch.arange(views, dtype=torch.int32, device=self.device)
        """int32 [views]: whose moving things the view sees."""
        self.hidden = make(dtype=torch.int32, value=-1)
        """int32 [views]: the one of them that it does not see (its own body), or -1."""
        if movers is not None and len(movers.kind) < views:
            self.env %= len(movers.kind)
        wanted = kinds.items() if own_images else ()
        self.images = {name: make(self.height, self.width, CHANNELS[name], dtype=kind) for name, kind in wanted}
        """[views, height, width, channels] each, written in place by every `render`."""
        self._seen = make(1 + (movers.kind.shape[1] if movers else 0), dtype=torch.int32)
        self._recipe = Recipe(self.width, self.height, tuple(sorted(kinds.items())), light, movers is not None, False)
        self._plan = self.plan_into(self.images) if self.images else None

    def __setattr__(self, name: str, value: Any) -> None:
        # Kernels are bound to the tensors: another one in their place would not be seen.
        if name in WRITTEN_IN_PLACE and hasattr(self, name):
            getattr(self, name).copy_(value)
        else:
            super().__setattr__(name, value)

    def plan_into(self, images: dict[str, torch.Tensor], only: torch.Tensor | None = None) -> Plan:
        """A plan that renders into other tensors [views, height, width, channels], which may be parts of larger ones.

        With `only`, bool [views], the other views are left as they are.
        """

        def view(tensor: torch.Tensor, dtype: Any) -> wp.array:
            return wp.from_torch(tensor, dtype=dtype)

        words, table = view(self.memory.words, wp.vec4), view(self.memory.table, wp.int32)
        position, rotation = view(self.position, wp.vec3), view(self.rotation, wp.quat)
        slope, env, seen = view(self.slope, wp.float32), view(self.env, wp.int32), view(self._seen, wp.int32)
        things = self.movers or Movers.make(1, 1, self.device)
        kind, place, size = view(things.kind, wp.int32), view(things.position, wp.vec3), view(things.size, wp.vec3)
        targets = []
        for name in CHANNELS:
            dtype = images[name].dtype if name in images else DEFAULT_TYPES[name]
            image = images.get(name, torch.empty(1, 1, 1, 1, dtype=dtype, device=self.device))
            targets.append(view(image, WARP_TYPES[dtype]))
        plan = Plan(self.device, self.num_views)
        if self.movers:
            ratio = self.height / self.width
            inputs = [table, position, rotation, slope, ratio, self.far, env, view(self.hidden, wp.int32)]
            plan.add_kernel(find_movers, self.num_views, [*inputs, kind, place, size, seen], unit=1, block=BLOCK)
        recipe = replace(self._recipe, masked=only is not None)
        mask = torch.ones(1, dtype=torch.bool, device=self.device) if only is None else only
        inputs = [words, table, position, rotation, slope, view(self.scene, wp.int32), view(mask, wp.bool)]
        inputs += [
            self.far,
            self.max_depth,
            wp.vec3(*SKY),
            env,
            seen,
            kind,
            place,
            view(things.rotation, wp.quat),
            size,
        ]
        inputs += [view(things.color, wp.vec3), view(things.semantic, wp.int32), view(things.instance, wp.int32)]
        count = self.num_views * recipe.rays_per_view
        plan.add_kernel(render_kernel(recipe), count, [*inputs, *targets], unit=recipe.rays_per_view, block=BLOCK)
        return plan

    def render(self, poses: torch.Tensor | None = None, scene: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """The images of all views. `poses` [views, 7] are positions and quaternions; without them `position` counts.

        The tensors are the same in every call and are written in place.
        """
        if poses is not None:
            if poses.shape != (self.num_views, 7):
                raise ShoalError(f"poses must have shape ({self.num_views}, 7), not {tuple(poses.shape)}.")
            self.position.copy_(poses[:, :3])
            self.rotation.copy_(poses[:, 3:])
        if scene is not None:
            if scene.shape != (self.num_views,):
                raise ShoalError(f"scene must have shape ({self.num_views},), not {tuple(scene.shape)}.")
            self.scene.copy_(scene)
        if self._plan is None:
            raise ShoalError("This renderer has no images of its own; use plan_into.")
        self._plan()
        return self.images


def heading(yaw: torch.Tensor, pitch: float = 0.0) -> torch.Tensor:
    """Quaternions [..., 4] of cameras that look towards `yaw` (radians from x towards y) and up by `pitch`."""
    half = yaw / 2
    up, flat = math.sin(-pitch / 2), math.cos(-pitch / 2)
    return torch.stack([-up * half.sin(), up * half.cos(), flat * half.sin(), flat * half.cos()], -1)


def _load(scenes: Any, device: str | torch.device) -> SceneMemory:
    several = [scenes] if isinstance(scenes, (Scene, PackedScene, str)) else list(scenes)
    if not several:
        raise ShoalError("A renderer needs at least one scene, got none.")
    device = full_device(device)
    ready = [prepare(s, device=device) if isinstance(s, str) else s for s in several]
    return SceneMemory.holding([s if isinstance(s, PackedScene) else pack_scene(s, device) for s in ready], device)


def check_settings(
    views: int, size: tuple[int, int], kinds: Any, fov: float, far: float, max_depth: float | None
) -> None:
    """Refuse what cannot be rendered, by name."""
    if views < 1 or min(size) < 1:
        raise ShoalError(f"There must be at least one view of one pixel, not {views} of {size[0]} x {size[1]}.")
    if views * Recipe(*size, (), False, False, False).rays_per_view >= 2**31:
        raise ShoalError(f"{views} views of {size[0]} x {size[1]} are more than 2^31 pixels; render them in parts.")
    for name, kind in kinds.items():
        if name not in CHANNELS:
            raise unknown("output", name, CHANNELS)
        if kind not in KINDS[name]:
            raise ShoalError(f"{name} images cannot be {kind}; choose one of {', '.join(map(str, KINDS[name]))}.")
    if not kinds:
        raise ShoalError(f"Name at least one output: {', '.join(CHANNELS)}.")
    if not 1.0 <= fov <= 170.0:
        raise ShoalError(f"A horizontal field of view of {fov} degrees cannot be shown; give 1 to 170.")
    reach = far if max_depth is None else max_depth
    if not (0 < far < math.inf and 0 < reach < math.inf):
        raise ShoalError(f"far and max_depth must be numbers greater than 0, not {far} and {max_depth}.")
    if kinds.get("depth") == torch.float16 and reach > torch.finfo(torch.float16).max:
        raise ShoalError(f"Depths up to {reach:g} m do not fit in float16; give a max_depth of 65504 or less.")
