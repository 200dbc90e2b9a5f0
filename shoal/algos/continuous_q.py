"""DDPG, TD3 and SAC as options of one learner.

Critics learn Q-values, and the actor maximizes them (DDPG, Lillicrap et al. 2016). TD3 (Fujimoto et al. 2018) adds the
minimum of two critics, target policy noise and delayed policy updates; SAC (Haarnoja et al. 2018) adds a stochastic
actor and an entropy bonus.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import nn

from shoal.algos.off_policy import OffPolicy, OffPolicyConfig, SoftUpdate
from shoal.core.errors import ShoalError
from shoal.core.noise import noise_plan
from shoal.core.settings import Bounds, NonNegative, NonNegativeFloat, PositiveFloat
from shoal.core.spaces import Box
from shoal.core.world import Group
from shoal.learn.learner import LearningRate
from shoal.learn.replay_draws import Sample
from shoal.learn.rollout import Rollout
from shoal.policy import ContinuousQPolicy
from shoal.policy.continuous_q import unsupported_actions

NOISE_SEED = 0x5AC
"""Mask of the seed, which separates the noise of updates from that of actions."""


@dataclass(frozen=True)
class DDPGConfig(OffPolicyConfig):
    """Settings of DDPG, and base of TD3's and SAC's."""

    lr: LearningRate = 1e-3
    """Learning rate; with --lr-scaling, for mini-batches of --lr-reference-batch samples."""
    replay_ratio: PositiveFloat = 64.0
    """Ratio of transitions drawn to transitions collected: how often each is used on average."""
    learning_starts: NonNegative = 5_000
    """Transitions collected with uniformly random actions before the first update."""
    tau: SoftUpdate = 0.005
    """Soft update coefficient of the target networks (Polyak averaging)."""
    critics: Annotated[int, Bounds(ge=1, le=2**8)] = 1
    """Number of critics; the minimum of their Q-values is used."""
    policy_delay: Annotated[int, Bounds(ge=1, le=2**20)] = 1
    """Critic updates per update of the actor and the target networks."""
    target_policy_noise: NonNegativeFloat = 0.0
    """Standard deviation of the target policy noise, in units of half the action range."""
    target_noise_clip: NonNegativeFloat = 0.5
    """Clip range of the target policy noise, in units of half the action range."""
    exploration_noise: NonNegativeFloat = 0.1
    """Standard deviation of the exploration noise, in units of half the action range (deterministic actors)."""
    stochastic: bool = False
    """Use a stochastic actor with an entropy bonus."""
    temperature: PositiveFloat | None = None
    """Entropy coefficient of a stochastic actor (none: learned to reach --target-entropy)."""
    target_entropy: float | None = None
    """Target entropy of a learned --temperature [nats] (none: minus the action dimension)."""

    network_settings: ClassVar[tuple[str, ...]] = ("critics", "stochastic", "exploration_noise", "temperature")

    @property
    def drawn(self) -> int:
        return self.batch_size * self.policy_delay

    @classmethod
    def unsupported(cls, group: Group) -> str:
        return unsupported_actions(group) or super().unsupported(group)

    def check_rnn(self, rnn: bool) -> None:
        if rnn:
            raise ShoalError("DDPG, TD3 and SAC do not support an RNN; use --rnn none, or --algo ppo or a2c.")

    def resolved_target_entropy(self, size: int) -> float:
        """`target_entropy`, or its default for actions of `size` dimensions."""
        return -float(size) if self.target_entropy is None else self.target_entropy


@dataclass(frozen=True)
class TD3Config(DDPGConfig):
    """Settings of TD3."""

    critics: Annotated[int, Bounds(ge=1, le=2**8)] = 2
    """Number of critics; the minimum of their Q-values is used."""
    policy_delay: Annotated[int, Bounds(ge=1, le=2**20)] = 2
    """Critic updates per update of the actor and the target networks."""
    target_policy_noise: NonNegativeFloat = 0.2
    """Standard deviation of the target policy noise, in units of half the action range."""

    presets_of: ClassVar[str] = "ddpg"


@dataclass(frozen=True)
class SACConfig(DDPGConfig):
    """Settings of SAC."""

    critics: Annotated[int, Bounds(ge=1, le=2**8)] = 2
    """Number of critics; the minimum of their Q-values is used."""
    stochastic: bool = True
    """Use a stochastic actor with an entropy bonus."""

    presets_of: ClassVar[str] = "ddpg"


class ContinuousQ(OffPolicy):
    """DDPG, TD3 and SAC: learns critics and an actor from a replay."""

    metric_names = ("loss", "q_value", "td_error")
    per_update = ("actor_loss", "entropy", "temperature")
    policy: ContinuousQPolicy
    target: ContinuousQPolicy
    config: DDPGConfig

    def __init__(
        self,
        policy: ContinuousQPolicy,
        rollout: Rollout,
        config: DDPGConfig,
        seed: int = 0,
        compiled: bool = False,
        bf16: bool = False,
    ):
        super().__init__(policy, rollout, config, seed, compiled, bf16)
        assert isinstance(policy.group.action, Box)
        size, draws = policy.group.action.size, config.policy_delay + 1
        self.noise = torch.zeros(draws, self.batch, size, device=self.device)
        """float32 [policy_delay + 1, batch, size]: normal noise of each critic update's targets and of the actor."""
        sample = torch.arange(self.batch, dtype=torch.int32, device=self.device) + self.reducer.rank * self.batch
        self._fill_noise = noise_plan(self.noise, True, (seed ^ NOISE_SEED) & 0x7FFFFFFF, sample, self.updates)
        self.target_entropy = config.resolved_target_entropy(size)
        self._critic_losses = self._maybe_compile(self._critic_losses_eager)
        self._actor_losses = self._maybe_compile(self._actor_losses_eager)
        self._set_exploration()
        self.set_progress(0.0)

    def trainable_parts(self) -> dict[str, nn.Module]:
        return {"critics": self.policy.critics, "actor": self.policy.actor}

    # --- one update -------------------------------------------------------------------------------------------------

    def update(self) -> None:
        self._fill_noise()
        go = torch.ones((), device=self.device)
        for normal in self.noise[:-1]:
            sample = self.replay.sample(self.batch, self.beta)
            terms = self._critic_losses(sample, normal)
            self._optimizer_step(terms, self.optimizer.gradient(terms["loss"]), go)
            if self.config.prioritized:
                self.replay.update_priorities(sample.index, terms["error"])
        terms = self._actor_losses(sample, self.noise[-1])
        actor = self.optimizers["actor"]
        actor.step(actor.gradient(terms["actor_loss"] + terms["temperature_loss"]), go)
        with torch.no_grad():
            for name in self.per_update:
                self.metrics[name].add_(terms[name].detach())
            self._count_update()
            self._soft_update(self.config.tau)

    def updates_due(self, samples: int) -> int:
        updates = super().updates_due(samples)
        self._set_exploration()
        return updates

    def _set_exploration(self) -> None:
        """Act uniformly at random until learning starts."""
        assert self.rollout.epsilon is not None
        self.rollout.epsilon.fill_(1.0 if self._learned_samples < 0 else 0.0)

    def _critic_losses_eager(self, sample: Sample, normal: torch.Tensor) -> dict[str, torch.Tensor]:
        """1/2 (Q(s, a) - y)^2, summed over critics, with y = r + gamma^n (min Q'(s', a') - alpha log pi(a'|s'))."""
        with torch.no_grad():
            action, log_prob = self._target_action(sample.next_observation, normal)
            with self._autocast():
                next_value = self.target.q_values(sample.next_observation, action).amin(dim=0)
            target = sample.reward + sample.discount * (next_value - self._temperature() * log_prob)
        with self._autocast():
            q_values = self.policy.q_values(sample.observation, sample.action)
        error = q_values - target
        abs_error = error.detach().abs().mean(dim=0)
        return dict(
            loss=(sample.weight * 0.5 * error.square()).sum(dim=0).mean(),
            error=abs_error,
            q_value=q_values.detach().mean(),
            td_error=abs_error.mean(),
        )

    def _target_action(self, observation: torch.Tensor, normal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Next actions [batch, size] of the targets and their log-probabilities [batch].

        A stochastic actor samples from its current distribution, as in SAC. A deterministic one uses the target network
        with noise, and its log-probabilities are 0.
        """
        c, head = self.config, self.policy.head
        with self._autocast():
            params = (self.policy if c.stochastic else self.target).distribution(observation)
        if c.stochastic:
            return head.sample_squashed(params, normal)
        noise = (c.target_policy_noise * normal).clamp(-c.target_noise_clip, c.target_noise_clip)
        return (torch.tanh(params) + noise).clamp(-1.0, 1.0), torch.zeros_like(normal[:, 0])

    def _actor_losses_eager(self, sample: Sample, normal: torch.Tensor) -> dict[str, torch.Tensor]:
        """Actor loss alpha log pi(a|s) - min Q(s, a); temperature loss -log alpha (log pi(a|s) + H)."""
        c, head = self.config, self.policy.head
        with self._autocast():
            params = self.policy.distribution(sample.observation)
        if c.stochastic:
            action, log_prob = head.sample_squashed(params, normal)
        else:
            action, log_prob = torch.tanh(params), torch.zeros_like(sample.reward)
        with self._autocast():
            q_values = self.policy.q_values(sample.observation, action).amin(dim=0)
        valid = (sample.weight > 0).float()
        temperature = self._temperature()
        loss = (valid * (temperature * log_prob - q_values)).mean()
        temperature_loss = torch.zeros_like(loss)
        if c.stochastic and c.temperature is None:
            temperature_loss = -head.log_temperature * (valid * (log_prob.detach() + self.target_entropy)).mean()
        entropy = -(valid * log_prob.detach()).mean()
        return dict(actor_loss=loss, temperature_loss=temperature_loss, entropy=entropy, temperature=temperature)

    def _temperature(self) -> torch.Tensor:
        head = self.policy.head
        return head.log_temperature.detach().exp() if head.stochastic else torch.zeros((), device=self.device)

    # --- between updates -------------------------------------------------------------------------------------------

    def describe(self) -> str:
        return f"{super().describe()}; target networks updated with tau {self.config.tau:g}"

    def state_dict(self) -> dict[str, torch.Tensor]:
        names = (f"target.{name}" for name in self.optimizers)
        return {**super().state_dict(), **dict(zip(names, self.target_flats, strict=True))}
