"""A rollout: `[T, N, A]` experience of one policy (time, env, agent), allocated once and written in place."""

from dataclasses import dataclass

import torch

from shoal.core.world import Group


@dataclass
class Rollout:
    """What a learner reads. Row t holds the observation, the action taken on it and what followed.

    Observations have one row more than the rest: the last one is what the next rollout starts from.
    """

    observation: torch.Tensor
    """[T + 1, N, A, *shape]"""
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
    """[K, N, A, *shape]: the final observations of the k-th truncated episode of each env in this rollout."""
    alive: torch.Tensor | None
    """[T + 1, N, A]: whether the agent was in the game when it acted (None: always)."""
    final_alive: torch.Tensor | None
    """[K, N, A]: whether it was still in the game at those ends (None: always)."""
    action_mask: torch.Tensor | None
    """[T + 1, N, A, choices]: what was allowed (None: everything)."""
    acting: torch.Tensor | None
    """[T + 1, N, A]: whether the action was the agent's choice, or an earlier one still stood (None: always)."""
    version: torch.Tensor
    """[1]: how many updates the policy that acted had seen."""
    valued: bool = False
    """Whether the first T rows of `value` come with the actions."""

    @property
    def steps(self) -> int:
        return self.reward.shape[0]

    @property
    def samples(self) -> int:
        return self.reward.numel()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))


CARRIED = ("observation", "alive", "action_mask", "acting")
"""Fields with a row more than the rest: the last row of one rollout is the first of the next."""


def allocate(groups: list[Group], steps: int, num_envs: int, truncations: int, device: torch.device) -> Rollout:
    """Memory for `steps` steps of the groups that one policy acts for, their agents one after the other.

    There is room for `truncations` truncated episodes per env.
    """
    batch = (num_envs, sum(g.agents for g in groups))
    see, act = groups[0].observation, groups[0].action

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def ones(wanted: bool, *shape: int) -> torch.Tensor | None:
        return torch.ones(shape, dtype=torch.bool, device=device) if wanted else None

    leaves = any(g.leaves for g in groups)
    return Rollout(
        observation=zeros(steps + 1, *batch, *see.shape, dtype=see.dtype),
        action=zeros(steps, *batch, *act.shape, dtype=act.dtype),
        log_prob=zeros(steps, *batch),
        value=zeros(steps + 1, *batch),
        reward=zeros(steps, *batch),
        terminated=zeros(steps, num_envs, dtype=torch.bool),
        truncated=zeros(steps, num_envs, dtype=torch.bool),
        final_observation=zeros(truncations, *batch, *see.shape, dtype=see.dtype),
        alive=ones(leaves, steps + 1, *batch),
        final_alive=ones(leaves, truncations, *batch),
        action_mask=ones(any(g.masked for g in groups), steps + 1, *batch, groups[0].choices),
        acting=ones(any(g.every > 1 for g in groups), steps + 1, *batch),
        version=zeros(1, dtype=torch.int32),
    )
