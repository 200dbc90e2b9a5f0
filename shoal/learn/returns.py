"""Advantages and returns of a rollout, with one thread per agent on CPU and GPU."""

from typing import no_type_check

import torch
import warp as wp

from shoal.core.kernels import Broadcast
from shoal.core.launch import Plan, bind
from shoal.learn.rollout import Rollout

ALL_TRUE = torch.ones(1, 1, 1, dtype=torch.bool)


@wp.func
@no_type_check
def generalized_advantage(
    env: int,
    agent: int,
    gamma: float,
    gae_lambda: float,
    reward_scale: wp.array[float],
    reward: wp.array3d[float],
    value: wp.array3d[float],
    final_value: wp.array3d[float],
    terminated: wp.array2d[wp.bool],
    truncated: wp.array2d[wp.bool],
    alive: wp.array3d[wp.bool],
    final_alive: wp.array3d[wp.bool],
    is_decision_step: wp.array3d[wp.bool],
    use_vtrace: bool,
    rho_clip: float,
    trace_clip: float,
    ratio: wp.array3d[float],
    advantage: wp.array3d[float],
    target: wp.array3d[float],
):
    """A_t = r_t + gamma (V(s_{t+1}) + lambda D_{t+1}) - V(s_t),  target V(s_t) + D_t;  D = A   (Schulman et al. 2016).

    With `use_vtrace`, the ratio w_t = pi(a_t) / mu(a_t) corrects for the lag of the behavior policy mu (Espeholt et al.
    2018): D_t = min(w_t, rho) (r_t + gamma V(s_{t+1}) - V(s_t)) + gamma lambda min(w_t, c) D_{t+1}.

    At the end of an episode the bracket is 0 if it terminated, and the value of the final observation if it was
    truncated. An agent that leaves has terminated. Between an agent's decisions, discounted rewards accumulate, so that
    each decision has one advantage.
    """
    steps = reward.shape[1]
    scale = reward_scale[0]
    can_leave = alive.shape[1] > 1
    can_wait = is_decision_step.shape[1] > 1
    slot = int(0)
    for t in range(steps):
        if truncated[env, t] and not terminated[env, t]:
            slot += 1
    next_value = value[env, steps, agent]  # V(s_{t+1}), then r_t + gamma V(s_{t+1})
    trace = float(0.0)  # D_{t+1}
    for back in range(steps):
        t = steps - 1 - back
        if terminated[env, t]:
            next_value = 0.0
            trace = 0.0
        elif truncated[env, t]:
            slot -= 1
            trace = 0.0
            next_value = value[env, t, agent]  # in place of a final observation that was not stored
            if slot < final_value.shape[1]:
                next_value = final_value[env, slot, agent]
                if can_leave:
                    if not final_alive[env, slot, agent]:
                        next_value = 0.0
        elif can_leave:
            if not alive[env, t + 1, agent]:
                next_value = 0.0
                trace = 0.0
        v = value[env, t, agent]
        next_value = scale * reward[env, t, agent] + gamma * next_value
        trace = gamma * trace
        gae = float(0.0)
        is_decision = bool(True)
        if can_leave:
            is_decision = alive[env, t, agent]
        if can_wait:
            is_decision = is_decision and is_decision_step[env, t, agent]
        if is_decision:
            gae = next_value + gae_lambda * trace - v
            if use_vtrace:
                w = ratio[env, t, agent]
                trace = wp.min(w, rho_clip) * (next_value - v) + gae_lambda * wp.min(w, trace_clip) * trace
            else:
                trace = gae
            next_value = v
            target[env, t, agent] = v + trace
        else:
            target[env, t, agent] = v
        advantage[env, t, agent] = gae


@wp.func
@no_type_check
def discounted_sum(
    env: int,
    agent: int,
    gamma: float,
    reward: wp.array3d[float],
    terminated: wp.array2d[wp.bool],
    truncated: wp.array2d[wp.bool],
    preempted: wp.array[wp.bool],
    carry: wp.array2d[float],
    total: wp.array3d[float],
):
    """R_t = gamma R_{t-1} + r_t within an episode; its standard deviation scales rewards.

    After a preempted rollout, the episode continues in the next rollout.
    """
    running = carry[env, agent]
    at_end = float(0.0)
    for t in range(reward.shape[1]):
        running = gamma * running + reward[env, t, agent]
        total[env, t, agent] = running
        if terminated[env, t] or truncated[env, t]:
            at_end = running
            running = 0.0
    carry[env, agent] = wp.where(preempted[env], at_end, running)


def _env_first(tensor: torch.Tensor) -> torch.Tensor:
    """A view of [T, N, ...] as [N, T, ...], since kernels index by env first."""
    return tensor.transpose(0, 1)


def advantage_plan(
    rollout: Rollout,
    value: torch.Tensor,
    final_value: torch.Tensor,
    reward_scale: torch.Tensor,
    advantage: torch.Tensor,
    target: torch.Tensor,
    gamma: float,
    gae_lambda: float,
    ratio: torch.Tensor | None = None,
    clips: tuple[float, float] = (1.0, 1.0),
) -> Plan:
    """Plan that fills `advantage` and `target` [T, N, A] from a rollout and its values.

    Args:
        rollout: The rollout.
        value: [T + 1, N, A].
        final_value: Values of final observations [K, N, A].
        reward_scale: [1], factor of the rewards.
        advantage: Output [T, N, A].
        target: Output [T, N, A].
        gamma: Discount factor.
        gae_lambda: Lambda of GAE.
        ratio: Probability ratio of current and behavior policy [T, N, A], for V-trace (None: GAE).
        clips: V-trace's bounds rho and c of the ratio.
    """
    envs, agents = rollout.reward.shape[1:]
    always = ALL_TRUE.to(value.device).expand(1, envs, agents).contiguous()
    arguments = dict(
        gamma=gamma,
        gae_lambda=gae_lambda,
        reward_scale=Broadcast(reward_scale),
        reward=_env_first(rollout.reward),
        value=_env_first(value),
        final_value=_env_first(final_value),
        terminated=_env_first(rollout.terminated),
        truncated=_env_first(rollout.truncated),
        alive=_env_first(always if rollout.alive is None else rollout.alive),
        final_alive=_env_first(always if rollout.final_alive is None else rollout.final_alive),
        is_decision_step=_env_first(always if rollout.is_decision_step is None else rollout.is_decision_step),
        use_vtrace=ratio is not None,
        rho_clip=clips[0],
        trace_clip=clips[1],
        ratio=_env_first(rollout.reward if ratio is None else ratio),
        advantage=_env_first(advantage),
        target=_env_first(target),
    )
    return bind("advantage", generalized_advantage, value.device, envs, arguments, agents)


def discounted_plan(rollout: Rollout, carry: torch.Tensor, total: torch.Tensor, gamma: float) -> Plan:
    """Plan that fills `total` [T, N, A] with running discounted rewards; `carry` [N, A] persists between rollouts."""
    envs, agents = rollout.reward.shape[1:]
    never = torch.zeros(envs, dtype=torch.bool, device=carry.device)
    arguments = dict(
        gamma=gamma,
        reward=_env_first(rollout.reward),
        terminated=_env_first(rollout.terminated),
        truncated=_env_first(rollout.truncated),
        preempted=never if rollout.preempted is None else rollout.preempted,
        carry=carry,
        total=_env_first(total),
    )
    return bind("discounted", discounted_sum, carry.device, envs, arguments, agents)
