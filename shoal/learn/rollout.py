"""A rollout: `[T, N, A]` experience of one policy (time, env, agent), allocated once and written in place."""

from dataclasses import dataclass

import torch

from shoal.core.reduce import ALONE, Reducer
from shoal.core.world import Group

EVERYTHING = slice(None)


@dataclass
class Rollout:
    """What a learner reads. Row t holds the observation, the action taken on it and what followed.

    Observations have one row more than the rest: the last one is what the next rollout starts from. If the policy sees
    several at once, as many rows from before the rollout stand in front of them; `stacked` joins them.
    """

    observation: torch.Tensor
    """[stack - 1 + T + 1, N, A, *shape]: each one once."""
    age: torch.Tensor | None
    """[T + 1, N]: steps since the episode began, at most stack - 1 (None: nothing is stacked)."""
    action: torch.Tensor
    """[T, N, A, *action]: as the policy chose it, before scaling and clipping."""
    log_prob: torch.Tensor
    """[T, N, A]: log-probability under the policy that acted."""
    value: torch.Tensor
    """[T + 1, N, A]: values of the observations, written with the actions if `valued`, else by the learner."""
    reward: torch.Tensor
    """[T, N, A]"""
    terminated: torch.Tensor
    """[T, N]"""
    truncated: torch.Tensor
    """[T, N]"""
    final_observation: torch.Tensor
    """[K, N, A, *seen]: the final observations of the k-th truncated episode of each env in this rollout."""
    alive: torch.Tensor | None
    """[T + 1, N, A]: whether the agent was in the game when it acted (None: always)."""
    final_alive: torch.Tensor | None
    """[K, N, A]: whether it was still in the game at those ends (None: always)."""
    action_mask: torch.Tensor | None
    """[T + 1, N, A, choices]: what was allowed (None: everything)."""
    is_decision_step: torch.Tensor | None
    """[T + 1, N, A]: whether the action was the agent's choice, or an earlier one still stood (None: always)."""
    rnn_state: torch.Tensor | None
    """[2, N, A, S]: what agents remembered before row 0, and what they remember now, before row T (None: nothing)."""
    final_state: torch.Tensor | None
    """[K, N, A, S]: what they remembered when those final observations were made."""
    cut: torch.Tensor | None
    """[N]: whether the last truncation is none: the rollout was cut short, and the episode goes on in the next one
    (None: rollouts are never cut short)."""
    epsilon: torch.Tensor | None
    """[N, A]: how often agents act at random (None: the policy's actions are drawn anyway)."""
    version: torch.Tensor
    """[1]: how many updates the policy that acted had seen."""
    valued: bool = False
    """Whether the first T rows of `value` come with the actions."""
    time_limit: int | None = None
    """Steps within which no env is truncated twice (None: there are none)."""
    reducer: Reducer = ALONE
    """The processes that fill rollouts like this one, each with envs of its own, and learn from all of them."""

    @property
    def steps(self) -> int:
        return self.reward.shape[0]

    @property
    def samples(self) -> int:
        return self.reward.numel()

    @property
    def stack(self) -> int:
        """Observations that the policy sees at once."""
        return self.observation.shape[0] - self.steps

    def window(self, t: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The observations that the policy sees at row t, and their ages: what `stacked` takes."""
        t %= self.steps + 1
        return self.observation[t : t + self.stack], None if self.age is None else self.age[t : t + 1]

    def carry_over(self) -> None:
        """Begin with what the last rollout ended with."""
        for row in range(self.stack):  # in this order: a short rollout writes where it has read before
            self.observation[row].copy_(self.observation[self.steps + row])
        for name in CARRIED[1:]:
            rows = getattr(self, name)
            if rows is not None:
                rows[0].copy_(rows[-1])
        if self.cut is not None and self.alive is not None:
            self.cut.zero_()
            self.alive[1:] = True  # of agents that never leave nobody writes it

    def settle(self, t: int | torch.Tensor, envs: slice | torch.Tensor = EVERYTHING, sits_out: bool = False) -> None:
        """After step t of some envs: how old episodes are, and no memory of those that have ended.

        Both may be tensors of numbers, a step for each env. If an env `sits_out` a step between two episodes, what that
        showed is of the last one: to whoever remembers, the step ended it once more.
        """
        if self.age is None and self.rnn_state is None:
            return
        if sits_out and self.alive is not None:
            self.terminated[t, envs] = self.terminated[t, envs] | ~self.alive[t, envs].any(-1)
        ended = self.terminated[t, envs] | self.truncated[t, envs]
        # Parts that are views are changed where they are; to put them into their place again then does nothing.
        if self.age is not None:
            age = self.age[t + 1, envs]
            grow(self.age[t, envs], ended, self.stack, out=age)
            self.age[t + 1, envs] = age
        if self.rnn_state is not None:
            self.rnn_state[-1, envs] = self.rnn_state[-1, envs].masked_fill_(ended.view(-1, 1, 1), 0.0)

    @property
    def latest_cut(self) -> int:
        """The most steps after which it can be cut short: what is seen with row T must fit into rows that are left."""
        return self.steps - max(1, self.stack - 1)

    def preempt(self, steps: int, envs: torch.Tensor, going: torch.Tensor) -> None:
        """Some envs, by number, have made only so many steps; the next rollout goes on with what they saw then.

        The rows that are left repeat the last step, so that they hold nothing odd, but are nobody's experience. To
        learners, episodes of envs `going` on are truncated; their final observations are in place.
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
        if self.cut is not None:
            self.cut[going] = True

    def begin(self) -> None:
        """All episodes begin with the next rollout."""
        for tensor in (self.age, self.rnn_state):
            if tensor is not None:
                tensor[-1].zero_()

    def carried(self) -> dict[str, torch.Tensor]:
        """What the next rollout begins with, by name."""
        found = {name: getattr(self, name)[-1] for name in CARRIED if getattr(self, name) is not None}
        return found if self.stack == 1 else {**found, "history": self.observation[-self.stack : -1]}

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))


def stacked(
    observation: torch.Tensor, age: torch.Tensor | None, rows: torch.Tensor | slice = EVERYTHING
) -> torch.Tensor:
    """What a policy sees, [n, *seen], out of observations [stack - 1 + T, N, A, *shape] and ages [T, N].

    `rows` are numbers of samples, (t * N + env) * A + agent. Frames of an earlier episode never show: further back than
    its age, a sample sees the first observation of its episode again. Without ages nothing is stacked, and what can
    be a view is one.
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
    """Ages [N] after a step: one more, as far as it matters, and 0 where an episode has begun."""
    torch.add(age, 1, out=out).clamp_(max=stack - 1).masked_fill_(ended, 0)


CARRIED = ("observation", "age", "alive", "action_mask", "is_decision_step", "rnn_state")
"""Fields that rollouts hand on: the last row of one rollout is the first of the next."""


def allocate(
    groups: list[Group],
    steps: int,
    num_envs: int,
    truncations: int,
    device: torch.device,
    state_size: int = 0,
    explores: bool = False,
    cuts: bool = False,
) -> Rollout:
    """Memory for `steps` steps of the groups that one policy acts for, their agents one after the other.

    There is room for `truncations` truncated episodes per env. The policy remembers `state_size` numbers per agent; if
    it `explores`, agents act at random now and then; with `cuts`, rollouts may be cut short, once for every env.
    """
    truncations = min(steps, truncations + cuts)
    batch = (num_envs, sum(g.agents for g in groups))
    see, act, stack = groups[0].observation, groups[0].action, groups[0].stack

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def ones(wanted: bool, *shape: int) -> torch.Tensor | None:
        return torch.ones(shape, dtype=torch.bool, device=device) if wanted else None

    leaves = cuts or any(g.can_leave for g in groups)
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
        cut=zeros(num_envs, dtype=torch.bool) if cuts else None,
        epsilon=zeros(*batch) if explores else None,
        version=zeros(1, dtype=torch.int32),
    )
