"""What A2C and PPO share: values, advantages, one compiled loss, one optimiser, metrics that stay on the device."""

from dataclasses import dataclass
from typing import Any

import torch

from shoal.core.settings import check_settings
from shoal.errors import ShoalError
from shoal.learn import losses
from shoal.learn.optim import Adam
from shoal.learn.returns import advantage_plan, discounted_plan
from shoal.learn.rollout import Rollout
from shoal.policy import ActorCritic, RunningMoments


@dataclass(frozen=True)
class PolicyGradientConfig:
    """Settings that every policy-gradient learner has."""

    lr: float = 3e-4
    """Learning rate of Adam."""
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
    anneal_lr: bool = True
    """Let the learning rate fall linearly to zero over the run."""
    normalise_advantage: bool = True
    """Scale the advantages of each mini-batch to mean 0 and deviation 1."""
    normalise_reward: bool = False
    """Divide rewards by the running deviation of the discounted return."""
    adam_eps: float = 1e-5
    """Epsilon of Adam."""

    def __post_init__(self):
        check_settings(self)
        _require("lr", self.lr, self.lr > 0, "above 0")
        _require("adam-eps", self.adam_eps, self.adam_eps > 0, "above 0")
        _require("gamma", self.gamma, 0 <= self.gamma <= 1, "between 0 and 1")
        _require("lam", self.lam, 0 <= self.lam <= 1, "between 0 and 1")
        _require("clip-norm", self.clip_norm, self.clip_norm > 0, "above 0")

    def check_samples(self, samples: int) -> None:
        """Refuse a rollout of a size that this learner cannot use."""


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
        config.check_samples(rollout.samples)
        self.policy, self.rollout, self.config, self.seed = policy, rollout, config, seed
        self.device = rollout.reward.device
        self.bf16 = bf16
        self.adam = Adam(policy, config.adam_eps, config.clip_norm, compiled)
        self.updates = torch.zeros(1, dtype=torch.int32, device=self.device)

        steps, envs, agents = rollout.reward.shape
        self.value = torch.zeros(steps + 1, envs, agents, device=self.device)
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
        self._observations = rollout.observation[:-1].flatten(0, 2)
        self._actions = rollout.action.flatten(0, 2)
        self._old_log_probs = rollout.log_prob.flatten()
        self._masks = None if rollout.action_mask is None else rollout.action_mask[:-1].flatten(0, 2)
        self._alive = None if rollout.alive is None else rollout.alive[:-1].flatten()

        names = (*self.metric_names, "gradient_norm", "explained_variance")
        self.metrics = {name: torch.zeros((), device=self.device) for name in names}
        self.metric_count = torch.zeros((), device=self.device)
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self._value_of = wrap(self._value_eager)
        self._losses = wrap(self._losses_eager)

    # --- one update ------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Learn from the rollout as it is now. No allocation that lasts, nothing read on the host."""
        self._prepare()
        self._learn()
        if self.policy.normalise:
            # After learning: the rollout was made, and must be learnt from, with one and the same normalisation.
            self.policy.moments.merge(self._observations, self._alive)
        self.updates.add_(1)

    def _prepare(self) -> None:
        """Values of all observations in one pass, then advantages and targets."""
        with torch.no_grad():
            if self._discounted is not None:
                self._discounted()
                self.reward_moments.merge(self.advantage.flatten(), self._alive)
                self.reward_scale.copy_(self.reward_moments.scale().view(1))
            self._value_of(self.rollout.observation, self.value)
            self._value_eager(self.rollout.final_observation, self.final_value)  # few rows: not worth compiling for
            self._advantages()
            weight = None if self._alive is None else self._alive.float()
            spread = losses.explained_variance(self.value[:-1].flatten(), self.target.flatten(), weight)
            self.metrics["explained_variance"].add_(spread)

    def _learn(self) -> None:
        raise ShoalError("PolicyGradient is the base of A2C and PPO; use one of them.")

    def _value_eager(self, observation: torch.Tensor, out: torch.Tensor) -> None:
        with self._precision():
            out.copy_(self.policy.value(observation.flatten(0, 2)).view_as(out))

    def _losses_eager(self, pick: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The loss and what is reported of it, over the samples `pick` (None: all)."""
        raise ShoalError("PolicyGradient is the base of A2C and PPO; use one of them.")

    def _evaluate(self, pick: torch.Tensor | None) -> tuple[Any, ...]:
        """Log-probability, entropy, value, advantage and target of the samples `pick`, and their weights."""

        def rows(tensor: torch.Tensor) -> torch.Tensor:
            return tensor if pick is None else tensor[pick]

        weight = None if self._alive is None else rows(self._alive).float()
        mask = None if self._masks is None else rows(self._masks)
        with self._precision():
            params, value = self.policy.distribution_and_value(rows(self._observations), mask)
        log_prob, entropy = self.policy.head.log_prob_and_entropy(params, rows(self._actions))
        advantage = rows(self.advantage.flatten())
        if self.config.normalise_advantage:
            advantage = losses.normalised(advantage, weight)
        return log_prob, entropy, value, advantage, rows(self.target.flatten()), weight

    def _descend(self, found: dict[str, torch.Tensor], go: torch.Tensor) -> None:
        """Step down found["loss"], unless `go` is 0, and add the rest to the metrics."""
        norm = self.adam.step(found["loss"], go)
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
        left = 1.0 - done if self.config.anneal_lr else 1.0
        self.adam.lr.fill_(self.config.lr * left)

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

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Everything the next update depends on, the policy included."""
        state = {f"policy.{k}": v for k, v in self.policy.state_dict().items()}
        state.update({f"adam.{k}": v for k, v in self.adam.state_dict().items()})
        state.update({f"reward_moments.{k}": v for k, v in self.reward_moments.state_dict().items()})
        state["reward_carry"] = self.reward_carry
        state["updates"] = self.updates
        return state

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        own = self.state_dict()
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self._updates_read = int(self.updates)


def _require(name: str, value: Any, good: bool, rule: str) -> None:
    if not good:
        raise ShoalError(f"--{name} must be {rule}, got {value}.")
