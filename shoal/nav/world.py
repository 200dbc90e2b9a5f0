"""NavWorld: the base of navigation tasks, with scenes, ground, movement, images and episodes."""

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any, ClassVar

import torch
import warp as wp

from shoal.core.kernel_world import KernelWorld, parameters_of
from shoal.core.kernels import Broadcast, Call
from shoal.core.launch import Plan, cpu_threads
from shoal.core.spaces import Box, Discrete
from shoal.core.store import Field
from shoal.core.world import Group, TrajectoryRecorder
from shoal.nav.cameras import AgentCameras
from shoal.nav.config import (
    NavConfig,
    active_episode_files,
    image_shapes,
    is_procedural,
    num_scenes_in_memory,
    scene_sources,
)
from shoal.nav.episode_files import read_episodes
from shoal.nav.ground import Body
from shoal.nav.nav_scenes import NavScenes, episodes_per_scene
from shoal.nav.pictures import NavTrajectoryRecorder, draw_env, record_path
from shoal.nav.stages import (
    FORWARD,
    NUM_PREVIOUS,
    STOP,
    move,
    reset_head_start,
    update_alive,
    update_cameras,
)
from shoal.nav.walk import Ground
from shoal.scene.pool import scene_order
from shoal.scene.prefetch import ScenePreload
from shoal.scene.sources import check_exists

STOP_ODDS = 0.03
"""Odds of STOP in a new policy, relative to each other action: about once in a hundred steps."""

SCENE_SEED_STRIDE = 7919
"""Factor from a process's first env number to the offset of its scene seed, so that processes load other scenes."""

GOLDEN_RATIO = 0.6180339887498949
"""The fractional parts of its multiples are spread evenly over 0 to 1, for any number of envs."""

INPUT_KINDS = {"depth": "depth", "rgb": "color", "previous": "choice"}
"""Part of an observation -> its kind in `Box.kinds`."""


class NavWorld(KernelWorld):
    """Base of navigation tasks: agents with a camera move by STOP, FORWARD, LEFT or RIGHT.

    A task declares:

    - `step`: Warp functions, usually `move` first;
    - `reset`: `enter_scene`, a function that samples the start, `store_start`;
    - `extra_observations`: (name, size) of the inputs that follow the images in an observation;
    - `observe`: Warp functions that write these inputs, from `first_extra` on.
    """

    Config: Any = NavConfig
    config: NavConfig
    resumable = False
    handles_settings = ("time_limit",)
    reuse_eval_world = True
    picture_size, picture_rate = (768, 320), 10
    has_stop: ClassVar[bool] = True
    """Whether STOP is one of the actions."""
    has_goal: ClassVar[bool] = True
    """Whether an agent has a goal; pictures then show it."""
    extra_observations: ClassVar[tuple[tuple[str, int], ...]] = (("previous", NUM_PREVIOUS),)
    settings = dict(
        common=dict(
            rollout_steps=32,
            epochs=2,
            num_minibatches=4,
            gamma=0.99,
            ent_coef=0.01,
            ent_coef_final_fraction=0.1,
            max_grad_norm=1.0,
            eval_stochastic=True,
        ),
        cpu=dict(
            total_steps=4_500_000,
            num_envs=256,
            num_minibatches=8,
            lr=1.5e-3,
            ent_coef=0.02,
            encoder="mlp",  # with 16 x 16 pixels as sample-efficient as convolutions, in a third of the time
            hidden=(256, 128),
            activation="relu",
            normalize_obs=True,
            rnn="gru",
            rnn_size=128,
            compile="off",  # compiling takes two minutes and gains little
            threads=1,
            world=dict(
                scenes="cabin:train",
                num_eval_scenes=25,
                detail=0.0,
                image_size=16,
                scenes_in_memory=8,
                goals_per_scene=16,
                desync_episodes=True,
            ),
        ),
        gpu=dict(
            total_steps=20_000_000,
            num_envs=1024,
            lr=6e-4,
            lr_warmup=0.01,
            lr_schedule="cosine",
            lr_final_fraction=0.01,
            eval_episodes=400,
            encoder="se-resnet9",
            rnn="lstm",
            rnn_size=512,
            rnn_layers=2,
            world=dict(scenes_in_memory=32, scene_swap_interval=3, desync_episodes=True),
        ),
        r2d2=dict(
            gamma=0.97,
            max_grad_norm=10.0,
            tau=0.01,
            priority_alpha=0.6,
            exploration_initial_eps=1.0,  # a new policy stops at once; random actions first give long paths
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
            lr_final_fraction=0.1,
        ),
    )

    @staticmethod
    def state(config: Any) -> dict[str, Field]:
        agents = (config.num_agents,)
        return dict(
            row=Field(int, agents, doc="row of the scene in the scene memory"),
            place=Field(wp.vec3, agents, unit="m", doc="position on the floor"),
            yaw=Field(float, agents, unit="rad", doc="heading, from x towards y"),
            present=Field(bool, agents, doc="whether the agent has not stopped yet"),
            start=Field(wp.vec3, agents, unit="m", doc="position at the start of the episode"),
            start_yaw=Field(float, agents, unit="rad"),
            goal_slot=Field(int, agents, doc="index of the goal's distance field"),
            goal=Field(wp.vec3, agents, unit="m"),
            start_distance=Field(float, agents, unit="m", doc="geodesic distance at the start of the episode"),
            distance=Field(float, agents, unit="m", doc="geodesic distance now"),
            previous=Field(int, agents, doc="last action + 1; 0 at the start"),
            walked=Field(float, agents, unit="m", doc="length of the path so far"),
            bumps=Field(float, agents, doc="steps blocked by an obstacle or another agent"),
            path_length=Field(float, unit="m", doc="walked, mean over the agents"),
            collisions=Field(float, doc="bumps, mean over the agents"),
            head_start=Field(int, unit="steps", doc="how much earlier than the time limit the episode is truncated"),
            eye_place=Field(wp.vec3, agents, unit="m", doc="position of the camera"),
            eye_turn=Field(wp.quat, agents, doc="orientation of the camera"),
            body_kind=Field(int, agents, doc="shape for the renderer; NONE after STOP"),
            body_place=Field(wp.vec3, agents, unit="m", doc="center of the body"),
        )

    @classmethod
    def groups_of(cls, config: Any) -> tuple[Group, ...]:
        parts = (*image_shapes(config), *((name, (size,)) for name, size in cls.extra_observations))
        total = sum(math.prod(shape) for _, shape in parts)
        kinds = tuple((name, INPUT_KINDS[name]) for name, _ in parts if name in INPUT_KINDS)
        box = Box((total,), dtype=torch.float16, parts=parts, kinds=kinds)
        action = Discrete(4, odds=(STOP_ODDS, 1.0, 1.0, 1.0)) if cls.has_stop else Discrete(3)
        agents = config.num_agents
        return (Group("agent", box, action, agents=agents, can_leave=cls.has_stop and agents > 1),)

    @classmethod
    def for_evaluation(cls, config: Any) -> Any:
        return replace(config, evaluating=True, desync_episodes=False)

    for_recording = for_evaluation

    def __init__(
        self,
        num_envs: int,
        device: str | torch.device = "cpu",
        config: Any = None,
        time_limit: int | None = None,
    ):
        self.nav_scenes: NavScenes | None = None
        """Scenes, ground and distance fields; None until the first episode."""
        self._preload: ScenePreload | None = None
        self._cameras: AgentCameras | None = None
        if time_limit is not None:  # `desync_episodes` depends on the time limit, so no wrapper may apply it
            config = config or self.Config()
            config = replace(config, max_steps=min(config.max_steps, time_limit))
        super().__init__(num_envs, device, config)

    # --- scenes ----------------------------------------------------------------------------------------------------

    def _allocate(self) -> None:
        super()._allocate()
        # Placeholders for the tables of NavScenes, so that parameters can be checked before scenes are loaded.
        kinds = dict(field=(torch.int16, (1, 1, 1)), goal_positions=(torch.float32, (1, 1, 3)))
        kinds |= dict(start_cells=(torch.int32, (1, 1)), goal_starts=(torch.int32, (1, 1, 2)))
        kinds |= dict(active_rows=(torch.int32, (1,)), num_active=(torch.int32, (1,)))
        kinds |= dict(episode_count=(torch.int32, (1,)), episode_start=(torch.float32, (1, 1, 4)))
        for name, (dtype, shape) in kinds.items():
            self._tables[name] = Broadcast(torch.zeros(shape, dtype=dtype, device=self.device))

    def _config_values(self) -> dict[str, Any]:
        values = super()._config_values()
        values["ground"] = Ground()
        values["turn_angle"] = math.radians(self.config.turn_angle)
        values["first_extra"] = sum(math.prod(shape) for _, shape in image_shapes(self.config))
        values["first_action"] = STOP if self.has_stop else FORWARD
        return values

    @property
    def path_range(self) -> tuple[float, float] | None:
        """Shortest and longest geodesic distance from start to goal [m]; None if the task sets no limits."""
        return None

    def prepare(self, seed: int) -> None:
        """Start preparing the first scenes in other processes; scenes from files are loaded now, to find errors."""
        sources = scene_sources(self.config)
        count = min(num_scenes_in_memory(self.config, self.num_envs), len(sources))
        first = list(islice(scene_order(sources, seed), count))
        check_exists(first)
        if active_episode_files(self.config) or not all(map(is_procedural, first)):
            self.reset(seed)
            return
        self._preload = ScenePreload(first, self.config.up, self.config.scale, max(1, cpu_threads() // 2))

    def _load_scenes(self, seed: int) -> None:
        config, sources = self.config, scene_sources(self.config)
        self._end_preload()
        in_memory, path = num_scenes_in_memory(config, self.num_envs), active_episode_files(config)
        episodes = read_episodes(path, sources) if path else None
        goals = config.goals_per_scene
        if episodes is not None:
            goals = episodes_per_scene(config, episodes, self.num_envs, min(in_memory, len(sources)))
        self.nav_scenes = NavScenes(
            sources,
            self.num_envs,
            in_memory,
            goals,
            self.device,
            seed,
            swap_interval=0 if config.evaluating else config.scene_swap_interval,
            body=Body(config.agent_radius, config.agent_height, config.max_step_height),
            cell_size=config.cell_size,
            memory_limit=int(config.memory_limit * 1e9) or None,
            up=config.up,
            scale=config.scale,
            strict=config.strict,
            episodes=episodes,
            fields_from="goals" if self.has_goal else "starts",
            path_range=self.path_range if episodes is None else None,
        )
        self._tables.update(self.nav_scenes.tables())
        self._settings["ground"] = self.nav_scenes.ground.arrays
        self._plans.clear()
        self.nav_scenes.pool.row = self.store.row
        self._cameras = None
        if config.image != "none":
            self._cameras = AgentCameras(self.store, config, self.nav_scenes.pool.memory)

    def duplicate_episodes(self) -> torch.Tensor | None:
        scenes = self.nav_scenes
        if scenes is None or scenes.episodes is None:
            return None
        turn = self.store.env_id // len(scenes.pool.active)
        return turn >= scenes.episode_count[self.store.row[:, 0].long()]

    def restart(self, mask: torch.Tensor) -> None:
        if self.nav_scenes is None:  # after the first `reset`, which has written the seed
            # Each process has its own scenes, in its own order.
            self._load_scenes(int(self.store.seed[0]) + SCENE_SEED_STRIDE * int(self.store.env_id[0]))
        first = self.store.episode < 0
        super().restart(mask)
        self._desync(first)

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore the episode totals. All episodes restart, since other scenes may be loaded now."""
        super().load_state_dict(state)
        self.store.step_count.zero_()  # interrupted episodes do not count as finished
        everywhere = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        self.restart(everywhere)
        self._desync(everywhere)

    def _desync(self, mask: torch.Tensor) -> None:
        """Spread the ends of episodes that have just begun evenly over the time limit."""
        if self.config.desync_episodes:
            ahead = torch.frac(self.store.env_id.double() * GOLDEN_RATIO) * self.config.max_steps
            self.store.head_start.copy_(torch.where(mask, ahead.int(), self.store.head_start))

    def _truncates(self, function: Any) -> bool:
        # `move` shortens only an env's first episode, so no env is truncated twice within the time limit.
        return function is not move and (super()._truncates(function) or "head_start" in parameters_of(function))

    def between_rollouts(self) -> None:
        if self.nav_scenes is not None:
            self.nav_scenes.poll()

    def _end_preload(self) -> None:
        if self._preload is not None:
            self._preload.close()
            self._preload = None

    def close(self) -> None:
        super().close()
        self._end_preload()
        if self.nav_scenes is not None:
            self.nav_scenes.close()
            self.nav_scenes = None

    # --- pictures --------------------------------------------------------------------------------------------------

    def picture(self, canvas, env: int) -> None:
        draw_env(canvas, self, env)

    def record_frame(self, memory: dict[str, Any], env: int) -> None:
        record_path(memory, self, env)

    def scenes_of_envs(self) -> list[str] | None:
        assert self.nav_scenes is not None
        scenes = self.nav_scenes.pool.memory
        return [getattr(scenes.scene(row), "name", "?") for row in self.store.row[:, 0].tolist()]

    def trajectory_recorder(self, envs: int) -> TrajectoryRecorder:
        return NavTrajectoryRecorder(self, envs)

    # --- images ----------------------------------------------------------------------------------------------------

    def _author(self, stage: str, when: str, renames: Mapping[str, str] | None = None) -> list:
        calls = super()._author(stage, when, dict(renames or {}))
        agents = self.config.num_agents
        if stage == "reset":
            calls.insert(0, Call(reset_head_start, when=when))
        if stage == "step" and self.groups[0].can_leave:
            calls.append(Call(update_alive, agents, when))
        if stage == "observe" and self.config.image != "none":
            calls.append(Call(update_cameras, agents, when))
            target = (renames or {}).get("observation", "observation")
            plans: dict[int, Plan] = {}
            calls.append(lambda arrays: self._render(getattr(arrays, target), when, plans))
        return calls

    def _render(self, observation: torch.Tensor, when: str, plans: dict[int, Plan]) -> None:
        assert self._cameras is not None
        self._cameras.render(observation, when, plans)
