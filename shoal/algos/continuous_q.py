"""Q-learning of real-valued actions: DDPG and what has been added to it, as options of one learner.

Critics learn what actions are worth, and the actor climbs what they say (DDPG, Lillicrap et al. 2016). Two critics, of
which the lower one counts, noise in the targets and an actor that learns at every second step make it TD3 (Fujimoto et
al. 2018); an actor that draws its actions and is paid for entropy makes it SAC (Haarnoja et al. 2018).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from shoal.algos.off_policy import OffPolicy, OffPolicyConfig
from shoal.core.errors import ShoalError, require
from shoal.core.noise import noise_plan
from shoal.core.world import Group
from shoal.learn.replay import Sample
from shoal.learn.rollout import Rollout
from shoal.policy import ContinuousQPolicy
from shoal.policy.continuous_q import no_bounded_box

NOISE_SEED = 0x5AC
"""Keeps the noise of updates away from that of actions."""


@dataclass(frozen=True)
class DDPGConfig(OffPolicyConfig):
    """Settings of Q-learning of real-valued actions; by default plain DDPG."""

    lr: float = 1e-3
    """Learning rate; with --lr-scale, of batches of --lr-batch samples."""
    replay_ratio: float = 64.0
    """How often a transition is learned from on average: samples drawn over samples made."""
    learning_starts: int = 5_000
    """Transitions that are made before the first update; until then any action is as likely."""
    tau: float = 0.005
    """Share of the way that the target networks follow at every update."""
    critics: int = 1
    """Networks that tell what actions are worth; where several do, the lowest counts."""
    policy_delay: int = 1
    """Steps of the critics for each one of the actor and of the target networks."""
    target_policy_noise: float = 0.0
    """Spread of the noise that targets add to the actor's choice, in halves of the actions' range."""
    target_noise_clip: float = 0.5
    """Largest size of that noise."""
    exploration_noise: float = 0.1
    """Spread of the noise with which a deterministic actor acts, in halves of the actions' range."""
    stochastic: bool = False
    """Let the actor draw its actions from a distribution and pay it for entropy."""
    temperature: float | None = None
    """What a nat of entropy is worth to a stochastic actor (none: learned, so that the target entropy is met)."""
    target_entropy: float | None = None
    """Entropy that a learned temperature aims at (none: -1 for each number of an action)."""

    network: ClassVar[tuple[str, ...]] = ("critics", "stochastic", "exploration_noise", "temperature")

    def __post_init__(self):
        super().__post_init__()
        for name in ("critics", "policy_delay"):
            require(name.replace("_", "-"), getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("target_policy_noise", "target_noise_clip", "exploration_noise"):
            require(name.replace("_", "-"), getattr(self, name), getattr(self, name) >= 0, "at least 0")
        require("tau", self.tau, 0 < self.tau <= 1, "above 0 and at most 1")
        require("temperature", self.temperature, self.temperature is None or self.temperature > 0, "above 0")

    @property
    def drawn(self) -> int:
        return self.batch_size * self.policy_delay

    @classmethod
    def unsupported(cls, group: Group) -> str:
        return no_bounded_box(group) or super().unsupported(group)

    def check_rnn(self, rnn: bool) -> None:
        if rnn:
            raise ShoalError("DDPG, TD3 and SAC have no use for an RNN; use --rnn none, or --algo ppo or a2c.")

    def entropy_of(self, group: Group) -> float:
        """The entropy that is aimed at."""
        return -float(group.action.size) if self.target_entropy is None else self.target_entropy


@dataclass(frozen=True)
class TD3Config(DDPGConfig):
    """Settings of TD3."""

    critics: int = 2
    """Networks that tell what actions are worth; where several do, the lowest counts."""
    policy_delay: int = 2
    """Steps of the critics for each one of the actor and of the target networks."""
    target_policy_noise: float = 0.2
    """Spread of the noise that targets add to the actor's choice, in halves of the actions' range."""

    like: ClassVar[str] = "ddpg"


@dataclass(frozen=True)
class SACConfig(DDPGConfig):
    """Settings of SAC."""

    critics: int = 2
    """Networks that tell what actions are worth; where several do, the lowest counts."""
    stochastic: bool = True
    """Let the actor draw its actions from a distribution and pay it for entropy."""

    like: ClassVar[str] = "ddpg"


class ContinuousQ(OffPolicy):
    """Learns what actions are worth from a replay of past rollouts, and how to choose the best."""

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
        size, draws = policy.group.action.size, config.policy_delay + 1
        self.noise = torch.zeros(draws, self.batch, size, device=self.device)
        """[policy_delay + 1, batch, size]: normal noise for the targets of each step of the critics, and the actor."""
        sample = torch.arange(self.batch, dtype=torch.int32, device=self.device) + self.reducer.rank * self.batch
        self._fill_noise = noise_plan(self.noise, True, (seed ^ NOISE_SEED) & 0x7FFFFFFF, sample, self.updates)
        self.target_entropy = config.entropy_of(policy.group)
        self._critic_losses = self._wrap(self._critic_losses_eager)
        self._actor_losses = self._wrap(self._actor_losses_eager)
        self._explore()
        self.set_progress(0.0)

    def trainable_parts(self) -> dict[str, nn.Module]:
        return {"critics": self.policy.critics, "actor": self.policy.actor}

    # --- one update -------------------------------------------------------------------------------------------------

    def update(self) -> None:
        self._fill_noise()
        go = torch.ones((), device=self.device)
        for normal in self.noise[:-1]:
            sample = self.replay.sample(self.batch, self.beta)
            found = self._critic_losses(sample, normal)
            self._optimizer_step(found, self.optimizer.gradient(found["loss"]), go)
            if self.config.prioritized:
                self.replay.update_priorities(sample.place, found["error"])
        found = self._actor_losses(sample, self.noise[-1])
        actor = self.optimizers["actor"]
        actor.step(actor.gradient(found["actor_loss"] + found["temperature_loss"]), go)
        with torch.no_grad():
            for name in self.per_update:
                self.metrics[name].add_(found[name].detach())
            self._count()
            self._soft_update(self.config.tau)

    def updates_due(self, made: int) -> int:
        found = super().updates_due(made)
        self._explore()
        return found

    def _explore(self) -> None:
        """Any action is as likely until learning begins."""
        assert self.rollout.epsilon is not None
        self.rollout.epsilon.fill_(1.0 if self._made < 0 else 0.0)

    def _critic_losses_eager(self, sample: Sample, normal: torch.Tensor) -> dict[str, torch.Tensor]:
        """1/2 (Q(s, a) - y)^2, summed over the critics: y = r + gamma^n (min Q'(s', a') - alpha log pi(a'|s'))."""
        with torch.no_grad():
            action, log_prob = self._target_action(sample.later, normal)
            with self._precision():
                ahead = self.target.q_values(sample.later, action).amin(dim=0)
            aim = sample.reward + sample.discount * (ahead - self._temperature() * log_prob)
        with self._precision():
            worth = self.policy.q_values(sample.seen, sample.action)
        error = worth - aim
        off = error.detach().abs().mean(dim=0)
        return dict(
            loss=(sample.weight * 0.5 * error.square()).sum(dim=0).mean(),
            error=off,
            q_value=worth.detach().mean(),
            td_error=off.mean(),
        )

    def _target_action(self, seen: torch.Tensor, normal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What would be done next [batch, size], and its log-probability, 0 for a deterministic actor.

        A stochastic actor draws anew; of a deterministic one the target network chooses, with noise added.
        """
        c, head = self.config, self.policy.head
        with self._precision():
            params = (self.policy if c.stochastic else self.target).distribution(seen)
        if c.stochastic:
            return head.drawn(params, normal)
        noise = (c.target_policy_noise * normal).clamp(-c.target_noise_clip, c.target_noise_clip)
        return (torch.tanh(params) + noise).clamp(-1.0, 1.0), torch.zeros_like(normal[:, 0])

    def _actor_losses_eager(self, sample: Sample, normal: torch.Tensor) -> dict[str, torch.Tensor]:
        """alpha log pi(a|s) - min Q(s, a), and for the temperature alpha: -log alpha (log pi(a|s) + H)."""
        c, head = self.config, self.policy.head
        with self._precision():
            params = self.policy.distribution(sample.seen)
        if c.stochastic:
            action, log_prob = head.drawn(params, normal)
        else:
            action, log_prob = torch.tanh(params), torch.zeros_like(sample.reward)
        with self._precision():
            worth = self.policy.q_values(sample.seen, action).amin(dim=0)
        counts = (sample.weight > 0).float()
        temperature = self._temperature()
        loss = (counts * (temperature * log_prob - worth)).mean()
        short = torch.zeros_like(loss)
        if c.stochastic and c.temperature is None:
            short = -head.log_temperature * (counts * (log_prob.detach() + self.target_entropy)).mean()
        entropy = -(counts * log_prob.detach()).mean()
        return dict(actor_loss=loss, temperature_loss=short, entropy=entropy, temperature=temperature)

    def _temperature(self) -> torch.Tensor:
        head = self.policy.head
        return head.log_temperature.detach().exp() if head.stochastic else torch.zeros((), device=self.device)

    # --- between updates -------------------------------------------------------------------------------------------

    def describe(self) -> str:
        return f"{super().describe()}; target networks following by {self.config.tau:g}"

    def state_dict(self) -> dict[str, torch.Tensor]:
        names = (f"target.{name}" for name in self.optimizers)
        return {**super().state_dict(), **dict(zip(names, self.target_flats, strict=True))}
