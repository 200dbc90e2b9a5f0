"""The bundled classic worlds against Gymnasium's, one step at a time from the same states."""

from collections.abc import Callable
from dataclasses import dataclass

import gymnasium
import numpy as np
import pytest
import torch

from shoal.core.world_loading import world_class

N = 64


@dataclass
class Case:
    name: str
    gym: str
    arrays: tuple[str, ...]
    """The store's arrays that make up Gymnasium's state, in order."""
    low: tuple[float, ...]
    high: tuple[float, ...]
    """Range of states to try, beyond the ends of an episode."""
    start: tuple[tuple[float, float], ...]
    """Range of each number of the state after a reset; equal bounds: a constant."""
    tolerance: float = 1e-5
    force: float = 0.0
    """Largest force to try, above the limit; 0: discrete actions."""
    terminates: bool = True
    safe: tuple[float, ...] = (0.0, 0.0)
    """A state from which one step does not end the episode."""


CASES = [
    Case(
        "cartpole",
        "CartPole-v1",
        ("x", "speed", "angle", "spin"),
        (-2.5, -3, -0.25, -3),
        (2.5, 3, 0.25, 3),
        ((-0.05, 0.05),) * 4,
        safe=(0.0,) * 4,
    ),
    Case(
        "pendulum",
        "Pendulum-v1",
        ("angle", "spin"),
        (-9, -8),
        (9, 8),
        ((-np.pi, np.pi), (-1, 1)),
        force=3.0,
        terminates=False,
    ),
    # Four derivatives of fast spins: rounding grows to a few 1e-5.
    Case(
        "acrobot",
        "Acrobot-v1",
        ("links",),
        (-np.pi, -np.pi, -8, -8),
        (np.pi, np.pi, 8, 8),
        ((-0.1, 0.1),) * 4,
        tolerance=5e-5,
        safe=(0.0,) * 4,
    ),
    Case(
        "mountain-car",
        "MountainCar-v0",
        ("position", "speed"),
        (-1.2, -0.07),
        (0.58, 0.07),
        ((-0.6, -0.4), (0, 0)),
        safe=(-0.5, 0.0),
    ),
    Case(
        "mountain-car-continuous",
        "MountainCarContinuous-v0",
        ("position", "speed"),
        (-1.2, -0.07),
        (0.58, 0.07),
        ((-0.6, -0.4), (0, 0)),
        force=1.5,
        safe=(-0.5, 0.0),
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def world(case):
    return world_class(case.name)(N)


def set_state(world, case: Case, state: np.ndarray) -> None:
    """Write float32 states [N, width] into the store."""
    if len(case.arrays) == 1:
        world.store[case.arrays[0]].copy_(torch.as_tensor(state))
    else:
        for column, name in enumerate(case.arrays):
            world.store[name].copy_(torch.as_tensor(state[:, column]))


def get_state(world, case: Case) -> np.ndarray:
    columns = [world.store[name].reshape(world.num_envs, -1) for name in case.arrays]
    return torch.cat(columns, dim=1).numpy().copy()


def set_gym_state(env, case: Case, state: np.ndarray) -> None:
    plain = env.unwrapped
    plain.state = state.astype(np.float32 if "Continuous" in case.gym else np.float64)
    if case.name == "cartpole":
        plain.steps_beyond_terminated = None
    if case.name == "pendulum":
        plain.last_u = None


def draw_actions(case: Case, world, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    if case.force:
        return rng.uniform(-case.force, case.force, (*shape, 1)).astype(np.float32)
    return rng.integers(0, world.groups[0].action.n, shape, dtype=np.int32)


def as_gym(case: Case) -> Callable:
    return (lambda action: action) if case.force else int


def test_one_step_from_random_states(case, world):
    """Observation, reward and end after one step are Gymnasium's, from states all over the space and past its edges."""
    rng = np.random.default_rng(7)
    env = gymnasium.make(case.gym).unwrapped
    env.reset(seed=0)
    ends = []
    for _ in range(4):
        state = rng.uniform(case.low, case.high, (N, len(case.low))).astype(np.float32)
        actions = draw_actions(case, world, rng, (N,))
        world.reset(0)
        set_state(world, case, state)
        out = world.step(torch.as_tensor(actions)[:, None])
        group = next(iter(out.groups.values()))
        ended = out.terminated.numpy()
        seen = torch.where(out.terminated[:, None], group.final_observation[:, 0], group.observation[:, 0]).numpy()
        for i in range(N):
            set_gym_state(env, case, state[i])
            expected, reward, terminated, _, _ = env.step(as_gym(case)(actions[i]))
            np.testing.assert_allclose(seen[i], expected, rtol=case.tolerance, atol=case.tolerance)
            assert float(group.reward[i, 0]) == pytest.approx(float(reward), rel=1e-5, abs=1e-5)
            assert bool(ended[i]) == terminated
        assert not out.truncated.any()
        ends.append(ended)
    assert np.any(ends) == case.terminates
    assert not np.all(ends)


def test_episodes_end_at_the_same_edge(case, world):
    """On both sides of the edge of termination, the flags are equal."""
    if not case.terminates:
        pytest.skip("never terminates")
    rng = np.random.default_rng(1)
    env = gymnasium.make(case.gym).unwrapped
    env.reset(seed=0)
    inside, outside, taken = [], [], []
    while len(inside) < N // 2:
        action = draw_actions(case, world, rng, (1,))[0]

        def ends(state, action=action):
            set_gym_state(env, case, state.astype(np.float32))
            return env.step(as_gym(case)(action))[2]

        near, far = rng.uniform(case.low, case.high, (2, len(case.low)))
        if ends(near) or not ends(far):
            continue
        low, high = 0.0, 1.0
        while high - low > 1e-6:
            middle = (low + high) / 2
            low, high = (low, middle) if ends(near + middle * (far - near)) else (middle, high)
        pair = [near + place * (far - near) for place in (low - 2e-5, high + 2e-5)]
        if not ends(pair[0]) and ends(pair[1]):
            inside.append(pair[0])
            outside.append(pair[1])
            taken.append(action)
    world.reset(0)
    set_state(world, case, np.array([*inside, *outside], np.float32))
    out = world.step(torch.as_tensor(np.array([*taken, *taken]))[:, None])
    assert out.terminated.tolist() == [False] * (N // 2) + [True] * (N // 2)


def test_many_steps_stay_close(case, world):
    """An env follows Gymnasium's for 20 steps from a reset."""
    rng = np.random.default_rng(3)
    world.reset(5)
    start = get_state(world, case)
    actions = draw_actions(case, world, rng, (20, N))
    rows = []
    for row in actions:
        out = world.step(torch.as_tensor(row)[:, None])
        group = next(iter(out.groups.values()))
        ended = out.terminated.numpy()
        rows.append(
            (group.observation[:, 0].numpy().copy(), group.final_observation[:, 0].numpy().copy(), ended.copy())
        )
    env = gymnasium.make(case.gym).unwrapped
    for i in range(8):
        env.reset(seed=0)
        set_gym_state(env, case, start[i])
        for t in range(20):
            expected, _, terminated, _, _ = env.step(as_gym(case)(actions[t, i]))
            observation, final, ended = (part[i] for part in rows[t])
            np.testing.assert_allclose(final if terminated else observation, expected, rtol=1e-3, atol=1e-3)
            assert bool(ended) == terminated
            if terminated:
                break


def test_truncates_where_gymnasium_does(case, world):
    """Held in a safe state, both count the same number of steps up to the time limit, twice."""
    env = gymnasium.make(case.gym)
    env.reset(seed=0)
    limit = env.spec.max_episode_steps
    action = np.zeros(1, np.float32) if case.force else 1
    tensor = torch.as_tensor(np.full((N, 1, 1), 0.0, np.float32) if case.force else np.ones((N, 1), np.int32))
    safe = np.tile(np.array(case.safe, np.float32), (N, 1))
    world.reset(0)
    cuts = []
    for t in range(1, limit + 2):
        set_state(world, case, safe)
        out = world.step(tensor)
        assert not out.terminated.any()
        truncated = out.truncated.numpy().copy()
        assert truncated.all() == truncated.any()
        cuts.append(bool(truncated.all()))
        if t <= limit:
            set_gym_state(env, case, safe[0])
            _, _, terminated, expected, _ = env.step(action)
            assert not terminated
            assert cuts[-1] == expected, t
    assert cuts == [t == limit for t in range(1, limit + 2)]
    assert (world.store.step_count == 1).all()


def distance_to_uniform(sample: np.ndarray, low: float, high: float) -> float:
    """Largest gap between the sample's cumulative distribution and the uniform one (Kolmogorov-Smirnov)."""
    expected = (np.sort(sample) - low) / (high - low)
    steps = np.arange(len(sample) + 1) / len(sample)
    return max(np.abs(expected - steps[1:]).max(), np.abs(expected - steps[:-1]).max())


def test_reset_distribution(case):
    """Starting states are uniform over Gymnasium's ranges, independent of each other, and new in every episode."""
    world = world_class(case.name)(4096)
    world.reset(11)
    first = get_state(world, case)
    world.restart(torch.ones(4096, dtype=torch.bool))
    second = get_state(world, case)
    env = gymnasium.make(case.gym).unwrapped
    theirs = []
    for seed in range(300):
        env.reset(seed=seed)
        theirs.append(np.array(env.state, np.float64))
    for column, (low, high) in enumerate(case.start):
        if low == high:
            assert (first[:, column] == low).all()
            assert all(state[column] == low for state in theirs)
            continue
        # 1.95 / sqrt(n): 999 of 1000 uniform samples pass. The seeds are fixed.
        for sample in (first[:, column], second[:, column]):
            assert sample.min() >= np.float32(low)
            assert sample.max() <= np.float32(high)
            assert distance_to_uniform(sample, low, high) < 1.95 / np.sqrt(4096)
        assert distance_to_uniform(np.array(theirs)[:, column], low, high) < 1.95 / np.sqrt(300)
        assert abs(np.corrcoef(first[:, column], second[:, column])[0, 1]) < 0.08
    moving = [c for c, (low, high) in enumerate(case.start) if low < high]
    between = np.atleast_2d(np.corrcoef(first[:, moving], rowvar=False))
    assert np.abs(between - np.eye(len(moving))).max() < 0.08


def test_settings_change_the_world():
    """A setting reaches the kernel: twice the force changes the speed of the cart."""
    cart = world_class("cartpole")
    speeds = []
    for force in (10.0, 20.0):
        world = cart(2, config=cart.Config(force=force))
        world.reset(0)
        set_state(world, CASES[0], np.zeros((2, 4), np.float32))
        world.step(torch.ones(2, 1, dtype=torch.int32))
        speeds.append(float(world.store.speed[0]))
    assert speeds[1] == pytest.approx(2 * speeds[0], rel=1e-6)
