"""What A2C and PPO share: values, advantages, one compiled loss, one optimiser, metrics that stay on the device.

A batch whose activations would not fit is worked through in passes of equal size; gradients add up over them.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from shoal.core.settings import check_settings
from shoal.errors import ShoalError
from shoal.learn import losses
from shoal.learn.optim import OPTIMISERS
from shoal.learn.returns import advantage_plan, discounted_plan
from shoal.learn.rollout import EVERYTHING, Rollout, stacked
from shoal.policy import ActorCritic, RunningMoments

BYTES_PER_ACTIVATION = {"fp32": 12, "bf16": 5}
"""What a number between two layers costs in an update: itself, what autograd keeps of it, and its gradient."""

LAMB_DECAY = 0.01
"""Weight decay of Lamb, unless another one is asked for."""

LR_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""Rule -> power of the size of a mini-batch that the learning rate grows with."""


@dataclass(frozen=True)
class PolicyGradientConfig:
    """Settings that every policy-gradient learner has."""

    lr: float = 3e-4
    """Learning rate; with --lr-scale, of mini-batches of --lr-batch samples."""
    lr_scale: Literal["none", "sqrt", "linear"] = "none"
    """How the learning rate grows with the samples of a mini-batch, those of all agents together."""
    lr_batch: int = 256
    """Samples of the mini-batch that --lr is for, where it grows."""
    lr_warmup: float = 0.0
    """Share of the run in which the learning rate rises from zero."""
    anneal: Literal["linear", "cosine", "none"] = "linear"
    """How the learning rate falls over the rest of the run."""
    lr_end: float = 0.0
    """Share of the learning rate that is left at the end, if it falls."""
    optimiser: Literal["adam", "lamb"] = "adam"
    """Adam, or Lamb for large batches, which fits the steps to the size of the weights."""
    weight_decay: float | None = None
    """Share of the weights lost per step, times the learning rate (none: 0.01 with Lamb, else 0)."""
    gamma: float = 0.99
    """Discount per step."""
    lam: float = 0.95
    """Lambda of the generalised advantage estimate."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    clip_norm: float = 0.5
    """Largest norm of the gradient."""
    normalise_advantage: bool = True
    """Scale the advantages of each mini-batch to mean 0 and deviation 1."""
    normalise_reward: bool = False
    """Divide rewards by the running deviation of the discounted return."""
    adam_eps: float = 1e-5
    """Epsilon of Adam and Lamb."""
    pass_size: int | None = None
    """Samples that an update works on at once; gradients add up (none: what fits in a few GiB)."""

    def __post_init__(self):
        check_settings(self)
        _require("lr", self.lr, self.lr > 0, "above 0")
        _require("lr-batch", self.lr_batch, self.lr_batch > 0, "above 0")
        _require("lr-warmup", self.lr_warmup, 0 <= self.lr_warmup < 1, "at least 0 and below 1")
        _require("lr-end", self.lr_end, 0 <= self.lr_end <= 1, "between 0 and 1")
        _require("weight-decay", self.weight_decay, (self.weight_decay or 0.0) >= 0, "at least 0")
        _require("adam-eps", self.adam_eps, self.adam_eps > 0, "above 0")
        _require("gamma", self.gamma, 0 <= self.gamma <= 1, "between 0 and 1")
        _require("lam", self.lam, 0 <= self.lam <= 1, "between 0 and 1")
        _require("clip-norm", self.clip_norm, self.clip_norm > 0, "above 0")
        _require("pass-size", self.pass_size, self.pass_size is None or self.pass_size > 0, "above 0")

    @property
    def decay(self) -> float:
        """The weight decay that is meant."""
        return LAMB_DECAY * (self.optimiser == "lamb") if self.weight_decay is None else self.weight_decay

    def batch(self, samples: int) -> int:
        """How many of the samples of a rollout a step is made of."""
        return samples

    def peak_lr(self, batch: int) -> float:
        """The highest learning rate for mini-batches of so many samples: lr (B / B0)^p, p = 1/2 or 1."""
        return self.lr * (batch / self.lr_batch) ** LR_POWERS[self.lr_scale]

    def lr_share(self, done: float) -> float:
        """The learning rate after a share `done` of the run, as a share of the highest.

        d / w up to the end w of the warm-up; then, with t from 0 to 1 over the rest and e the share left at the end,
        1 - (1 - e) t or e + (1 - e) (1 + cos(pi t)) / 2.
        """
        if done < self.lr_warmup:
            return done / self.lr_warmup
        t = min(1.0, (done - self.lr_warmup) / (1.0 - self.lr_warmup))
        left = {"none": 1.0, "linear": 1.0 - t, "cosine": 0.5 * (1.0 + math.cos(math.pi * t))}[self.anneal]
        return left if self.anneal == "none" else self.lr_end + (1.0 - self.lr_end) * left

    def check_samples(self, samples: int, sequences: int | None = None) -> None:
        """Refuse a rollout of a size that this learner cannot use; with `sequences`, one that stays in whole ones."""


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
    mean: torch.Tensor
    scale: torch.Tensor


class PolicyGradient:
    """Base of the learners: `update()` turns the rollout it was made for into a better policy."""

    metric_names: tuple[str, ...] = ()

    def __init__(
        self,
        policy: ActorCritic,
        rollout: Rollout,
        config: PolicyGradientConfig,
        seed: int = 0,
        compiled: bool = False,
        bf16: bool = False,
    ):
        sequences = None if policy.core is None else rollout.samples // rollout.steps
        config.check_samples(rollout.samples, sequences)
        self.units = sequences or rollout.samples
        """What mini-batches are drawn from: samples, or the sequences of env and agent that a core goes along."""
        self._each = rollout.samples // self.units
        self.policy, self.rollout, self.config, self.seed = policy, rollout, config, seed
        self.device = rollout.reward.device
        self.bf16 = bf16
        make = OPTIMISERS[config.optimiser]
        self.optimiser = make(policy, config.adam_eps, config.clip_norm, compiled, weight_decay=config.decay)
        self.peak_lr = config.peak_lr(config.batch(rollout.samples))
        """The highest learning rate of the run."""
        self.updates = torch.zeros(1, dtype=torch.int32, device=self.device)

        envs, agents = rollout.reward.shape[1:]
        self.value = rollout.value
        self.final_value = torch.zeros(rollout.final_observation.shape[:3], device=self.device)
        self.advantage = torch.zeros_like(rollout.reward)
        self.target = torch.zeros_like(rollout.reward)
        self.reward_scale = torch.ones(1, device=self.device)
        self.reward_moments = RunningMoments().to(self.device)
        self.reward_carry = torch.zeros(envs, agents, device=self.device)
        self._discounted = None
        if config.normalise_reward:
            self._discounted = discounted_plan(rollout, self.reward_carry, self.advantage, config.gamma)
        self._advantages = advantage_plan(
            rollout,
            self.value,
            self.final_value,
            self.reward_scale,
            self.advantage,
            self.target,
            config.gamma,
            config.lam,
        )

        # Flat views of the rollout, one row per sample.
        own_choice = [t[:-1].flatten() for t in (rollout.alive, rollout.acting) if t is not None]
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
        self.pass_size = config.pass_size or max(1, limit)

        names = (*self.metric_names, "gradient_norm", "explained_variance")
        self.metrics = {name: torch.zeros((), device=self.device) for name in names}
        self.metric_count = torch.zeros((), device=self.device)
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self._value_of = wrap(self._value_eager)
        self._losses = wrap(self._losses_eager)
        self._whole_of = wrap(self._whole_eager)
        self._explained = wrap(losses.explained_variance)

    # --- one update ------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Learn from the rollout as it is now. No allocation that lasts, nothing read on the host."""
        self._prepare()
        self._learn()
        if self.policy.has_moments:
            # After learning: the rollout was made, and must be learnt from, with one and the same normalisation.
            for rows in self._passes(self.rollout.samples):
                part = self._batch.part(rows)
                self.policy.take_in(part.observation, part.counts)
        self.updates.add_(1)

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
            spread = self._explained(self._batch.value, self._batch.target, weight)
            self.metrics["explained_variance"].add_(spread)

    def _values(self) -> None:
        """Values of all observations, in few large passes."""
        r, out = self.rollout, self.value
        passes = [] if r.valued else self._passes(r.samples)
        if len(passes) == 1:
            self._value_of(stacked(r.observation, r.age), out.view(-1))
        else:
            for rows in passes:
                self._value_of(stacked(r.observation, r.age, rows), self._batch.value[rows])
            now = None if r.state is None else r.state[-1].flatten(0, 1)
            self._value_eager(stacked(*r.window(-1)), out[-1].view(-1), now)
        final = r.final_observation.flatten(0, 2)
        then = None if r.final_state is None else r.final_state.flatten(0, 2)
        for rows in self._passes(final.shape[0]):  # few rows: not worth compiling for
            state = None if then is None else then[rows]
            self._value_eager(final[rows], self.final_value.view(-1)[rows], state)

    def _passes(self, units: int, samples_each: int = 1) -> list[slice]:
        """Samples or sequences in passes that fit in memory, of equal size where that is possible."""
        least = -(-units // max(1, self.pass_size // samples_each))
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

    def _gradient(self, pick: torch.Tensor | None) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """The losses over the samples or sequences `pick` (None: all) and the gradient of found["loss"]."""
        if pick is None and self.policy.core is not None:
            pick = torch.arange(self.units, device=self.device)
        passes = self._passes(self.units if pick is None else pick.shape[0], self._each)
        if len(passes) == 1:
            found = self._losses(self._batch, pick, None)
            return found, self.optimiser.gradient(found["loss"])
        with torch.no_grad():
            whole = self._whole_of(self._batch.advantage, self._counts, self._rows(pick))
        total: dict[str, torch.Tensor] = {}
        gradient = torch.zeros_like(self.optimiser.flat)
        for rows in passes:
            batch = self._batch.part(rows) if pick is None else self._batch
            found = self._losses(batch, None if pick is None else pick[rows], whole)
            gradient += self.optimiser.gradient(found["loss"])
            for name, value in found.items():
                total[name] = total.get(name, 0.0) + value.detach()
        return total, gradient

    def _whole_eager(self, advantage: torch.Tensor, counts: torch.Tensor | None, pick: torch.Tensor | None) -> Totals:
        advantage = advantage if pick is None else advantage[pick]
        weight = None if counts is None else (counts if pick is None else counts[pick]).float()
        samples = torch.full_like(advantage[0], advantage.shape[0]) if weight is None else weight.sum()
        return Totals(samples, *losses.moments(advantage, weight))

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
        if self.config.normalise_advantage:
            mean, scale = losses.moments(batch.advantage, weight) if whole is None else (whole.mean, whole.scale)
            batch = batch._replace(advantage=(batch.advantage - mean) * scale)
        found = self._terms(batch, log_prob, value, weight)
        found["entropy_loss"] = -losses.weighted_mean(entropy, weight)
        found["loss"] = (
            found["policy_gradient_loss"]
            + self.config.value_weight * found["value_loss"]
            + self.config.entropy * found["entropy_loss"]
        )
        if whole is None:
            return found
        here = value.shape[0] if weight is None else weight.sum()
        share = here / whole.samples.clamp(min=1.0)
        return {name: term * share for name, term in found.items()}

    def _rows(self, pick: torch.Tensor | None) -> torch.Tensor | None:
        """The samples of what was picked: itself, or the sequences step by step, [T * n]."""
        if pick is None:
            return None
        pick = pick.long()  # places in a large rollout, times the size of an observation, pass 2^31
        if self.policy.core is None:
            return pick
        steps = torch.arange(self.rollout.steps, device=self.device)
        return (steps.unsqueeze(-1) * self.units + pick).flatten()

    def _forward(self, batch: Batch, pick: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Parameters and values of the samples of a batch; sequences `pick` begin with what was remembered then."""
        r = self.rollout
        if pick is None or r.state is None:
            return self.policy.distribution_and_value(batch.observation, batch.mask)
        ended = (r.terminated | r.truncated)[:, pick // r.reward.shape[2]]
        return self.policy.sequence(batch.observation, r.state[0].flatten(0, 1)[pick], ended, batch.mask)

    def _terms(
        self, batch: Batch, log_prob: torch.Tensor, value: torch.Tensor, weight: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """A learner's own losses: `policy_gradient_loss`, `value_loss` and what else it reports."""
        raise ShoalError("PolicyGradient is the base of A2C and PPO; use one of them.")

    def _descend(self, found: dict[str, torch.Tensor], gradient: torch.Tensor, go: torch.Tensor) -> None:
        """Step down the gradient, unless `go` is 0, and add what was found to the metrics."""
        norm = self.optimiser.step(gradient, go)
        with torch.no_grad():
            for name in self.metric_names:
                self.metrics[name].add_(found[name].detach())
            self.metrics["gradient_norm"].add_(norm)
            self.metric_count.add_(1.0)

    def _precision(self):
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    # --- between updates -------------------------------------------------------------------------------------------

    def set_progress(self, done: float) -> None:
        """Tell how much of the run is over, from 0 to 1: sets the learning rate."""
        self.optimiser.lr.fill_(self.peak_lr * self.config.lr_share(done))

    def remark(self) -> str:
        """How steps are made, in words."""
        c, batch = self.config, self.config.batch(self.rollout.samples)
        rate = f"{c.lr:.3g}"
        if c.lr_scale != "none":
            power = "sqrt" if c.lr_scale == "sqrt" else ""
            rate += f" x {power}({batch:,} / {c.lr_batch:,}) = {self.peak_lr:.3g}"
        rate += f", rising over {100 * c.lr_warmup:g} % of the run" if c.lr_warmup else ""
        fall = {"none": "", "linear": ", falling linearly", "cosine": ", falling as a cosine"}[c.anneal]
        fall += f" to {100 * c.lr_end:g} % of it" if fall and c.lr_end else " to 0" if fall else ""
        passes = len(self._passes(batch // self._each, self._each))
        size = f"{batch:,} samples" + (f" in {passes} passes" if passes > 1 else "")
        decay = f", weight decay {c.decay:g}" if c.decay else ""
        return f"{c.optimiser.capitalize()}{decay}, mini-batches of {size}, learning rate {rate}{fall}"

    def read_metrics(self) -> dict[str, float]:
        """Means since the last reading. Waits for the device: once per log interval."""
        count = max(1.0, float(self.metric_count))  # sync: the deliberate one
        updates = int(self.updates) - getattr(self, "_updates_read", 0)
        self._updates_read = int(self.updates)
        means = {}
        for name, total in self.metrics.items():
            means[name] = float(total) / (max(1, updates) if name == "explained_variance" else count)
            total.zero_()
        self.metric_count.zero_()
        return means

    @property
    def nbytes(self) -> int:
        """Memory that grows with the number of envs."""
        own = (self.final_value, self.advantage, self.target, self.reward_carry)
        weights = 0 if self._counts is None else self._counts.nbytes * (len(self._choices) > 1)
        return sum(t.nbytes for t in own) + weights

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything the next update depends on, besides the policy."""
        state = {f"optimiser.{k}": v for k, v in self.optimiser.state_dict().items()}
        state.update({f"reward_moments.{k}": v for k, v in self.reward_moments.state_dict().items()})
        state["reward_carry"] = self.reward_carry
        state["updates"] = self.updates
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
        self._updates_read = int(self.updates)


def activation_memory(device: torch.device) -> int:
    """Bytes that the activations of one pass of an update may take: a quarter of a GPU, or 1 GiB."""
    return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else 2**30


def _require(name: str, value: Any, good: bool, rule: str) -> None:
    if not good:
        raise ShoalError(f"--{name} must be {rule}, got {value}.")
