"""The batch renderer: images of many views of many scenes in one call, written in place."""

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
    KernelVariant,
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
"""Possible dtypes of each kind of image."""

WRITTEN_IN_PLACE = ("position", "rotation", "slope", "scene", "env", "hidden")
"""Tensors of a renderer whose addresses are fixed: assigning to one copies into it."""

SKY = (0.62, 0.74, 0.88)
"""RGB color of rays without a hit."""


class Renderer:
    """Renders `views` images at once. Write `position`, `rotation`, `slope` and `scene`, or pass poses; call `render`.

    A camera without rotation faces along x; y is to its left, z up (meters). Depth is measured along the view axis.

    | output | channels | dtypes | values |
    |---|---|---|---|
    | depth | 1 | float32, float16, uint8 | meters, at most `max_depth`; uint8: 255 is `max_depth` |
    | rgb | 3 | uint8, float16, float32 | uint8: 0 to 255; else 0 to 1 |
    | semantic | 1 | int32, uint8 | index into the scene's labels, 0 for none |
    | instance | 1 | int32, uint8 | number of the object, 0 for none |
    | normal | 3 | float32, float16, uint8 | unit vector towards the camera's side, world axes; uint8: 128 is 0 |
    """

    def __init__(
        self,
        scenes: SceneMemory | Sequence[Scene | PackedScene | str] | Scene | PackedScene | str,
        views: int,
        size: tuple[int, int] = (64, 64),
        outputs: Sequence[str] | Mapping[str, torch.dtype] | str = ("depth", "rgb"),
        *,
        hfov: float = 90.0,
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
        """
        Args:
            scenes: scene memory, or scenes to load.
            views: number of images.
            size: width and height [pixels].
            outputs: images to render, by name, with dtypes if a mapping.
            hfov: horizontal field of view [degrees].
            far: largest distance of a hit [m].
            max_depth: largest depth value [m] (None: `far`).
            light: shade colors by the surface's direction.
            movers: moving objects.
            device: where scenes are loaded.
            own_images: allocate `images`; if False, only `plan_into` renders.
            scene: int32 [views], used instead of an own tensor.
            position: float32 [views, 3], used instead of an own tensor.
            rotation: float32 [views, 4], used instead of an own tensor.
        """
        init_warp()
        self.memory = scenes if isinstance(scenes, SceneMemory) else _load(scenes, device)
        self.device = self.memory.device
        self.num_views, (self.width, self.height) = views, size
        names = [outputs] if isinstance(outputs, str) else outputs
        kinds = (
            dict(names)
            if isinstance(names, Mapping)
            else {name: DEFAULT_TYPES.get(name, torch.float32) for name in names}
        )
        check_settings(views, size, kinds, hfov, far, max_depth)
        # With depth alone, hits beyond its maximum are not needed.
        self.max_depth = far if max_depth is None else max_depth
        self.far = min(far, self.max_depth) if set(kinds) == {"depth"} else far
        self.movers = movers

        def make(*shape: int, dtype: torch.dtype = torch.float32, value: float = 0) -> torch.Tensor:
            return torch.full((views, *shape), value, dtype=dtype, device=self.device)

        self.position = make(3) if position is None else position
        """float32 [views, 3]: positions of the cameras [m]."""
        self.rotation = make(4) if rotation is None else rotation
        """float32 [views, 4]: orientations of the cameras, quaternions x, y, z, w."""
        if rotation is None:
            self.rotation[:, 3] = 1.0
        self.slope = make(value=math.tan(math.radians(hfov) / 2))
        """float32 [views]: tangent of half the horizontal field of view."""
        self.scene = make(dtype=torch.int32) if scene is None else scene
        """int32 [views]: row of the scene memory."""
        self.env = torch.arange(views, dtype=torch.int32, device=self.device)
        """int32 [views]: env whose moving objects are visible."""
        self.hidden = make(dtype=torch.int32, value=-1)
        """int32 [views]: index of the moving object that is invisible (the agent's body), or -1."""
        if movers is not None and len(movers.kind) < views:
            self.env %= len(movers.kind)
        wanted = kinds.items() if own_images else ()
        self.images = {name: make(self.height, self.width, CHANNELS[name], dtype=kind) for name, kind in wanted}
        """By name, images [views, height, width, channels], which every `render` overwrites."""
        self._visible = make(1 + (movers.kind.shape[1] if movers else 0), dtype=torch.int32)
        self._variant = KernelVariant(
            self.width, self.height, tuple(sorted(kinds.items())), light, movers is not None, False
        )
        self._plan = self.plan_into(self.images) if self.images else None

    def __setattr__(self, name: str, value: Any) -> None:
        # Kernels are bound to the addresses of these tensors.
        if name in WRITTEN_IN_PLACE and hasattr(self, name):
            getattr(self, name).copy_(value)
        else:
            super().__setattr__(name, value)

    def plan_into(self, images: dict[str, torch.Tensor], only: torch.Tensor | None = None) -> Plan:
        """A launch plan that renders into other tensors.

        Args:
            images: by name, tensors [views, height, width, channels], which may be slices of larger ones.
            only: bool [views], views to render; the others are left unchanged (None: all).

        Returns:
            The plan; calling it renders.
        """

        def view(tensor: torch.Tensor, dtype: Any) -> wp.array:
            return wp.from_torch(tensor, dtype=dtype)

        words, table = view(self.memory.words, wp.vec4), view(self.memory.table, wp.int32)
        position, rotation = view(self.position, wp.vec3), view(self.rotation, wp.quat)
        slope, env, visible = view(self.slope, wp.float32), view(self.env, wp.int32), view(self._visible, wp.int32)
        movers = self.movers or Movers.make(1, 1, self.device)
        kind, mover_position, size = (
            view(movers.kind, wp.int32),
            view(movers.position, wp.vec3),
            view(movers.size, wp.vec3),
        )
        targets = []
        for name in CHANNELS:
            dtype = images[name].dtype if name in images else DEFAULT_TYPES[name]
            image = images.get(name, torch.empty(1, 1, 1, 1, dtype=dtype, device=self.device))
            targets.append(view(image, WARP_TYPES[dtype]))
        plan = Plan(self.device, self.num_views)
        if self.movers:
            ratio = self.height / self.width
            inputs = [table, position, rotation, slope, ratio, self.far, env, view(self.hidden, wp.int32)]
            plan.add_kernel(
                find_movers, self.num_views, [*inputs, kind, mover_position, size, visible], unit=1, block=BLOCK
            )
        variant = replace(self._variant, masked=only is not None)
        mask = torch.ones(1, dtype=torch.bool, device=self.device) if only is None else only
        inputs = [words, table, position, rotation, slope, view(self.scene, wp.int32), view(mask, wp.bool)]
        inputs += [
            self.far,
            self.max_depth,
            wp.vec3(*SKY),
            env,
            visible,
            kind,
            mover_position,
            view(movers.rotation, wp.quat),
            size,
        ]
        inputs += [view(movers.color, wp.vec3), view(movers.semantic, wp.int32), view(movers.instance, wp.int32)]
        count = self.num_views * variant.rays_per_view
        plan.add_kernel(render_kernel(variant), count, [*inputs, *targets], unit=variant.rays_per_view, block=BLOCK)
        return plan

    def render(self, poses: torch.Tensor | None = None, scene: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Render all views.

        Args:
            poses: float32 [views, 7], positions and quaternions (None: `position` and `rotation`).
            scene: int [views], rows of the scene memory (None: unchanged).

        Returns:
            The images, by name; the same tensors in every call.
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
            raise ShoalError("This renderer was made with own_images=False; use plan_into.")
        self._plan()
        return self.images


def heading(yaw: torch.Tensor, pitch: float = 0.0) -> torch.Tensor:
    """Quaternions [..., 4] of cameras that face along `yaw` (from x towards y) and up by `pitch`, in radians."""
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
    views: int, size: tuple[int, int], kinds: Any, hfov: float, far: float, max_depth: float | None
) -> None:
    """Raise a ShoalError for settings that cannot be rendered."""
    if views < 1 or min(size) < 1:
        raise ShoalError(f"A renderer needs at least one view of one pixel, got {views} of {size[0]} x {size[1]}.")
    if views * KernelVariant(*size, (), False, False, False).rays_per_view >= 2**31:
        raise ShoalError(f"{views} views of {size[0]} x {size[1]} are more than 2^31 pixels; render fewer at a time.")
    for name, kind in kinds.items():
        if name not in CHANNELS:
            raise unknown("output", name, CHANNELS)
        if kind not in KINDS[name]:
            raise ShoalError(f"{name} images cannot be {kind}; choose one of {', '.join(map(str, KINDS[name]))}.")
    if not kinds:
        raise ShoalError(f"A renderer needs at least one output: {', '.join(CHANNELS)}.")
    if not 1.0 <= hfov <= 170.0:
        raise ShoalError(f"The horizontal field of view must be between 1 and 170 degrees, got {hfov}.")
    limit = far if max_depth is None else max_depth
    if not (0 < far < math.inf and 0 < limit < math.inf):
        raise ShoalError(f"far and max_depth must be finite and above 0, got {far} and {max_depth}.")
    if kinds.get("depth") == torch.float16 and limit > torch.finfo(torch.float16).max:
        raise ShoalError(f"Depths up to {limit:g} m do not fit in float16; use a max_depth of at most 65504.")
