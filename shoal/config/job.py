"""A run as settings: world, training, algorithm."""

import typing
from dataclasses import dataclass, fields, replace
from typing import Any

from shoal.config.schema import POLICY_SETTINGS, TrainConfig
from shoal.core.errors import ShoalError, unknown
from shoal.core.settings import read_setting
from shoal.core.user_code import UserCode
from shoal.core.world_loading import world_class

ONE_POLICY = "all"
"""Name of the policy that acts for all groups."""


@dataclass(frozen=True)
class Job:
    """A world by name, its settings, the run's and the learner's: everything that `shoal train` needs."""

    world: str
    train: TrainConfig
    learn: Any
    """Settings of the learner that `train.algo` names."""
    world_config: Any
    """Settings of the world: an instance of its Config."""

    @property
    def groups(self) -> tuple[Any, ...]:
        """Who acts."""
        cls = world_class(self.world)
        with UserCode(f"The groups of {self.world} cannot be read", cls):
            return cls.groups_of(self.world_config)

    def policy_groups(self) -> dict[str, list[Any]]:
        """Name of a policy -> the groups it acts for."""
        if self.train.one_policy:
            return {ONE_POLICY: list(self.groups)}
        return {group.name: [group] for group in self.groups}

    def policy_of(self, group: str) -> str:
        """The name of the policy that acts for a group."""
        return ONE_POLICY if self.train.one_policy else group

    def for_policy(self, name: str) -> "Job":
        """The job with one policy's own settings in place of the common ones."""
        own = self.overrides().get(name, {})
        run = {k: v for k, v in own.items() if k in POLICY_SETTINGS}
        learn = {k: v for k, v in own.items() if k not in POLICY_SETTINGS}
        return replace(self, train=replace(self.train, **run), learn=replace(self.learn, **learn))

    def check_samples(self) -> None:
        """Refuse rollouts of a size that a learner cannot use."""
        for name, groups in self.policy_groups().items():
            own = self.for_policy(name)
            rnn = own.train.rnn != "none"
            lanes = self.train.num_envs * sum(group.agents for group in groups)
            own.learn.check_rollout(self.train.rollout_steps, lanes, rnn)
            count = self.train.processes
            own.learn.check_processes(self.train.rollout_steps, lanes // count, rnn, count)

    def check_cuts(self) -> None:
        """Refuse --sync-frac where rollouts cannot be cut short."""
        if not self.train.sync_frac:
            return
        if world_class(self.world).on_device:
            raise ShoalError(
                f"--sync-frac is for envs on the host: a rollout of {self.world} is made in one go; leave it out."
            )
        for name in self.policy_groups():
            own = self.for_policy(name)
            own.learn.check_cuts(own.train.rnn != "none")

    def overrides(self) -> dict[str, dict[str, Any]]:
        """Policy -> its own settings, with values of their proper types."""
        hints = {k: v for k, v in typing.get_type_hints(TrainConfig).items() if k in POLICY_SETTINGS}
        learn_hints = typing.get_type_hints(type(self.learn))
        hints.update({f.name: learn_hints[f.name] for f in fields(self.learn)})
        found: dict[str, dict[str, Any]] = {}
        for entry in self.train.per_group:
            where, equals, text = entry.partition("=")
            name, dot, key = where.partition(".")
            key = key.replace("-", "_")
            if not equals or not dot:
                raise ShoalError(f"--per-group must be GROUP.SETTING=VALUE, got {entry!r}.")
            if key not in hints:
                raise unknown(f"setting of group {name}:", key, hints)
            found.setdefault(name, {})[key] = read_setting(f"--per-group {entry}", text, hints[key])
        return found
