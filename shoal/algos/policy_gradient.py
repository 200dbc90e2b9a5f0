"""Base of the policy-gradient learners: values, advantages and the compiled loss.

A mini-batch whose activations do not fit is split into micro-batches of equal size with gradient accumulation.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shoal.core.errors import ShoalError
from shoal.core.launch import cpu_threads
from shoal.core.settings import Positive, PositiveFloat, UnitInterval
from shoal.learn import losses
from shoal.learn.learner import BYTES_PER_ACTIVATION, Learner, LearnerConfig, activation_memory
from shoal.learn.returns import advantage_plan, discounted_plan
from shoal.learn.rollout import EVERYTHING, Rollout, stacked
from shoal.policy import ActorCritic, RunningMoments

MIN_THREADED_ACTIVATIONS = 4096
"""Activations per sample from which a network that is not compiled runs one micro-batch per CPU core, in threads.
Operations parallelized over all cores would spend most time in synchronization."""


@dataclass(frozen=True)
class PolicyGradientConfig(LearnerConfig):
    """Settings of all policy-gradient algorithms."""

    gae_lambda: UnitInterval = 0.95
    """Lambda of generalized advantage estimation (GAE)."""
    ent_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    ent_coef_final_fraction: UnitInterval = 1.0
    """Final entropy coefficient as a fraction of the initial one, after linear decay."""
    vf_coef: float = 0.5
    """Coefficient of the value loss."""
    normalize_advantage: bool = True
    """Normalize the advantages of each mini-batch to mean 0 and standard deviation 1."""
    normalize_reward: bool = False
    """Divide rewards by the running standard deviation of the discounted return."""
    vtrace: bool = False
    """Correct advantages and targets for policy lag with V-trace."""
    rho_clip: PositiveFloat = 1.0
    """V-trace's clip of the importance ratio of a step (rho)."""
    trace_clip: PositiveFloat = 1.0
    """V-trace's clip of the importance ratio in the trace (c)."""
    micro_batch_size: Positive | None = None
    """Samples per forward and backward pass, with gradient accumulation (none: as many as fit in memory)."""


class Batch(NamedTuple):
    """A rollout with one row per sample, or a subset of its samples."""

    observation: torch.Tensor
    """[n, *stacked shape]; with `age`, the rollout's single frames, from which `part` gathers."""
    action: torch.Tensor
    log_prob: torch.Tensor
    value: torch.Tensor
    advantage: torch.Tensor
    target: torch.Tensor
    mask: torch.Tensor | None
    valid: torch.Tensor | None
    """bool [n]: whether the agent was alive and chose the action (None: always)."""
    age: torch.Tensor | None
    """int32 [T, N]: ages of the rollout, if observations are not gathered yet."""

    def part(self, rows: torch.Tensor | slice) -> "Batch":
        """A subset of the samples, by index."""
        return Batch(
            observation=self.observation[rows] if self.age is None else stacked(self.observation, self.age, rows),
            action=self.action[rows],
            log_prob=self.log_prob[rows],
            value=self.value[rows],
            advantage=self.advantage[rows],
            target=self.target[rows],
            mask=None if self.mask is None else self.mask[rows],
            valid=None if self.valid is None else self.valid[rows],
            age=None,
        )


class Totals(NamedTuple):
    """Statistics of a mini-batch, so that the losses of its micro-batches add up to its loss."""

    samples: torch.Tensor
    """Number of valid samples, averaged over processes, as gradients are."""
    mean: torch.Tensor
    """Mean advantage."""
    scale: torch.Tensor
    """Inverse standard deviation of the advantages."""


class PolicyGradient(Learner):
    """Base of A2C and PPO: `update` improves the policy with the rollout."""

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
        self.ent_coef = torch.tensor(config.ent_coef, device=self.device)
        self.units = rollout.samples if policy.rnn is None else rollout.samples // rollout.steps
        """Number of units that mini-batches are drawn from: samples or, with an RNN, sequences of an env and agent."""
        self._samples_per_unit = rollout.samples // self.units
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
        """float32 [T, N, A]: probability ratio of the actions under the current and the behavior policy."""
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
        self._valid_masks = own_choice
        self._valid = None if not own_choice else own_choice[0] if len(own_choice) == 1 else own_choice[0].clone()
        self._alive = None if rollout.alive is None else rollout.alive[:-1].flatten()
        self._batch = Batch(
            observation=rollout.observation[:-1] if rollout.stack > 1 else rollout.observation[:-1].flatten(0, 2),
            action=rollout.action.flatten(0, 2),
            log_prob=rollout.log_prob.flatten(),
            value=self.value[:-1].flatten(),
            advantage=self.advantage.flatten(),
            target=self.target.flatten(),
            mask=None if rollout.action_mask is None else rollout.action_mask[:-1].flatten(0, 2),
            valid=self._valid,
            age=None if rollout.age is None else rollout.age[:-1],
        )
        each = BYTES_PER_ACTIVATION["bf16" if bf16 else "fp32"] * policy.activations()
        limit = activation_memory(self.device) // each
        self.micro_batch_size = config.micro_batch_size or max(1, limit)
        self._workers = None
        threaded = config.micro_batch_size is None and policy.activations() >= MIN_THREADED_ACTIVATIONS
        if threaded and self.device.type == "cpu" and not compiled and cpu_threads() > 1:
            share = -(-config.batch(rollout.samples) // cpu_threads())
            self.micro_batch_size = min(self.micro_batch_size, max(self._samples_per_unit, share))
            self._workers = ThreadPoolExecutor(cpu_threads(), initializer=lambda: torch.set_num_threads(1))
        if self.reducer.size > 1:  # moments are pooled per pass, so all processes need the same number of passes
            least = torch.full((1,), -float(self.micro_batch_size), dtype=torch.float64, device=self.device)
            self.reducer.maximum(least)
            self.micro_batch_size = -int(least)

        self._value_of = self._maybe_compile(self._value_eager)
        self._evaluate_actions = self._maybe_compile(self._evaluate_actions_eager)
        self._losses = self._maybe_compile(self._losses_eager)
        self._moments_of = self._maybe_compile(self._moments_eager)
        self._explained_variance = self._maybe_compile(losses.explained_variance)

    # --- one update ------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Learn from the rollout. Makes no lasting allocations and reads nothing on the host."""
        self._prepare()
        self._learn()
        if self.policy.has_moments:
            # After learning: collecting and learning must use the same normalization.
            for rows in self._passes(self.rollout.samples):
                part = self._batch.part(rows)
                self.policy.update_normalizer(part.observation, part.valid)
        self._count_update()

    def _prepare(self) -> None:
        """Compute values of all observations, then advantages and targets."""
        with torch.no_grad():
            if self._valid is not None and len(self._valid_masks) > 1:
                torch.logical_and(*self._valid_masks, out=self._valid)
            if self._discounted is not None:
                self._discounted()
                self.reward_moments.merge(self.advantage.flatten(), self._alive)
                self.reward_scale.copy_(self.reward_moments.scale().view(1))
            self._values()
            self._advantages()
            weight = None if self._valid is None else self._valid.float()
            if self.reducer.size == 1:
                explained = self._explained_variance(self._batch.value, self._batch.target, weight)
            else:
                explained = self._pooled_explained_variance(weight)
            self.metrics["explained_variance"].add_(explained)

    def _pooled_explained_variance(self, weight: torch.Tensor | None) -> torch.Tensor:
        """`losses.explained_variance` over the samples of all processes."""
        target = self._batch.target
        both = (target - self._batch.value, target)
        means = torch.stack([losses.weighted_mean(x, weight) for x in both])
        variances = torch.stack([losses.variance(x, weight) for x in both])
        samples = torch.full_like(means[0], target.shape[0]) if weight is None else weight.sum()
        residual, total = self.reducer.pooled(samples, means, variances)[2]
        return 1.0 - residual / total.clamp(min=1e-8)

    def _values(self) -> None:
        """Compute the values of all observations, in few large passes."""
        r, out = self.rollout, self.value
        passes = [] if r.has_values or self.ratio is not None else self._passes(r.samples)
        if self.ratio is not None:
            for rows in self._passes(self.units, self._samples_per_unit):
                self._evaluate_actions(rows, self.ratio.view(-1))
        if len(passes) == 1:
            self._value_of(stacked(r.observation, r.age), out.view(-1))
        else:
            for rows in passes:
                self._value_of(stacked(r.observation, r.age, rows), self._batch.value[rows])
            current = None if r.rnn_state is None else r.rnn_state[-1].flatten(0, 1)
            self._value_eager(stacked(*r.window(-1)), out[-1].view(-1), current)
        final = r.final_observation.flatten(0, 2)
        final_state = None if r.final_state is None else r.final_state.flatten(0, 2)
        for rows in self._passes(final.shape[0]):  # eager, since compiling does not pay off for few rows
            state = None if final_state is None else final_state[rows]
            self._value_eager(final[rows], self.final_value.view(-1)[rows], state)

    def _passes(self, units: int, samples_per_unit: int = 1) -> list[slice]:
        """Split samples or sequences into passes that fit in memory, of equal size if possible."""
        least = -(-units // max(1, self.micro_batch_size // samples_per_unit))
        count = least
        while units % count and count < 4 * least:
            count += 1
        size = -(-units // count)
        return [slice(start, min(start + size, units)) for start in range(0, units, size)]

    def _learn(self) -> None:
        raise ShoalError("PolicyGradient is a base class; use A2C or PPO.")

    def _value_eager(self, observation: torch.Tensor, out: torch.Tensor, state: torch.Tensor | None = None) -> None:
        with self._autocast():
            out.copy_(self.policy.value(observation, state))

    def _evaluate_actions_eager(self, units: slice, ratio: torch.Tensor) -> None:
        """Compute values and probability ratios of samples or sequences under the current policy."""
        pick = None if self.policy.rnn is None else torch.arange(units.start, units.stop, device=self.device)
        rows = units if pick is None else self._rows(pick)
        batch = self._batch.part(rows)
        with self._autocast():
            params, value = self._forward(batch, pick)
        log_prob, _ = self.policy.head.log_prob_and_entropy(params, batch.action)
        self._batch.value[rows] = value
        ratio[rows] = torch.exp(log_prob - batch.log_prob)

    def _gradient(
        self, pick: torch.Tensor | None, totals: Totals | None
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Losses of the samples or sequences `pick` (None: all), and the gradient of the total loss.

        `totals` are their statistics from `_totals`.
        """
        if pick is None and self.policy.rnn is not None:
            pick = torch.arange(self.units, device=self.device)
        passes = self._passes(self.units if pick is None else pick.shape[0], self._samples_per_unit)
        if totals is None:
            terms = self._losses(self._batch, pick, None)
            return terms, self.optimizer.gradient(terms["loss"])

        def one(rows: slice) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            batch = self._batch.part(rows) if pick is None else self._batch
            terms = self._losses(batch, None if pick is None else pick[rows], totals)
            return terms, self.optimizer.gradient(terms["loss"])

        total: dict[str, torch.Tensor] = {}
        gradient = torch.zeros_like(self.optimizer.flat)
        for terms, part in map(one, passes) if self._workers is None else self._workers.map(one, passes):
            gradient += part
            for name, value in terms.items():
                total[name] = total.get(name, 0.0) + value.detach()
        return total, gradient

    @torch.no_grad()
    def _totals(self, picks: Sequence[torch.Tensor | None]) -> Sequence[Totals | None]:
        """Statistics of each mini-batch; None if it is one pass of one process."""
        size = self.units if picks[0] is None else picks[0].shape[0]
        if self.reducer.size == 1 and len(self._passes(size, self._samples_per_unit)) == 1:
            return [None] * len(picks)
        rows = [None if pick is None else self._rows(pick) for pick in picks]
        each = [self._moments_of(self._batch.advantage, self._valid, part) for part in rows]
        samples, mean, variance = self.reducer.pooled(*(torch.stack(parts) for parts in zip(*each, strict=True)))
        statistics = samples / self.reducer.size, mean, losses.inverse_std(variance)
        return [Totals(*parts) for parts in zip(*statistics, strict=True)]

    def _moments_eager(
        self, advantage: torch.Tensor, valid: torch.Tensor | None, pick: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Number of valid samples of a mini-batch, and mean and variance of their advantages."""
        advantage = advantage if pick is None else advantage[pick]
        weight = None if valid is None else (valid if pick is None else valid[pick]).float()
        samples = torch.full_like(advantage[0], advantage.shape[0]) if weight is None else weight.sum()
        return samples, losses.weighted_mean(advantage, weight), losses.variance(advantage, weight)

    def _losses_eager(self, batch: Batch, pick: torch.Tensor | None, totals: Totals | None) -> dict[str, torch.Tensor]:
        """Losses and metrics of the samples or sequences `pick` of a batch (None: all).

        With `totals`, they are one micro-batch, and the results of all micro-batches add up to the mini-batch's means.
        """
        rows = None if pick is None else self._rows(pick)
        if rows is not None or batch.age is not None:
            batch = batch.part(EVERYTHING if rows is None else rows)
        weight = None if batch.valid is None else batch.valid.float()
        with self._autocast():
            params, value = self._forward(batch, pick)
        log_prob, entropy = self.policy.head.log_prob_and_entropy(params, batch.action)
        if self.config.normalize_advantage:
            mean, scale = losses.moments(batch.advantage, weight) if totals is None else (totals.mean, totals.scale)
            batch = batch._replace(advantage=(batch.advantage - mean) * scale)
        terms = self._terms(batch, log_prob, value, weight)
        terms["entropy_loss"] = -losses.weighted_mean(entropy, weight)
        terms["loss"] = (
            terms["policy_gradient_loss"]
            + self.config.vf_coef * terms["value_loss"]
            + self.ent_coef * terms["entropy_loss"]
        )
        if totals is None:
            return terms
        num_valid = value.shape[0] if weight is None else weight.sum()
        share = num_valid / totals.samples.clamp(min=1.0 / self.reducer.size)
        return {name: term * share for name, term in terms.items()}

    def _rows(self, pick: torch.Tensor) -> torch.Tensor:
        """Sample indices of `pick`: `pick` or, with an RNN, the samples of its sequences, time first [T * n]."""
        pick = pick.long()  # offsets of observations in a large rollout exceed int32
        if self.policy.rnn is None:
            return pick
        steps = torch.arange(self.rollout.steps, device=self.device)
        return (steps.unsqueeze(-1) * self.units + pick).flatten()

    def _forward(self, batch: Batch, pick: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters and values of a batch; sequences `pick` start from their stored recurrent states."""
        r = self.rollout
        if pick is None or r.rnn_state is None:
            return self.policy.distribution_and_value(batch.observation, batch.mask)
        ended = (r.terminated | r.truncated)[:, pick // r.reward.shape[2]]
        return self.policy.sequence(batch.observation, r.rnn_state[0].flatten(0, 1)[pick], ended, batch.mask)

    def _terms(
        self, batch: Batch, log_prob: torch.Tensor, value: torch.Tensor, weight: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """The algorithm's losses: `policy_gradient_loss`, `value_loss` and further metrics."""
        raise ShoalError("PolicyGradient is a base class; use A2C or PPO.")

    # --- between updates -------------------------------------------------------------------------------------------

    def set_progress(self, done: float) -> None:
        super().set_progress(done)
        self.ent_coef.fill_(self.config.ent_coef * (1.0 - (1.0 - self.config.ent_coef_final_fraction) * done))

    def mark_discontinuity(self) -> None:
        self.reward_carry.zero_()

    def _describe_passes(self) -> str:
        passes = len(
            self._passes(self.config.batch(self.rollout.samples) // self._samples_per_unit, self._samples_per_unit)
        )
        return f" in {passes} passes" if passes > 1 else ""

    @property
    def nbytes(self) -> int:
        own = (self.final_value, self.advantage, self.target, self.reward_carry)
        own += () if self.ratio is None else (self.ratio,)
        weights = 0 if self._valid is None else self._valid.nbytes * (len(self._valid_masks) > 1)
        return sum(t.nbytes for t in own) + weights

    def state_dict(self) -> dict[str, torch.Tensor]:
        state = super().state_dict()
        state.update({f"reward_moments.{k}": v for k, v in self.reward_moments.state_dict().items()})
        state["reward_carry"] = self.reward_carry
        return state

    def env_axes(self) -> dict[str, int]:
        return {**super().env_axes(), "reward_carry": 0}
