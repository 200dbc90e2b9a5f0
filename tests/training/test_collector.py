"""A rollout holds what a plain world does with the same actions."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from shoal.algos.a2c import A2C, A2CConfig
from shoal.core import Box, Group, KernelWorld, MultiDiscrete
from shoal.core.wrappers import ActionRepeat, CastObservation, FrameStack, TimeLimit, TransformObservation
from shoal.policy import ActorCritic, mlp_encoder
from shoal.runs.evaluation import Player
from shoal.training.collector import Collector
from tests.core.test_groups import Meadow
from tests.core.test_kernel_world import Drift
from tests.helpers import Counting, CountingReference, play_references, play_world


def policies(world) -> dict[str, ActorCritic]:
    torch.manual_seed(0)
    made = {}
    for g in world.groups:
        made[g.name] = policy = ActorCritic(g, mlp_encoder((8,), "tanh"), True, False, 0.0)
        with torch.no_grad():
            policy.head.linear.weight.normal_()
    return made


def collector(world, steps: int, seed: int = 0, first_env: int = 0) -> Collector:
    made = Collector(world, policies(world), steps, seed, first_env=first_env)
    made.start(seed, first_env)
    return made


def rows(made: Collector, rollouts: int) -> dict[str, np.ndarray]:
    """The rollouts of the first group, one after the other."""
    r = next(iter(made.rollouts.values()))
    parts = []
    for _ in range(rollouts):
        made.collect()
        names = ("action", "reward", "terminated", "truncated", "log_prob")
        parts.append({name: getattr(r, name).numpy().copy() for name in names})
        parts[-1].update(before=r.observation[:-1].numpy().copy(), after=r.observation[1:].numpy().copy())
        parts[-1].update(final=r.final_observation.numpy().copy())
    return {name: [part[name] for part in parts] for name in parts[0]}


@pytest.mark.parametrize("steps", [1, 3, 16])
def test_rollouts_equal_a_twin_that_takes_their_actions(steps):
    """Over several rollouts: observations before and after, rewards, ends, and every real final observation."""
    found = rows(collector(Counting(6), steps), max(5, 30 // steps))
    actions = np.concatenate(found["action"])[:, :, 0]
    twin = play_references([CountingReference(i) for i in range(6)], actions)
    assert len(np.unique(actions)) == 3
    np.testing.assert_array_equal(np.concatenate(found["before"])[0, :, 0], twin.first)
    np.testing.assert_array_equal(np.concatenate(found["before"])[1:, :, 0], twin.observation[:-1])
    np.testing.assert_array_equal(np.concatenate(found["after"])[:, :, 0], twin.observation)
    np.testing.assert_array_equal(np.concatenate(found["reward"])[:, :, 0], twin.reward)
    np.testing.assert_array_equal(np.concatenate(found["terminated"]), twin.terminated)
    np.testing.assert_array_equal(np.concatenate(found["truncated"]), twin.truncated)
    cuts = 0
    for i, kept in enumerate(found["final"]):
        span = slice(i * steps, (i + 1) * steps)
        only_cut = twin.truncated[span] & ~twin.terminated[span]
        for env in range(6):
            expected = twin.final[span][only_cut[:, env], env]
            np.testing.assert_array_equal(kept[: len(expected), env, 0], expected)
            cuts += len(expected)
    assert cuts > 5


class Masked(KernelWorld):
    """After step 5 the mask of env 2, agent 1 allows nothing in the second part of its action."""

    @dataclass(frozen=True)
    class Config:
        stuck: bool = True
        leaves: bool = False
        every: int = 1
        max_steps: int = 100

    @staticmethod
    def groups(config):
        action = MultiDiscrete((2, 3))
        return (
            Group("g", Box(1), action, agents=2, masked=True, can_leave=config.leaves, action_interval=config.every),
        )

    def step(self, s):
        if s.config.leaves:
            s.alive[:, 1] &= s.step_count < 5

    def reset(self, s):
        return {}

    def observe(self, s):
        empty = torch.zeros_like(s.action_mask)
        empty[:, 1, 2:] = ((s.step_count == 5) & (s.env_id == 2) & s.config.stuck)[:, None]
        return dict(observation=torch.zeros_like(s.observation), action_mask=~empty)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (dict(), (5, 2, "g", 1)),
        (dict(every=5), (5, 2, "g", 1)),
        (dict(every=4), None),  # it does not choose at that step
        (dict(leaves=True), None),  # it has left
        (dict(stuck=False), None),
    ],
    ids=str,
)
def test_an_action_mask_that_allows_nothing_is_found_rollouts_later(config, found):
    made = collector(Masked(4, config=Masked.Config(**config)), 4)
    for _ in range(4):
        made.collect()
    assert made.first_empty_mask() == found


def test_wrapped_worlds_collect_their_observations():
    def make():
        return TimeLimit(ActionRepeat(Counting(6), 2), 3)

    found = rows(collector(make(), 7), 4)
    expected = play_world(make(), np.concatenate(found["action"])[:, :, 0])
    np.testing.assert_array_equal(np.concatenate(found["after"])[:, :, 0], expected.observation)
    np.testing.assert_array_equal(np.concatenate(found["truncated"]), expected.truncated)
    np.testing.assert_array_equal(np.concatenate(found["reward"])[:, :, 0], expected.reward)


# --- several observations at once ---------------------------------------------------------------------------------


class StackTwin:
    """One env that shows its last observations at once; before the first there are copies of it."""

    def __init__(self, env, frames):
        self.env, self.frames = env, frames

    def reset(self):
        self.seen = [self.env.reset()] * self.frames
        return np.concatenate(self.seen)

    def step(self, action):
        seen, *rest = self.env.step(action)
        self.seen = [*self.seen[1:], seen]
        return np.concatenate(self.seen), *rest


def short(world):
    """A single number of two bytes per observation."""
    shown = TransformObservation(world, lambda x: x[..., :1] + 8.0 * (x[..., 1:] % 100), Box(1))
    return CastObservation(shown, torch.float16)


class ShortTwin(CountingReference):
    def see(self):
        return np.array([self.clock + 8.0 * (self.episode % 100)], np.float32)


def listen(policy: ActorCritic) -> list[torch.Tensor]:
    """What a policy is shown from now on."""
    heard: list[torch.Tensor] = []
    policy.policy_encoder.register_forward_pre_hook(lambda _, inputs: heard.append(inputs[0].clone()))
    return heard


@pytest.mark.parametrize(
    ("wrap", "make_twin"), [(lambda w: w, CountingReference), (short, ShortTwin)], ids=["floats", "short"]
)
@pytest.mark.parametrize(("stack", "steps"), [(2, 7), (3, 5), (4, 1), (4, 2), (4, 16)])
def test_stacks_equal_a_twin_that_keeps_its_own(stack, steps, wrap, make_twin):
    """As the policy acts on them, as the learner gathers them in any order, and where episodes are cut off."""
    made = collector(FrameStack(wrap(Counting(6)), stack), steps)
    (rollout,), (policy,) = made.rollouts.values(), made.policies.values()
    rollout.valued = False
    heard, learner = listen(policy), A2C(policy, rollout, A2CConfig())
    shown, learned, last, actions, kept = [], [], [], [], []
    for _ in range(max(5, 40 // steps)):
        heard.clear()
        made.collect()
        shown += heard
        order = torch.randperm(rollout.samples, dtype=torch.int32)
        back = torch.empty(rollout.samples, dtype=torch.long)
        back[order.long()] = torch.arange(rollout.samples)
        picked = learner._batch.part(order).observation[back]
        assert torch.equal(picked, learner._batch.part(slice(None)).observation)
        assert torch.equal(picked[2:5], learner._batch.part(slice(2, 5)).observation)
        heard.clear()
        learner._values()
        assert torch.equal(heard[0][:-6].view_as(picked), picked.float())
        learned.append(picked.unflatten(0, (steps, 6)))
        last.append(heard[0][-6:])
        actions.append(rollout.action[:, :, 0].clone())
        kept.append(rollout.final_observation[:, :, 0].clone())
    twin = play_references([StackTwin(make_twin(i), stack) for i in range(6)], torch.cat(actions).numpy())
    expected = np.concatenate([twin.first[None], twin.observation])
    np.testing.assert_array_equal(torch.stack(shown), expected[:-1])
    np.testing.assert_array_equal(torch.cat(learned), expected[:-1])
    np.testing.assert_array_equal(torch.stack(last), expected[steps::steps])
    cuts = 0
    for i, slots in enumerate(kept):
        span = slice(i * steps, (i + 1) * steps)
        only_cut = twin.truncated[span] & ~twin.terminated[span]
        for env in range(6):
            final = twin.final[span][only_cut[:, env], env]
            np.testing.assert_array_equal(slots[: len(final), env], final)
            cuts += len(final)
    assert cuts > 5


def test_a_player_sees_the_same_stacks():
    world = FrameStack(Counting(6), 3)
    made = policies(world)
    heard, actions = listen(made["counter"]), []
    player = Player(world, made, seed=0, sample=True)
    step = world.world.step
    world.world.step = lambda action, *rest: (actions.append(action["counter"][:, 0].clone()), step(action, *rest))[1]
    for _ in range(30):
        player.step()
    twin = play_references([StackTwin(CountingReference(i), 3) for i in range(6)], torch.stack(actions).numpy())
    np.testing.assert_array_equal(torch.stack(heard), np.concatenate([twin.first[None], twin.observation])[:-1])


def test_stacks_of_many_agents_are_separate():
    """Agents of an env share their age, not their frames."""
    made = collector(FrameStack(Meadow(7), 3), 8)
    heard = listen(made.policies["sheep"])
    sheep = made.rollouts["sheep"]
    frames, began = [np.zeros_like(sheep.observation[0])] * 3, np.ones((7, 1, 1), bool)
    for _ in range(3):
        heard.clear()
        made.collect()
        for t in range(8):
            now = sheep.observation[t + 2].numpy().copy()
            frames = [*(np.where(began, now, frame) for frame in frames[1:]), now]
            np.testing.assert_array_equal(heard[t].unflatten(0, now.shape[:2]), np.concatenate(frames, axis=-1))
            began = (sheep.terminated[t] | sheep.truncated[t]).numpy()[:, None, None]
    assert sheep.terminated.any() or sheep.truncated.any()


def test_an_env_and_its_policy_do_not_depend_on_the_batch():
    """Envs 3 to 5 of a batch of eight do as a batch that holds only them."""
    whole = rows(collector(Drift(8), 6), 3)
    part = rows(collector(Drift(3), 6, first_env=3), 3)
    for name in ("action", "terminated", "truncated"):
        np.testing.assert_array_equal(np.array(whole[name])[:, :, 3:6], np.array(part[name]), err_msg=name)
    np.testing.assert_allclose(np.array(whole["log_prob"])[:, :, 3:6], np.array(part["log_prob"]), atol=1e-6)


def test_log_probabilities_are_those_of_the_policy():
    made = collector(Drift(8), 6)
    made.collect()
    r, policy = made.rollouts["leaf"], made.policies["leaf"]
    with torch.no_grad():
        params = policy.distribution(r.observation[:-1].flatten(0, 2))
        expected, _ = policy.head.log_prob_and_entropy(params, r.action.flatten())
    torch.testing.assert_close(r.log_prob.flatten(), expected, rtol=1e-5, atol=1e-5)


def test_actions_follow_the_policy():
    """Over many draws the share of each choice is its mean probability; each rollout draws other actions."""
    made = collector(Drift(512), 8)
    shares, probs = [], []
    for _ in range(4):
        made.collect()
        r = made.rollouts["leaf"]
        with torch.no_grad():
            probs.append(made.policies["leaf"].distribution(r.observation[:-1].flatten(0, 2)).softmax(-1))
        shares.append(r.action.flatten().clone())
    expected = torch.cat(probs).mean(0)
    found = torch.bincount(torch.cat(shares).long(), minlength=3) / (4 * 8 * 512)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


def test_two_groups_with_agents_that_leave_and_choices_that_are_not_allowed():
    """Everyone in the rollouts is alive, dead and allowed as in a world stepped in place with the same actions."""
    made, plain = collector(Meadow(7), 8), Meadow(7)
    out = plain.reset(0)
    wolf, sheep = made.rollouts["wolf"], made.rollouts["sheep"]
    deaths = 0
    for _ in range(4):
        made.collect()
        for t in range(8):
            np.testing.assert_array_equal(wolf.action_mask[t], out.groups["wolf"].action_mask)
            np.testing.assert_array_equal(sheep.alive[t], out.groups["sheep"].alive)
            np.testing.assert_array_equal(sheep.observation[t], out.groups["sheep"].observation)
            assert wolf.action_mask[t].gather(-1, wolf.action[t].long()[..., None]).all()
            out = plain.step({"wolf": wolf.action[t], "sheep": sheep.action[t]})
            np.testing.assert_array_equal(wolf.reward[t], out.groups["wolf"].reward)
            np.testing.assert_array_equal(wolf.terminated[t], out.terminated)
            np.testing.assert_array_equal(sheep.truncated[t], out.truncated)
            deaths += int((~out.groups["sheep"].alive).sum())
    assert deaths > 10
