"""Advantages and returns over a rollout: one thread per agent walks through time, on CPU and on GPU."""

import torch
import warp as wp

from shoal.core.launch import Plan, Whole, bind
from shoal.learn.rollout import Rollout

ALWAYS = torch.ones(1, 1, 1, dtype=torch.bool)


@wp.func
def generalised_advantage(
    env: int,
    agent: int,
    gamma: float,
    lam: float,
    reward_scale: wp.array[float],
    reward: wp.array3d[float],
    value: wp.array3d[float],
    final_value: wp.array3d[float],
    terminated: wp.array2d[wp.bool],
    truncated: wp.array2d[wp.bool],
    alive: wp.array3d[wp.bool],
    advantage: wp.array3d[float],
    target: wp.array3d[float],
):
    """A_t = d_t + gamma lam A_{t+1},  d_t = r_t + gamma V(s_{t+1}) - V(s_t)   (Schulman et al. 2016).

    The sum stops at the end of an episode. There V(s_{t+1}) is 0 if it terminated, the value of the real final
    observation if it was truncated. An agent that leaves the game has terminated, whatever the others do; one that
    leaves in the very step that truncates its env counts as truncated, since its flag is the next episode's by then.
    """
    steps = reward.shape[1]
    scale = reward_scale[0]
    can_leave = alive.shape[1] > 1
    slot = int(0)
    for t in range(steps):
        if truncated[env, t] and not terminated[env, t]:
            slot += 1
    following = float(0.0)
    for back in range(steps):
        t = steps - 1 - back
        next_value = value[env, t + 1, agent]
        going_on = float(1.0)
        if terminated[env, t]:
            next_value = 0.0
            going_on = 0.0
        elif truncated[env, t]:
            slot -= 1
            next_value = final_value[env, slot, agent]
            going_on = 0.0
        elif can_leave:
            if not alive[env, t + 1, agent]:
                next_value = 0.0
                going_on = 0.0
        v = value[env, t, agent]
        following = scale * reward[env, t, agent] + gamma * next_value - v + gamma * lam * going_on * following
        if can_leave:
            if not alive[env, t, agent]:
                following = 0.0
        advantage[env, t, agent] = following
        target[env, t, agent] = following + v


@wp.func
def discounted_sum(
    env: int,
    agent: int,
    gamma: float,
    reward: wp.array3d[float],
    terminated: wp.array2d[wp.bool],
    truncated: wp.array2d[wp.bool],
    carry: wp.array2d[float],
    total: wp.array3d[float],
):
    """R_t = gamma R_{t-1} + r_t within an episode; its spread is what rewards are divided by."""
    running = carry[env, agent]
    for t in range(reward.shape[1]):
        running = gamma * running + reward[env, t, agent]
        total[env, t, agent] = running
        if terminated[env, t] or truncated[env, t]:
            running = 0.0
    carry[env, agent] = running


def _by_env(tensor: torch.Tensor) -> torch.Tensor:
    """[T, N, ...] seen as [N, T, ...]: envs lead in kernels, time leads in memory."""
    return tensor.transpose(0, 1)


def advantage_plan(
    rollout: Rollout,
    value: torch.Tensor,
    final_value: torch.Tensor,
    reward_scale: torch.Tensor,
    advantage: torch.Tensor,
    target: torch.Tensor,
    gamma: float,
    lam: float,
) -> Plan:
    """Fills `advantage` and `target` [T, N, A] from a rollout and its values ([T + 1, N, A], final: [K, N, A])."""
    envs, agents = rollout.reward.shape[1:]
    alive = rollout.alive
    if alive is None:
        alive = ALWAYS.to(value.device).expand(1, envs, agents).contiguous()
    arguments = dict(
        gamma=gamma,
        lam=lam,
        reward_scale=Whole(reward_scale),
        reward=_by_env(rollout.reward),
        value=_by_env(value),
        final_value=_by_env(final_value),
        terminated=_by_env(rollout.terminated),
        truncated=_by_env(rollout.truncated),
        alive=_by_env(alive),
        advantage=_by_env(advantage),
        target=_by_env(target),
    )
    return bind("advantage", generalised_advantage, value.device, envs, arguments, agents)


def discounted_plan(rollout: Rollout, carry: torch.Tensor, total: torch.Tensor, gamma: float) -> Plan:
    """Fills `total` [T, N, A] with running discounted sums of rewards; `carry` [N, A] lives on between rollouts."""
    envs, agents = rollout.reward.shape[1:]
    arguments = dict(
        gamma=gamma,
        reward=_by_env(rollout.reward),
        terminated=_by_env(rollout.terminated),
        truncated=_by_env(rollout.truncated),
        carry=carry,
        total=_by_env(total),
    )
    return bind("discounted", discounted_sum, carry.device, envs, arguments, agents)
