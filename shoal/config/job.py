"""A job: the settings of a run."""

import typing
from dataclasses import dataclass, fields, replace
from typing import Any

from shoal.config.schema import (
    SECTION_OF,
    EvaluationConfig,
    HardwareConfig,
    MultiAgentConfig,
    RunConfig,
    ScheduleConfig,
    WrapperConfig,
)
from shoal.core.errors import ShoalError, unknown
from shoal.core.settings import check_settings, read_setting
from shoal.core.user_code import UserCode
from shoal.core.world_loading import world_class
from shoal.policy.config import PolicyConfig

POLICY_SETTINGS = tuple(f.name for f in fields(PolicyConfig))
"""Settings of the network; like the algorithm's, groups may have their own."""

ONE_POLICY = "all"
"""Name of the policy that acts for all groups."""


@dataclass(frozen=True)
class Job:
    """Everything that `shoal train` needs: a world by name, and the settings of world, algorithm and run."""

    world: str
    learn: Any
    """Settings of the algorithm that `run.algo` names."""
    world_config: Any
    """Settings of the world: an instance of its Config."""
    run: RunConfig
    hardware: HardwareConfig
    policy: PolicyConfig
    schedule: ScheduleConfig
    wrappers: WrapperConfig
    multi_agent: MultiAgentConfig
    evaluation: EvaluationConfig

    def __post_init__(self):
        check_settings(self.world_config, "world.")

    def change(self, **settings: Any) -> "Job":
        """The job with other values of some settings, whichever section they are in."""
        parts: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            parts.setdefault(SECTION_OF[name], {})[name] = value
        sections = {section: replace(getattr(self, section), **part) for section, part in parts.items()}
        return replace(self, **sections)

    @property
    def groups(self) -> tuple[Any, ...]:
        """The world's groups of agents."""
        cls = world_class(self.world)
        with UserCode(f"The groups of {self.world} cannot be read", cls):
            return cls.groups_of(self.world_config)

    def policy_groups(self) -> dict[str, list[Any]]:
        """Groups by the name of the policy that acts for them."""
        if self.multi_agent.one_policy:
            return {ONE_POLICY: list(self.groups)}
        return {group.name: [group] for group in self.groups}

    def policy_of(self, group: str) -> str:
        """The name of the policy that acts for a group."""
        return ONE_POLICY if self.multi_agent.one_policy else group

    def for_policy(self, name: str) -> "Job":
        """The job with the per-group settings of one policy."""
        own = self.overrides().get(name, {})
        policy = {k: v for k, v in own.items() if k in POLICY_SETTINGS}
        learn = {k: v for k, v in own.items() if k not in POLICY_SETTINGS}
        return replace(self, policy=replace(self.policy, **policy), learn=replace(self.learn, **learn))

    def check_samples(self) -> None:
        """Refuse rollout sizes that an algorithm cannot use."""
        for name, groups in self.policy_groups().items():
            own = self.for_policy(name)
            rnn = own.policy.rnn != "none"
            lanes = self.run.num_envs * sum(group.agents for group in groups)
            own.learn.check_rollout(self.run.rollout_steps, lanes, rnn)
            count = self.hardware.processes
            own.learn.check_processes(self.run.rollout_steps, lanes // count, rnn, count)

    def check_preemption(self) -> None:
        """Refuse --sync-frac where rollouts cannot be preempted."""
        if not self.schedule.sync_frac:
            return
        if world_class(self.world).on_device:
            raise ShoalError(
                f"--sync-frac is for envs on the CPU (gym:, ale:, zoo: ...): rollouts of {self.world} cannot be "
                "preempted; leave it out."
            )
        for name in self.policy_groups():
            own = self.for_policy(name)
            own.learn.check_preemption(own.policy.rnn != "none")

    def overrides(self) -> dict[str, dict[str, Any]]:
        """Per-group settings by policy, parsed to their types."""
        hints = typing.get_type_hints(PolicyConfig)
        learn_hints = typing.get_type_hints(type(self.learn))
        hints.update({f.name: learn_hints[f.name] for f in fields(self.learn)})
        found: dict[str, dict[str, Any]] = {}
        for entry in self.multi_agent.group_settings:
            where, equals, text = entry.partition("=")
            name, dot, key = where.partition(".")
            key = key.replace("-", "_")
            if not equals or not dot:
                raise ShoalError(f"--group-settings must be GROUP.SETTING=VALUE, got {entry!r}.")
            if key not in hints:
                raise unknown(f"setting of group {name}:", key, hints)
            found.setdefault(name, {})[key] = read_setting(f"--group-settings {entry}", text, hints[key])
        return found
