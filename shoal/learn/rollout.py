"""A rollout: `[T, N, A]` experience of one group (time, env, agent), allocated once and written in place."""

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
    action_mask: torch.Tensor | None
    """[T + 1, N, A, choices]: what was allowed (None: everything)."""
    version: torch.Tensor
    """[1]: how many updates the policy that acted had seen."""

    @property
    def steps(self) -> int:
        return self.reward.shape[0]

    @property
    def samples(self) -> int:
        return self.reward.numel()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if t is not None)


def allocate(group: Group, steps: int, num_envs: int, truncations: int, device: torch.device) -> Rollout:
    """Memory for `steps` steps, with room for `truncations` truncated episodes per env."""
    batch = (num_envs, group.agents)
    see = group.observation

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Rollout(
        observation=zeros(steps + 1, *batch, *see.shape, dtype=see.dtype),
        action=zeros(steps, *batch, *group.action.shape, dtype=group.action.dtype),
        log_prob=zeros(steps, *batch),
        reward=zeros(steps, *batch),
        terminated=zeros(steps, num_envs, dtype=torch.bool),
        truncated=zeros(steps, num_envs, dtype=torch.bool),
        final_observation=zeros(truncations, *batch, *see.shape, dtype=see.dtype),
        alive=torch.ones(steps + 1, *batch, dtype=torch.bool, device=device) if group.leaves else None,
        action_mask=torch.ones(steps + 1, *batch, group.choices, dtype=torch.bool, device=device)
        if group.masked
        else None,
        version=zeros(1, dtype=torch.int32),
    )
