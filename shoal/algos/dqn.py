"""DQN, Rainbow and R2D2 as options of one learner.

The options are double DQN (van Hasselt et al. 2016), dueling (Wang et al. 2016), prioritized replay (Schaul et al.
2016), n-step targets, categorical values (C51, Bellemare et al. 2017), quantiles (QR-DQN, Dabney et al. 2018) and noisy
networks (Fortunato et al. 2018); all but quantiles together are Rainbow (Hessel et al. 2018). Exploration rates can
differ between envs (Ape-X, Horgan et al. 2018). Policies with an RNN learn from sequences with burn-in (R2D2,
Kapturowski et al. 2019), and values can be rescaled (Pohlen et al. 2018).
"""

import warnings
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import torch

from shoal.algos.off_policy import OffPolicy, OffPolicyConfig, SoftUpdate
from shoal.core.errors import ShoalError, require
from shoal.core.settings import INT32, Bounds, NonNegative, NonNegativeFloat, Positive, PositiveFloat, UnitInterval
from shoal.core.world import Group
from shoal.learn import losses
from shoal.learn.learner import LearningRate
from shoal.learn.replay_draws import Sample, Sequences
from shoal.learn.rollout import Rollout
from shoal.policy import QPolicy
from shoal.policy.q import unsupported_actions

ONLINE_NOISE, TARGET_NOISE = 1, 2
"""Random streams of the noisy layers of the online and the target network; acting uses stream 0."""

ETA = 0.9
"""Weight of a sequence's maximum error in its priority; the mean has weight 1 - ETA."""

TOLERANCE = 1e-3
"""Tolerated distance of an estimated value from the atoms' range, as a fraction of the range."""


@dataclass(frozen=True)
class QConfig(OffPolicyConfig):
    """Settings of DQN, and base of Rainbow's and R2D2's."""

    target_update_interval: Annotated[int, Bounds(ge=1, le=INT32)] = 500
    """Updates between copies of the weights to the target network."""
    tau: SoftUpdate | None = None
    """Soft update coefficient of the target network (Polyak averaging) instead of copies (none: copies)."""
    huber_delta: PositiveFloat | None = 1.0
    """Threshold of the Huber loss (none: squared error, for returns far above 1)."""
    double_q: bool = False
    """Use double DQN: the online network selects the action that the target network evaluates."""
    dueling: bool = False
    """Use a dueling network: a state value plus advantages."""
    atoms: Annotated[int, Bounds(ge=1, le=2**16)] = 1
    """Number of atoms of categorical Q-values between --v-min and --v-max (1: scalar Q-values; C51: 51)."""
    v_min: float = -10.0
    """Return of the lowest atom."""
    v_max: float = 10.0
    """Return of the highest atom."""
    quantiles: Annotated[int, Bounds(ge=0, le=2**16)] = 0
    """Number of quantiles per Q-value (0: off; QR-DQN: 200)."""
    noisy: bool = False
    """Use a noisy last layer for exploration, besides epsilon."""
    exploration_initial_eps: UnitInterval = 1.0
    """Initial probability of a random action."""
    exploration_final_eps: UnitInterval = 0.05
    """Final probability of a random action."""
    exploration_fraction: UnitInterval = 0.2
    """Fraction of the run over which epsilon is annealed."""
    apex_alpha: NonNegativeFloat = 0.0
    """Per-env exploration epsilon^(1 + alpha i / (N - 1)) for env i of N (0: equal; Ape-X: 7)."""
    burn_in: NonNegative = 32
    """With an RNN: leading steps of each sequence that only warm up the recurrent state."""
    sequence_length: Positive = 64
    """With an RNN: learned steps per sequence, after the burn-in; must divide the batch size."""
    rescale: bool = False
    """Learn h(Q) = sign(Q) (sqrt(|Q| + 1) - 1) + Q / 1000 instead of Q, for unclipped rewards."""

    network_settings: ClassVar[tuple[str, ...]] = ("dueling", "noisy", "atoms", "v_min", "v_max", "quantiles")

    def __post_init__(self):
        super().__post_init__()
        require("v-max", self.v_max, self.v_max > self.v_min, f"above --v-min ({self.v_min:g})")
        if self.atoms > 1 and self.quantiles:
            raise ShoalError(f"Q-values use --atoms ({self.atoms}) or --quantiles ({self.quantiles}), not both.")
        if self.rescale and (self.atoms > 1 or self.quantiles):
            raise ShoalError("--rescale needs scalar Q-values; use --atoms 1 and --quantiles 0.")

    def sequence_rows(self, rnn: bool) -> tuple[int, int]:
        return (self.burn_in, self.sequence_length) if rnn else (0, 0)

    @classmethod
    def unsupported(cls, group: Group) -> str:
        return unsupported_actions(group) or super().unsupported(group)

    def check_rollout(self, steps: int, lanes: int, rnn: bool) -> None:
        if rnn and (self.burn_in % steps or self.sequence_length % steps):
            near = [
                max(least, round(rows / steps)) * steps
                for rows, least in ((self.burn_in, 0), (self.sequence_length, 1))
            ]
            raise ShoalError(
                f"With an RNN, --burn-in {self.burn_in} and --sequence-length {self.sequence_length} must be multiples "
                f"of --rollout-steps {steps}; use --burn-in {near[0]} --sequence-length {near[1]}, or another "
                "--rollout-steps."
            )
        if rnn and self.batch_size % self.sequence_length:
            batch = max(1, round(self.batch_size / self.sequence_length)) * self.sequence_length
            raise ShoalError(
                f"With an RNN, --batch-size {self.batch_size} must be a multiple of --sequence-length "
                f"{self.sequence_length}; use --batch-size {batch}, or another --sequence-length."
            )
        super().check_rollout(steps, lanes, rnn)

    def epsilon_at(self, progress: float) -> float:
        """Probability of a random action at `progress` [0, 1] of the run."""
        t = 1.0 if progress >= self.exploration_fraction else progress / self.exploration_fraction
        return self.exploration_initial_eps + (self.exploration_final_eps - self.exploration_initial_eps) * t


@dataclass(frozen=True)
class RainbowConfig(QConfig):
    """Settings of Rainbow."""

    n_step: Positive = 3
    """Number of rewards in n-step targets."""
    double_q: bool = True
    """Use double DQN: the online network selects the action that the target network evaluates."""
    dueling: bool = True
    """Use a dueling network: a state value plus advantages."""
    prioritized: bool = True
    """Prioritized replay: draw transitions by TD error."""
    atoms: Annotated[int, Bounds(ge=1, le=2**16)] = 51
    """Number of atoms of categorical Q-values between --v-min and --v-max (1: scalar Q-values; C51: 51)."""
    noisy: bool = True
    """Use a noisy last layer for exploration, besides epsilon."""
    exploration_final_eps: UnitInterval = 0.0
    """Final probability of a random action."""
    exploration_fraction: UnitInterval = 0.1
    """Fraction of the run over which epsilon is annealed."""


@dataclass(frozen=True)
class R2D2Config(QConfig):
    """Settings of R2D2, whose policy has an RNN and learns from sequences."""

    lr: LearningRate = 5e-4
    """Learning rate; with --lr-scaling, for mini-batches of --lr-reference-batch samples."""
    gamma: UnitInterval = 0.997
    """Discount factor."""
    max_grad_norm: PositiveFloat = 40.0
    """Maximum norm for gradient clipping."""
    batch_size: Annotated[int, Bounds(ge=1, le=INT32)] = 1280
    """Transitions per update."""
    replay_ratio: PositiveFloat = 2.0
    """Ratio of transitions drawn to transitions collected: how often each is used on average."""
    n_step: Positive = 5
    """Number of rewards in n-step targets."""
    double_q: bool = True
    """Use double DQN: the online network selects the action that the target network evaluates."""
    dueling: bool = True
    """Use a dueling network: a state value plus advantages."""
    prioritized: bool = True
    """Prioritized replay: draw transitions by TD error."""
    priority_alpha: UnitInterval = 0.9
    """Exponent of the TD error in the priority."""
    priority_beta: UnitInterval = 0.6
    """Initial exponent of the importance weights; it rises to 1 over the run."""
    exploration_initial_eps: UnitInterval = 0.4
    """Initial probability of a random action."""
    exploration_final_eps: UnitInterval = 0.4
    """Final probability of a random action."""
    apex_alpha: NonNegativeFloat = 7.0
    """Per-env exploration epsilon^(1 + alpha i / (N - 1)) for env i of N (0: equal; Ape-X: 7)."""
    burn_in: NonNegative = 40
    """With an RNN: leading steps of each sequence that only warm up the recurrent state."""
    sequence_length: Positive = 80
    """With an RNN: learned steps per sequence, after the burn-in; must divide the batch size."""
    rescale: bool = True
    """Learn h(Q) = sign(Q) (sqrt(|Q| + 1) - 1) + Q / 1000 instead of Q, for unclipped rewards."""

    run_defaults: ClassVar[dict[str, Any]] = dict(rnn="lstm", rollout_steps=40)

    def check_rnn(self, rnn: bool) -> None:
        if not rnn:
            raise ShoalError("R2D2 needs an RNN; use --rnn lstm or gru, or --algo dqn.")


class TDBatch(NamedTuple):
    """A batch for the TD loss, one row per transition."""

    q_logits: torch.Tensor
    """[n, choices, width]: outputs of the online network."""
    target_logits: torch.Tensor
    """[n, parts, width]: outputs of the target network for the greedy choices n steps later."""
    action: torch.Tensor
    """int64 [n, parts]"""
    reward: torch.Tensor
    """float32 [n]: n-step reward."""
    discount: torch.Tensor
    """float32 [n]: factor of the bootstrap value."""
    weight: torch.Tensor
    """float32 [n]: importance weight; 0 for rows that are ignored."""


class QLearner(OffPolicy):
    """DQN, Rainbow and R2D2: learns Q-values of discrete actions from a replay."""

    metric_names = ("loss", "q_value", "td_error")
    policy: QPolicy
    target: QPolicy
    config: QConfig

    def __init__(
        self,
        policy: QPolicy,
        rollout: Rollout,
        config: QConfig,
        seed: int = 0,
        compiled: bool = False,
        bf16: bool = False,
    ):
        super().__init__(policy, rollout, config, seed, compiled, bf16)
        (self.target_flat,) = self.target_flats
        online_noise = policy.noise_plan(seed, ONLINE_NOISE, self.updates)
        target_noise = self.target.noise_plan(seed, TARGET_NOISE, self.updates)
        self._noise = [plan for plan in (online_noise, target_noise) if plan is not None]
        self._exponents = _epsilon_exponents(rollout, config.apex_alpha)
        self._losses = self._maybe_compile(self._losses_eager)
        self._warned = False
        self.set_progress(0.0)

    # --- one rollout, one update ------------------------------------------------------------------------------------

    def update(self) -> None:
        for plan in self._noise:
            plan()
        sample = self._draw()
        terms = self._losses(sample)
        self._optimizer_step(terms, self.optimizer.gradient(terms["loss"]), torch.ones((), device=self.device))
        with torch.no_grad():
            if self.config.prioritized:
                self.replay.update_priorities(sample.index, terms["error"].detach())
            self._count_update()
            c = self.config
            self._soft_update((self.updates % c.target_update_interval == 0).float() if c.tau is None else c.tau)

    def _draw(self) -> Sample | Sequences:
        """Draw transitions or, with an RNN, sequences."""
        if self.policy.rnn is None:
            return self.replay.sample(self.batch, self.beta)
        count = self.batch // self.sequence_length
        return self.replay.sample_sequences(count, self.burn_in, self.sequence_length, self.beta)

    def _losses_eager(self, sample: Sample | Sequences) -> dict[str, torch.Tensor]:
        """The loss, summed over the parts of an action, and the TD error of each sample."""
        head = self.policy.head
        batch = self._from_sequences(sample) if isinstance(sample, Sequences) else self._from_transitions(sample)
        loss = q_values = error = torch.zeros_like(batch.reward)
        for i, part in enumerate(batch.q_logits.split(head.nvec, dim=1)):
            chosen = _select(part, batch.action[:, i])
            part_loss, part_error = self._td_loss(chosen, batch.target_logits[:, i], batch)
            loss, error = loss + part_loss, error + part_error
            value = head.q_values(chosen.detach().unsqueeze(1)).squeeze(1)
            q_values = q_values + (losses.inverse_rescale(value) if self.config.rescale else value) / len(head.nvec)
        terms = dict(loss=(batch.weight * loss).mean(), q_value=q_values.mean(), td_error=error.detach().mean())
        if isinstance(sample, Sequences):
            valid = sample.valid[self.burn_in :]
            error = error.view_as(valid)
            terms["td_error"] = losses.weighted_mean(error.detach(), valid.float())
            error = _sequence_error(error, valid)
        return dict(terms, error=error)

    def _from_transitions(self, sample: Sample) -> TDBatch:
        """The TD batch of single transitions."""
        with self._autocast():
            q_logits = self.policy.q_logits(sample.observation)
            with torch.no_grad():
                target = self.target.q_logits(sample.next_observation)
                selector = self.policy.q_logits(sample.next_observation) if self.config.double_q else target
        target_logits = self._greedy_outputs(target, selector, sample.next_action_mask)
        action = sample.action.view(len(sample.index), -1).long()
        return TDBatch(q_logits, target_logits, action, sample.reward, sample.discount, sample.weight)

    def _from_sequences(self, sample: Sequences) -> TDBatch:
        """The TD batch of sequences, row by row, after the burn-in of both networks without gradient.

        Targets index the outputs of the rows after the burn-in, followed by those of the final observations.
        """
        burn_in, length = self.burn_in, self.sequence_length
        observation, ended = sample.observation[burn_in:], sample.terminated | sample.truncated
        final = sample.final_observation
        with self._autocast():
            with torch.no_grad():
                state = self._burned_in_state(self.policy, sample, ended)
                target_state = self._burned_in_state(self.target, sample, ended)
                target, target_states = self.target.sequence(observation, target_state, ended[burn_in:])
            q_logits, states = self.policy.sequence(observation, state, ended[burn_in:])
            with torch.no_grad():
                selector = target = torch.cat([target, self._final_outputs(self.target, sample, target_states)])
                if self.config.double_q:
                    selector = torch.cat([q_logits.detach(), self._final_outputs(self.policy, sample, states.detach())])
        mask = sample.action_mask  # everything is allowed in final observations
        if mask is not None:
            mask = torch.cat([mask[burn_in:], mask.new_ones(*final.shape[:2], mask.shape[-1])]).flatten(0, 1)
        target_logits = self._greedy_outputs(target.flatten(0, 1), selector.flatten(0, 1), mask)
        batch = len(sample.index)
        index = (sample.next_row[burn_in:] - burn_in) * batch + torch.arange(batch, device=self.device)
        rows = slice(burn_in, burn_in + length)
        return TDBatch(
            q_logits[:length].flatten(0, 1),
            target_logits[index.flatten()],
            sample.action[rows].reshape(length * batch, -1).long(),
            sample.n_step_reward[rows].flatten(),
            sample.discount[rows].flatten(),
            (sample.weight * sample.valid[rows]).flatten(),
        )

    def _burned_in_state(self, network: QPolicy, sample: Sequences, ended: torch.Tensor) -> torch.Tensor:
        """Recurrent state [batch, S] of a network after the burn-in."""
        assert sample.state is not None
        if not self.burn_in:
            return sample.state
        return network.final_state(sample.observation[: self.burn_in], sample.state, ended[: self.burn_in])

    def _final_outputs(self, network: QPolicy, sample: Sequences, states: torch.Tensor) -> torch.Tensor:
        """Outputs [F, batch, choices, width] for final observations, given the states after the burn-in."""
        row = (sample.final_row - self.burn_in).clamp(min=0)  # no target uses those within the burn-in, or missing ones
        state = states.gather(0, row.unsqueeze(-1).expand(-1, -1, states.shape[-1]))
        q_logits = network.q_logits(sample.final_observation.flatten(0, 1), state.flatten(0, 1))
        return q_logits.unflatten(0, row.shape)

    def _greedy_outputs(self, target: torch.Tensor, selector: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Outputs [n, parts, width] of `target` [n, choices, width] for the greedy choices of `selector`."""
        head = self.policy.head
        with torch.no_grad():
            chosen = head.greedy_choices(head.q_values(selector, mask))
            parts = enumerate(target.split(head.nvec, dim=1))
            return torch.stack([_select(part, chosen[:, i]) for i, part in parts], dim=1)

    def _td_loss(
        self, logits: torch.Tensor, target_logits: torch.Tensor, batch: TDBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """TD loss [n] and absolute error [n] of logits [n, width], given the target network's n steps later."""
        head = self.policy.head
        if head.atoms > 1:
            target = losses.categorical_projection(
                target_logits.softmax(-1), batch.reward, batch.discount, head.support
            )
            loss = losses.cross_entropy(logits, target)
            return loss, loss
        if self.config.rescale:
            target_logits = losses.inverse_rescale(target_logits)
        target = batch.reward.unsqueeze(-1) + batch.discount.unsqueeze(-1) * target_logits
        if self.config.rescale:
            target = losses.rescale(target)
        if head.quantiles:
            loss = losses.quantile_loss(logits, target)
            return loss, loss
        error = (logits - target).squeeze(-1)
        return losses.huber(error, self.config.huber_delta), error.abs()

    # --- between updates -------------------------------------------------------------------------------------------

    def set_progress(self, done: float) -> None:
        """Set the learning rate, beta and epsilon for the completed fraction `done` of the run."""
        super().set_progress(done)
        c = self.config
        assert self.rollout.epsilon is not None
        self.rollout.epsilon.copy_(torch.pow(c.epsilon_at(done), self._exponents))

    def describe(self) -> str:
        c = self.config
        how = f"copied every {c.target_update_interval:,} updates" if c.tau is None else f"updated with tau {c.tau:g}"
        along = (
            f"; sequences of {self.sequence_length} steps after a burn-in of {self.burn_in}"
            if self.sequence_length
            else ""
        )
        return f"{super().describe()}{along}; target network {how}"

    def read_metrics(self) -> dict[str, float]:
        self._check_support()
        return super().read_metrics()

    def _check_support(self) -> None:
        """Warn once if the mean state value is outside the range of the atoms.

        It is estimated as r / (1 - gamma (1 - p)) from the replay's mean reward r and fraction p of terminated steps.
        """
        c = self.config
        if c.atoms == 1 or self._warned or self._learned_samples < 0 or self.reducer.rank:
            return
        rows = slice(0, int(self.replay.filled))  # sync: once per log interval
        fraction = float(self.replay.terminated[rows].float().mean())
        value = float(self.replay.reward[rows].mean()) / max(1.0 - c.gamma * (1.0 - fraction), 1e-9)
        tolerance = TOLERANCE * (c.v_max - c.v_min)
        if not c.v_min - tolerance <= value <= c.v_max + tolerance:
            self._warned = True
            warnings.warn(
                f"Values of group {self.policy.group.name!r} are about {value:.3g}, outside the range of the atoms, "
                f"--v-min {c.v_min:g} to --v-max {c.v_max:g}; set it to the range of discounted returns.",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {**super().state_dict(), "target": self.target_flat}


def _sequence_error(error: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """eta max |e| + (1 - eta) mean |e| over the valid rows of sequences [rows, n]   (Kapturowski et al. 2019)."""
    size = error.abs() * valid
    return ETA * size.amax(dim=0) + (1.0 - ETA) * size.sum(dim=0) / valid.sum(dim=0).clamp(min=1)


def _epsilon_exponents(rollout: Rollout, alpha: float) -> torch.Tensor:
    """Exponent of epsilon per env and agent [N, A], as in Ape-X."""
    (envs, agents), reducer = rollout.reward.shape[1:], rollout.reducer
    powers = torch.linspace(1.0, 1.0 + alpha, envs * reducer.size, device=rollout.reward.device)
    return powers.view(reducer.size, envs)[reducer.rank].unsqueeze(-1).expand(-1, agents)


def _select(q_logits: torch.Tensor, choice: torch.Tensor) -> torch.Tensor:
    """Outputs [batch, width] of one choice per row, from [batch, choices, width]."""
    if not q_logits.is_cuda:
        return q_logits[torch.arange(len(choice), device=choice.device), choice]
    # A gather's gradient is a scatter, which a compiler cannot fuse; the gradient of a masked sum it can.
    here = torch.arange(q_logits.shape[1], device=choice.device) == choice.unsqueeze(-1)
    return torch.where(here.unsqueeze(-1), q_logits, 0.0).sum(dim=1)
