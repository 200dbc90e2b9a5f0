"""What every step does around the author's functions: clearing, keeping books, beginning episodes.

Functions per env are branch-free where they run for every env, so that the CPU's compiler can vectorize them. Those
per agent touch nothing of other agents.
"""

import warp as wp


@wp.func
def clear_ended(env: int, ended: wp.array[wp.bool]):
    ended[env] = False


@wp.func
def begin(env: int, step_count: wp.array[int], terminated: wp.array[wp.bool], truncated: wp.array[wp.bool]):
    step_count[env] = step_count[env] + 1
    terminated[env] = False
    truncated[env] = False


@wp.func
def begin_one(env: int, reward: wp.array[float]):
    reward[env] = 0.0


@wp.func
def begin_agent(env: int, agent: int, reward: wp.array2d[float]):
    reward[env, agent] = 0.0


@wp.func
def remember_alive(env: int, agent: int, alive: wp.array2d[wp.bool], was_alive: wp.array2d[wp.bool]):
    was_alive[env, agent] = alive[env, agent]


@wp.func
def hold_choice(
    env: int, agent: int, is_decision_step: wp.array2d[wp.bool], action: wp.array2d[int], held: wp.array2d[int]
):
    """A group that does not choose at every step: its choice is taken over when it does."""
    if is_decision_step[env, agent]:
        held[env, agent] = action[env, agent]


@wp.func
def hold_choices(
    env: int, agent: int, is_decision_step: wp.array2d[wp.bool], action: wp.array3d[int], held: wp.array3d[int]
):
    if is_decision_step[env, agent]:
        for part in range(action.shape[2]):
            held[env, agent, part] = action[env, agent, part]


@wp.func
def hold_numbers(
    env: int, agent: int, is_decision_step: wp.array2d[wp.bool], action: wp.array3d[float], held: wp.array3d[float]
):
    if is_decision_step[env, agent]:
        for part in range(action.shape[2]):
            held[env, agent, part] = action[env, agent, part]


@wp.func
def zero_dead_rewards(env: int, agent: int, was_alive: wp.array2d[wp.bool], reward: wp.array2d[float]):
    """An agent that had left the game before this step gets nothing, whatever the world wrote."""
    if not was_alive[env, agent]:
        reward[env, agent] = 0.0


@wp.func
def settle_one(env: int, reward: wp.array[float], episode_return: wp.array[float]):
    episode_return[env] = episode_return[env] + reward[env]


@wp.func
def settle_agent(env: int, agent: int, reward: wp.array2d[float], episode_return: wp.array2d[float]):
    episode_return[env, agent] = episode_return[env, agent] + reward[env, agent]


@wp.func
def settle(
    env: int,
    max_steps: int,
    step_count: wp.array[int],
    terminated: wp.array[wp.bool],
    truncated: wp.array[wp.bool],
    ended: wp.array[wp.bool],
):
    cut = truncated[env] or step_count[env] >= max_steps
    truncated[env] = cut
    ended[env] = terminated[env] or cut


@wp.func
def keep_alive(env: int, agent: int, alive: wp.array2d[wp.bool], final_alive: wp.array2d[wp.bool]):
    final_alive[env, agent] = alive[env, agent]


@wp.func
def report(
    env: int,
    step_count: wp.array[int],
    value: wp.array[float],
    value_sum: wp.array[float],
    last_value: wp.array[float],
):
    """Book what the world reports of an episode that has ended."""
    if step_count[env] > 0:
        value_sum[env] = value_sum[env] + value[env]
        last_value[env] = value[env]


@wp.func
def agents_mean(env: int, values: wp.array2d[float]) -> float:
    """The mean over the agents of an env, summed in their order."""
    total = float(0.0)
    for agent in range(values.shape[1]):
        total += values[env, agent]
    return total / float(values.shape[1])


@wp.func
def finish_one(
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
def finish_many(
    env: int,
    step_count: wp.array[int],
    episode_return: wp.array2d[float],
    return_sum: wp.array[float],
    last_return: wp.array[float],
):
    """The return of a group is the mean over its agents."""
    if step_count[env] > 0:
        mean = agents_mean(env, episode_return)
        return_sum[env] = return_sum[env] + mean
        last_return[env] = mean


@wp.func
def finish(
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
def forget_return(env: int, agent: int, episode_return: wp.array2d[float]):
    episode_return[env, agent] = 0.0


@wp.func
def all_alive(env: int, agent: int, alive: wp.array2d[wp.bool]):
    alive[env, agent] = True


@wp.func
def next_acting(env: int, agent: int, every: int, step_count: wp.array[int], is_decision_step: wp.array2d[wp.bool]):
    """Whether a group that does not act at every step chooses at the next one."""
    is_decision_step[env, agent] = step_count[env] % every == 0
