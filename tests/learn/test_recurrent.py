"""Policies with an RNN: sequences against single steps, gradients against torch's cells, a memory task."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import warp as wp
from torch import nn
from torch.distributions import Categorical

import shoal
from shoal.algos.a2c import A2C, A2CConfig
from shoal.algos.ppo import PPO, PPOConfig
from shoal.core import Box, Discrete, Field, Group, KernelWorld, Random
from shoal.core.errors import ShoalError
from shoal.core.random import integer
from shoal.core.wrappers import FrameStack, TimeLimit
from shoal.learn.rollout import stacked
from shoal.policy import RNN, ActorCritic, mlp_encoder, rnn_maker
from shoal.runs.checkpoint import load_checkpoint
from shoal.runs.evaluation import Player, evaluate
from shoal.runs.jobs import make_job
from shoal.training.collector import Collector
from shoal.training.trainer import Trainer
from tests.core.test_groups import Meadow
from tests.helpers import Counting

KINDS = ("lstm", "gru")
SIZE = 6


# --- the RNN --------------------------------------------------------------------------------------------------------


def cell_of(rnn: Any) -> Any:
    """Torch's cell with the weights of an RNN of one layer."""
    (rnn,) = rnn.layers
    cell = (nn.LSTMCell if rnn.kind == "lstm" else nn.GRUCell)(rnn.input.in_features, rnn.size)
    pairs = zip(("ih", "hh"), (rnn.input, rnn.recurrent), strict=True)
    cell.load_state_dict({f"{what}_{end}": getattr(layer, what) for end, layer in pairs for what in ("weight", "bias")})
    return cell


def walk(cell: Any, features: torch.Tensor, state: torch.Tensor, ended: torch.Tensor) -> torch.Tensor:
    """Outputs [T, size] of one sequence, with a zero state after every end."""
    parts = [part[None] for part in state.split(cell.hidden_size)]
    outputs = []
    for x, over in zip(features, ended, strict=True):
        after = cell(x[None], tuple(parts) if len(parts) > 1 else parts[0])
        parts = list(after) if isinstance(after, tuple) else [after]
        outputs.append(parts[0][0])
        if over:
            parts = [torch.zeros_like(part) for part in parts]
    return torch.stack(outputs)


def test_logits_and_values_are_not_rounded_to_bf16():
    """The heads of a policy with a GRU run in float32 under bf16 autocast."""
    torch.manual_seed(0)
    group = Group("a", Box(5), Discrete(3))
    policy = ActorCritic(group, mlp_encoder((16,), "relu"), True, False, 0.0, rnn_maker("gru", 16))
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits, values, output = policy.step(torch.randn(64, 5), torch.zeros(64, policy.state_size))
    heads = policy.head.linear, policy.value_head
    expected = [output @ layer.weight.T + layer.bias for layer in heads]
    torch.testing.assert_close(logits, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(values, expected[1][:, 0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_layer_equals_torch_s_cell(kind):
    """Outputs and gradients of sequences with ends inside, and the state after single steps."""
    torch.manual_seed(0)
    rnn = RNN(kind, 3, SIZE)
    (layer,) = rnn.layers
    nn.init.normal_(layer.input.bias)
    nn.init.normal_(layer.recurrent.bias)
    features, state = torch.randn(9, 4, 3), torch.randn(4, rnn.state_size)
    ended, weight = torch.rand(9, 4) < 0.3, torch.randn(9, 4, SIZE)
    found = rnn.sequence(features, state, ended)
    (found * weight).sum().backward()
    cell = cell_of(rnn)
    expected = torch.stack([walk(cell, features[:, i], state[i], ended[:, i]) for i in range(4)], dim=1)
    (expected * weight).sum().backward()
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip((layer.input, layer.recurrent), ("ih", "hh"), strict=True):
        for what in ("weight", "bias"):
            torch.testing.assert_close(getattr(ours, what).grad, getattr(cell, f"{what}_{theirs}").grad)
    for t in range(9):
        out, state = rnn.step(features[t], state)
        torch.testing.assert_close(out, expected[t])
        state = torch.where(ended[t, :, None], 0.0, state)


def torch_layers(rnn: RNN) -> Any:
    """Torch's LSTM or GRU of several layers with the weights of an RNN."""
    reference = (nn.LSTM if rnn.kind == "lstm" else nn.GRU)(3, rnn.size, len(rnn.layers))
    with torch.no_grad():
        for i, layer in enumerate(rnn.layers):
            for end, own in (("ih", layer.input), ("hh", layer.recurrent)):
                getattr(reference, f"weight_{end}_l{i}").copy_(own.weight)
                getattr(reference, f"bias_{end}_l{i}").copy_(own.bias)
    return reference


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_several_layers_equal_torch_s(kind, layers):
    """Outputs and gradients against torch's layers, called separately for each episode."""
    torch.manual_seed(0)
    rnn = RNN(kind, 3, SIZE, layers)
    for p in rnn.parameters():
        nn.init.normal_(p, std=0.5)
    reference = torch_layers(rnn)
    assert rnn.state_size == layers * SIZE * (2 if kind == "lstm" else 1)
    features, state = torch.randn(9, 4, 3), torch.randn(4, rnn.state_size)
    ended, weight = torch.rand(9, 4) < 0.3, torch.randn(9, 4, SIZE)
    found = rnn.sequence(features, state, ended)
    (found * weight).sum().backward()

    columns = []
    for i in range(4):
        # [layers, parts of a layer's state, size] -> the outputs of all layers, and all cells.
        parts = state[i].view(layers, -1, SIZE).transpose(0, 1).unbind()
        outputs = []
        for t in range(9):
            given = tuple(part.contiguous() for part in parts)
            out, after = reference(features[t : t + 1, i], given if kind == "lstm" else given[0])
            parts = after if kind == "lstm" else (after,)
            if ended[t, i]:
                parts = tuple(torch.zeros_like(part) for part in parts)
            outputs.append(out[0])
        columns.append(torch.stack(outputs))
    expected = torch.stack(columns, dim=1)
    (expected * weight).sum().backward()
    torch.testing.assert_close(found, expected)
    for i, layer in enumerate(rnn.layers):
        for end, own in (("ih", layer.input), ("hh", layer.recurrent)):
            torch.testing.assert_close(own.weight.grad, getattr(reference, f"weight_{end}_l{i}").grad)
            torch.testing.assert_close(own.bias.grad, getattr(reference, f"bias_{end}_l{i}").grad)
    for t in range(9):
        out, state = rnn.step(features[t], state)
        torch.testing.assert_close(out, expected[t])
        state = torch.where(ended[t, :, None], 0.0, state)


# --- collecting and learning ----------------------------------------------------------------------------------------


def make_policies(world, kind: str, normalize=False, layers=1) -> dict[str, ActorCritic]:
    torch.manual_seed(0)
    made = {}
    for g in world.groups:
        rnn = rnn_maker(kind, SIZE, layers)
        made[g.name] = policy = ActorCritic(g, mlp_encoder((8,), "tanh"), False, normalize, 0.0, rnn)
        with torch.no_grad():
            policy.head.linear.weight.normal_()
    return made


def make_collector(world, kind: str, steps: int, layers=1) -> Collector:
    made = Collector(world, make_policies(world, kind, layers=layers), steps, 0)
    made.start(0)
    return made


WORLDS = {
    "counting": lambda: Counting(6),
    "stacked": lambda: FrameStack(Counting(6), 3),
    "several agents that leave": lambda: TimeLimit(Meadow(6), 5),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("steps", "layers"), [(1, 1), (5, 2), (16, 1)])
def test_sequences_equal_single_steps(world, kind, steps, layers):
    """Log-probabilities, values and bootstrap values of sequences equal those of acting."""
    made = make_collector(WORLDS[world](), kind, steps, layers)
    name = list(made.rollouts)[-1]
    rollout, policy = made.rollouts[name], made.policies[name]
    learner = PPO(policy, rollout, PPOConfig(num_minibatches=1))
    envs, agents = rollout.reward.shape[1:]
    state = torch.zeros(envs * agents, policy.state_size)
    cuts = 0
    for _ in range(max(3, 24 // steps)):
        made.collect()
        torch.testing.assert_close(rollout.rnn_state[0].flatten(0, 1), state)
        with torch.no_grad():
            learner._values()
            slots = torch.zeros(envs, dtype=torch.long)
            for t in range(steps):
                params, value, state = policy.step(stacked(*rollout.window(t)), state, mask_of(rollout, t))
                log_prob, _ = policy.head.log_prob_and_entropy(params, rollout.action[t].flatten(0, 1))
                torch.testing.assert_close(rollout.log_prob[t].flatten(), log_prob, rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(rollout.value[t].flatten(), value, rtol=1e-4, atol=1e-5)
                state = state.unflatten(0, (envs, agents))
                ended = rollout.terminated[t] | rollout.truncated[t]
                for env in (ended & ~rollout.terminated[t]).nonzero().flatten().tolist():
                    final = rollout.final_observation[slots[env], env]
                    torch.testing.assert_close(policy.value(final, state[env]), learner.final_value[slots[env], env])
                    slots[env] += 1
                    cuts += 1
                state = torch.where(ended[:, None, None], 0.0, state).flatten(0, 1)
            torch.testing.assert_close(rollout.value[-1].flatten(), policy.value(stacked(*rollout.window(-1)), state))
            pick = torch.randperm(envs * agents)
            batch = learner._batch.part(learner._rows(pick))
            params, value = learner._forward(batch, pick)
            log_prob, _ = policy.head.log_prob_and_entropy(params, batch.action)
        torch.testing.assert_close(log_prob, batch.log_prob, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(value, batch.value, rtol=1e-4, atol=1e-5)
    assert cuts > 3


def mask_of(rollout, t: int):
    return None if rollout.action_mask is None else rollout.action_mask[t].flatten(0, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", ["stacked", "several agents that leave"])
@pytest.mark.parametrize("micro_batch_size", [None, 25, 1])
def test_a_gradient_equals_that_of_a_slow_reference(world, kind, micro_batch_size):
    """PPO's loss of a few sequences, unrolled one by one with torch's cell, in one pass and in several."""
    made = make_collector(WORLDS[world](), kind, 12)
    name = list(made.rollouts)[-1]
    rollout, policy = made.rollouts[name], made.policies[name]
    made.collect()
    made.collect()
    config = PPOConfig(num_minibatches=1, ent_coef=0.02, micro_batch_size=micro_batch_size)
    learner = PPO(policy, rollout, config)
    rollout.log_prob.add_(0.3 * torch.randn_like(rollout.log_prob))
    learner._prepare()
    agents = rollout.reward.shape[2]
    pick = torch.tensor([4, 0, 3, 5], dtype=torch.int32)
    found, gradient = learner._gradient(pick, *learner._totals([pick]))

    cell = cell_of(policy.rnn)
    rows: list[list[torch.Tensor]] = []
    for i in pick.tolist():
        env, agent = divmod(i, agents)
        ended = rollout.terminated[:, env] | rollout.truncated[:, env]
        seen = torch.stack([stacked(*rollout.window(t))[i] for t in range(12)])
        features = walk(cell, policy.policy_encoder(seen), rollout.rnn_state[0, env, agent], ended)
        mask = None if rollout.action_mask is None else rollout.action_mask[:-1, env, agent]
        reference = Categorical(logits=policy.head(features, mask))
        value = policy.value_head(features)[:, 0]
        counts = torch.ones(12, dtype=torch.bool) if rollout.alive is None else rollout.alive[:-1, env, agent]
        columns = (
            reference.log_prob(rollout.action[:, env, agent]) - rollout.log_prob[:, env, agent],
            reference.entropy(),
            value - learner.target[:, env, agent],
            learner.advantage[:, env, agent],
        )
        rows.append([column[counts] for column in columns])
    log_ratio, entropy, error, advantage = (torch.cat(column) for column in zip(*rows, strict=True))
    advantage = (advantage - advantage.mean()) / advantage.std(correction=0)
    ratio = log_ratio.exp()
    gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    loss = -gain + 0.5 * 0.5 * error.square().mean() - 0.02 * entropy.mean()
    torch.testing.assert_close(found["loss"].detach(), loss.detach(), rtol=1e-4, atol=1e-5)
    ours = {id(p): n for n, p in policy.named_parameters()}
    theirs = dict(zip(("rnn.layers.0.input", "rnn.layers.0.recurrent"), ("ih", "hh"), strict=True))
    wanted = []
    for p in learner.optimizer.parameters:
        layer, _, what = ours[id(p)].rpartition(".")
        wanted.append(getattr(cell, f"{what}_{theirs[layer]}") if layer in theirs else p)
    expected = learner.optimizer.flatten(list(torch.autograd.grad(loss, wanted)))
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a2c_learns_from_all_sequences(kind):
    """One pass and several give the same step, with normalized observations and agents that leave."""
    weights = []
    for micro_batch_size in (None, 40):
        world = TimeLimit(Meadow(6), 5)
        policies = make_policies(world, kind, normalize=True)
        made = Collector(world, policies, 12, 0)
        made.start(0)
        learner = A2C(policies["sheep"], made.rollouts["sheep"], A2CConfig(lr=0.01, micro_batch_size=micro_batch_size))
        learner.set_progress(0.0)
        for _ in range(2):
            made.collect()
            learner.update()
        weights.append(learner.optimizer.flat.clone())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-5)


def test_sequences_must_divide_into_minibatches():
    """Refused before allocation; samples that divide are not enough."""
    settings = dict(num_envs=6, rollout_steps=8, device="cpu", num_minibatches=4)
    make_job("cartpole", **settings)
    with pytest.raises(ShoalError, match=r"6 sequences.*4 mini-batches"):
        make_job("cartpole", rnn="lstm", **settings)
    for flag in ("--rnn-size", "--rnn-layers"):
        with pytest.raises(ShoalError, match=rf"{flag}.*0"):
            make_job("cartpole", device="cpu", **{flag[2:].replace("-", "_"): 0})


def test_evaluation_resets_the_state_with_the_episode():
    world = FrameStack(Counting(6), 2)
    policies = make_policies(world, "lstm")
    policy, seen, states = policies["counter"], [], []
    policy.policy_encoder.register_forward_hook(lambda *given: seen.append(given[-1].clone()))
    player = Player(world, policies, seed=0, stochastic=True)
    state = torch.zeros(6, policy.state_size)
    for _ in range(20):
        player.step()
        with torch.no_grad():
            state = policy.rnn.step(seen[-1], state)[1]
        ended = world.outputs.terminated | world.outputs.truncated
        state = torch.where(ended[:, None], 0.0, state)
        states.append(ended.sum())
        torch.testing.assert_close(player._state["counter"][:, 0], state)
    assert sum(states) > 10


# --- runs -----------------------------------------------------------------------------------------------------------


@wp.func
def answer(
    env: int,
    delay: int,
    clock: wp.array[int],
    cue: wp.array[int],
    action: wp.array[int],
    reward: wp.array[float],
    terminated: wp.array[wp.bool],
):
    clock[env] = clock[env] + 1
    terminated[env] = clock[env] == delay
    if clock[env] == delay and action[env] == cue[env]:
        reward[env] = 1.0
    else:
        reward[env] = 0.0


@wp.func
def new_cue(env: int, rng: Random, clock: wp.array[int], cue: wp.array[int]):
    clock[env] = 0
    cue[env] = integer(rng, 0, 3)


@wp.func
def show_cue(env: int, clock: wp.array[int], cue: wp.array[int], observation: wp.array2d[float]):
    for i in range(3):
        observation[env, i] = 0.0
    if clock[env] == 0:
        observation[env, cue[env]] = 1.0
    observation[env, 3] = float(clock[env]) / 4.0


class Recall(KernelWorld):
    """The first observation is one of three cues, which the last action must repeat. Guessing gives 1/3 on average."""

    @dataclass(frozen=True)
    class Config:
        max_steps: int = 100
        delay: int = 5

    state = dict(clock=Field(int), cue=Field(int))
    groups = (Group("pupil", observation=Box(4), action=Discrete(3)),)
    step, reset, observe = answer, new_cue, show_cue


RECALL = f"{__file__}:Recall"


@pytest.mark.parametrize(
    ("rnn", "least", "most"),
    [("lstm", 0.97, 1.0), pytest.param("gru", 0.97, 1.0, marks=pytest.mark.slow), ("none", 0.2, 0.5)],
)
def test_only_a_policy_with_an_rnn_solves_recall(rnn, least, most):
    settings = dict(
        num_envs=64, rollout_steps=12, total_steps=50 * 768, lr=5e-3, hidden=(16,), rnn_size=24, ent_coef=0.01
    )
    job = make_job(RECALL, rnn=rnn, device="cpu", seed=1, **settings)
    trainer = Trainer(job)
    while not trainer.done:
        trainer.iterate()
    assert least <= evaluate(job, trainer.policies, episodes=300)["pupil"].mean <= most


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, algo):
    """With frame stacking and truncated episodes, an interrupted run ends with the same numbers."""
    small = dict(
        num_envs=32,
        rollout_steps=8,
        eval_episodes=4,
        quiet=True,
        device="cpu",
        log_every_seconds=0.0,
        lr_schedule="none",
    )
    small.update(algo=algo, rnn="gru", rnn_size=8, rnn_layers=2, frame_stack=3, time_limit=11, normalize_obs=True)
    whole = shoal.train("cartpole", total_steps=6 * 256, run_dir=tmp_path / "whole", **small)
    shoal.train("cartpole", total_steps=3 * 256, run_dir=tmp_path / "cut", **small)
    resumed = shoal.resume(tmp_path / "cut", total_steps=6 * 256)
    one, other = (load_checkpoint(run.folder.pick("last"), "cpu").state for run in (whole, resumed))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert one["collector.cart.rnn_state"].abs().sum() > 0
    assert one["collector.cart.history"].shape[0] == 2


def test_one_of_two_groups_can_have_an_rnn():
    settings = dict(
        world_config=dict(num_taggers=3, num_runners=6, size=4.0, max_steps=10),
        num_envs=8,
        rollout_steps=8,
        hidden=(8,),
    )
    job = make_job("tag-continuous", device="cpu", group_settings=("runner.rnn=lstm", "runner.rnn-size=5"), **settings)
    trainer = Trainer(job)
    before = {name: learner.optimizer.flat.clone() for name, learner in trainer.learners.items()}
    for _ in range(3):
        trainer.iterate()
    assert {name: policy.state_size for name, policy in trainer.policies.items()} == {"tagger": 0, "runner": 10}
    assert trainer.collector.rollouts["tagger"].rnn_state is None
    assert trainer.collector.rollouts["runner"].rnn_state.shape == (2, 8, 6, 10)
    for name, learner in trainer.learners.items():
        assert not torch.equal(before[name], learner.optimizer.flat)
        assert int(learner.optimizer.bad_steps) == 0
