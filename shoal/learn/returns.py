"""Advantages and returns over a rollout: one thread per agent walks through time, on CPU and on GPU."""

import torch
import warp as wp

from shoal.core.kernels import Broadcast
from shoal.core.launch import Plan, bind
from shoal.learn.rollout import Rollout

ALWAYS = torch.ones(1, 1, 1, dtype=torch.bool)


@wp.func
def generalized_advantage(
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
    is_decision_step: wp.array3d[wp.bool],
    lags: bool,
    rho_clip: float,
    trace_clip: float,
    ratio: wp.array3d[float],
    advantage: wp.array3d[float],
    target: wp.array3d[float],
):
    """A_t = r_t + gamma (V(s_{t+1}) + lam D_{t+1}) - V(s_t),  target V(s_t) + D_t;  D = A   (Schulman et al. 2016).

    If the policy has changed since it acted (`lags`), by a ratio w_t = pi(a_t) / mu(a_t) of probabilities, D is
    V-trace's (Espeholt et al. 2018): D_t = min(w_t, rho) (r_t + gamma V(s_{t+1}) - V(s_t)) + gamma lam
    min(w_t, c) D_{t+1}.

    At the end of an episode the bracket is 0 if it terminated, the value of the real final observation if it was
    truncated. An agent that leaves the game has terminated, whatever the others do. Where an agent does not choose,
    the rewards up to its next choice add up, discounted: one decision, one advantage.
    """
    steps = reward.shape[1]
    scale = reward_scale[0]
    can_leave = alive.shape[1] > 1
    can_wait = is_decision_step.shape[1] > 1
    slot = int(0)
    for t in range(steps):
        if truncated[env, t] and not terminated[env, t]:
            slot += 1
    ahead = value[env, steps, agent]  # what follows on row t is worth, as it was held to be
    more = float(0.0)  # and how much more it turned out to be
    for back in range(steps):
        t = steps - 1 - back
        if terminated[env, t]:
            ahead = 0.0
            more = 0.0
        elif truncated[env, t]:
            slot -= 1
            more = 0.0
            ahead = value[env, t, agent]  # stands in for a final observation that there was no room for
            if slot < final_value.shape[1]:
                ahead = final_value[env, slot, agent]
                if can_leave:
                    if not final_alive[env, slot, agent]:
                        ahead = 0.0
        elif can_leave:
            if not alive[env, t + 1, agent]:
                ahead = 0.0
                more = 0.0
        v = value[env, t, agent]
        ahead = scale * reward[env, t, agent] + gamma * ahead
        more = gamma * more
        gain = float(0.0)
        chooses = bool(True)
        if can_leave:
            chooses = alive[env, t, agent]
        if can_wait:
            chooses = chooses and is_decision_step[env, t, agent]
        if chooses:
            gain = ahead + lam * more - v
            if lags:
                w = ratio[env, t, agent]
                more = wp.min(w, rho_clip) * (ahead - v) + lam * wp.min(w, trace_clip) * more
            else:
                more = gain
            ahead = v
            target[env, t, agent] = v + more
        else:
            target[env, t, agent] = v
        advantage[env, t, agent] = gain


@wp.func
def discounted_sum(
    env: int,
    agent: int,
    gamma: float,
    reward: wp.array3d[float],
    terminated: wp.array2d[wp.bool],
    truncated: wp.array2d[wp.bool],
    cut: wp.array[wp.bool],
    carry: wp.array2d[float],
    total: wp.array3d[float],
):
    """R_t = gamma R_{t-1} + r_t within an episode; its spread is what rewards are divided by.

    Where the rollout was cut short, the episode goes on with the next one.
    """
    running = carry[env, agent]
    at_end = float(0.0)
    for t in range(reward.shape[1]):
        running = gamma * running + reward[env, t, agent]
        total[env, t, agent] = running
        if terminated[env, t] or truncated[env, t]:
            at_end = running
            running = 0.0
    carry[env, agent] = wp.where(cut[env], at_end, running)


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
    ratio: torch.Tensor | None = None,
    clips: tuple[float, float] = (1.0, 1.0),
) -> Plan:
    """Fills `advantage` and `target` [T, N, A] from a rollout and its values ([T + 1, N, A], final: [K, N, A]).

    With a `ratio` [T, N, A] of probabilities, now over then, by V-trace; `clips` are the bounds rho and c.
    """
    envs, agents = rollout.reward.shape[1:]
    always = ALWAYS.to(value.device).expand(1, envs, agents).contiguous()
    arguments = dict(
        gamma=gamma,
        lam=lam,
        reward_scale=Broadcast(reward_scale),
        reward=_by_env(rollout.reward),
        value=_by_env(value),
        final_value=_by_env(final_value),
        terminated=_by_env(rollout.terminated),
        truncated=_by_env(rollout.truncated),
        alive=_by_env(always if rollout.alive is None else rollout.alive),
        final_alive=_by_env(always if rollout.final_alive is None else rollout.final_alive),
        is_decision_step=_by_env(always if rollout.is_decision_step is None else rollout.is_decision_step),
        lags=ratio is not None,
        rho_clip=clips[0],
        trace_clip=clips[1],
        ratio=_by_env(rollout.reward if ratio is None else ratio),
        advantage=_by_env(advantage),
        target=_by_env(target),
    )
    return bind("advantage", generalized_advantage, value.device, envs, arguments, agents)


def discounted_plan(rollout: Rollout, carry: torch.Tensor, total: torch.Tensor, gamma: float) -> Plan:
    """Fills `total` [T, N, A] with running discounted sums of rewards; `carry` [N, A] lives on between rollouts."""
    envs, agents = rollout.reward.shape[1:]
    never = torch.zeros(envs, dtype=torch.bool, device=carry.device)
    arguments = dict(
        gamma=gamma,
        reward=_by_env(rollout.reward),
        terminated=_by_env(rollout.terminated),
        truncated=_by_env(rollout.truncated),
        cut=never if rollout.cut is None else rollout.cut,
        carry=carry,
        total=_by_env(total),
    )
    return bind("discounted", discounted_sum, carry.device, envs, arguments, agents)
