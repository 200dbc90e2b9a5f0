"""Warp functions of every step, around the author's: clear flags, hold actions, sum rewards, end and begin episodes.

Functions that run for every env are branch-free, so that the CPU's compiler can vectorize them. Functions per agent
access no data of other agents.
"""

from typing import no_type_check

import warp as wp


@wp.func
@no_type_check
def clear_ended(env: int, ended: wp.array[wp.bool]):
    ended[env] = False


@wp.func
@no_type_check
def begin_step(env: int, step_count: wp.array[int], terminated: wp.array[wp.bool], truncated: wp.array[wp.bool]):
    step_count[env] = step_count[env] + 1
    terminated[env] = False
    truncated[env] = False


@wp.func
@no_type_check
def clear_reward(env: int, reward: wp.array[float]):
    reward[env] = 0.0


@wp.func
@no_type_check
def clear_agent_reward(env: int, agent: int, reward: wp.array2d[float]):
    reward[env, agent] = 0.0


@wp.func
@no_type_check
def save_alive(env: int, agent: int, alive: wp.array2d[wp.bool], was_alive: wp.array2d[wp.bool]):
    was_alive[env, agent] = alive[env, agent]


@wp.func
@no_type_check
def hold_discrete(
    env: int, agent: int, is_decision_step: wp.array2d[wp.bool], action: wp.array2d[int], held: wp.array2d[int]
):
    """Copy the action of an agent that chooses in this step; otherwise its last action stays in effect."""
    if is_decision_step[env, agent]:
        held[env, agent] = action[env, agent]


@wp.func
@no_type_check
def hold_multi_discrete(
    env: int, agent: int, is_decision_step: wp.array2d[wp.bool], action: wp.array3d[int], held: wp.array3d[int]
):
    if is_decision_step[env, agent]:
        for part in range(action.shape[2]):
            held[env, agent, part] = action[env, agent, part]


@wp.func
@no_type_check
def hold_box(
    env: int, agent: int, is_decision_step: wp.array2d[wp.bool], action: wp.array3d[float], held: wp.array3d[float]
):
    if is_decision_step[env, agent]:
        for part in range(action.shape[2]):
            held[env, agent, part] = action[env, agent, part]


@wp.func
@no_type_check
def zero_dead_rewards(env: int, agent: int, was_alive: wp.array2d[wp.bool], reward: wp.array2d[float]):
    """Zero the reward of an agent that had left before this step, whatever the world wrote."""
    if not was_alive[env, agent]:
        reward[env, agent] = 0.0


@wp.func
@no_type_check
def add_reward(env: int, reward: wp.array[float], episode_return: wp.array[float]):
    episode_return[env] = episode_return[env] + reward[env]


@wp.func
@no_type_check
def add_agent_reward(env: int, agent: int, reward: wp.array2d[float], episode_return: wp.array2d[float]):
    episode_return[env, agent] = episode_return[env, agent] + reward[env, agent]


@wp.func
@no_type_check
def set_ended(
    env: int,
    max_steps: int,
    step_count: wp.array[int],
    terminated: wp.array[wp.bool],
    truncated: wp.array[wp.bool],
    ended: wp.array[wp.bool],
):
    expired = truncated[env] or step_count[env] >= max_steps
    truncated[env] = expired
    ended[env] = terminated[env] or expired


@wp.func
@no_type_check
def save_final_alive(env: int, agent: int, alive: wp.array2d[wp.bool], final_alive: wp.array2d[wp.bool]):
    final_alive[env, agent] = alive[env, agent]


@wp.func
@no_type_check
def record_report(
    env: int,
    step_count: wp.array[int],
    value: wp.array[float],
    value_sum: wp.array[float],
    last_value: wp.array[float],
):
    """Record a reported value at the end of an episode."""
    if step_count[env] > 0:
        value_sum[env] = value_sum[env] + value[env]
        last_value[env] = value[env]


@wp.func
@no_type_check
def agents_mean(env: int, values: wp.array2d[float]) -> float:
    """The mean over the agents of an env, summed in their order."""
    total = float(0.0)
    for agent in range(values.shape[1]):
        total += values[env, agent]
    return total / float(values.shape[1])


@wp.func
@no_type_check
def record_return(
    env: int,
    step_count: wp.array[int],
    episode_return: wp.array[float],
    return_sum: wp.array[float],
    last_return: wp.array[float],
):
    if step_count[env] > 0:
        return_sum[env] = return_sum[env] + episode_return[env]
        last_return[env] = episode_return[env]
    episode_return[env] = 0.0


@wp.func
@no_type_check
def record_mean_return(
    env: int,
    step_count: wp.array[int],
    episode_return: wp.array2d[float],
    return_sum: wp.array[float],
    last_return: wp.array[float],
):
    """Record the return of a group: the mean over its agents."""
    if step_count[env] > 0:
        mean = agents_mean(env, episode_return)
        return_sum[env] = return_sum[env] + mean
        last_return[env] = mean


@wp.func
@no_type_check
def record_episode(
    env: int,
    step_count: wp.array[int],
    episode: wp.array[int],
    finished: wp.array[int],
    length_sum: wp.array[wp.int64],
    last_length: wp.array[int],
):
    if step_count[env] > 0:
        finished[env] = finished[env] + 1
        length_sum[env] = length_sum[env] + wp.int64(step_count[env])
        last_length[env] = step_count[env]
    episode[env] = episode[env] + 1
    step_count[env] = 0


@wp.func
@no_type_check
def clear_return(env: int, agent: int, episode_return: wp.array2d[float]):
    episode_return[env, agent] = 0.0


@wp.func
@no_type_check
def set_alive(env: int, agent: int, alive: wp.array2d[wp.bool]):
    alive[env, agent] = True


@wp.func
@no_type_check
def set_decision_step(
    env: int, agent: int, action_interval: int, step_count: wp.array[int], is_decision_step: wp.array2d[wp.bool]
):
    """Set whether the agents of a group that does not act at every step choose at the next one."""
    is_decision_step[env, agent] = step_count[env] % action_interval == 0
