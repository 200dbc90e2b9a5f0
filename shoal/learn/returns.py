"""Advantages and returns over a rollout: one thread per agent walks through time, on CPU and on GPU."""

import torch
import warp as wp

from shoal.core.kernels import Whole
from shoal.core.launch import Plan, bind
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
    final_alive: wp.array3d[wp.bool],
    acting: wp.array3d[wp.bool],
    advantage: wp.array3d[float],
    target: wp.array3d[float],
):
    """A_t = r_t + gamma (V(s_{t+1}) + lam A_{t+1}) - V(s_t)   (Schulman et al. 2016).

    At the end of an episode the bracket is 0 if it terminated, the value of the real final observation if it was
    truncated. An agent that leaves the game has terminated, whatever the others do. Where an agent does not choose,
    the rewards up to its next choice add up, discounted: one decision, one advantage.
    """
    steps = reward.shape[1]
    scale = reward_scale[0]
    can_leave = alive.shape[1] > 1
    can_wait = acting.shape[1] > 1
    slot = int(0)
    for t in range(steps):
        if truncated[env, t] and not terminated[env, t]:
            slot += 1
    tail = value[env, steps, agent]  # what the future after row t is worth
    for back in range(steps):
        t = steps - 1 - back
        if terminated[env, t]:
            tail = 0.0
        elif truncated[env, t]:
            slot -= 1
            tail = final_value[env, slot, agent]
            if can_leave:
                if not final_alive[env, slot, agent]:
                    tail = 0.0
        elif can_leave:
            if not alive[env, t + 1, agent]:
                tail = 0.0
        v = value[env, t, agent]
        tail = scale * reward[env, t, agent] + gamma * tail
        gain = tail - v
        chooses = bool(True)
        if can_leave:
            chooses = alive[env, t, agent]
        if can_wait:
            chooses = chooses and acting[env, t, agent]
        if chooses:
            tail = v + lam * gain
        else:
            gain = 0.0
        advantage[env, t, agent] = gain
        target[env, t, agent] = gain + v


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
    always = ALWAYS.to(value.device).expand(1, envs, agents).contiguous()
    arguments = dict(
        gamma=gamma,
        lam=lam,
        reward_scale=Whole(reward_scale),
        reward=_by_env(rollout.reward),
        value=_by_env(value),
        final_value=_by_env(final_value),
        terminated=_by_env(rollout.terminated),
        truncated=_by_env(rollout.truncated),
        alive=_by_env(always if rollout.alive is None else rollout.alive),
        final_alive=_by_env(always if rollout.final_alive is None else rollout.final_alive),
        acting=_by_env(always if rollout.acting is None else rollout.acting),
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
