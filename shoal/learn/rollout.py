"""Rollout buffer: experience [T, N, A] (time, env, agent) of one policy, allocated once and written in place."""

from dataclasses import dataclass

import torch

from shoal.core.reduce import ALONE, Reducer
from shoal.core.world import Group

EVERYTHING = slice(None)


@dataclass
class Rollout:
    """Experience of one policy. Row t holds an observation, the action taken on it, and the outcome.

    Observations have one row more than actions: the next rollout starts from the last one. With frame stacking, the
    stack - 1 rows before the rollout come first; `stacked` joins them.
    """

    observation: torch.Tensor
    """[stack - 1 + T + 1, N, A, *shape]: single frames."""
    age: torch.Tensor | None
    """int32 [T + 1, N]: steps since the episode began, up to stack - 1 (None: no frame stack)."""
    action: torch.Tensor
    """[T, N, A, *action]: the policy's actions before scaling and clipping."""
    log_prob: torch.Tensor
    """float32 [T, N, A]: log-probability under the behavior policy."""
    value: torch.Tensor
    """float32 [T + 1, N, A]: values, computed while collecting if `has_values`, else by the learner."""
    reward: torch.Tensor
    """float32 [T, N, A]"""
    terminated: torch.Tensor
    """bool [T, N]"""
    truncated: torch.Tensor
    """bool [T, N]"""
    final_observation: torch.Tensor
    """[K, N, A, *stacked shape]: final observations of the k-th truncated episode of each env in this rollout."""
    alive: torch.Tensor | None
    """bool [T + 1, N, A]: whether the agent was alive when it acted (None: always)."""
    final_alive: torch.Tensor | None
    """bool [K, N, A]: whether the agent was alive at the final observation (None: always)."""
    action_mask: torch.Tensor | None
    """bool [T + 1, N, A, choices]: allowed choices (None: all)."""
    is_decision_step: torch.Tensor | None
    """bool [T + 1, N, A]: whether the agent chose the action, instead of repeating its last one (None: always)."""
    rnn_state: torch.Tensor | None
    """float32 [2, N, A, S]: recurrent states before row 0, and the current ones, before row T (None: no RNN)."""
    final_state: torch.Tensor | None
    """float32 [K, N, A, S]: recurrent states at the final observations (None: no RNN)."""
    preempted: torch.Tensor | None
    """bool [N]: whether the rollout was preempted: its last truncation is artificial, and the episode continues in the
    next rollout (None: rollouts are never preempted)."""
    epsilon: torch.Tensor | None
    """float32 [N, A]: probability of a random action (None: the policy samples from a distribution)."""
    version: torch.Tensor
    """int32 [1]: number of updates of the behavior policy."""
    has_values: bool = False
    """Whether the first T rows of `value` are computed while collecting."""
    time_limit: int | None = None
    """Minimum number of steps between two truncations of an env (None: unknown)."""
    reducer: Reducer = ALONE
    """The data-parallel processes, each with a rollout of its share of the envs."""

    @property
    def steps(self) -> int:
        """T: steps per env."""
        return self.reward.shape[0]

    @property
    def samples(self) -> int:
        """T N A: steps of all envs and agents."""
        return self.reward.numel()

    @property
    def stack(self) -> int:
        """Number of stacked frames."""
        return self.observation.shape[0] - self.steps

    def window(self, t: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The frames of the stacked observation at row t and their ages, the arguments of `stacked`."""
        t %= self.steps + 1
        return self.observation[t : t + self.stack], None if self.age is None else self.age[t : t + 1]

    def carry_over(self) -> None:
        """Copy the last row, from which the next rollout starts, to the first."""
        for row in range(self.stack):  # ascending, since source and destination overlap in short rollouts
            self.observation[row].copy_(self.observation[self.steps + row])
        for name in CARRIED[1:]:
            rows = getattr(self, name)
            if rows is not None:
                rows[0].copy_(rows[-1])
        if self.preempted is not None and self.alive is not None:
            self.preempted.zero_()
            self.alive[1:] = True  # not written during the rollout if agents cannot leave

    def update_ages(
        self, t: int | torch.Tensor, envs: slice | torch.Tensor = EVERYTHING, reset_only_step: bool = False
    ) -> None:
        """Update ages and zero the recurrent states of ended episodes after step t.

        Args:
            t: The step, or int64 [n], one per env.
            envs: The envs, or int64 [n].
            reset_only_step: Whether autoreset is NEXT_STEP: the reset-only step is marked terminated, so that the
                recurrent state is zeroed.
        """
        if self.age is None and self.rnn_state is None:
            return
        if reset_only_step and self.alive is not None:
            self.terminated[t, envs] = self.terminated[t, envs] | ~self.alive[t, envs].any(-1)
        ended = self.terminated[t, envs] | self.truncated[t, envs]
        # With slices these are views, updated in place, and the assignments below have no effect.
        if self.age is not None:
            age = self.age[t + 1, envs]
            grow(self.age[t, envs], ended, self.stack, out=age)
            self.age[t + 1, envs] = age
        if self.rnn_state is not None:
            self.rnn_state[-1, envs] = self.rnn_state[-1, envs].masked_fill_(ended.view(-1, 1, 1), 0.0)

    @property
    def max_preempt_step(self) -> int:
        """Maximum step of a preemption: the frames of row T must fit into the remaining rows."""
        return self.steps - max(1, self.stack - 1)

    def preempt(self, steps: int, envs: torch.Tensor, going: torch.Tensor) -> None:
        """End the rollout of some envs after `steps` steps; the next rollout continues from there.

        The remaining rows repeat the last step, marked as not alive, so that learners ignore them. For learners, the
        episodes of envs `going` (those that have not ended) are truncated; their final observations must be stored.
        """
        whole, last, before = self.steps, steps - 1, self.stack - 1
        seen = self.observation[steps : steps + self.stack, envs]
        self.observation[steps + before : whole + before, envs] = self.observation[last + before, envs]
        self.observation[whole:, envs] = seen
        for rows in (self.age, self.alive, self.action_mask, self.is_decision_step):
            if rows is not None:
                rows[whole, envs] = rows[steps, envs]
                rows[steps:whole, envs] = rows[last, envs]
        for rows in (self.action, self.log_prob, self.value):
            rows[steps:whole, envs] = rows[last, envs]
        for rows in (self.alive, self.reward, self.terminated, self.truncated):
            if rows is not None:
                rows[steps:whole, envs] = 0
        self.truncated[last, going] = True
        if self.preempted is not None:
            self.preempted[going] = True

    def start_episodes(self) -> None:
        """Start new episodes with the next rollout."""
        for tensor in (self.age, self.rnn_state):
            if tensor is not None:
                tensor[-1].zero_()

    def carry_state(self) -> dict[str, torch.Tensor]:
        """The tensors from which the next rollout starts, by name."""
        found = {name: getattr(self, name)[-1] for name in CARRIED if getattr(self, name) is not None}
        return found if self.stack == 1 else {**found, "history": self.observation[-self.stack : -1]}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))


def stacked(
    observation: torch.Tensor, age: torch.Tensor | None, rows: torch.Tensor | slice = EVERYTHING
) -> torch.Tensor:
    """Observations with stacked frames [n, *stacked shape].

    Frames from before the episode are replaced by its first one. Without a frame stack, the result is a view if `rows`
    is a slice.

    Args:
        observation: Single frames [stack - 1 + T, N, A, *shape].
        age: int [T, N], steps since the episode began (None: no frame stack).
        rows: Indices of samples, (t * N + env) * A + agent.
    """
    frames = observation.flatten(0, 2)
    if age is None:
        return frames[rows]
    agents, stack = observation.shape[2], observation.shape[0] - age.shape[0] + 1
    per_row = age.shape[1] * agents
    if isinstance(rows, slice):
        rows = torch.arange(*rows.indices(age.numel() * agents), device=age.device)
    back = torch.arange(stack - 1, -1, -1, device=age.device)
    back = torch.minimum(back, age.flatten()[rows // agents].unsqueeze(-1))
    return frames[rows.unsqueeze(-1) + (stack - 1 - back) * per_row].flatten(1, 2)


def grow(age: torch.Tensor, ended: torch.Tensor, stack: int, out: torch.Tensor) -> None:
    """Increment ages [N] up to stack - 1, and set those of `ended` episodes to 0."""
    torch.add(age, 1, out=out).clamp_(max=stack - 1).masked_fill_(ended, 0)


CARRIED = ("observation", "age", "alive", "action_mask", "is_decision_step", "rnn_state")
"""Fields whose last row is the first row of the next rollout."""


def allocate(
    groups: list[Group],
    steps: int,
    num_envs: int,
    truncations: int,
    device: torch.device,
    state_size: int = 0,
    explores: bool = False,
    preemptible: bool = False,
) -> Rollout:
    """Allocate a rollout of the groups that share a policy, with their agents concatenated.

    Args:
        groups: The groups.
        steps: Steps per env.
        num_envs: Number of envs.
        truncations: Final observations to store per env.
        device: The device.
        state_size: Size of an agent's recurrent state (0: no RNN).
        explores: Whether agents explore with random-action rates.
        preemptible: Whether rollouts can be preempted, up to once per env.
    """
    truncations = min(steps, truncations + preemptible)
    batch = (num_envs, sum(g.agents for g in groups))
    see, act, stack = groups[0].observation, groups[0].action, groups[0].stack

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def ones(wanted: bool, *shape: int) -> torch.Tensor | None:
        return torch.ones(shape, dtype=torch.bool, device=device) if wanted else None

    leaves = preemptible or any(g.can_leave for g in groups)
    return Rollout(
        observation=zeros(stack + steps, *batch, *see.shape, dtype=see.dtype),
        age=zeros(steps + 1, num_envs, dtype=torch.int32) if stack > 1 else None,
        action=zeros(steps, *batch, *act.shape, dtype=act.dtype),
        log_prob=zeros(steps, *batch),
        value=zeros(steps + 1, *batch),
        reward=zeros(steps, *batch),
        terminated=zeros(steps, num_envs, dtype=torch.bool),
        truncated=zeros(steps, num_envs, dtype=torch.bool),
        final_observation=zeros(truncations, *batch, *groups[0].policy_observation.shape, dtype=see.dtype),
        alive=ones(leaves, steps + 1, *batch),
        final_alive=ones(leaves, truncations, *batch),
        action_mask=ones(any(g.masked for g in groups), steps + 1, *batch, groups[0].choices),
        is_decision_step=ones(any(g.action_interval > 1 for g in groups), steps + 1, *batch),
        rnn_state=zeros(2, *batch, state_size) if state_size else None,
        final_state=zeros(truncations, *batch, state_size) if state_size else None,
        preempted=zeros(num_envs, dtype=torch.bool) if preemptible else None,
        epsilon=zeros(*batch) if explores else None,
        version=zeros(1, dtype=torch.int32),
    )
