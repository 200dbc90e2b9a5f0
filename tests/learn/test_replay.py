"""The replay against a slow reference that stores whole episodes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core import Box, Discrete, Group
from shoal.core.errors import ShoalError
from shoal.core.world_loading import world_class
from shoal.learn.replay import Replay
from shoal.learn.replay_draws import Sample, Sequences
from shoal.learn.rollout import Rollout, allocate, stacked
from shoal.policy import ActorCritic, mlp_encoder
from shoal.training.collector import Collector

GAMMA = 0.9


class Reference:
    """Random experience of `total` steps, from which rollouts are filled; observations are almost surely distinct."""

    def __init__(
        self,
        total: int,
        steps: int,
        envs: int,
        agents: int,
        seed: int,
        stack: int = 1,
        leaves: bool = False,
        masked: bool = False,
        dtype: torch.dtype = torch.float32,
        ends: tuple[float, float] = (0.1, 0.1),
        slots: int | None = None,
        state_size: int = 0,
    ):
        rng = np.random.default_rng(seed)
        self.steps, self.envs, self.agents, self.stack, self.total = steps, envs, agents, stack, total
        space = Box((2,), dtype=dtype)
        group = Group("g", space, Discrete(3), agents, masked=masked, can_leave=leaves, stack=stack)
        self.rollout = allocate([group], steps, envs, slots or steps, torch.device("cpu"), state_size)
        shape = (total + 1, envs, agents)
        self.observation = rng.integers(0, 250, (*shape, 2))
        self.final = rng.integers(0, 250, (*shape, 2))
        self.action = rng.integers(0, 3, shape)
        self.reward = rng.normal(size=shape).astype(np.float32)
        self.mask = rng.random((*shape, 3)) < 0.6
        self.terminated, self.truncated = (rng.random((total, envs)) < share for share in ends)
        self.state = rng.normal(size=(*shape, max(1, state_size))).astype(np.float32)
        ended = self.terminated | self.truncated
        self.age = np.zeros((total + 1, envs), int)
        self.alive = np.ones(shape, bool)
        self.final_alive = np.ones(shape, bool)
        if leaves:
            self.alive[:] = rng.random(shape) < 0.85
            self.final_alive[:] = rng.random(shape) < 0.7
        for t in range(total):
            self.age[t + 1] = np.where(ended[t], 0, self.age[t] + 1)
            self.alive[t + 1] &= self.alive[t] | ended[t][:, None]
        self.done = 0

    def fill(self) -> Rollout:
        """The next rollout."""
        r, t0, steps = self.rollout, self.done, self.steps
        rows = np.arange(t0 - self.stack + 1, t0 + steps + 1).clip(0)
        r.observation.copy_(torch.as_tensor(self.observation[rows]))
        here, more = slice(t0, t0 + steps), slice(t0, t0 + steps + 1)
        if r.age is not None:
            r.age.copy_(torch.as_tensor(self.age[more].clip(max=self.stack - 1)))
        for name in ("action", "reward", "terminated", "truncated"):
            getattr(r, name).copy_(torch.as_tensor(getattr(self, name)[here]))
        if r.alive is not None:
            r.alive.copy_(torch.as_tensor(self.alive[more]))
        if r.action_mask is not None:
            r.action_mask.copy_(torch.as_tensor(self.mask[more]))
        if r.rnn_state is not None:
            r.rnn_state[0].copy_(torch.as_tensor(self.state[t0]))
        r.final_observation.fill_(77)
        for env in range(self.envs):
            for slot, t in enumerate(np.flatnonzero(self.only_truncated[here, env])):
                if slot < r.final_observation.shape[0]:
                    seen = torch.as_tensor(self.final_seen(t0 + t, env))
                    r.final_observation[slot, env].copy_(seen)
                    if r.final_alive is not None:
                        r.final_alive[slot, env].copy_(torch.as_tensor(self.final_alive[t0 + t, env]))
        self.done += steps
        return r

    @property
    def only_truncated(self) -> np.ndarray:
        return self.truncated & ~self.terminated

    def seen(self, t: int, env: int, agent: int) -> np.ndarray:
        rows = [t - min(back, self.age[t, env]) for back in range(self.stack - 1, -1, -1)]
        return np.concatenate([self.observation[row, env, agent] for row in rows])

    def final_seen(self, t: int, env: int) -> np.ndarray:
        """Final observations of an env's agents for the episode truncated in step t."""
        first = t - self.age[t, env]
        rows = [max(t + 1 - back, first) for back in range(self.stack - 1, 0, -1)]
        return np.concatenate([*(self.observation[row, env] for row in rows), self.final[t, env]], 1)

    def n_step_outcome(self, t: int, env: int, agent: int, n: int) -> SimpleNamespace:
        """The n-step return of step t and how its window ended."""
        reward, discount_k = 0.0, 1.0
        for u in range(t, t + n):
            reward += discount_k * self.reward[u, env, agent]
            discount_k *= GAMMA
            if self.terminated[u, env]:
                return SimpleNamespace(reward=reward, discount=0.0, kind="over", row=u)
            if self.truncated[u, env]:
                discount = discount_k * self.final_alive[u, env, agent]
                return SimpleNamespace(reward=reward, discount=discount, kind="cut", row=u)
            if not self.alive[u + 1, env, agent]:
                return SimpleNamespace(reward=reward, discount=0.0, kind="left", row=u)
        return SimpleNamespace(reward=reward, discount=discount_k, kind="on", row=t + n)

    def locate(self, replay: Replay, place: int, stride: int = 1) -> tuple[int, int, int]:
        """The step, env and agent of an index of the ring."""
        row, env, agent = np.unravel_index(place, (replay.steps // stride, self.envs, self.agents))
        step = self.done - (self.done - 1 - row * stride) % replay.steps - 1
        return int(step), int(env), int(agent)

    def kept(self, replay: Replay, t: int, env: int) -> bool:
        """Whether the final observation of step t is still stored."""
        return int(self.only_truncated[t : self.done, env].sum()) <= replay.finals.shape[0]


def check(reference: Reference, replay: Replay, sample: Sample) -> None:
    for i, place in enumerate(sample.index.tolist()):
        t, env, agent = reference.locate(replay, place)
        assert max(0, reference.done - replay.steps) + reference.stack - 1 <= t < reference.done - replay.n_step
        what = reference.n_step_outcome(t, env, agent, replay.n_step)
        lost = what.kind == "cut" and not reference.kept(replay, what.row, env)
        assert (float(sample.weight[i]) > 0) == (bool(reference.alive[t, env, agent]) and not lost)
        np.testing.assert_array_equal(sample.observation[i].numpy(), reference.seen(t, env, agent))
        assert int(sample.action[i]) == reference.action[t, env, agent]
        if not reference.alive[t, env, agent] or lost:
            continue
        np.testing.assert_allclose(float(sample.reward[i]), what.reward, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(float(sample.discount[i]), what.discount, rtol=1e-5)
        if what.kind == "on":
            np.testing.assert_array_equal(sample.next_observation[i].numpy(), reference.seen(what.row, env, agent))
        elif what.kind == "cut":
            np.testing.assert_array_equal(
                sample.next_observation[i].numpy(), reference.final_seen(what.row, env)[agent]
            )
        if sample.action_mask is not None:
            np.testing.assert_array_equal(sample.action_mask[i].numpy(), reference.mask[t, env, agent])
            if what.kind == "on":
                np.testing.assert_array_equal(sample.next_action_mask[i].numpy(), reference.mask[what.row, env, agent])
            elif what.kind == "cut":
                assert sample.next_action_mask[i].all()


def check_leaves(reference: Reference, replay: Replay) -> None:
    """Exactly the alive agents with a complete history and n-step window have a positive priority."""
    leaves = replay.tree.leaves.numpy()
    for place in range(len(leaves)):
        t, env, agent = reference.locate(replay, place)
        oldest = max(0, reference.done - replay.steps) + reference.stack - 1
        allowed = oldest <= t < reference.done - replay.n_step and reference.alive[t, env, agent]
        assert (leaves[place] > 0) == allowed, (t, env, agent)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.integers(1, 6),
    blocks=st.integers(0, 4),
    appends=st.integers(1, 20),
    envs=st.integers(1, 3),
    agents=st.integers(1, 3),
    n_step=st.integers(1, 5),
    stack=st.integers(1, 4),
    leaves=st.booleans(),
    masked=st.booleans(),
    prioritized=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.uint8]),
    seed=st.integers(0, 2**31),
)
def test_samples_equal_the_reference(
    steps, blocks, appends, envs, agents, n_step, stack, leaves, masked, prioritized, dtype, seed
):
    """Episode ends within the window, wrap-around of frames and windows, final observations no longer stored."""
    blocks += -(-(n_step + stack + steps) // steps)
    appends += -(-(n_step + stack + 1) // steps)
    reference = Reference(steps * appends, steps, envs, agents, seed, stack, leaves, masked, dtype)
    replay = Replay(reference.rollout, blocks * steps - steps // 2, n_step, GAMMA, prioritized=prioritized, seed=seed)
    assert replay.steps == blocks * steps
    for _ in range(appends):
        reference.fill()
        replay.append()
        if reference.done >= n_step + stack + 1:
            sample = replay.sample(8)
            if prioritized and float(replay.tree.nodes[-1]) == 0.0:
                assert not sample.weight.any()
                continue
            check(reference, replay, sample)
            replay.update_priorities(sample.index, torch.randn(8))
        if prioritized:
            check_leaves(reference, replay)
    assert int(replay.filled) == min(reference.done, replay.steps)
    assert int(replay.head) == reference.done % replay.steps


def fill_replay(reference: Reference, replay: Replay) -> Replay:
    while reference.done < reference.total:
        reference.fill()
        replay.append()
    return replay


def chi_square(found: np.ndarray, expected: np.ndarray) -> float:
    """Number of standard deviations of the statistic above its expectation."""
    some = expected > 0
    assert found[~some].sum() == 0
    statistic = ((found[some] - expected[some]) ** 2 / expected[some]).sum()
    freedom = some.sum() - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


def test_uniform_draws_are_uniform_over_valid_rows():
    reference = Reference(48, 4, 3, 2, 0, stack=3)
    replay = fill_replay(reference, Replay(reference.rollout, 20, 2, GAMMA))
    found = np.zeros(20 * 6)
    for _ in range(60):
        sample = replay.sample(500)
        np.add.at(found, sample.index.numpy(), 1)
        assert (sample.weight == 1.0).all()
    valid = np.zeros(20 * 6)
    for place in range(len(valid)):
        t = reference.locate(replay, place)[0]
        valid[place] = 48 - 20 + 2 <= t < 48 - 2
    assert valid.sum() == 16 * 6
    assert abs(chi_square(found, valid / valid.sum() * found.sum())) < 4


@pytest.mark.parametrize("batch", [16, 1000])
def test_draws_are_proportional_to_priorities_and_weights_correct_for_it(batch):
    """Small batches, and one that contains most indices several times."""
    reference = Reference(48, 4, 3, 2, 0, leaves=True)
    replay = fill_replay(reference, Replay(reference.rollout, 20, 2, GAMMA, prioritized=True, alpha=0.7, eps=0.01))
    rng = np.random.default_rng(0)
    for _ in range(40):
        place = replay.sample(8).index
        replay.update_priorities(place, torch.as_tensor(rng.normal(size=8) * 5))
    leaves = replay.tree.leaves.numpy().astype(np.float64)
    found = np.zeros_like(leaves)
    for _ in range(40_000 // batch):
        sample = replay.sample(batch, beta=torch.tensor(0.6))
        places = sample.index.numpy()
        np.add.at(found, places, 1)
        counts = sample.weight.numpy() > 0
        expected = (leaves / leaves.sum() * (leaves > 0).sum())[places] ** -0.6
        expected[~counts] = 0
        np.testing.assert_allclose(sample.weight.numpy(), expected / expected.max(), rtol=1e-4)
    # Stratified draws vary less than independent ones, so the statistic may be below its expectation.
    assert chi_square(found, leaves / leaves.sum() * found.sum()) < 4


def test_new_rows_get_the_maximum_priority():
    reference = Reference(40, 4, 2, 1, 0)
    replay = Replay(reference.rollout, 16, 1, GAMMA, prioritized=True, alpha=0.5, eps=0.0)
    for _ in range(4):
        reference.fill()
        replay.append()
    assert set(replay.tree.leaves.unique().tolist()) == {0.0, 1.0}
    replay.update_priorities(torch.tensor([20]), torch.tensor([-9.0]))
    reference.fill()
    replay.append()
    assert sorted(replay.tree.leaves.unique().tolist()) == [0.0, 1.0, 3.0]
    assert int((replay.tree.leaves == 3.0).sum()) == 1 + 4 * 2


def test_updates_do_not_raise_incomplete_rows():
    reference = Reference(8, 4, 2, 1, 0)
    replay = fill_replay(reference, Replay(reference.rollout, 16, 2, GAMMA, prioritized=True))
    everything = torch.arange(32)
    replay.update_priorities(everything, torch.full((32,), 5.0))
    check_leaves(reference, replay)


def test_a_sample_without_its_final_observation_has_weight_zero():
    """Every step is truncated, and final observations of an eighth of the rows are stored."""
    reference = Reference(64, 2, 2, 1, 0, ends=(0.0, 1.0))
    replay = fill_replay(reference, Replay(reference.rollout, 32, 1, GAMMA))
    assert replay.finals.shape[0] == 4
    sample = replay.sample(500)
    check(reference, replay, sample)
    counted = {reference.locate(replay, p)[0] for p in sample.index[sample.weight > 0].tolist()}
    assert counted == {60, 61, 62}


def test_with_a_time_limit_all_final_observations_are_kept():
    reference = Reference(64, 4, 2, 1, 0, ends=(0.0, 0.0), slots=1)
    reference.truncated[4::5] = True
    reference.age[:] = (np.arange(65) % 5)[:, None]
    reference.rollout.time_limit = 5
    replay = fill_replay(reference, Replay(reference.rollout, 32, 3, GAMMA))
    sample = replay.sample(300)
    check(reference, replay, sample)
    assert (sample.weight == 1).all()


@pytest.mark.parametrize("prioritized", [False, True])
def test_steps_between_decisions_have_weight_zero(prioritized):
    """The agent chooses every second step and repeats its last action in between."""
    reference = Reference(24, 4, 2, 1, 0)
    reference.rollout.is_decision_step = torch.ones(5, 2, 1, dtype=torch.bool)
    reference.rollout.is_decision_step[1::2] = False
    replay = fill_replay(reference, Replay(reference.rollout, 16, 2, GAMMA, prioritized=prioritized))
    sample = replay.sample(200)
    steps = torch.tensor([reference.locate(replay, p)[0] for p in sample.index.tolist()])
    assert torch.equal(sample.weight > 0, steps % 2 == 0)
    assert bool((steps % 2 == 0).all()) == prioritized


def test_windows_end_at_a_discontinuity():
    """The next rollout starts new episodes."""
    reference = Reference(16, 4, 2, 1, 0, ends=(0.0, 0.0))
    replay = Replay(reference.rollout, 16, 2, GAMMA)
    for t in range(4):
        if t == 2:
            replay.mark_discontinuity()
        reference.fill()
        replay.append()
    sample = replay.sample(300)
    steps = torch.tensor([reference.locate(replay, p)[0] for p in sample.index.tolist()])
    assert torch.equal(sample.weight == 0, (steps == 6) | (steps == 7))


def test_a_loaded_replay_continues_identically():
    kept = []
    for resumed in (False, True):
        reference = Reference(60, 5, 3, 2, 0, stack=2, leaves=True, masked=True)
        replay = Replay(reference.rollout, 20, 3, GAMMA, prioritized=True, seed=4)
        for t in range(12):
            reference.fill()
            replay.append()
            if t == 6 and resumed:
                saved = {name: tensor.clone() for name, tensor in replay.state_dict().items()}
                replay = Replay(reference.rollout, 20, 3, GAMMA, prioritized=True, seed=4)
                replay.load_state_dict(saved)
            if t > 1:
                sample = replay.sample(16, 0.5)
                replay.update_priorities(sample.index, sample.reward)
        sample = replay.sample(16)
        kept.append([getattr(sample, name).clone() for name in vars(sample)] + list(replay.state_dict().values()))
    for one, other in zip(*kept, strict=True):
        assert torch.equal(one, other)


def test_draws_depend_only_on_seed_and_counter():
    reference = Reference(40, 4, 4, 1, 0)
    one, other = (
        fill_replay(Reference(40, 4, 4, 1, 0), Replay(reference.rollout, 20, 1, GAMMA, seed=s)) for s in (1, 2)
    )
    first = one.sample(64).index.clone()
    assert not torch.equal(first, one.sample(64).index)
    assert not torch.equal(first, other.sample(64).index)
    one.counter.zero_()
    assert torch.equal(first, one.sample(64).index)


def test_a_state_of_another_shape_is_refused():
    reference = Reference(40, 4, 4, 1, 0)
    one, other = Replay(reference.rollout, 20, 1, GAMMA), Replay(reference.rollout, 24, 1, GAMMA)
    with pytest.raises(ShoalError, match="does not match this one in: action"):
        one.load_state_dict(other.state_dict())
    with pytest.raises(ShoalError, match="priority"):
        Replay(reference.rollout, 20, 1, GAMMA, prioritized=True).load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(steps=4, n_step=1), "too short"),
        (dict(steps=40, n_step=0), "n_step"),
        (dict(steps=40, n_step=1, sequences=6), "must be multiples"),
        (dict(steps=2**30, n_step=1), "holds up to"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    reference = Reference(4, 4, 1, 2, 0)
    with pytest.raises(ShoalError, match=message):
        Replay(reference.rollout, gamma=GAMMA, **settings)


def test_the_memory_estimate_is_close():
    reference = Reference(8, 8, 16, 2, 0, stack=3, leaves=True, masked=True)
    for prioritized in (False, True):
        replay = Replay(reference.rollout, 160, 3, GAMMA, prioritized=prioritized)
        estimate = Replay.bytes_per_step(reference.rollout, prioritized) * 160
        assert abs(replay.nbytes / estimate - 1) < 0.03


def test_transitions_of_cartpole_obey_its_physics():
    """Stepping a world from the transition's state gives its outcome."""
    world = world_class("cartpole")(32, "cpu")
    group = world.groups[0]
    torch.manual_seed(0)
    policy = ActorCritic(group, mlp_encoder((8,), "relu"), True, False, 0.0)
    collector = Collector(world, {group.name: policy}, 8, seed=1)
    replay = Replay(collector.rollouts[group.name], 64, 1, GAMMA)
    collector.start(0)
    for _ in range(20):
        collector.collect()
        replay.append()
    sample = replay.sample(512)
    other = world_class("cartpole")(512, "cpu")
    other.reset(0)
    for name, column in zip(("x", "speed", "angle", "spin"), sample.observation.T, strict=True):
        other.store[name].copy_(column.view_as(other.store[name]))
    out = other.step(sample.action.view(512, 1))
    group_out = out.groups[group.name]
    ended = out.terminated
    assert torch.equal(sample.reward, group_out.reward[:, 0])
    assert torch.equal(sample.discount == 0, ended)
    assert torch.equal(sample.next_observation[~ended], group_out.observation[:, 0][~ended])
    assert ended.any()


# --- sequences ------------------------------------------------------------------------------------------------------


def check_sequences(reference: Reference, replay: Replay, found: Sequences, span: int) -> None:
    n, rows = replay.n_step, span + replay.n_step
    for i, place in enumerate(found.index.tolist()):
        first, env, agent = reference.locate(replay, place, reference.steps)
        assert first % reference.steps == 0
        assert max(0, reference.done - replay.steps) + reference.stack - 1 <= first <= reference.done - rows
        assert (float(found.weight[i]) > 0) == bool(reference.alive[first : first + span, env, agent].any())
        np.testing.assert_array_equal(found.state[i].numpy(), reference.state[first, env, agent])
        cuts = [
            t
            for t in range(rows)
            if reference.only_truncated[first + t, env] and reference.kept(replay, first + t, env)
        ]
        cuts = cuts[: found.final_row.shape[0]]
        assert [t for t in found.final_row[:, i].tolist() if t >= 0] == cuts
        for f, t in enumerate(cuts):
            np.testing.assert_array_equal(
                found.final_observation[f, i].numpy(), reference.final_seen(first + t, env)[agent]
            )
        for t in range(rows):
            at = first + t, env, agent
            np.testing.assert_array_equal(found.observation[t, i].numpy(), reference.seen(*at))
            assert int(found.action[t, i]) == reference.action[at]
            assert float(found.reward[t, i]) == reference.reward[at]
            assert bool(found.alive[t, i]) == reference.alive[at]
            assert bool(found.terminated[t, i]) == reference.terminated[at[:2]]
            assert bool(found.truncated[t, i]) == reference.truncated[at[:2]]
            np.testing.assert_array_equal(found.action_mask[t, i].numpy(), reference.mask[at])
        for t in range(span):
            what = reference.n_step_outcome(first + t, env, agent, n)
            lost = what.kind == "cut" and what.row - first not in cuts
            assert bool(found.valid[t, i]) == (bool(reference.alive[first + t, env, agent]) and not lost)
            if found.valid[t, i]:
                np.testing.assert_allclose(float(found.n_step_reward[t, i]), what.reward, rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(float(found.discount[t, i]), what.discount, rtol=1e-5)
                if what.kind == "on":
                    assert int(found.next_row[t, i]) == t + n
                if what.kind == "cut":
                    assert int(found.next_row[t, i]) == rows + cuts.index(what.row - first)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.integers(1, 4),
    burn_in=st.integers(0, 2),
    length=st.integers(1, 3),
    blocks=st.integers(0, 3),
    appends=st.integers(1, 10),
    n_step=st.integers(1, 4),
    stack=st.integers(1, 3),
    leaves=st.booleans(),
    prioritized=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_sequences_equal_the_reference(
    steps, burn_in, length, blocks, appends, n_step, stack, leaves, prioritized, seed
):
    burn_in, length = burn_in * steps, length * steps
    span = burn_in + length
    least = span + n_step + stack + steps
    blocks, appends = blocks + -(-least // steps), appends + -(-least // steps)
    reference = Reference(steps * appends, steps, 2, 2, seed, stack, leaves, masked=True, state_size=3)
    replay = Replay(
        reference.rollout, blocks * steps, n_step, GAMMA, prioritized=prioritized, seed=seed, sequences=span
    )
    for _ in range(appends):
        reference.fill()
        replay.append()
        if reference.done < least:
            continue
        found = replay.sample_sequences(5, burn_in, length, 0.5)
        if prioritized:
            leaves_now = replay.tree.leaves.numpy()
            for place in range(len(leaves_now)):
                first, env, agent = reference.locate(replay, place, steps)
                inside = max(0, reference.done - replay.steps) + stack - 1 <= first <= reference.done - span - n_step
                allowed = inside and reference.alive[first : first + span, env, agent].any()
                assert (leaves_now[place] > 0) == allowed
            if not leaves_now.any():
                continue
            replay.update_priorities(found.index, torch.randn(5))
        check_sequences(reference, replay, found, span)


def test_sample_and_sample_sequences_need_the_matching_replay():
    reference = Reference(16, 4, 2, 1, 0, state_size=2)
    steps, sequences = Replay(reference.rollout, 32, 1, GAMMA), Replay(reference.rollout, 32, 1, GAMMA, sequences=12)
    with pytest.raises(ShoalError, match="multiples of rollouts of 4"):
        steps.sample_sequences(4, 4, 8)
    with pytest.raises(ShoalError, match="multiples of rollouts of 4"):
        sequences.sample_sequences(4, 6, 6)
    with pytest.raises(ShoalError, match="sample_sequences"):
        sequences.sample(4)


def test_the_reference_equals_stacked():
    """Checks the reference itself."""
    reference = Reference(12, 4, 2, 2, 3, stack=3, ends=(0.2, 0.2))
    for _ in range(3):
        r = reference.fill()
        seen = stacked(r.observation, r.age).view(5, 2, 2, -1).numpy()
        for t in range(4):
            np.testing.assert_array_equal(seen[t, 1, 0], reference.seen(reference.done - 4 + t, 1, 0))
