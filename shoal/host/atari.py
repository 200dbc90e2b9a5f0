"""Atari games through ale-py's native batch, with the usual preprocessing; frames are stacked on the device."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from shoal.core.errors import ShoalError, unknown
from shoal.core.extras import import_extra
from shoal.core.settings import Bounds
from shoal.core.world import Group
from shoal.host.config import HostConfig, own_flag
from shoal.host.device_bridge import RewardTransform
from shoal.host.envs import SINGLE, HostGroup
from shoal.host.native import SAME_STEP, NativeLibrary
from shoal.host.packing import pack_action, pack_observation
from shoal.host.world import HostWorld

MAX_FRAMES = 108_000
"""Frames after which a game is truncated: half an hour."""


@dataclass(frozen=True)
class AtariConfig(HostConfig):
    """Settings of Atari games."""

    stack: Annotated[int, own_flag, Bounds(ge=1)] = 4
    """Frames that the policy sees at once."""
    frame_skip: Annotated[int, own_flag, Bounds(ge=1)] = 4
    """Frames per step, with the same action; the observation is the maximum of the last two."""
    screen_size: Annotated[int, own_flag, Bounds(ge=36)] = 84
    """Side of a frame [pixels]."""
    noop_max: Annotated[int, own_flag, Bounds(ge=0)] = 30
    """Maximum number of no-op frames at the start of a game."""
    repeat_action_probability: Annotated[float, own_flag, Bounds(ge=0, le=1)] = 0.0
    """Probability that a frame repeats the last action (sticky actions; 0.25 is the newer protocol)."""
    terminal_on_life_loss: Annotated[bool, own_flag] = True
    """End an episode when a life is lost; evaluations play whole games."""
    clip_reward: Annotated[bool, own_flag] = True
    """Train on the sign of the reward; scores are the original points."""
    full_action_space: Annotated[bool, own_flag] = False
    """Use all 18 actions, instead of those that the game uses."""

    def __post_init__(self):
        super().__post_init__()
        if self.vec_backend not in ("auto", "native"):
            raise ShoalError(
                f"ale: games have a native batch only, so --vec-backend {self.vec_backend} is not possible."
            )


class AtariWorld(HostWorld):
    """An Atari game.

    | | |
    |---|---|
    | observation | one gray frame of 84 x 84, uint8; the policy sees the last four |
    | action | the buttons the game knows |
    | reward | points, of which learners see the sign |
    | end | the game is over, or (`--terminal-on-life-loss`) a life is lost; truncated after 108,000 frames |
    """

    Config: ClassVar[type[HostConfig]] = AtariConfig
    handles_settings = ("time_limit", "frame_stack")
    writes_alive = False
    config: AtariConfig

    @classmethod
    def host_groups_of(cls, config: HostConfig) -> list[HostGroup]:
        assert isinstance(config, AtariConfig)
        return _atari_group(cls.env_name, config.screen_size, config.full_action_space)

    @classmethod
    def groups_of(cls, config: HostConfig) -> tuple[Group, ...]:
        assert isinstance(config, AtariConfig)
        return tuple(replace(group, stack=config.stack) for group in super().groups_of(config))

    @classmethod
    def for_evaluation(cls, config: HostConfig) -> HostConfig:
        assert isinstance(config, AtariConfig)
        return replace(super().for_evaluation(config), terminal_on_life_loss=False)

    @classmethod
    def for_recording(cls, config: HostConfig) -> HostConfig:
        return cls.for_evaluation(config)

    def _limit(self, time_limit: int | None) -> int | None:
        longest = MAX_FRAMES // self.config.frame_skip
        return longest if time_limit is None else min(longest, time_limit)

    @property
    def time_limit(self) -> int | None:
        return self.limit

    def native_library(self) -> NativeLibrary:
        return NativeLibrary(partial(_make_vector, self.env_name, self.config, self.limit or 0), only_backend=True)

    def reward_transform(self) -> RewardTransform | None:
        return _clip if self.config.clip_reward else None

    def picture(self, canvas, env: int) -> None:
        frame = self.vector_env.arrays[f"{SINGLE}.observation"][env, 0, 0]
        canvas.paste(np.repeat(frame[:, :, None], 3, axis=2))


def _make_vector(game: str, config: AtariConfig, limit: int, count: int, threads: int) -> Any:
    return import_extra("ale_py.vector_env").AtariVectorEnv(
        game,
        count,
        num_threads=min(threads, count),
        max_num_frames_per_episode=limit * config.frame_skip,
        repeat_action_probability=config.repeat_action_probability,
        full_action_space=config.full_action_space,
        autoreset_mode=SAME_STEP,
        img_height=config.screen_size,
        img_width=config.screen_size,
        stack_num=1,
        frameskip=config.frame_skip,
        noop_max=config.noop_max,
        episodic_life=config.terminal_on_life_loss,
        reward_clipping=False,
    )


def _clip(reward: torch.Tensor) -> None:
    reward.clamp_(-1.0, 1.0)


@cache
def _atari_group(game: str, size: int, full_action_space: bool) -> list[HostGroup]:
    """The group of a game, found without starting an env."""
    module = import_extra("ale_py")
    names = module.roms.get_all_rom_ids()
    if game not in names:
        raise unknown("Atari game", game, names)
    module.ALEInterface.setLoggerMode(module.LoggerMode.Error)
    ale = module.ALEInterface()
    ale.loadROM(module.roms.get_rom_path(game))
    buttons = ale.getLegalActionSet() if full_action_space else ale.getMinimalActionSet()
    frame = Box(0, 255, (1, size, size), np.uint8)
    return [HostGroup(SINGLE, [SINGLE], pack_observation(frame), pack_action(Discrete(len(buttons))))]
