"""Evaluate policies: play whole episodes in separate envs with separate seeds, and score them."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.config.job import Job
from shoal.core.errors import ShoalError, new_file, require, writing
from shoal.core.graph import Graphed
from shoal.core.world import Group, World
from shoal.learn.rollout import grow, stacked
from shoal.policy import ActorCritic, Policy, mlp_encoder
from shoal.runs.metrics import finite
from shoal.training.build import make_world
from shoal.training.collector import action_noise

EVALUATION_SEED = 1_000_003
"""Added to a run's seed, so that evaluation episodes differ from training episodes."""

JSON = (".json",)

MAX_EVAL_STEPS = 50_000
"""Maximum episode length [steps] of an evaluation, for worlds without a time limit."""

SCENES_SHOWN = 20
"""Maximum number of scenes in the printed table."""

NORMAL = 1.959964
"""97.5 % quantile of the normal distribution."""

STUDENT = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157)
"""97.5 % quantiles of Student's distribution with 1, 2, ... degrees of freedom; for more, see `student`."""

Watch = Callable[[World, torch.Tensor], None]
"""Called with the world and bool [env], the unfinished episodes, after the reset and after every step."""


@dataclass(frozen=True)
class Score:
    """Statistics of one group's episode returns, or of a metric that the world reports per episode."""

    mean: float
    std: float
    episodes: int
    length: float
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the mean, see `confidence`; None for too few episodes."""

    def __str__(self) -> str:
        around = "" if self.interval is None else " [{:.2f}, {:.2f}]".format(*self.interval)
        return (
            f"mean {self.mean:.2f}{around}  std {self.std:.2f}  episodes {self.episodes}  mean length {self.length:.1f}"
        )

    def short(self, digits: int = 3) -> str:
        """The mean and its confidence interval as text."""
        if self.interval is None:
            return _number(self.mean, digits)
        return f"{_number(self.mean, digits)} [{', '.join(_number(end, digits) for end in self.interval)}]"


class Evaluation(dict[str, Score]):
    """Group -> score of its returns.

    Attributes:
        reports: Scores of the metrics that the world reports, by name.
        by_scene: Scene -> scores of the reports (of the returns, if there are none), in worlds with scenes.
        episodes: Env, scene, length, returns and reports of every episode.
    """

    def __init__(
        self,
        groups: dict[str, Score],
        reports: dict[str, Score],
        by_scene: dict[str, dict[str, Score]] | None = None,
        episodes: Sequence[Mapping[str, Any]] = (),
    ):
        super().__init__(groups)
        self.reports, self.by_scene, self.episodes = reports, by_scene or {}, list(episodes)

    @property
    def mean(self) -> float:
        """Mean return over the groups."""
        return sum(score.mean for score in self.values()) / len(self)

    def brief(self) -> list[str]:
        """Lines to print during training: one per group and one with the reports."""
        lines = self._returns()
        if self.reports:
            lines.append("  ".join(f"{name} {_number(score.mean)}" for name, score in self.reports.items()))
        return lines

    def lines(self) -> list[str]:
        """Lines to print: one per group, one per report, and a table of the scenes if there are several.

        Brackets hold 95 % confidence intervals of the mean.
        """
        width = max(map(len, self.reports), default=0)
        reports = [f"{name:{width}}  {score.short()}" for name, score in self.reports.items()]
        return [*self._returns(), *reports, *self._scenes()]

    def _returns(self) -> list[str]:
        return [f"{name}: {score}" if len(self) > 1 else str(score) for name, score in self.items()]

    def _scenes(self) -> list[str]:
        """A table of the scenes, sorted ascending by success rate or, without one, by the first metric."""
        if len(self.by_scene) < 2:
            return []
        names = list(next(iter(self.by_scene.values())))
        by = "success" if "success" in names else names[0]
        worst = sorted(self.by_scene, key=lambda scene: (self.by_scene[scene][by].mean, scene))
        rows = [["scene", "episodes", *names]]
        for scene in worst[:SCENES_SHOWN]:
            scores = self.by_scene[scene]
            rows.append([scene, str(scores[by].episodes), *(scores[name].short(2) for name in names)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        more = len(worst) - SCENES_SHOWN
        return ["", f"{len(worst)} scenes, lowest {by} first:", *table, *([f"and {more} more"] if more > 0 else [])]

    def to_json(self) -> str:
        """Scores and episodes as JSON."""
        scenes = {scene: _plain(scores) for scene, scores in self.by_scene.items()}
        everything = dict(groups=_plain(self), reports=_plain(self.reports), scenes=scenes, episodes=self.episodes)
        return json.dumps(finite(everything), indent=1, allow_nan=False) + "\n"

    def save(self, path: Path | str) -> Path:
        """Write scores and episodes to a .json file."""
        path = new_file(path, JSON, "An evaluation")
        with writing(path):
            path.write_text(self.to_json())
        return path


class RandomPolicy(ActorCritic):
    """Samples uniformly from the allowed actions, or from the range of a Box."""

    def __init__(self, group: Group):
        super().__init__(group, mlp_encoder((1,), "tanh"), shared_encoder=True, normalize=False, log_std_init=0.0)

    def distribution(self, observation: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        params = super().distribution(observation, mask)
        uniform = torch.zeros_like(params)
        return uniform if mask is None else torch.where(mask, uniform, params)


class Player:
    """Steps a world with policies by group, without learning.

    With `stochastic`, actions are sampled, otherwise they are the mode of the distribution; random policies always
    sample. Noisy networks run without noise.
    """

    def __init__(self, world: World, policies: Mapping[str, Policy], seed: int, stochastic: bool):
        self.world, self.policies = world, policies
        self.counter = torch.zeros(1, dtype=torch.int32, device=world.device)
        actors = {
            g.name: (policies[g.name], g.agents)
            for g in world.groups
            if stochastic or isinstance(policies[g.name], RandomPolicy)
        }
        self.noise, self.plans = action_noise(world, actors, 1, seed, self.counter)
        world.reset(seed)
        self._stack = max(g.stack for g in world.groups)
        self._age = torch.zeros(1, world.num_envs, dtype=torch.int32, device=world.device)
        shown = {g.name: world.outputs.groups[g.name].observation for g in world.groups}
        self._window = {g.name: torch.stack([shown[g.name]] * g.stack) for g in world.groups}
        """Group -> frame stack [stack, env, agent, ...], the newest frame last."""
        self._state = {
            g.name: torch.zeros(world.num_envs, g.agents, policies[g.name].state_size, device=world.device)
            for g in world.groups
            if policies[g.name].state_size
        }

    @torch.no_grad()
    def step(self) -> None:
        """Choose actions for all agents and step the world."""
        for plan in self.plans:
            plan()
        self.counter.add_(1)
        actions = {}
        for g in self.world.groups:
            out, policy = self.world.outputs.groups[g.name], self.policies[g.name]
            policy.zero_noise()
            mask = None if out.action_mask is None else out.action_mask.flatten(0, 1)
            seen, state = stacked(self._window[g.name], self._age if g.stack > 1 else None), self._state.get(g.name)
            if state is None:
                params = policy.distribution(seen, mask)
            else:
                params, _, after = policy.step(seen, state.flatten(0, 1), mask)
                state.copy_(after.view_as(state))
            if g.name in self.noise:
                if policy.explores:
                    policy.head.explore(self.noise[g.name], policy.head.eval_epsilon)
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
    policies: Mapping[str, Policy],
    episodes: int,
    seed: int | None = None,
    stochastic: bool | None = None,
    stop: Callable[[], bool] = lambda: False,
    watch: Watch | None = None,
    world: World | None = None,
) -> Evaluation:
    """Play whole episodes and score each group.

    Every env plays one episode: taking the first episodes to finish would favor short ones. If the world has fewer
    distinct episodes than `episodes`, each counts once.

    Args:
        policies: Policy by group.
        episodes: Number of episodes, and of envs.
        seed: Seed of the episodes; None: the run's.
        stochastic: Sample actions instead of taking the mode; None: the run's `eval_stochastic`.
        stop: Polled every 25 steps; True ends the evaluation, and unfinished episodes count as 0.
        watch: Called after the reset and after every step.
        world: A world to use, which stays open; None: build one.
    """
    if episodes < 1:
        raise ShoalError(f"--episodes must be at least 1, got {episodes}.")
    with closing(make_world(job, episodes, "evaluation")) if world is None else nullcontext(world) as world:
        player = Player(
            world,
            policies,
            evaluation_seed(job, seed),
            job.evaluation.eval_stochastic if stochastic is None else stochastic,
        )
        step = Graphed(player.step, world.device, job.hardware.cuda_graphs and world.on_device)
        scenes, repeats = world.scenes_of_envs(), world.duplicate_episodes()
        finished = torch.zeros(episodes, dtype=torch.bool, device=world.device)
        last = world.last_episode()
        totals = [torch.zeros(episodes, device=world.device) for _ in (*last.returns, *last.reports, "length")]
        if watch:
            watch(world, ~finished)
        for played in range(MAX_EVAL_STEPS):
            step()
            out = world.outputs
            now = (out.terminated | out.truncated) & ~finished
            last = world.last_episode()
            found = (*last.returns.values(), *last.reports.values(), last.length.float())
            for value, total in zip(found, totals, strict=True):
                torch.where(now, value, total, out=total)
            finished |= now
            if watch:
                watch(world, ~finished)
            if played % 25 == 24 and (bool(finished.all()) or stop()):  # sync: every 25 steps
                break
        else:
            raise ShoalError(f"{job.world}: some episodes did not end within {MAX_EVAL_STEPS} steps; set --time-limit.")
    *figures, length = torch.stack(totals).double().cpu()
    returns = dict(zip(last.returns, figures, strict=False))
    reports = dict(zip(last.reports, figures[len(returns) :], strict=True))
    rows = []
    for env in range(episodes) if repeats is None else (~repeats).nonzero().flatten().tolist():
        row: dict[str, Any] = dict(env=env, length=int(length[env]))
        if scenes is not None:
            row["scene"] = scenes[env]
        row["returns"] = {name: float(values[env]) for name, values in returns.items()}
        row["reports"] = {name: float(values[env]) for name, values in reports.items()}
        rows.append(row)
    return _evaluation(rows)


def _evaluation(rows: list[dict[str, Any]]) -> Evaluation:
    """Scores over all episodes and by scene."""
    length = torch.tensor([row["length"] for row in rows], dtype=torch.float64)

    def columns(kind: str) -> dict[str, torch.Tensor]:
        return {name: torch.tensor([row[kind][name] for row in rows], dtype=torch.float64) for name in rows[0][kind]}

    returns, reports = columns("returns"), columns("reports")
    scenes = [row.get("scene") for row in rows]
    by_scene = {}
    for scene in dict.fromkeys(scenes):
        if scene is not None:
            here = torch.tensor([name == scene for name in scenes])
            # All scenes decide whether a metric is a rate: in one scene, a count may be 0 in every episode.
            by_scene[scene] = {
                name: _score(x[here], length[here], is_rate(x)) for name, x in (reports or returns).items()
            }
    groups = {name: _score(values, length) for name, values in returns.items()}
    return Evaluation(groups, {name: _score(values, length) for name, values in reports.items()}, by_scene, rows)


def evaluation_seed(job: Job, seed: int | None) -> int:
    """The seed of evaluation and recording episodes, from the user's seed or the run's."""
    require("seed", seed, seed is None or 0 <= seed < 2**31, "between 0 and 2147483647")
    return EVALUATION_SEED + (job.run.seed if seed is None else seed)


def is_rate(values: torch.Tensor) -> bool:
    """Whether a metric is 0 or 1 in every episode."""
    return bool(((values == 0) | (values == 1)).all())


def confidence(values: torch.Tensor, rate: bool | None = None) -> tuple[float, float] | None:
    """95 % confidence interval of the mean of independent episodes; None for too few.

    Args:
        values: Metric by episode.
        rate: Whether the metric is 0 or 1 by definition; None: whether all values are.

    Returns:
        Wilson's interval for a rate, else Student's: the mean +- t s / sqrt(n).
    """
    values = values.double()
    n, mean = values.numel(), float(values.mean())
    if is_rate(values) if rate is None else rate:
        z2 = NORMAL**2
        middle = (mean + z2 / (2 * n)) / (1 + z2 / n)
        half = NORMAL / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
        return (0.0 if mean == 0 else middle - half), (1.0 if mean == 1 else middle + half)
    if n < 2:
        return None
    half = student(n - 1) * float(values.std()) / math.sqrt(n)
    return mean - half, mean + half


def student(freedom: int) -> float:
    """97.5 % quantile of Student's distribution, by its series in 1 / freedom (Abramowitz and Stegun 26.7.5)."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z, n = NORMAL, float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160
    return z + first / n + second / n**2 + third / n**3 + fourth / n**4


def _score(values: torch.Tensor, lengths: torch.Tensor, rate: bool | None = None) -> Score:
    std = float(values.std(correction=0))
    around = confidence(values, rate)
    return Score(float(values.mean()), 0.0 if math.isnan(std) else std, values.numel(), float(lengths.mean()), around)


def _number(value: float, digits: int = 3) -> str:
    """A number with few digits, in scientific notation only from 1e7 on."""
    return f"{value:.0f}" if 10**digits <= abs(value) < 1e7 else f"{value:.{digits}g}"


def _plain(scores: Mapping[str, Score]) -> dict[str, dict[str, Any]]:
    return {name: vars(score) for name, score in scores.items()}
