"""NavWorld: what navigation tasks share: scenes, ground, movement, images and episodes. A task adds a short file."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import warp as wp

from shoal.core.kernel_world import KernelWorld
from shoal.core.kernels import Whole
from shoal.core.launch import Plan
from shoal.core.random import Random, integer, uniform
from shoal.core.spaces import Box, Discrete
from shoal.core.store import Field
from shoal.core.world import Group
from shoal.nav.geodesic import distance_at
from shoal.nav.ground import Body
from shoal.nav.site import Site
from shoal.nav.walk import Ground, cell_middle, walk
from shoal.render.renderer import Renderer

STOP, FORWARD, LEFT, RIGHT = 0, 1, 2, 3

TRIES = 64
"""Places that are tried for the start of an episode before a less good one is taken."""


@dataclass(frozen=True)
class NavConfig:
    """Settings that all navigation tasks have."""

    scenes: str = "house:train"
    """Scenes to train in: house:train, house:0-99, a file or a folder of them; several with commas."""
    test_scenes: str = "house:test"
    """Scenes to evaluate and record in."""
    detail: float = 1.0
    """Detail of procedural houses."""
    up: Literal["auto", "y", "z"] = "auto"
    """Upward axis of mesh files."""
    scale: float = 1.0
    """Metres per unit of mesh files."""
    resident: int = 16
    """Scenes on the device at a time."""
    swap: int = 8
    """Rollouts between two new scenes at least; 0 keeps the first ones."""
    goals: int = 64
    """Goals per resident scene, each with its own field of distances."""
    memory_limit: float = 0.0
    """Gigabytes of device memory for scenes (0: as the first ones need)."""
    image: Literal["depth", "rgb", "none"] = "depth"
    """What the agent sees; "none" is the blind agent."""
    size: int = 64
    """Pixels of the image a side."""
    max_steps: int = 500
    """Steps before an episode is truncated."""
    forward: float = 0.25
    """Metres of a step."""
    turn: float = 10.0
    """Degrees of a turn."""
    slide: bool = True
    """Slide along what is in the way, instead of stopping."""
    eye: float = 1.25
    """Metres of the camera above the floor."""
    fov: float = 90.0
    """Horizontal field of view, degrees."""
    max_depth: float = 10.0
    """Metres: farther away is all the same."""
    radius: float = 0.1
    """Metres from the agent's middle to obstacles, at least."""
    height: float = 1.5
    """Metres that the agent needs above the floor."""
    climb: float = 0.2
    """Metres of the highest step."""
    cell: float = 0.1
    """Metres of a cell of the ground."""
    min_distance: float = 1.0
    """Metres from start to goal at least, along the floor."""
    max_distance: float = 30.0
    """Metres at most."""
    playing: bool = False
    """Evaluate: the test scenes instead of the training scenes."""


class NavWorld(KernelWorld):
    """Base of navigation tasks: STOP, FORWARD, LEFT or RIGHT in scenes, seen through a camera.

    A task gives `step` (its first function should be `move`), `extras` (what the network sees beside the image, as
    (name, size) pairs) and `observe` functions that write them behind the image.
    """

    Config = NavConfig
    resumable = False
    extras: ClassVar[tuple[tuple[str, int], ...]] = (("previous", 5),)

    state = dict(
        row=Field(int, doc="scene"),
        place=Field(wp.vec3, unit="m", doc="on the floor"),
        yaw=Field(float, unit="rad", doc="from x towards y"),
        goal_slot=Field(int),
        goal=Field(wp.vec3, unit="m"),
        start_distance=Field(float, unit="m", doc="along the floor, when the episode began"),
        distance=Field(float, unit="m", doc="along the floor, now"),
        previous=Field(int, doc="the last action + 1; 0 at the start"),
        walked=Field(float, unit="m", doc="length of the path so far"),
        collisions=Field(float, doc="steps in which something was in the way"),
        success=Field(float, doc="1 if the episode succeeded"),
        spl=Field(float, doc="success weighted by path length"),
        soft_spl=Field(float, doc="progress weighted by path length"),
    )

    @staticmethod
    def parts(config: Any, extras: tuple[tuple[str, int], ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The parts of an observation: the image, then the extras."""
        image = {"depth": 1, "rgb": 3, "none": 0}[config.image]
        shown = ((config.image, (config.size, config.size, image)),) if image else ()
        return (*shown, *((name, (size,)) for name, size in extras))

    @classmethod
    def groups_of(cls, config: Any) -> tuple[Group, ...]:
        parts = cls.parts(config, cls.extras)
        total = sum(math.prod(shape) for _, shape in parts)
        kinds = {name: kind for name, kind in (("depth", "depth"), ("previous", "choice")) if name in dict(parts)}
        box = Box((total,), dtype=torch.float16, parts=parts, kinds=kinds)
        return (Group("agent", observation=box, action=Discrete(4)),)

    @classmethod
    def playing(cls, config: Any) -> Any:
        return replace(config, playing=True)

    shown = playing

    def __init__(self, num_envs: int, device: str | torch.device = "cpu", config: Any = None):
        self._site: Site | None = None
        super().__init__(num_envs, device, config)

    # --- scenes ----------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        super()._allocate()
        kinds = dict(field=(torch.int16, (1, 1, 1)), goal_places=(torch.float32, (1, 1, 3)))
        kinds |= dict(standing=(torch.int32, (1, 1)), standing_count=(torch.int32, (1,)))
        kinds |= dict(choice=(torch.int32, (1,)), choices=(torch.int32, (1,)))
        for name, (dtype, shape) in kinds.items():
            self._tables[name] = Whole(torch.zeros(shape, dtype=dtype, device=self.device))

    def _config_values(self) -> dict[str, Any]:
        values = super()._config_values()
        values["ground"] = Ground()
        values["turn"] = math.radians(self.config.turn)
        values["first_extra"] = sum(math.prod(s) for _, s in self.parts(self.config, ()))
        return values

    def _open(self, seed: int) -> None:
        """Load the first scenes and find their ground."""
        config = self.config
        sources = [s.strip() for s in (config.test_scenes if config.playing else config.scenes).split(",")]
        if config.detail != 1.0:
            sources = [f"{s}@{config.detail:g}" if s.startswith("house:") and "@" not in s else s for s in sources]
        self._site = Site(
            sources,
            self.num_envs,
            config.resident,
            config.goals,
            self.device,
            seed,
            config.swap,
            Body(config.radius, config.height, config.climb),
            config.cell,
            int(config.memory_limit * 1e9) or None,
            config.up,
            config.scale,
        )
        self._tables.update(self._site.tables())
        self._settings["ground"] = self._site.ground.ground
        self._plans.clear()
        self._site.pool.row = self.store.row
        self._renderer = None
        if config.image != "none":
            memory = self._site.pool.memory
            self._renderer = Renderer(
                memory, self.num_envs, (config.size,) * 2, {config.image: torch.float16}, fov=config.fov,
                max_depth=config.max_depth, own_images=False, scene=self.store.row,
            )  # fmt: skip

    def restart(self, mask: torch.Tensor) -> None:
        if self._site is None:  # the first episodes: `reset` has set the seed
            self._open(int(self.store.seed[0]))
        super().restart(mask)

    def tend(self) -> None:
        if self._site is not None:
            self._site.poll()

    def close(self) -> None:
        super().close()
        if self._site is not None:
            self._site.close()
            self._site = None

    # --- images ----------------------------------------------------------------------------------------------------

    def _author(self, stage: str, when: str, renames: dict[str, str] | None = None) -> list:
        calls = super()._author(stage, when, renames)
        if stage == "observe" and self.config.image != "none":
            target = (renames or {}).get("observation", "observation")
            plans: dict[int, Plan] = {}
            calls.append(lambda arrays: self._render(getattr(arrays, target), when, plans))
        return calls

    def _render(self, observation: torch.Tensor, when: str, plans: dict[int, Plan]) -> None:
        """Render into the first part of an observation, for all envs or for those whose flag `when` is set."""
        renderer, config = self._renderer, self.config
        assert renderer is not None
        if observation.data_ptr() not in plans:
            channels = 1 if config.image == "depth" else 3
            image = observation[:, 0, : config.size**2 * channels].unflatten(1, (config.size, config.size, channels))
            plans[observation.data_ptr()] = renderer.plan_into(
                {config.image: image}, self.store[when] if when else None
            )
        place, half = self.store.place, self.store.yaw * 0.5
        renderer.position.copy_(place)
        renderer.position[:, 2] += config.eye
        renderer.rotation[:, 2] = half.sin()
        renderer.rotation[:, 3] = half.cos()
        plans[observation.data_ptr()]()


# --- functions of tasks --------------------------------------------------------------------------------------------


@wp.func
def move(
    env: int,
    action: wp.array(dtype=int),
    row: wp.array(dtype=int),
    place: wp.array(dtype=wp.vec3),
    yaw: wp.array(dtype=float),
    previous: wp.array(dtype=int),
    walked: wp.array(dtype=float),
    collisions: wp.array(dtype=float),
    ground: Ground,
    forward: float,
    turn: float,
    slide: bool,
):
    """Walk or turn."""
    a = action[env]
    if a == FORWARD:
        along = wp.vec2(wp.cos(yaw[env]), wp.sin(yaw[env])) * forward
        done = walk(ground, row[env], place[env], along, slide)
        walked[env] = walked[env] + wp.length(done.place - place[env])
        place[env] = done.place
        if done.blocked:
            collisions[env] = collisions[env] + 1.0
    elif a == LEFT:
        yaw[env] = yaw[env] + turn
    elif a == RIGHT:
        yaw[env] = yaw[env] - turn
    previous[env] = a + 1


@wp.func
def begin_episode(
    env: int,
    rng: Random,
    row: wp.array(dtype=int),
    place: wp.array(dtype=wp.vec3),
    yaw: wp.array(dtype=float),
    goal_slot: wp.array(dtype=int),
    goal: wp.array(dtype=wp.vec3),
    start_distance: wp.array(dtype=float),
    distance: wp.array(dtype=float),
    previous: wp.array(dtype=int),
    walked: wp.array(dtype=float),
    collisions: wp.array(dtype=float),
    success: wp.array(dtype=float),
    spl: wp.array(dtype=float),
    soft_spl: wp.array(dtype=float),
    ground: Ground,
    field: wp.array3d(dtype=wp.uint16),
    goal_places: wp.array2d(dtype=wp.vec3),
    standing: wp.array2d(dtype=int),
    standing_count: wp.array(dtype=int),
    choice: wp.array(dtype=int),
    choices: wp.array(dtype=int),
    min_distance: float,
    max_distance: float,
):
    """A scene, a goal and a start that Habitat's rules allow: not too near, not too far, and rarely straight ahead."""
    r = choice[integer(rng, 0, choices[0])]
    slot = int(0)
    start = wp.vec3()
    far = float(0.0)
    best = float(-1.0)
    for k in range(TRIES):
        if best < 2.0:
            s = integer(rng, 1 + 3 * k, goal_places.shape[1])
            i = standing[r, integer(rng, 2 + 3 * k, standing_count[r])]
            here = cell_middle(ground, r, i)
            target = goal_places[r, s]
            d = distance_at(ground, r, field, s, target, here)
            straight = wp.length(target - here)
            fits = d >= min_distance and d <= max_distance and wp.abs(target[2] - here[2]) <= 0.5
            ratio = d / wp.max(straight, 0.01)
            keep = 20.0 * (ratio - 0.98) * (ratio - 0.98)
            good = float(0.0)
            if fits:
                good = 1.0
                if ratio >= 1.1 or uniform(rng, 3 + 3 * k, 0.0, 1.0) < keep:
                    good = 2.0
            elif d < 1.0e6:
                good = 0.5
            if good > best:
                best = good
                slot = s
                start = here
                far = d
    row[env] = r
    goal_slot[env] = slot
    goal[env] = goal_places[r, slot]
    place[env] = start
    yaw[env] = uniform(rng, 1 + 3 * TRIES, -3.1415927, 3.1415927)
    start_distance[env] = far
    distance[env] = far
    previous[env] = 0
    walked[env] = 0.0
    collisions[env] = 0.0
    success[env] = 0.0
    spl[env] = 0.0
    soft_spl[env] = 0.0


@wp.func
def show_previous(
    env: int,
    previous: wp.array(dtype=int),
    first_extra: int,
    observation: wp.array2d(dtype=wp.float16),
):
    """The last action, one of five."""
    for k in range(5):
        observation[env, first_extra + k] = wp.where(previous[env] == k, wp.float16(1.0), wp.float16(0.0))
