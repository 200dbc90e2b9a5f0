"""Atari games through ale-py's native batch, with the usual preprocessing; frames are stacked on the device."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from gymnasium.spaces import Box, Discrete

from shoal.core.errors import ShoalError, unknown
from shoal.core.extras import import_extra
from shoal.core.world import Group
from shoal.host.config import HostConfig, own_flag
from shoal.host.engines import Engine
from shoal.host.envs import SINGLE, Team
from shoal.host.native import SAME_STEP
from shoal.host.packing import pack_action, pack_observation
from shoal.host.world import HostWorld

LONGEST = 108_000
"""Frames after which a game is cut off: half an hour."""


@dataclass(frozen=True)
class AtariConfig(HostConfig):
    """Settings of Atari games."""

    stack: Annotated[int, own_flag] = 4
    """Frames that the policy sees at once."""
    frame_skip: Annotated[int, own_flag] = 4
    """Frames that an action is held for; the last two are joined by their maximum."""
    size: Annotated[int, own_flag] = 84
    """Side of a frame [pixels]."""
    noops: Annotated[int, own_flag] = 30
    """A game begins with up to so many frames of doing nothing."""
    sticky: Annotated[float, own_flag] = 0.0
    """Probability that a frame repeats the last action (0.25 is the newer way to make games random)."""
    life_loss: Annotated[bool, own_flag] = True
    """End an episode when a life is lost; in evaluation it is always the whole game."""
    clip_reward: Annotated[bool, own_flag] = True
    """Show learners the sign of the reward; scores are of the reward itself."""
    all_actions: Annotated[bool, own_flag] = False
    """All 18 actions, instead of those the game knows."""

    def __post_init__(self):
        super().__post_init__()
        for name, least in (("stack", 1), ("frame_skip", 1), ("size", 36), ("noops", 0)):
            if getattr(self, name) < least:
                flag = name.replace("_", "-")
                raise ShoalError(f"--{flag} must be at least {least}, got {getattr(self, name)}.")
        if not 0.0 <= self.sticky <= 1.0:
            raise ShoalError(f"--sticky must be between 0 and 1, got {self.sticky}.")
        if self.batch not in ("auto", "native"):
            raise ShoalError(f"ale: games have a native batch only, so --batch {self.batch} is not possible.")


class AtariWorld(HostWorld):
    """An Atari game.

    | | |
    |---|---|
    | observation | one gray frame of 84 x 84, uint8; the policy sees the last four |
    | action | the buttons the game knows |
    | reward | points, of which learners see the sign |
    | end | the game is over, or (`--life-loss`) a life is lost; truncated after 108,000 frames |
    """

    Config: ClassVar[type[HostConfig]] = AtariConfig
    handles_settings = ("time_limit", "frame_stack")
    config: AtariConfig

    @classmethod
    def teams_of(cls, config: HostConfig) -> list[Team]:
        assert isinstance(config, AtariConfig)
        return _team(cls.env_name, config.size, config.all_actions)

    @classmethod
    def groups_of(cls, config: HostConfig) -> tuple[Group, ...]:
        assert isinstance(config, AtariConfig)
        return tuple(replace(group, stack=config.stack) for group in super().groups_of(config))

    @classmethod
    def _loses(cls, config: HostConfig) -> bool:
        return False

    @classmethod
    def for_evaluation(cls, config: HostConfig) -> HostConfig:
        assert isinstance(config, AtariConfig)
        return replace(super().for_evaluation(config), life_loss=False)

    @classmethod
    def for_recording(cls, config: HostConfig) -> HostConfig:
        return cls.for_evaluation(config)

    @classmethod
    def has_native(cls, config: HostConfig) -> bool:
        return True

    def _limit(self, asked: int | None) -> int | None:
        own = LONGEST // self.config.frame_skip
        return own if asked is None else min(own, asked)

    @property
    def time_limit(self) -> int | None:
        return self.limit

    def make_vector(self, count: int, threads: int) -> Any:
        config = self.config
        return import_extra("ale_py.vector_env").AtariVectorEnv(
            self.env_name,
            count,
            num_threads=min(threads, count),
            max_num_frames_per_episode=(self.limit or 0) * config.frame_skip,
            repeat_action_probability=config.sticky,
            full_action_space=config.all_actions,
            autoreset_mode=SAME_STEP,
            img_height=config.size,
            img_width=config.size,
            stack_num=1,
            frameskip=config.frame_skip,
            noop_max=config.noops,
            episodic_life=config.life_loss,
            reward_clipping=False,
        )

    def _make_engine(self) -> Engine:
        return self._native_engine()

    def shape_reward(self, reward: torch.Tensor) -> None:
        if self.config.clip_reward:
            reward.clamp_(-1.0, 1.0)

    def picture(self, canvas, env: int) -> None:
        frame = self._arrays[f"{SINGLE}.observation"][env, 0, 0]
        canvas.paste(np.repeat(frame[:, :, None], 3, axis=2))


@cache
def _team(game: str, size: int, all_actions: bool) -> list[Team]:
    """Who plays a game: made without starting it."""
    module = import_extra("ale_py")
    names = module.roms.get_all_rom_ids()
    if game not in names:
        raise unknown("Atari game", game, names)
    module.ALEInterface.setLoggerMode(module.LoggerMode.Error)
    ale = module.ALEInterface()
    ale.loadROM(module.roms.get_rom_path(game))
    buttons = ale.getLegalActionSet() if all_actions else ale.getMinimalActionSet()
    seen = Box(0, 255, (1, size, size), np.uint8)
    return [Team(SINGLE, [SINGLE], pack_observation(seen), pack_action(Discrete(len(buttons))))]
