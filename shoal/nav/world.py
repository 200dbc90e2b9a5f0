"""NavWorld: what navigation tasks share: scenes, ground, movement, images and episodes. A task adds a short file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar, Literal

import torch
import warp as wp

from shoal.core.errors import ShoalError, require
from shoal.core.kernel_world import KernelWorld, parameters_of
from shoal.core.kernels import Broadcast, Call
from shoal.core.launch import Plan, cpu_threads
from shoal.core.spaces import Box, Discrete
from shoal.core.store import Field
from shoal.core.world import Group, TrajectoryRecorder
from shoal.nav.episodes import Episodes, read_episodes
from shoal.nav.ground import Body, check_cell
from shoal.nav.maps import NavTracks, draw_env, remember_path
from shoal.nav.site import Site
from shoal.nav.stages import FORWARD, PREVIOUS, STOP, aim, begin_whole, move, show_alive
from shoal.nav.walk import Ground
from shoal.render.movers import Movers
from shoal.render.renderer import Renderer
from shoal.scene.house import BUILDINGS
from shoal.scene.pool import scene_order
from shoal.scene.prefetch import ScenePreload
from shoal.scene.sources import check_exists, expand

STOP_ODDS = 0.03
"""How likely a new policy stops, compared with each other action: about once in a hundred steps."""

OTHER_SCENES = 7919
"""From the seed of the scenes of one env to the next one's, for the first env of a process."""

GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole parts, fill the interval from 0 to 1 evenly, however many there are."""

IMAGES: dict[str, dict[str, int]] = {
    "depth": {"depth": 1},
    "rgb": {"rgb": 3},
    "rgbd": {"depth": 1, "rgb": 3},
    "none": {},
}
"""What can be seen -> images and their channels, in order."""

KINDS = {"depth": "depth", "rgb": "color", "previous": "choice"}
"""Part of an observation -> what a network is told of it."""

BODY_COLORS = ((0.90, 0.35, 0.15), (0.15, 0.45, 0.85), (0.20, 0.65, 0.30), (0.80, 0.70, 0.10))
"""Of agents as others see them, in turn."""


@dataclass(frozen=True)
class NavConfig:
    """Settings that all navigation tasks have."""

    scenes: str = "house:train"
    """Scenes to train in: house:train, cabin:0-99, a file or a folder of them; several with commas."""
    eval_scenes: str = ""
    """Scenes to evaluate and record in (none: for procedural ones others of their kind, else the same)."""
    held_out: int = 200
    """How many of those an evaluation plays in."""
    episode_files: str = ""
    """Episodes to train on, in Habitat's PointNav format: a .json.gz file or a split's folder (none: drawn)."""
    test_episode_files: str = ""
    """Episodes to evaluate on and record, likewise."""
    detail: float = 1.0
    """Detail of procedural houses."""
    up: Literal["auto", "y", "z"] = "auto"
    """Upward axis of mesh files."""
    scale: float = 1.0
    """Meters per unit of mesh files."""
    strict: bool = False
    """Refuse mesh files whose textures are missing, instead of a warning."""
    resident: int = 16
    """Scenes on the device at a time."""
    swap: int = 8
    """Rollouts between two new scenes at least; 0 keeps the first ones."""
    goals: int = 64
    """Goals per resident scene, each with its own field of distances."""
    memory_limit: float = 0.0
    """Gigabytes of device memory for scenes (0: as the first ones need)."""
    agents: int = 1
    """Agents per env; they see one another, and stand in one another's way."""
    image: Literal["depth", "rgb", "rgbd", "none"] = "depth"
    """What the agent sees; "none" is the blind agent."""
    size: int = 64
    """Pixels of the image a side."""
    max_steps: int = 500
    """Steps before an episode is truncated."""
    stagger: bool = False
    """Cut the first episodes of training short, all to different lengths, so that envs do not go in step for ever."""
    forward: float = 0.25
    """Meters of a step."""
    turn: float = 10.0
    """Degrees of a turn."""
    slide: bool = True
    """Slide along what is in the way, instead of stopping."""
    eye: float = 1.25
    """Meters of the camera above the floor."""
    fov: float = 90.0
    """Horizontal field of view, degrees."""
    max_depth: float = 10.0
    """Meters: farther away is all the same."""
    radius: float = 0.1
    """Meters from the agent's middle to obstacles, at least."""
    height: float = 1.5
    """Meters that the agent needs above the floor."""
    climb: float = 0.2
    """Meters of the highest step, and of the rise of a slope from one cell to the next."""
    cell: float = 0.1
    """Meters of a cell of the ground."""
    playing: bool = False
    """Evaluate: the test scenes instead of the training scenes."""

    def __post_init__(self):
        for name in ("resident", "goals", "agents", "size", "max_steps", "held_out"):
            require(name.replace("_", "-"), value := getattr(self, name), value >= 1, "at least 1")
        for name in ("forward", "turn", "eye", "max_depth", "radius", "height", "scale"):
            require(name.replace("_", "-"), value := getattr(self, name), 0 < value < 1e3, "above 0 and below 1000")
        for name in ("climb", "detail", "swap", "memory_limit"):
            require(name.replace("_", "-"), value := getattr(self, name), value >= 0, "0 or more")
        require("cell", self.cell, 0.01 <= self.cell <= 1.0, "between 0.01 and 1 m")
        check_cell(self.cell, self.radius)
        require("fov", self.fov, 1 <= self.fov <= 170, "between 1 and 170 degrees")
        if self.agents > 1:
            reach = 4 * self.radius
            rule = f"at most {reach:g}, twice an agent's width: agents would step over one another"
            require("forward", self.forward, self.forward <= reach, rule)
        require("height", self.height, self.height > self.climb + 0.1, "at least 0.1 m more than --climb")


class NavWorld(KernelWorld):
    """Base of navigation tasks: STOP, FORWARD, LEFT or RIGHT in scenes, seen through a camera.

    A task gives `step` (its first function should be `move`), `reset` (`enter_scene`, what draws the start,
    `keep_start`), `extras` (what the network sees beside the image, as (name, size) pairs) and `observe` functions that
    write them behind the image.
    """

    Config = NavConfig
    resumable = False
    handles_settings = ("time_limit",)
    reuse_eval_world = True
    picture_size, picture_rate = (768, 320), 10
    stops: ClassVar[bool] = True
    """Whether an agent can choose to STOP."""
    goals_shown: ClassVar[bool] = True
    """Whether an agent has a goal to go to, for pictures."""
    extras: ClassVar[tuple[tuple[str, int], ...]] = (("previous", PREVIOUS),)
    settings = dict(
        common=dict(
            rollout_steps=32,
            epochs=2,
            num_minibatches=4,
            gamma=0.99,
            ent_coef=0.01,
            ent_coef_final=0.1,
            max_grad_norm=1.0,
            eval_stochastic=True,
        ),
        cpu=dict(
            total_steps=4_500_000,
            num_envs=256,
            num_minibatches=8,
            lr=1.5e-3,
            ent_coef=0.02,
            encoder="mlp",  # of 16 x 16 pixels it learns as much from a frame as convolutions, in a third of the time
            hidden=(256, 128),
            activation="relu",
            normalize_obs=True,
            rnn="gru",
            rnn_size=128,
            compile="off",  # takes two minutes, and gains little
            threads=1,
            world=dict(
                scenes="cabin:train",
                held_out=25,
                detail=0.0,
                size=16,
                resident=8,
                goals=16,
                stagger=True,
            ),
        ),
        gpu=dict(
            total_steps=20_000_000,
            num_envs=1024,
            lr=6e-4,
            lr_warmup=0.01,
            lr_schedule="cosine",
            lr_final=0.01,
            eval_episodes=400,
            encoder="se-resnet9",
            rnn="lstm",
            rnn_size=512,
            rnn_layers=2,
            world=dict(resident=32, swap=3, stagger=True),
        ),
        r2d2=dict(
            gamma=0.97,
            max_grad_norm=10.0,
            tau=0.01,
            priority_alpha=0.6,
            exploration_initial_eps=1.0,  # a new policy stops at once: first some long walks
            apex_alpha=3.0,
        ),
        r2d2_cpu=dict(
            total_steps=600_000,
            num_envs=64,
            lr=1e-3,
            rollout_steps=10,
            burn_in=10,
            sequence_length=20,
            batch_size=640,
            replay_ratio=4.0,
            buffer_size=200_000,
            learning_starts=10_000,
            lr_schedule="linear",
            lr_final=0.1,
        ),
    )

    @staticmethod
    def state(config: Any) -> dict[str, Field]:
        each = (config.agents,)
        return dict(
            row=Field(int, each, doc="scene"),
            place=Field(wp.vec3, each, unit="m", doc="on the floor"),
            yaw=Field(float, each, unit="rad", doc="from x towards y"),
            present=Field(bool, each, doc="whether the agent is still there"),
            start=Field(wp.vec3, each, unit="m", doc="where the episode began"),
            start_yaw=Field(float, each, unit="rad"),
            goal_slot=Field(int, each),
            goal=Field(wp.vec3, each, unit="m"),
            start_distance=Field(float, each, unit="m", doc="along the floor, when the episode began"),
            distance=Field(float, each, unit="m", doc="along the floor, now"),
            previous=Field(int, each, doc="the last action + 1; 0 at the start"),
            walked=Field(float, each, unit="m", doc="length of the path so far"),
            bumps=Field(float, each, doc="steps in which something was in the way"),
            path_length=Field(float, unit="m", doc="walked, mean over the agents"),
            collisions=Field(float, doc="bumps, mean over the agents"),
            head_start=Field(int, unit="steps", doc="by which the episode ends before the time limit"),
            eye_place=Field(wp.vec3, each, unit="m"),
            eye_turn=Field(wp.quat, each),
            body_kind=Field(int, each, doc="as the renderer knows it; NONE when it is not there"),
            body_place=Field(wp.vec3, each, unit="m", doc="its middle"),
        )

    @staticmethod
    def images(config: Any) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The parts of an observation that are images."""
        return tuple((name, (config.size, config.size, channels)) for name, channels in IMAGES[config.image].items())

    @classmethod
    def groups_of(cls, config: Any) -> tuple[Group, ...]:
        parts = (*cls.images(config), *((name, (size,)) for name, size in cls.extras))
        total = sum(math.prod(shape) for _, shape in parts)
        kinds = {name: KINDS[name] for name, _ in parts if name in KINDS}
        box = Box((total,), dtype=torch.float16, parts=parts, kinds=kinds)
        action = Discrete(4, odds=(STOP_ODDS, 1.0, 1.0, 1.0)) if cls.stops else Discrete(3)
        return (Group("agent", box, action, agents=config.agents, can_leave=cls.stops and config.agents > 1),)

    @classmethod
    def for_evaluation(cls, config: Any) -> Any:
        return replace(config, playing=True, stagger=False)

    for_recording = for_evaluation

    def __init__(
        self,
        num_envs: int,
        device: str | torch.device = "cpu",
        config: Any = None,
        time_limit: int | None = None,
    ):
        self._site: Site | None = None
        self._preload: ScenePreload | None = None
        if time_limit is not None:  # episodes that begin out of phase must know it
            config = config or self.Config()
            config = replace(config, max_steps=min(config.max_steps, time_limit))
        super().__init__(num_envs, device, config)

    # --- scenes ----------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        super()._allocate()
        # In the place of a site's tables until scenes are loaded, so that parameters can be checked.
        kinds = dict(field=(torch.int16, (1, 1, 1)), goal_places=(torch.float32, (1, 1, 3)))
        kinds |= dict(standing=(torch.int32, (1, 1)), goal_starts=(torch.int32, (1, 1, 2)))
        kinds |= dict(choice=(torch.int32, (1,)), choices=(torch.int32, (1,)))
        kinds |= dict(episode_count=(torch.int32, (1,)), episode_start=(torch.float32, (1, 1, 4)))
        for name, (dtype, shape) in kinds.items():
            self._tables[name] = Broadcast(torch.zeros(shape, dtype=dtype, device=self.device))

    def _config_values(self) -> dict[str, Any]:
        values = super()._config_values()
        values["ground"] = Ground()
        values["turn"] = math.radians(self.config.turn)
        values["first_extra"] = sum(math.prod(shape) for _, shape in self.images(self.config))
        values["first_action"] = STOP if self.stops else FORWARD
        return values

    def _sources(self) -> list[str]:
        """The scenes to play in, one by one."""
        config = self.config
        sources = [s.strip() for s in config.scenes.split(",")]
        if not config.playing:
            return self._expand(sources)
        if config.eval_scenes:
            return self._expand([s.strip() for s in config.eval_scenes.split(",")])
        others = self._expand(list(dict.fromkeys(_unseen(source) for source in sources)))
        seen = set(filter(_is_built, self._expand(sources)))
        if not (unseen := [scene for scene in others if scene not in seen]):
            raise ShoalError(f"--scenes {config.scenes} leaves none to evaluate in; name some: --eval-scenes.")
        return unseen

    def _expand(self, sources: list[str]) -> list[str]:
        """Single scenes, the procedural ones in the detail that is asked for."""
        detail = self.config.detail
        if detail != 1.0:
            sources = [f"{s}@{detail:g}" if _is_built(s) and "@" not in s else s for s in sources]
        return expand(sources)

    @property
    def _episode_files(self) -> str:
        """The episodes to play; empty: they are drawn."""
        return self.config.test_episode_files if self.config.playing else self.config.episode_files

    @property
    def _resident(self) -> int:
        """Scenes on the device at a time."""
        return min(self.config.held_out, self.num_envs) if self.config.playing else self.config.resident

    @property
    def ways(self) -> tuple[float, float] | None:
        """Meters of the shortest and the longest way to a goal that a task asks for, if it does."""
        return None

    def prepare(self, seed: int) -> None:
        """Let other processes prepare the first scenes; those of files, which may be anything, are opened now."""
        sources = self._sources()
        first = list(islice(scene_order(sources, seed), min(self._resident, len(sources))))
        check_exists(first)
        if self._episode_files or not all(map(_is_built, first)):
            self.reset(seed)
            return
        self._preload = ScenePreload(first, self.config.up, self.config.scale, max(1, cpu_threads() // 2))

    def _open(self, seed: int) -> None:
        """Load the first scenes and find their ground."""
        config, sources = self.config, self._sources()
        self._end_preload()
        episodes = read_episodes(self._episode_files, sources) if self._episode_files else None
        self._site = Site(
            sources,
            self.num_envs,
            self._resident,
            config.goals if episodes is None else self._slots(episodes, len(sources)),
            self.device,
            seed,
            0 if config.playing else config.swap,
            Body(config.radius, config.height, config.climb),
            config.cell,
            int(config.memory_limit * 1e9) or None,
            config.up,
            config.scale,
            episodes,
            "goals" if self.goals_shown else "starts",
            self.ways if episodes is None else None,
            config.strict,
        )
        self._tables.update(self._site.tables())
        self._settings["ground"] = self._site.ground.ground
        self._plans.clear()
        self._site.pool.row = self.store.row
        self._renderer = None
        if config.image != "none":
            self._renderer = self._make_renderer()

    def _slots(self, episodes: Mapping[str, Episodes], scenes: int) -> int:
        """How many episodes of a scene to have at a time; in an evaluation as many as its envs play."""
        agents = self.config.agents
        few = min(episodes.values(), key=len)
        if len(few) < agents:
            raise ShoalError(f"{few.file} has {len(few)} episode(s) of {few.scene}, too few for {agents} agents.")
        if not self.config.playing:
            return max(self.config.goals, agents)
        turns = -(-self.num_envs // min(self._resident, scenes))
        return min(turns + agents - 1, max(map(len, episodes.values())))

    def duplicate_episodes(self) -> torch.Tensor | None:
        site = self._site
        if site is None or site.episodes is None:
            return None
        turn = self.store.env_id // len(site.pool.active)
        return turn >= site.episode_count[self.store.row[:, 0].long()]

    def _make_renderer(self) -> Renderer:
        config, store = self.config, self.store
        assert self._site is not None
        views, movers = self.num_envs * config.agents, None
        self._views_wanted = torch.zeros_like(store.present)
        if config.agents > 1:
            movers = Movers.make(self.num_envs, config.agents, self.device)
            movers = replace(movers, kind=store.body_kind, position=store.body_place)
            straight = max(0.0, config.height / 2 - config.radius)
            movers.size[:] = torch.tensor([config.radius, config.radius, straight])
            colors = [BODY_COLORS[k % len(BODY_COLORS)] for k in range(config.agents)]
            movers.color[:] = torch.tensor(colors)
        made = Renderer(
            self._site.pool.memory,
            views,
            (config.size, config.size),
            {name: torch.float16 for name, _ in self.images(config)},
            fov=config.fov,
            max_depth=config.max_depth,
            movers=movers,
            own_images=False,
            scene=store.row.view(views),
            position=store.eye_place.view(views, 3),
            rotation=store.eye_turn.view(views, 4),
        )
        made.env = torch.arange(views, device=self.device) // config.agents
        if movers is not None:
            made.hidden = torch.arange(views, device=self.device) % config.agents
        return made

    def restart(self, mask: torch.Tensor) -> None:
        if self._site is None:  # the first episodes: `reset` has set the seed
            # Processes have scenes of their own, in an order of their own.
            self._open(int(self.store.seed[0]) + OTHER_SCENES * int(self.store.env_id[0]))
        first = self.store.episode < 0
        super().restart(mask)
        self._put_out_of_phase(first)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over the books. Other scenes may be here than were then: all episodes begin anew."""
        super().load_state_dict(state)
        self.store.step_count.zero_()  # those that were under way do not count as finished
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.restart(everywhere)
        self._put_out_of_phase(everywhere)

    def _put_out_of_phase(self, mask: torch.Tensor) -> None:
        """Spread the ends of episodes that have just begun over the time limit, evenly."""
        if self.config.stagger:
            ahead = torch.frac(self.store.env_id.double() * GOLDEN) * self.config.max_steps
            self.store.head_start.copy_(torch.where(mask, ahead.int(), self.store.head_start))

    def _truncates(self, function: Any) -> bool:
        # `move` ends the first episode of an env sooner by its head start, and so no two within the time limit.
        return function is not move and (super()._truncates(function) or "head_start" in parameters_of(function))

    def between_rollouts(self) -> None:
        if self._site is not None:
            self._site.poll()

    def _end_preload(self) -> None:
        if self._preload is not None:
            self._preload.close()
            self._preload = None

    def close(self) -> None:
        super().close()
        self._end_preload()
        if self._site is not None:
            self._site.close()
            self._site = None

    # --- looking on ------------------------------------------------------------------------------------------------

    def picture(self, canvas, env: int) -> None:
        draw_env(canvas, self, env)

    def record_frame(self, memory: dict[str, Any], env: int) -> None:
        remember_path(memory, self, env)

    def scenes_of_envs(self) -> list[str] | None:
        assert self._site is not None
        scenes = self._site.pool.memory
        return [getattr(scenes.scene(row), "name", "?") for row in self.store.row[:, 0].tolist()]

    def trajectory_recorder(self, envs: int) -> TrajectoryRecorder:
        return NavTracks(self, envs)

    # --- images ----------------------------------------------------------------------------------------------------

    def _author(self, stage: str, when: str, renames: dict[str, str] | None = None) -> list:
        calls = super()._author(stage, when, renames)
        agents = self.config.agents
        if stage == "reset":
            calls.insert(0, Call(begin_whole, when=when))
        if stage == "step" and self.groups[0].can_leave:
            calls.append(Call(show_alive, agents, when))
        if stage == "observe" and self.config.image != "none":
            calls.append(Call(aim, agents, when))
            target = (renames or {}).get("observation", "observation")
            plans: dict[int, Plan] = {}
            calls.append(lambda arrays: self._render(getattr(arrays, target), when, plans))
        return calls

    def _render(self, observation: torch.Tensor, when: str, plans: dict[int, Plan]) -> None:
        """Render into the first parts of an observation, for all envs or for those whose flag `when` is set."""
        assert self._renderer is not None
        agents, key = self.config.agents, observation.data_ptr()
        only = self.store[when] if when else None
        if only is not None and agents > 1:
            self._views_wanted.copy_(only.unsqueeze(1).expand(-1, agents))
            only = self._views_wanted.view(-1)
        if key not in plans:
            images, first = {}, 0
            for name, shape in self.images(self.config):
                last = first + math.prod(shape)
                images[name] = observation.flatten(0, 1)[:, first:last].unflatten(1, shape)
                first = last
            plans[key] = self._renderer.plan_into(images, only)
        plans[key]()


def _is_built(source: str) -> bool:
    """Whether scenes are procedural, not files."""
    return source.partition(":")[0] in BUILDINGS


def _unseen(source: str) -> str:
    """Scenes of the same kind that no training sees, where there are any."""
    if not _is_built(source):
        return source
    building, _, rest = source.partition(":")
    _, at, detail = rest.partition("@")
    return f"{building}:test{at}{detail}"
