"""What all learners share: settings of their steps, optimizers, metrics that stay on the device."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from shoal.core.errors import ShoalError, require
from shoal.core.settings import check_settings
from shoal.core.world import Group
from shoal.learn.optim import OPTIMIZERS, Adam
from shoal.learn.rollout import Rollout
from shoal.policy.normalize import RunningMoments

BYTES_PER_ACTIVATION = {"fp32": 12, "bf16": 5}
"""What a number between two layers costs in an update: itself, what autograd keeps of it, and its gradient."""

LAMB_DECAY = 0.01
"""Weight decay of Lamb, unless another one is asked for."""

LR_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""Rule -> power of the size of a mini-batch that the learning rate grows with."""


MOST = dict(
    lr=1e6,
    batch_size=2**31 - 1,
    policy_delay=2**20,
    target_update_interval=2**31 - 1,
    atoms=2**16,
    quantiles=2**16,
    critics=2**8,
)
"""The largest values of settings that overflow or that sizes are made of, where a learner has them."""


@dataclass(frozen=True)
class LearnerConfig:
    """Settings that every learner has."""

    lr: float = 3e-4
    """Learning rate; with --lr-scale, of mini-batches of --lr-batch samples."""
    lr_scale: Literal["none", "sqrt", "linear"] = "none"
    """How the learning rate grows with the samples of a mini-batch, those of all agents together."""
    lr_batch: int = 256
    """Samples of the mini-batch that --lr is for, where it grows."""
    lr_warmup: float = 0.0
    """Share of the run in which the learning rate rises from zero."""
    lr_schedule: Literal["linear", "cosine", "none"] = "linear"
    """How the learning rate falls over the rest of the run."""
    lr_final: float = 0.0
    """Share of the learning rate that is left at the end, if it falls."""
    optimizer: Literal["adam", "lamb"] = "adam"
    """Adam, or Lamb for large batches, which fits the steps to the size of the weights."""
    weight_decay: float | None = None
    """Share of the weights lost per step, times the learning rate (none: 0.01 with Lamb, else 0)."""
    gamma: float = 0.99
    """Discount per step."""
    max_grad_norm: float = 0.5
    """Largest norm of the gradient."""
    adam_eps: float = 1e-5
    """Epsilon of Adam and Lamb."""

    network: ClassVar[tuple[str, ...]] = ()
    """Names of the settings that the policy's network depends on."""
    like: ClassVar[str] = ""
    """Name of the learner whose tuned settings are this one's too, where a world has none for it."""
    run: ClassVar[dict[str, Any]] = {}
    """Settings of a run that go with this learner, unless the world or the user says something else."""

    def __post_init__(self):
        check_settings(self)
        for name, most in MOST.items():
            value = getattr(self, name, 0)
            require(name.replace("_", "-"), value, value <= most, f"at most {most}")
        require("lr", self.lr, self.lr > 0, "above 0")
        require("lr-batch", self.lr_batch, self.lr_batch > 0, "above 0")
        require("lr-warmup", self.lr_warmup, 0 <= self.lr_warmup < 1, "at least 0 and below 1")
        require("lr-final", self.lr_final, 0 <= self.lr_final <= 1, "between 0 and 1")
        require("weight-decay", self.weight_decay, (self.weight_decay or 0.0) >= 0, "at least 0")
        require("adam-eps", self.adam_eps, self.adam_eps > 0, "above 0")
        require("gamma", self.gamma, 0 <= self.gamma <= 1, "between 0 and 1")
        require("max-grad-norm", self.max_grad_norm, self.max_grad_norm > 0, "above 0")

    @property
    def decay(self) -> float:
        """The weight decay that is meant."""
        return LAMB_DECAY * (self.optimizer == "lamb") if self.weight_decay is None else self.weight_decay

    def optimize(self, module: nn.Module, compiled: bool) -> Adam:
        """The optimizer that is meant, for the parameters of a module."""
        return OPTIMIZERS[self.optimizer](module, self.adam_eps, self.max_grad_norm, compiled, weight_decay=self.decay)

    def batch(self, samples: int) -> int:
        """How many samples a step is made of, if a rollout has so many."""
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
        left = {"none": 1.0, "linear": 1.0 - t, "cosine": 0.5 * (1.0 + math.cos(math.pi * t))}[self.lr_schedule]
        return left if self.lr_schedule == "none" else self.lr_final + (1.0 - self.lr_final) * left

    @classmethod
    def unsupported(cls, group: Group) -> str:
        """Why this learner cannot learn for a group; "" if it can."""
        return ""

    def check_rnn(self, rnn: bool) -> None:
        """Refuse a policy with an RNN, or without one, if this learner cannot use it."""

    def check_rollout(self, steps: int, lanes: int, rnn: bool) -> None:
        """Refuse rollouts of a size that this learner cannot use: steps of so many lanes, envs times agents."""

    def check_processes(self, steps: int, lanes: int, rnn: bool, processes: int) -> None:
        """Refuse a number of processes that cannot share the work, each with so many lanes of its own."""

    def check_cuts(self, rnn: bool) -> None:
        """Refuse rollouts that are cut short, if this learner cannot use them."""


class Learner:
    """Base of the learners. After every rollout: `store`, then `update` as often as is `due`.

    `store` and `update` allocate nothing that lasts and read nothing on the host: they can be recorded as graphs.
    """

    metric_names: tuple[str, ...] = ()
    """What every step of the optimizer adds to."""
    per_update: tuple[str, ...] = ()
    """Metrics that are added to once per update, however many steps it has."""

    def __init__(
        self,
        policy: Any,
        rollout: Rollout,
        config: LearnerConfig,
        seed: int = 0,
        compiled: bool = False,
        bf16: bool = False,
    ):
        self.reducer = reducer = rollout.reducer
        self.samples = rollout.samples * reducer.size
        """Samples of a rollout, those of all processes together."""
        lanes, rnn = rollout.samples // rollout.steps, policy.rnn is not None
        config.check_rollout(rollout.steps, lanes * reducer.size, rnn)
        config.check_processes(rollout.steps, lanes, rnn, reducer.size)
        self.policy, self.rollout, self.config, self.seed = policy, rollout, config, seed
        self.device = rollout.reward.device
        self.bf16 = bf16
        self.optimizers = {name: config.optimize(module, compiled) for name, module in self.trainable_parts().items()}
        """One for each part of the policy that has a loss of its own."""
        self.optimizer = next(iter(self.optimizers.values()))
        if reducer.size > 1:
            for optimizer in self.optimizers.values():
                optimizer.reduce = reducer.average
        for module in policy.modules():
            if isinstance(module, RunningMoments):
                module.reducer = reducer
        self.peak_lr = config.peak_lr(config.batch(self.samples))
        """The highest learning rate of the run."""
        self.updates = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._updates_read = 0
        names = (*self.metric_names, "gradient_norm", *self.per_update)
        self.metrics = {name: torch.zeros((), device=self.device) for name in names}
        self.metric_count = torch.zeros((), device=self.device)
        self._wrap: Any = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)

    def trainable_parts(self) -> dict[str, nn.Module]:
        """The parts of the policy that have a loss and an optimizer of their own, by the optimizer's name."""
        return {"optimizer": self.policy}

    def store(self) -> None:
        """Take in the rollout as it is now, if the learner keeps experience."""

    def mark_discontinuity(self) -> None:
        """Tell that the next rollout does not go on where the last one ended."""

    def on_weights_loaded(self) -> None:
        """Tell that the policy has been given other weights."""

    def updates_due(self, made: int) -> int:
        """How many updates this rollout calls for, after so many samples of the run."""
        return 1

    def update(self) -> None:
        """Learn."""
        raise ShoalError("Learner is the base of PolicyGradient and OffPolicy; use what is made of them.")

    def _optimizer_step(self, found: dict[str, torch.Tensor], gradient: torch.Tensor, go: torch.Tensor) -> None:
        """Step down the gradient, unless `go` is 0, and add what was found to the metrics."""
        norm = self.optimizer.step(gradient, go)
        with torch.no_grad():
            for name in self.metric_names:
                self.metrics[name].add_(found[name].detach())
            self.metrics["gradient_norm"].add_(norm)
            self.metric_count.add_(1.0)

    def _count(self) -> None:
        """One update more, of which the next rollout tells."""
        self.updates.add_(1)
        self.rollout.version.add_(1)

    def _precision(self):
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    # --- between updates -------------------------------------------------------------------------------------------

    def set_progress(self, done: float) -> None:
        """Tell how much of the run is over, from 0 to 1: sets the learning rate."""
        for optimizer in self.optimizers.values():
            optimizer.lr.fill_(self.peak_lr * self.config.lr_share(done))

    def describe(self) -> str:
        """How steps are made, in words."""
        c, batch = self.config, self.config.batch(self.samples)
        rate = f"{c.lr:.3g}"
        if c.lr_scale != "none":
            power = "sqrt" if c.lr_scale == "sqrt" else ""
            rate += f" x {power}({batch:,} / {c.lr_batch:,}) = {self.peak_lr:.3g}"
        rate += f", rising over {100 * c.lr_warmup:g} % of the run" if c.lr_warmup else ""
        fall = {"none": "", "linear": ", falling linearly", "cosine": ", falling as a cosine"}[c.lr_schedule]
        fall += f" to {100 * c.lr_final:g} % of it" if fall and c.lr_final else " to 0" if fall else ""
        decay = f", weight decay {c.decay:g}" if c.decay else ""
        size = f"{batch:,} samples{self._in_passes()}"
        return f"{c.optimizer.capitalize()}{decay}, mini-batches of {size}, learning rate {rate}{fall}"

    def _in_passes(self) -> str:
        """In how many passes a mini-batch is worked through, in words, if there are several."""
        return ""

    def read_metrics(self) -> dict[str, float]:
        """Means since the last reading. Waits for the device: once per log interval."""
        count = max(1.0, float(self.metric_count))  # sync: the deliberate one
        updates = int(self.updates) - self._updates_read
        self._updates_read = int(self.updates)
        totals = torch.stack(list(self.metrics.values()))
        self.reducer.average(totals)
        means = {}
        for (name, total), value in zip(self.metrics.items(), totals.tolist(), strict=True):
            means[name] = value / (max(1, updates) if name in self.per_update else count)
            total.zero_()
        self.metric_count.zero_()
        return means

    @property
    def nbytes(self) -> int:
        """Memory that grows with the number of envs."""
        return 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything the next update depends on, besides the policy."""
        pairs = self.optimizers.items()
        state = {f"{name}.{k}": v for name, optimizer in pairs for k, v in optimizer.state_dict().items()}
        return {**state, "updates": self.updates}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
        self._updates_read = int(self.updates)

    def env_axes(self) -> dict[str, int]:
        """Names of the state that have the envs along an axis, and which: each process has its own part of them."""
        return {}


def activation_memory(device: torch.device) -> int:
    """Bytes that the activations of one pass of an update may take: a quarter of a GPU, or 1 GiB."""
    return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else 2**30


def part_of(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries under a prefix, without it."""
    return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
