"""What policy-gradient learners share: values, advantages, one compiled loss, metrics that stay on the device.

A batch whose activations would not fit is worked through in passes of equal size; gradients add up over them.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shoal.core.errors import ShoalError, require
from shoal.core.launch import cpu_threads
from shoal.learn import losses
from shoal.learn.learner import BYTES_PER_ACTIVATION, Learner, LearnerConfig, activation_memory
from shoal.learn.returns import advantage_plan, discounted_plan
from shoal.learn.rollout import EVERYTHING, Rollout, stacked
from shoal.policy import ActorCritic, RunningMoments

HEAVY = 4096
"""From so many numbers between its layers on, per sample, a network that is not compiled has a pass for each CPU core:
in one operation after the other, each on all cores, these would mostly wait for one another."""


@dataclass(frozen=True)
class PolicyGradientConfig(LearnerConfig):
    """Settings that every policy-gradient learner has."""

    gae_lambda: float = 0.95
    """Lambda of the generalized advantage estimate."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    ent_coef_final: float = 1.0
    """Share of that weight that is left at the end of the run; it falls linearly."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    normalize_advantage: bool = True
    """Scale the advantages of each mini-batch to mean 0 and deviation 1."""
    normalize_reward: bool = False
    """Divide rewards by the running deviation of the discounted return."""
    vtrace: bool = False
    """Correct advantages and targets by V-trace for what the policy has learned since it acted."""
    rho_clip: float = 1.0
    """Largest ratio of probabilities, now over then, by which V-trace weighs what was learned from a step."""
    trace_clip: float = 1.0
    """Largest ratio by which it weighs what came after the step."""
    micro_batch_size: int | None = None
    """Samples that an update works on at once; gradients add up (none: what fits in a few GiB)."""

    def __post_init__(self):
        super().__post_init__()
        require("gae-lambda", self.gae_lambda, 0 <= self.gae_lambda <= 1, "between 0 and 1")
        require("ent-coef-final", self.ent_coef_final, 0 <= self.ent_coef_final <= 1, "between 0 and 1")
        for name in ("rho_clip", "trace_clip"):
            require(name.replace("_", "-"), getattr(self, name), getattr(self, name) > 0, "above 0")
        size = self.micro_batch_size
        require("micro-batch-size", size, size is None or size > 0, "above 0")


class Batch(NamedTuple):
    """A rollout with one row per sample, or a part of one."""

    observation: torch.Tensor
    """[n, *seen]; with `age`, the rows of a rollout that what is seen is gathered from."""
    action: torch.Tensor
    log_prob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    target: torch.Tensor
    mask: torch.Tensor | None
    counts: torch.Tensor | None
    """Whether the sample was an agent's own choice, in the game (None: all were)."""
    age: torch.Tensor | None
    """[T, N], as in the rollout, while observations are yet to be gathered."""

    def part(self, rows: torch.Tensor | slice) -> "Batch":
        """Some samples, by number."""
        if self.age is None:
            return Batch(*(None if tensor is None else tensor[rows] for tensor in self))
        rest = (None if tensor is None else tensor[rows] for tensor in self[1:-1])
        return Batch(stacked(self.observation, self.age, rows), *rest, age=None)


class Totals(NamedTuple):
    """What a part of a mini-batch must know of all of it, to add up to the same loss."""

    samples: torch.Tensor
    """How many count. Of several processes their mean, since gradients are averaged over them."""
    mean: torch.Tensor
    scale: torch.Tensor


class PolicyGradient(Learner):
    """Base of A2C and PPO: `update()` turns the rollout it was made for into a better policy."""

    per_update = ("explained_variance",)
    policy: ActorCritic
    config: PolicyGradientConfig

    def __init__(
        self,
        policy: ActorCritic,
        rollout: Rollout,
        config: PolicyGradientConfig,
        seed: int = 0,
        compiled: bool = False,
        bf16: bool = False,
    ):
        super().__init__(policy, rollout, config, seed, compiled, bf16)
        self.entropy_weight = torch.tensor(config.ent_coef, device=self.device)
        self.units = rollout.samples if policy.rnn is None else rollout.samples // rollout.steps
        """What mini-batches are drawn from: samples, or the sequences of env and agent that an RNN goes along."""
        self._each = rollout.samples // self.units
        envs, agents = rollout.reward.shape[1:]
        self.value = rollout.value
        self.final_value = torch.zeros(rollout.final_observation.shape[:3], device=self.device)
        self.advantage = torch.zeros_like(rollout.reward)
        self.target = torch.zeros_like(rollout.reward)
        self.reward_scale = torch.ones(1, device=self.device)
        self.reward_moments = RunningMoments().to(self.device)
        self.reward_moments.reducer = self.reducer
        self.reward_carry = torch.zeros(envs, agents, device=self.device)
        self._discounted = None
        if config.normalize_reward:
            self._discounted = discounted_plan(rollout, self.reward_carry, self.advantage, config.gamma)
        self.ratio = torch.ones_like(rollout.log_prob) if config.vtrace else None
        """[T, N, A]: probability of the actions now over that when they were taken."""
        self._advantages = advantage_plan(
            rollout,
            self.value,
            self.final_value,
            self.reward_scale,
            self.advantage,
            self.target,
            config.gamma,
            config.gae_lambda,
            self.ratio,
            (config.rho_clip, config.trace_clip),
        )

        # Flat views of the rollout, one row per sample.
        own_choice = [t[:-1].flatten() for t in (rollout.alive, rollout.is_decision_step) if t is not None]
        self._choices = own_choice
        self._counts = None if not own_choice else own_choice[0] if len(own_choice) == 1 else own_choice[0].clone()
        self._alive = None if rollout.alive is None else rollout.alive[:-1].flatten()
        self._batch = Batch(
            observation=rollout.observation[:-1] if rollout.stack > 1 else rollout.observation[:-1].flatten(0, 2),
            action=rollout.action.flatten(0, 2),
            log_prob=rollout.log_prob.flatten(),
            value=self.value[:-1].flatten(),
            advantage=self.advantage.flatten(),
            target=self.target.flatten(),
            mask=None if rollout.action_mask is None else rollout.action_mask[:-1].flatten(0, 2),
            counts=self._counts,
            age=None if rollout.age is None else rollout.age[:-1],
        )
        each = BYTES_PER_ACTIVATION["bf16" if bf16 else "fp32"] * policy.activations()
        limit = activation_memory(self.device) // each
        self.micro_batch_size = config.micro_batch_size or max(1, limit)
        self._workers = None
        heavy = config.micro_batch_size is None and policy.activations() >= HEAVY
        if heavy and self.device.type == "cpu" and not compiled and cpu_threads() > 1:
            share = -(-config.batch(rollout.samples) // cpu_threads())
            self.micro_batch_size = min(self.micro_batch_size, max(self._each, share))
            self._workers = ThreadPoolExecutor(cpu_threads(), initializer=lambda: torch.set_num_threads(1))
        if self.reducer.size > 1:  # moments are pooled with every pass: all processes make as many
            least = torch.full((1,), -float(self.micro_batch_size), dtype=torch.float64, device=self.device)
            self.reducer.maximum(least)
            self.micro_batch_size = -int(least)

        self._value_of = self._wrap(self._value_eager)
        self._judge = self._wrap(self._judge_eager)
        self._losses = self._wrap(self._losses_eager)
        self._whole_of = self._wrap(self._whole_eager)
        self._explained = self._wrap(losses.explained_variance)

    # --- one update ------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Learn from the rollout as it is now. No allocation that lasts, nothing read on the host."""
        self._prepare()
        self._learn()
        if self.policy.has_moments:
            # After learning: the rollout was made, and must be learned from, with one and the same normalization.
            for rows in self._passes(self.rollout.samples):
                part = self._batch.part(rows)
                self.policy.update_normalizer(part.observation, part.counts)
        self._count()

    def _prepare(self) -> None:
        """Values of all observations, then advantages and targets."""
        with torch.no_grad():
            if self._counts is not None and len(self._choices) > 1:
                torch.logical_and(*self._choices, out=self._counts)
            if self._discounted is not None:
                self._discounted()
                self.reward_moments.merge(self.advantage.flatten(), self._alive)
                self.reward_scale.copy_(self.reward_moments.scale().view(1))
            self._values()
            self._advantages()
            weight = None if self._counts is None else self._counts.float()
            if self.reducer.size == 1:
                spread = self._explained(self._batch.value, self._batch.target, weight)
            else:
                spread = self._explained_by_all(weight)
            self.metrics["explained_variance"].add_(spread)

    def _explained_by_all(self, weight: torch.Tensor | None) -> torch.Tensor:
        """`losses.explained_variance` over the samples of all processes."""
        target = self._batch.target
        both = (target - self._batch.value, target)
        means = torch.stack([losses.weighted_mean(x, weight) for x in both])
        spreads = torch.stack([losses.variance(x, weight) for x in both])
        samples = torch.full_like(means[0], target.shape[0]) if weight is None else weight.sum()
        left, whole = self.reducer.pooled(samples, means, spreads)[2]
        return 1.0 - left / whole.clamp(min=1e-8)

    def _values(self) -> None:
        """Values of all observations, in few large passes."""
        r, out = self.rollout, self.value
        passes = [] if r.valued or self.ratio is not None else self._passes(r.samples)
        if self.ratio is not None:
            for rows in self._passes(self.units, self._each):
                self._judge(rows, self.ratio.view(-1))
        if len(passes) == 1:
            self._value_of(stacked(r.observation, r.age), out.view(-1))
        else:
            for rows in passes:
                self._value_of(stacked(r.observation, r.age, rows), self._batch.value[rows])
            now = None if r.rnn_state is None else r.rnn_state[-1].flatten(0, 1)
            self._value_eager(stacked(*r.window(-1)), out[-1].view(-1), now)
        final = r.final_observation.flatten(0, 2)
        then = None if r.final_state is None else r.final_state.flatten(0, 2)
        for rows in self._passes(final.shape[0]):  # few rows: not worth compiling for
            state = None if then is None else then[rows]
            self._value_eager(final[rows], self.final_value.view(-1)[rows], state)

    def _passes(self, units: int, samples_each: int = 1) -> list[slice]:
        """Samples or sequences in passes that fit in memory, of equal size where that is possible."""
        least = -(-units // max(1, self.micro_batch_size // samples_each))
        count = least
        while units % count and count < 4 * least:
            count += 1
        size = -(-units // count)
        return [slice(start, min(start + size, units)) for start in range(0, units, size)]

    def _learn(self) -> None:
        raise ShoalError("PolicyGradient is the base of A2C and PPO; use one of them.")

    def _value_eager(self, observation: torch.Tensor, out: torch.Tensor, state: torch.Tensor | None = None) -> None:
        with self._precision():
            out.copy_(self.policy.value(observation, state))

    def _judge_eager(self, units: slice, ratio: torch.Tensor) -> None:
        """What the policy now makes of some samples or sequences: values, and how much likelier their actions are."""
        pick = None if self.policy.rnn is None else torch.arange(units.start, units.stop, device=self.device)
        rows = units if pick is None else self._rows(pick)
        batch = self._batch.part(rows)
        with self._precision():
            params, value = self._forward(batch, pick)
        log_prob, _ = self.policy.head.log_prob_and_entropy(params, batch.action)
        self._batch.value[rows] = value
        ratio[rows] = torch.exp(log_prob - batch.log_prob)

    def _gradient(
        self, pick: torch.Tensor | None, whole: Totals | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The losses over the samples or sequences `pick` (None: all) and the gradient of found["loss"].

        `whole` is what `_totals` tells of them.
        """
        if pick is None and self.policy.rnn is not None:
            pick = torch.arange(self.units, device=self.device)
        passes = self._passes(self.units if pick is None else pick.shape[0], self._each)
        if whole is None:
            found = self._losses(self._batch, pick, None)
            return found, self.optimizer.gradient(found["loss"])

        def one(rows: slice) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            batch = self._batch.part(rows) if pick is None else self._batch
            found = self._losses(batch, None if pick is None else pick[rows], whole)
            return found, self.optimizer.gradient(found["loss"])

        total: dict[str, torch.Tensor] = {}
        gradient = torch.zeros_like(self.optimizer.flat)
        for found, part in map(one, passes) if self._workers is None else self._workers.map(one, passes):
            gradient += part
            for name, value in found.items():
                total[name] = total.get(name, 0.0) + value.detach()
        return total, gradient

    @torch.no_grad()
    def _totals(self, picks: Sequence[torch.Tensor | None]) -> Sequence[Totals | None]:
        """What is to be known beforehand of each mini-batch; None where one pass of one process sees all of it."""
        size = self.units if picks[0] is None else picks[0].shape[0]
        if self.reducer.size == 1 and len(self._passes(size, self._each)) == 1:
            return [None] * len(picks)
        each = [self._whole_of(self._batch.advantage, self._counts, self._rows(pick)) for pick in picks]
        samples, mean, spread = self.reducer.pooled(*(torch.stack(parts) for parts in zip(*each, strict=True)))
        found = samples / self.reducer.size, mean, losses.scale_of(spread)
        return [Totals(*parts) for parts in zip(*found, strict=True)]

    def _whole_eager(
        self, advantage: torch.Tensor, counts: torch.Tensor | None, pick: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """How many samples of a mini-batch count, and mean and variance of their advantages."""
        advantage = advantage if pick is None else advantage[pick]
        weight = None if counts is None else (counts if pick is None else counts[pick]).float()
        samples = torch.full_like(advantage[0], advantage.shape[0]) if weight is None else weight.sum()
        return samples, losses.weighted_mean(advantage, weight), losses.variance(advantage, weight)

    def _losses_eager(self, batch: Batch, pick: torch.Tensor | None, whole: Totals | None) -> dict[str, torch.Tensor]:
        """The loss and what is reported of it, over the samples or sequences `pick` of a batch (None: all).

        With `whole`, they are a part of a larger mini-batch: what is returned adds up to the means over all of it.
        """
        rows = self._rows(pick)
        if rows is not None or batch.age is not None:
            batch = batch.part(EVERYTHING if rows is None else rows)
        weight = None if batch.counts is None else batch.counts.float()
        with self._precision():
            params, value = self._forward(batch, pick)
        log_prob, entropy = self.policy.head.log_prob_and_entropy(params, batch.action)
        if self.config.normalize_advantage:
            mean, scale = losses.moments(batch.advantage, weight) if whole is None else (whole.mean, whole.scale)
            batch = batch._replace(advantage=(batch.advantage - mean) * scale)
        found = self._terms(batch, log_prob, value, weight)
        found["entropy_loss"] = -losses.weighted_mean(entropy, weight)
        found["loss"] = (
            found["policy_gradient_loss"]
            + self.config.vf_coef * found["value_loss"]
            + self.entropy_weight * found["entropy_loss"]
        )
        if whole is None:
            return found
        here = value.shape[0] if weight is None else weight.sum()
        share = here / whole.samples.clamp(min=1.0 / self.reducer.size)
        return {name: term * share for name, term in found.items()}

    def _rows(self, pick: torch.Tensor | None) -> torch.Tensor | None:
        """The samples of what was picked: itself, or the sequences step by step, [T * n]."""
        if pick is None:
            return None
        pick = pick.long()  # places in a large rollout, times the size of an observation, pass 2^31
        if self.policy.rnn is None:
            return pick
        steps = torch.arange(self.rollout.steps, device=self.device)
        return (steps.unsqueeze(-1) * self.units + pick).flatten()

    def _forward(self, batch: Batch, pick: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters and values of the samples of a batch; sequences `pick` begin with what was remembered then."""
        r = self.rollout
        if pick is None or r.rnn_state is None:
            return self.policy.distribution_and_value(batch.observation, batch.mask)
        ended = (r.terminated | r.truncated)[:, pick // r.reward.shape[2]]
        return self.policy.sequence(batch.observation, r.rnn_state[0].flatten(0, 1)[pick], ended, batch.mask)

    def _terms(
        self, batch: Batch, log_prob: torch.Tensor, value: torch.Tensor, weight: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """A learner's own losses: `policy_gradient_loss`, `value_loss` and what else it reports."""
        raise ShoalError("PolicyGradient is the base of A2C and PPO; use one of them.")

    # --- between updates -------------------------------------------------------------------------------------------

    def set_progress(self, done: float) -> None:
        super().set_progress(done)
        self.entropy_weight.fill_(self.config.ent_coef * (1.0 - (1.0 - self.config.ent_coef_final) * done))

    def mark_discontinuity(self) -> None:
        self.reward_carry.zero_()

    def _in_passes(self) -> str:
        passes = len(self._passes(self.config.batch(self.rollout.samples) // self._each, self._each))
        return f" in {passes} passes" if passes > 1 else ""

    @property
    def nbytes(self) -> int:
        own = (self.final_value, self.advantage, self.target, self.reward_carry)
        own += () if self.ratio is None else (self.ratio,)
        weights = 0 if self._counts is None else self._counts.nbytes * (len(self._choices) > 1)
        return sum(t.nbytes for t in own) + weights

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = super().state_dict()
        state.update({f"reward_moments.{k}": v for k, v in self.reward_moments.state_dict().items()})
        state["reward_carry"] = self.reward_carry
        return state

    def env_axes(self) -> dict[str, int]:
        return {**super().env_axes(), "reward_carry": 0}
