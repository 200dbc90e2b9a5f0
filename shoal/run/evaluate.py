"""Evaluating: how well a policy does, in envs and with seeds of its own."""

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import torch

from shoal.core.world import Group, World
from shoal.errors import ShoalError
from shoal.learn.rollout import grow, stacked
from shoal.policy import ActorCritic, mlp_torso
from shoal.run.build import make_world
from shoal.run.collect import action_noise
from shoal.run.config import Job

EVALUATION_SEED = 1_000_003
"""Added to a run's seed, so that evaluation never replays the episodes it was trained on."""

LONGEST = 50_000
"""Steps after which an evaluation of a world without a time limit gives up."""


@dataclass(frozen=True)
class Score:
    """Returns of whole episodes of one group, or a figure that the world reports of them."""

    mean: float
    std: float
    episodes: int
    length: float

    def __str__(self) -> str:
        return f"mean {self.mean:.2f}  std {self.std:.2f}  episodes {self.episodes}  mean length {self.length:.1f}"


class Evaluation(dict[str, Score]):
    """Group -> score of its returns; `reports` has the figures that the world reports, by name."""

    def __init__(self, groups: dict[str, Score], reports: dict[str, Score]):
        super().__init__(groups)
        self.reports = reports

    @property
    def mean(self) -> float:
        """Mean return over the groups."""
        return sum(score.mean for score in self.values()) / len(self)

    def lines(self) -> list[str]:
        """What to print: a line per group and one with the reports."""
        lines = [f"{name}: {score}" if len(self) > 1 else str(score) for name, score in self.items()]
        if self.reports:
            lines.append("  ".join(f"{name} {score.mean:.3g}" for name, score in self.reports.items()))
        return lines


class RandomPolicy(ActorCritic):
    """Chooses at random: evenly among what is allowed, or over the range of a Box."""

    def __init__(self, group: Group):
        super().__init__(group, mlp_torso((1,), "tanh"), shared=True, normalise=False, log_std=0.0)

    def distribution(self, observation: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        params = super().distribution(observation, mask)
        even = torch.zeros_like(params)
        return even if mask is None else torch.where(mask, even, params)


class Player:
    """Policies (by group) playing a world, step by step, without learning.

    `sample` draws actions instead of taking the likeliest; random policies always do.
    """

    def __init__(self, world: World, policies: dict[str, ActorCritic], seed: int, sample: bool):
        self.world, self.policies = world, policies
        self.counter = torch.zeros(1, dtype=torch.int32, device=world.device)
        actors = {
            g.name: (policies[g.name], g.agents)
            for g in world.groups
            if sample or isinstance(policies[g.name], RandomPolicy)
        }
        self.noise, self.plans = action_noise(world, actors, 1, seed, self.counter)
        world.reset(seed)
        self._stack = max(g.stack for g in world.groups)
        self._age = torch.zeros(1, world.num_envs, dtype=torch.int32, device=world.device)
        shown = {g.name: world.outputs.groups[g.name].observation for g in world.groups}
        self._window = {g.name: torch.stack([shown[g.name]] * g.stack) for g in world.groups}
        """By group, the observations that are seen at once, the newest last."""
        self._state = {
            g.name: torch.zeros(world.num_envs, g.agents, policies[g.name].state_size, device=world.device)
            for g in world.groups
            if policies[g.name].state_size
        }

    @torch.no_grad()
    def step(self) -> None:
        """All agents act once."""
        for plan in self.plans:
            plan()
        self.counter.add_(1)
        actions = {}
        for g in self.world.groups:
            out, policy = self.world.outputs.groups[g.name], self.policies[g.name]
            mask = None if out.action_mask is None else out.action_mask.flatten(0, 1)
            seen, state = stacked(self._window[g.name], self._age if g.stack > 1 else None), self._state.get(g.name)
            if state is None:
                params = policy.distribution(seen, mask)
            else:
                params, _, after = policy.step(seen, state.flatten(0, 1), mask)
                state.copy_(after.view_as(state))
            if g.name in self.noise:
                action, _ = policy.head.sample(params, self.noise[g.name][0])
            else:
                action = policy.head.mode(params)
            shape = (self.world.num_envs, g.agents, *g.action.shape)
            actions[g.name] = policy.head.to_world(action).view(shape)
        out = self.world.step(actions)
        ended = out.terminated | out.truncated
        grow(self._age, ended, self._stack, out=self._age)
        for state in self._state.values():
            state.masked_fill_(ended.view(-1, 1, 1), 0.0)
        for name, window in self._window.items():
            window.copy_(torch.cat([window[1:], out.groups[name].observation.unsqueeze(0)]))


def evaluate(
    job: Job,
    policies: dict[str, ActorCritic],
    episodes: int,
    seed: int | None = None,
    sample: bool | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation:
    """Play `episodes` whole episodes, one per env, with policies by group, and score each group.

    One episode per env: taking the first ones to finish would favour the short. `sample` draws actions instead of
    taking the likeliest (none: as the run's own evaluations do). `stop` is asked now and then; if it says so, episodes
    under way count as they stand.
    """
    if episodes < 1:
        raise ShoalError(f"--episodes must be at least 1, got {episodes}.")
    with closing(make_world(job, episodes, "playing")) as world:
        player = Player(
            world, policies, evaluation_seed(job, seed), job.train.eval_sample if sample is None else sample
        )
        finished = torch.zeros(episodes, dtype=torch.bool, device=world.device)
        last = world.last_episode()
        totals = [torch.zeros(episodes, device=world.device) for _ in (*last.returns, *last.reports, "length")]
        for step in range(LONGEST):
            player.step()
            out = world.outputs
            now = (out.terminated | out.truncated) & ~finished
            last = world.last_episode()
            found = (*last.returns.values(), *last.reports.values(), last.length.float())
            for value, total in zip(found, totals, strict=True):
                torch.where(now, value, total, out=total)
            finished |= now
            if step % 25 == 24 and (bool(finished.all()) or stop()):  # sync: evaluation may wait
                break
        else:
            raise ShoalError(
                f"{job.world}: some episodes were still running after {LONGEST} steps; give it a --time-limit."
            )
    length = float(totals.pop().mean())
    scores = [_score(total, length) for total in totals]
    count = len(last.returns)
    groups = dict(zip(last.returns, scores[:count], strict=True))
    return Evaluation(groups, dict(zip(last.reports, scores[count:], strict=True)))


def evaluation_seed(job: Job, seed: int | None) -> int:
    """The seed of episodes that are played for their score or their looks: the user's, or the run's."""
    return EVALUATION_SEED + (job.train.seed if seed is None else seed)


def _score(returns: torch.Tensor, length: float) -> Score:
    values = returns.double()
    std = float(values.std(correction=0))
    return Score(float(values.mean()), 0.0 if math.isnan(std) else std, values.numel(), length)
