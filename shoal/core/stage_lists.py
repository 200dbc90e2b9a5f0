"""The order of stages in a step and in a restart: Shoal's own functions around the author's."""

from collections.abc import Callable
from typing import Any

from shoal.core import stages
from shoal.core.author_stages import AuthorStages, Stage, parameters_of
from shoal.core.kernels import Call
from shoal.core.spaces import Box, Mixed
from shoal.core.standard_arrays import GroupArrays
from shoal.core.world import Group

AuthorCalls = Callable[..., list[Stage]]
"""`(stage, when, renames)` -> the author's calls of a stage, and those that a base class adds."""


class StageLists:
    """Lists the stages of a world."""

    def __init__(self, arrays: GroupArrays, reports: tuple[str, ...], author: AuthorStages):
        self._arrays, self._reports, self._author = arrays, reports, author
        self._names = arrays.names
        self._leaving = [g for g in arrays.groups if g.can_leave]
        self._pausing = [g for g in arrays.groups if g.action_interval > 1]

    def step(self, author_calls: AuthorCalls, holding: bool) -> list[Stage]:
        """One step, in order. With `holding`, envs whose flag `active` is unset stay as they are."""
        when = "active" if holding else ""
        torch_hold = holding and self._author.is_torch("step")
        run: list[Stage] = [Call(stages.clear_ended)] if holding else []
        if torch_hold:
            run.append(self._author.save_held)
        run.append(Call(stages.begin_step, when=when))
        run += self._group_settings(stages.clear_reward, stages.clear_agent_reward, when)
        run += [self._standard(g, stages.save_alive, when, "begin") for g in self._leaving]
        run += [self._standard(g, _hold_function(g), when, "begin") for g in self._pausing]
        run += author_calls("step", when)
        if torch_hold:
            run.append(self._author.restore_held)
        run += [self._standard(g, stages.zero_dead_rewards, when, "mute") for g in self._leaving]
        run += self._group_settings(stages.add_reward, stages.add_agent_reward, when)
        run.append(Call(stages.set_ended, when=when))
        names = [(self._names[g.name, "observation"], self._names[g.name, "final_observation"]) for g in self._groups]
        run += author_calls("observe", "ended", dict(names))
        run += [self._standard(g, stages.save_final_alive, "ended", "observe") for g in self._leaving]
        run += self._begin_episode(author_calls)
        run += author_calls("observe", "")
        run += [self._next_decision(g, "") for g in self._pausing]
        return run

    def restart(self, author_calls: AuthorCalls) -> list[Stage]:
        """A new episode where the flag `ended` is set, in order."""
        decisions = [self._next_decision(g, "ended") for g in self._pausing]
        return [*self._begin_episode(author_calls), *author_calls("observe", "ended"), *decisions]

    @property
    def _groups(self) -> tuple[Group, ...]:
        return self._arrays.groups

    def _begin_episode(self, author_calls: AuthorCalls) -> list[Stage]:
        """Statistics of the finished episode, then the reset."""
        run: list[Stage] = []
        for name in self._reports:
            names = {"value": name, "value_sum": f"{name}_sum", "last_value": f"last_{name}"}
            run.append(Call(stages.record_report, when="ended", names=names))
        for g in self._groups:
            run.append(self._standard(g, stages.record_return if g.agents == 1 else stages.record_mean_return, "ended"))
        run.append(Call(stages.record_episode, when="ended"))
        for g in self._groups:
            if g.agents > 1:
                run.append(self._standard(g, stages.clear_return, "ended", "fresh"))
            if g.can_leave:
                run.append(self._standard(g, stages.set_alive, "ended", "fresh"))
        return [*run, *author_calls("reset", "ended")]

    def _group_settings(self, per_env: Any, per_agent: Any, when: str) -> list[Stage]:
        """One call per group: `per_env` once per env for a group of one agent, `per_agent` once per agent of others."""
        return [self._standard(g, per_env if g.agents == 1 else per_agent, when, per_agent.key) for g in self._groups]

    def _standard(self, g: Group, function: Any, when: str, no_barrier_group: str = "") -> Call:
        """A function of core/stages.py, bound to the arrays of one group."""
        parameters = parameters_of(function)
        names = {n: self._names[g.name, n] for n in parameters if (g.name, n) in self._names}
        return Call(function, g.agents if "agent" in parameters else 0, when, names, no_barrier_group)

    def _next_decision(self, g: Group, when: str) -> Call:
        names = {
            "action_interval": f"{g.name}_action_interval",
            "is_decision_step": self._names[g.name, "is_decision_step"],
        }
        return Call(stages.set_decision_step, g.agents, when, names)


def _hold_function(g: Group) -> Any:
    """The function that copies a group's action where it is chosen in this step, by the type of its space."""
    if isinstance(g.action, (Box, Mixed)):
        return stages.hold_box
    return stages.hold_multi_discrete if g.action.shape else stages.hold_discrete
