"""Base of all learners: optimizer settings, optimizers, and metrics on the device."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import nn

from shoal.core.errors import ShoalError
from shoal.core.settings import Bounds, NonNegativeFloat, Positive, PositiveFloat, UnitInterval, check_settings
from shoal.core.world import Group
from shoal.learn.optim import OPTIMIZERS, Adam
from shoal.learn.rollout import Rollout
from shoal.policy.normalize import RunningMoments

BYTES_PER_ACTIVATION = {"fp32": 12, "bf16": 5}
"""Bytes per activation in an update: the activation, what autograd keeps of it, and its gradient."""

LAMB_DECAY = 0.01
"""Default weight decay of Lamb."""

LR_POWERS = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
"""Scaling rule -> exponent of the mini-batch size in the learning rate."""

LearningRate = Annotated[float, Bounds(gt=0, le=1e6)]


@dataclass(frozen=True)
class LearnerConfig:
    """Settings of all algorithms."""

    lr: LearningRate = 3e-4
    """Learning rate; with --lr-scaling, for mini-batches of --lr-reference-batch samples."""
    lr_scaling: Literal["none", "sqrt", "linear"] = "none"
    """Scaling of the learning rate with the mini-batch size (samples of all envs and agents)."""
    lr_reference_batch: Positive = 256
    """Reference mini-batch size of --lr, used by --lr-scaling."""
    lr_warmup: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    """Fraction of the run with linear learning-rate warmup from 0."""
    lr_schedule: Literal["linear", "cosine", "none"] = "linear"
    """Learning-rate schedule after the warmup."""
    lr_final_fraction: UnitInterval = 0.0
    """Final learning rate as a fraction of the peak."""
    optimizer: Literal["adam", "lamb"] = "adam"
    """Optimizer: Adam, or Lamb for large batches."""
    weight_decay: NonNegativeFloat | None = None
    """Decoupled weight decay (none: 0.01 with Lamb, else 0)."""
    gamma: UnitInterval = 0.99
    """Discount factor."""
    max_grad_norm: PositiveFloat = 0.5
    """Maximum norm for gradient clipping."""
    adam_eps: PositiveFloat = 1e-5
    """Epsilon of the optimizer, for numerical stability."""

    network_settings: ClassVar[tuple[str, ...]] = ()
    """Names of the settings that determine the policy's network."""
    presets_of: ClassVar[str] = ""
    """Name of the algorithm whose presets apply where a world has none for this one."""
    run_defaults: ClassVar[dict[str, Any]] = {}
    """Default run settings of this algorithm, below those of the world and the user."""

    def __post_init__(self):
        check_settings(self)

    @property
    def resolved_weight_decay(self) -> float:
        """`weight_decay`, or the optimizer's default."""
        return LAMB_DECAY * (self.optimizer == "lamb") if self.weight_decay is None else self.weight_decay

    def make_optimizer(self, module: nn.Module, compiled: bool) -> Adam:
        """Create the optimizer of a module's parameters."""
        make = OPTIMIZERS[self.optimizer]
        return make(module, self.adam_eps, self.max_grad_norm, compiled, weight_decay=self.resolved_weight_decay)

    def batch(self, samples: int) -> int:
        """Samples per optimizer step, given the samples of a rollout."""
        return samples

    def peak_lr(self, batch: int) -> float:
        """Peak learning rate for mini-batches of `batch` samples: lr (B / B0)^p with p = 1/2 or 1."""
        return self.lr * (batch / self.lr_reference_batch) ** LR_POWERS[self.lr_scaling]

    def lr_factor(self, progress: float) -> float:
        """Learning rate at `progress` [0, 1] of the run, as a fraction of the peak.

        progress / w during the warmup w; then, with t from 0 to 1 and final fraction e, 1 - (1 - e) t or
        e + (1 - e) (1 + cos(pi t)) / 2.
        """
        if progress < self.lr_warmup:
            return progress / self.lr_warmup
        t = min(1.0, (progress - self.lr_warmup) / (1.0 - self.lr_warmup))
        left = {"none": 1.0, "linear": 1.0 - t, "cosine": 0.5 * (1.0 + math.cos(math.pi * t))}[self.lr_schedule]
        return left if self.lr_schedule == "none" else self.lr_final_fraction + (1.0 - self.lr_final_fraction) * left

    @classmethod
    def unsupported(cls, group: Group) -> str:
        """The reason why this algorithm does not support a group ("": it does)."""
        return ""

    def check_rnn(self, rnn: bool) -> None:
        """Refuse a policy with or without an RNN, if this algorithm does not support it."""

    def check_rollout(self, steps: int, lanes: int, rnn: bool) -> None:
        """Refuse unsupported rollout sizes: `steps` times `lanes` (envs x agents)."""

    def check_processes(self, steps: int, lanes: int, rnn: bool, processes: int) -> None:
        """Refuse a number of processes that cannot split the batch; each has `lanes` envs x agents."""

    def check_preemption(self, rnn: bool) -> None:
        """Refuse preempted rollouts, if this algorithm does not support them."""


class Learner:
    """Base of all learners. After every rollout, call `store`, then `update` as often as `updates_due` returns.

    `store` and `update` make no lasting allocations and read nothing on the host, so CUDA graphs can capture them.
    """

    metric_names: tuple[str, ...] = ()
    """Metrics averaged over optimizer steps."""
    per_update: tuple[str, ...] = ()
    """Metrics averaged over updates."""

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
        """Samples per rollout, of all processes."""
        lanes, rnn = rollout.samples // rollout.steps, policy.rnn is not None
        config.check_rollout(rollout.steps, lanes * reducer.size, rnn)
        config.check_processes(rollout.steps, lanes, rnn, reducer.size)
        self.policy, self.rollout, self.config, self.seed = policy, rollout, config, seed
        self.device = rollout.reward.device
        self.bf16 = bf16
        self.optimizers = {
            name: config.make_optimizer(module, compiled) for name, module in self.trainable_parts().items()
        }
        """Optimizers of the policy's parts with separate losses, by name."""
        self.optimizer = next(iter(self.optimizers.values()))
        if reducer.size > 1:
            for optimizer in self.optimizers.values():
                optimizer.reduce = reducer.average
        for module in policy.modules():
            if isinstance(module, RunningMoments):
                module.reducer = reducer
        self.peak_lr = config.peak_lr(config.batch(self.samples))
        """Peak learning rate of the run."""
        self.updates = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._updates_read = 0
        names = (*self.metric_names, "gradient_norm", *self.per_update)
        self.metrics = {name: torch.zeros((), device=self.device) for name in names}
        self.metric_count = torch.zeros((), device=self.device)
        self._maybe_compile: Any = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)

    def trainable_parts(self) -> dict[str, nn.Module]:
        """The policy's parts with separate losses and optimizers, by the optimizer's name."""
        return {"optimizer": self.policy}

    def store(self) -> None:
        """Store the rollout, if the learner has a replay."""

    def mark_discontinuity(self) -> None:
        """Mark that the next rollout does not continue the last one."""

    def on_weights_loaded(self) -> None:
        """Update what depends on the policy's weights, after they were loaded."""

    def updates_due(self, samples: int) -> int:
        """Number of updates after this rollout; `samples` is the run's total so far."""
        return 1

    def update(self) -> None:
        """Update the policy once."""
        raise ShoalError("Learner is a base class; use A2C, PPO, QLearner or ContinuousQ.")

    def _optimizer_step(self, terms: dict[str, torch.Tensor], gradient: torch.Tensor, go: torch.Tensor) -> None:
        """Take an optimizer step, unless `go` is 0, and add the losses to the metrics."""
        norm = self.optimizer.step(gradient, go)
        with torch.no_grad():
            for name in self.metric_names:
                self.metrics[name].add_(terms[name].detach())
            self.metrics["gradient_norm"].add_(norm)
            self.metric_count.add_(1.0)

    def _count_update(self) -> None:
        """Increment the number of updates, also in the rollout."""
        self.updates.add_(1)
        self.rollout.version.add_(1)

    def _autocast(self):
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bf16, cache_enabled=False)

    # --- between updates -------------------------------------------------------------------------------------------

    def set_progress(self, done: float) -> None:
        """Set the learning rate for the completed fraction `done` of the run."""
        for optimizer in self.optimizers.values():
            optimizer.lr.fill_(self.peak_lr * self.config.lr_factor(done))

    def describe(self) -> str:
        """A sentence that describes the updates, for the log."""
        c, batch = self.config, self.config.batch(self.samples)
        rate = f"{c.lr:.3g}"
        if c.lr_scaling != "none":
            power = "sqrt" if c.lr_scaling == "sqrt" else ""
            rate += f" x {power}({batch:,} / {c.lr_reference_batch:,}) = {self.peak_lr:.3g}"
        rate += f", warmup over {100 * c.lr_warmup:g} % of the run" if c.lr_warmup else ""
        fall = {"none": "", "linear": ", linear decay", "cosine": ", cosine decay"}[c.lr_schedule]
        fall += (
            f" to {100 * c.lr_final_fraction:g} % of it" if fall and c.lr_final_fraction else " to 0" if fall else ""
        )
        decay = c.resolved_weight_decay
        weight_decay = f", weight decay {decay:g}" if decay else ""
        size = f"{batch:,} samples{self._describe_passes()}"
        return f"{c.optimizer.capitalize()}{weight_decay}, mini-batches of {size}, learning rate {rate}{fall}"

    def _describe_passes(self) -> str:
        """Describe the number of micro-batches per mini-batch, if more than one."""
        return ""

    def read_metrics(self) -> dict[str, float]:
        """Means since the last call. Synchronizes with the device, once per log interval."""
        count = max(1.0, float(self.metric_count))  # sync: deliberate
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
        """Bytes that grow with the number of envs."""
        return 0

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All tensors that the next update depends on, except the policy's."""
        pairs = self.optimizers.items()
        state = {f"{name}.{k}": v for name, optimizer in pairs for k, v in optimizer.state_dict().items()}
        return {**state, "updates": self.updates}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])
        self._updates_read = int(self.updates)

    def env_axes(self) -> dict[str, int]:
        """Axis of the envs in each state tensor that is sharded over processes, by the tensor's name."""
        return {}


def activation_memory(device: torch.device) -> int:
    """Maximum bytes of activations per micro-batch: a quarter of a GPU's memory, or 1 GiB."""
    return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else 2**30


def part_of(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    """The entries whose names start with a prefix, which is removed."""
    return {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
