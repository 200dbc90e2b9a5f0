"""Evaluating: how well a policy does, in envs and with seeds of its own."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from shoal.core.world import World
from shoal.errors import ShoalError
from shoal.policy import ActorCritic
from shoal.run.build import make_world
from shoal.run.collect import action_noise
from shoal.run.config import Job

EVALUATION_SEED = 1_000_003
"""Added to a run's seed, so that evaluation never replays the episodes it was trained on."""

LONGEST = 50_000
"""Steps after which an evaluation of a world without a time limit gives up."""


@dataclass(frozen=True)
class Score:
    """Returns of whole episodes of one group."""

    mean: float
    std: float
    episodes: int
    length: float

    def __str__(self) -> str:
        return f"mean {self.mean:.2f}  std {self.std:.2f}  episodes {self.episodes}  mean length {self.length:.1f}"


class Player:
    """Policies playing a world, step by step, without learning."""

    def __init__(self, world: World, policies: dict[str, ActorCritic], seed: int, sample: bool):
        self.world, self.policies, self.sample = world, policies, sample
        self.counter = torch.zeros(1, dtype=torch.int32, device=world.device)
        self.noise, self.plans = action_noise(world, policies, 1, seed, self.counter) if sample else ({}, [])
        world.reset(seed)

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
            params = policy.distribution(out.observation.flatten(0, 1), mask)
            if self.sample:
                action, _ = policy.head.sample(params, self.noise[g.name][0])
            else:
                action = policy.head.mode(params)
            shape = (self.world.num_envs, g.agents, *g.action.shape)
            actions[g.name] = policy.head.to_world(action).view(shape)
        self.world.step(actions)


def evaluate(
    job: Job,
    policies: dict[str, ActorCritic],
    episodes: int,
    seed: int | None = None,
    sample: bool = False,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Score]:
    """Play `episodes` whole episodes, one per env, and score each group.

    One episode per env: taking the first ones to finish would favour the short. `sample` draws actions instead of
    taking the likeliest. `stop` is asked now and then; if it says so, episodes under way count as they stand.
    """
    if episodes < 1:
        raise ShoalError(f"--episodes must be at least 1, got {episodes}.")
    world = make_world(job, episodes)
    player = Player(world, policies, EVALUATION_SEED + (job.train.seed if seed is None else seed), sample)
    finished = torch.zeros(episodes, dtype=torch.bool, device=world.device)
    returns = {g.name: torch.zeros(episodes, device=world.device) for g in world.groups}
    lengths = torch.zeros(episodes, device=world.device)
    for step in range(LONGEST):
        player.step()
        out = world.outputs
        now = (out.terminated | out.truncated) & ~finished
        last_return, last_length = world.last_episode()
        for name, total in returns.items():
            torch.where(now, last_return[name], total, out=total)
        torch.where(now, last_length.float(), lengths, out=lengths)
        finished |= now
        if step % 25 == 24 and (bool(finished.all()) or stop()):  # sync: evaluation may wait
            break
    else:
        raise ShoalError(
            f"{job.world}: some episodes were still running after {LONGEST} steps; give it a --time-limit."
        )
    length = float(lengths.mean())
    return {name: _score(total, length) for name, total in returns.items()}


def _score(returns: torch.Tensor, length: float) -> Score:
    values = returns.double()
    std = float(values.std(correction=0))
    return Score(float(values.mean()), 0.0 if math.isnan(std) else std, values.numel(), length)
