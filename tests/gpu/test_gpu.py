"""On a GPU: worlds step as on the CPU, and recorded graphs equal the eager path."""

from contextlib import closing

import pytest
import torch

from shoal.core import Box, Discrete, Group, MultiDiscrete
from shoal.core.registry import KERNEL_WORLDS
from shoal.core.world_loading import world_class
from shoal.policy import ActorCritic, mlp_encoder
from shoal.runs.evaluation import evaluate
from shoal.runs.jobs import make_job
from shoal.training.build import by_group, make_policies, make_world
from shoal.training.trainer import Trainer
from tests.host.test_preemption import ScriptedPreemption


def random_action(group, envs, generator):
    shape = (envs, group.agents, *group.action.shape)
    if group.action.dtype == torch.int32:
        top = group.action.n if isinstance(group.action, Discrete) else min(group.action.nvec)
        return torch.randint(0, top, shape, generator=generator, dtype=torch.int32)
    return torch.empty(shape).uniform_(group.action.low, group.action.high, generator=generator)


MANY = [
    ("tag-grid", dict(num_taggers=40, full_observation=False, random_start=True, size=12)),
    ("tag-continuous", dict(num_taggers=3, num_runners=4, num_neighbors=5, max_steps=40, tag_distance=0.3)),
    ("tag-continuous", dict(num_taggers=3, num_runners=300, num_neighbors=16, max_steps=30)),
]
"""Worlds with several lanes of a warp per env, or a block of threads."""


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize(("name", "config"), [*((name, {}) for name in KERNEL_WORLDS), *MANY])
def test_cpu_and_gpu_agree_step_by_step(name, config):
    """From the same state: integers and flags exactly, floats to 1e-5 per step, with restarts."""
    envs = 512 if len(world_class(name).groups_of(world_class(name).Config(**config))) == 1 else 24
    made = world_class(name).Config(**config)
    cpu, gpu = world_class(name)(envs, "cpu", made), world_class(name)(envs, "cuda", made)
    cpu.reset(5)
    gpu.reset(5)
    generator = torch.Generator().manual_seed(1)
    ended = 0
    for _ in range(60):
        actions = {g.name: random_action(g, envs, generator) for g in cpu.groups}
        cpu.store.step_count += torch.randint(0, 20, (envs,), generator=generator, dtype=torch.int32)
        gpu.load_state_dict({k: v.cuda() for k, v in cpu.state_dict().items()})
        cpu.step(actions)
        gpu.step({name: action.cuda() for name, action in actions.items()})
        for field, tensor in cpu.store.tensors.items():
            other = gpu.store[field].cpu()
            if tensor.is_floating_point():
                torch.testing.assert_close(other, tensor, rtol=1e-5, atol=1e-5, msg=lambda m, f=field: f"{f}: {m}")
            else:
                assert torch.equal(other, tensor), field
        ended += int(cpu.store.ended.sum())
    assert ended > 0


def test_an_env_does_the_same_in_a_small_and_a_large_batch():
    worlds = [world_class("cartpole")(n, "cuda") for n in (8, 8192)]
    for world in worlds:
        world.reset(3)
    for step in range(200):
        for world in worlds:
            action = ((torch.arange(world.num_envs) * 7 + step * 5) % 3 > 1).int().view(-1, 1).cuda()
            world.step(action)
    assert torch.equal(worlds[0].store.x, worlds[1].store.x[:8])
    assert torch.equal(worlds[0].store.episode, worlds[1].store.episode[:8])


REPLAY = dict(
    batch_size=512, buffer_size=2**16, replay_ratio=0.5, learning_starts=1000, double_q=True, prioritized=True
)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        ("cartpole", dict(algo="ppo")),
        ("cartpole", dict(algo="a2c")),
        ("pendulum", dict(algo="ppo", normalize_obs=True, normalize_reward=True, target_kl=0.02)),
        ("cartpole", dict(algo="ppo", action_repeat=2, frame_stack=2, time_limit=20)),
        ("cartpole", dict(algo="ppo", rnn="lstm", rnn_size=32, frame_stack=3, time_limit=20, target_kl=0.02)),
        ("pendulum", dict(algo="a2c", rnn="gru", rnn_size=32, micro_batch_size=1000, normalize_obs=True)),
        ("cartpole", dict(algo="dqn", frame_stack=2, time_limit=20, tau=0.1, **REPLAY)),
        ("cartpole", dict(algo="rainbow", normalize_obs=True, **REPLAY)),
        ("cartpole", dict(algo="r2d2", burn_in=16, sequence_length=32, rnn_size=32, time_limit=20, **REPLAY)),
        ("tag-grid", dict(algo="dqn", one_policy=False, quantiles=5, **REPLAY)),
        ("tag-grid", dict(algo="ppo", one_policy=True)),
        ("tag-continuous", dict(algo="a2c", micro_batch_size=5000, obs_dtype="bfloat16")),
    ],
)
def test_graphs_and_the_eager_path_give_the_same_numbers(world, settings):
    """Six iterations, of which a graph replays four. Without compiling, both launch the same kernels."""
    weights, rewards = [], []
    for graph in (False, True):
        common = dict(num_envs=256, rollout_steps=16, total_steps=1e9, device="cuda", compile="off", precision="fp32")
        trainer = Trainer(make_job(world, cuda_graphs=graph, **common, **settings))
        for _ in range(6):
            trainer.iterate()
        learner, rollout = next(iter(trainer.learners.values())), next(iter(trainer.collector.rollouts.values()))
        weights.append(learner.optimizer.flat.clone())
        rewards.append(rollout.reward.clone())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rewards[0], rewards[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("world", "settings"),
    [("cartpole", dict(rnn="gru")), ("tag-grid", dict(frame_stack=2)), ("cartpole", dict(algo="dqn"))],
)
@pytest.mark.parametrize("stochastic", [False, True])
def test_evaluations_score_the_same_with_and_without_graphs(world, settings, stochastic):
    scores = []
    for graph in (False, True):
        job = make_job(world, device="cuda", cuda_graphs=graph, compile="off", precision="fp32", **settings)
        with closing(make_world(job, 1)) as one:
            policies = by_group(job, make_policies(job, one))
        scores.append(evaluate(job, policies, 64, stochastic=stochastic).episodes)
    assert scores[0] == scores[1]


@pytest.mark.parametrize(
    ("inputs", "hidden", "activation", "space", "masked", "normalize", "shared_encoder"),
    [
        (6, (32, 32), "relu", Discrete(5), False, False, True),
        (71, (256, 256), "relu", MultiDiscrete((21, 21)), False, False, True),
        (21, (64, 64), "tanh", Discrete(5), True, True, False),
        (4, (64, 48), "silu", MultiDiscrete((3, 7, 2)), True, False, True),
        (9, (17, 33), "elu", Discrete(2), False, True, True),
    ],
)
@pytest.mark.parametrize("rows", [4001, 2**18 + 3])
def test_the_fused_policy_acts_like_the_layers(
    inputs, hidden, activation, space, masked, normalize, shared_encoder, rows
):
    """Same noise, same actions but for roundings of bf16; log-probabilities and values to those roundings."""
    from shoal.policy.fused import FusedActor, supports

    torch.manual_seed(0)
    group = Group("a", Box(inputs), space, masked=masked)
    policy = ActorCritic(group, mlp_encoder(hidden, activation), shared_encoder, normalize, 0.0).cuda()
    assert supports(policy)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        policy.moments.merge(torch.randn(1000, inputs, device="cuda") * 2 + 1)
    seen = torch.randn(rows, 1, inputs, device="cuda")
    mask = None
    if masked:
        mask = torch.rand(rows, 1, group.choices, device="cuda") > 0.4
        for start in [sum(policy.head.nvec[:i]) for i in range(len(policy.head.nvec))]:
            mask[..., start] = True
    noise = torch.rand(rows, policy.head.noise_width, device="cuda")
    action = torch.zeros(rows, 1, *space.shape, dtype=torch.int32, device="cuda")
    log_prob, value = torch.zeros(rows, 1, device="cuda"), torch.zeros(rows, 1, device="cuda")
    with torch.no_grad():
        FusedActor(policy)(seen, mask, noise, action, log_prob, value)
        flat = None if mask is None else mask.flatten(0, 1)
        params, expected = policy.distribution_and_value(seen.flatten(0, 1), flat)
        others, _ = policy.head.sample(params, noise)
        own, _ = policy.head.log_prob_and_entropy(params, action.flatten(0, 1))
    assert (action.flatten(0, 1) == others).float().mean() > 0.98
    torch.testing.assert_close(log_prob.flatten(), own, rtol=0.0, atol=0.1)  # a masked choice would be at -1e9
    if shared_encoder:
        torch.testing.assert_close(value.flatten(), expected, rtol=0.0, atol=0.1)


def test_compiled_bf16_learns_cartpole():
    trainer = Trainer(make_job("cartpole", device="cuda", total_steps=4e6, num_envs=2048))
    while not trainer.done:
        trainer.iterate()
    from shoal.runs.evaluation import evaluate

    assert evaluate(trainer.job, trainer.policies, 100)["cart"].mean >= 475


def test_resume_on_a_gpu_is_exact(tmp_path):
    import shoal
    from shoal.runs.checkpoint import load_checkpoint

    settings = dict(num_envs=256, rollout_steps=16, device="cuda", quiet=True, eval_episodes=4, lr_schedule="none")
    one = 256 * 16
    whole = shoal.train("cartpole", total_steps=8 * one, run_dir=tmp_path / "whole", **settings)
    shoal.train("cartpole", total_steps=4 * one, run_dir=tmp_path / "cut", **settings)
    resumed = shoal.resume(tmp_path / "cut", total_steps=8 * one)
    a, b = (load_checkpoint(r.folder.pick("last"), "cpu").state for r in (whole, resumed))
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def host_experience(world, env_schedule, graph, updates=5, preemptions=(), **settings):
    host = dict(env_schedule=env_schedule, desync_steps=4, num_workers=2, **settings.pop("world_config", {}))
    sizes = dict(
        num_envs=8, rollout_steps=8, num_minibatches=2, epochs=1, total_steps=100_000, compile="off", precision="fp32"
    )
    trainer = Trainer(make_job(world, device="cuda", cuda_graphs=graph, world_config=host, **(sizes | settings)))
    if preemptions:
        trainer.collector.preemption = ScriptedPreemption(*preemptions)
    made = []
    with closing(trainer.world):
        for _ in range(updates):
            trainer.collect()
            rollout = trainer.collector.rollouts["agent"]
            made += [t.clone() for t in (rollout.observation, rollout.action, rollout.reward, rollout.log_prob)]
            trainer.update()
    return made


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        ("ale:pong", {}),
        ("gym:CartPole-v1", dict(world_config=dict(vec_backend="processes"))),
        ("gym:CartPole-v1", dict(world_config=dict(vec_backend="processes"), time_limit=5, frame_stack=3)),
        ("gym:Pendulum-v1", dict(world_config=dict(vec_backend="processes"), time_limit=5, rnn="gru", rnn_size=8)),
    ],
)
def test_host_worlds_give_the_same_experience_with_every_schedule_with_and_without_graphs(world, settings):
    pytest.importorskip("ale_py")
    plain = host_experience(world, "lockstep", False, **settings)
    for env_schedule, graph in (
        ("lockstep", True),
        ("alternating", True),
        ("first-come", True),
        ("alternating", False),
    ):
        for a, b in zip(plain, host_experience(world, env_schedule, graph, **settings), strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("world", "settings"),
    [("ale:pong", {}), ("gym:Pendulum-v1", dict(world_config=dict(vec_backend="processes"), rnn="gru", rnn_size=8))],
)
def test_preempted_host_rollouts_are_the_same_with_and_without_graphs(world, settings):
    pytest.importorskip("ale_py")
    settings = dict(settings, sync_frac=0.5, preemptions=(2, None, 1), updates=9)
    plain = host_experience(world, "lockstep", False, **settings)
    for env_schedule in ("lockstep", "alternating"):
        for a, b in zip(plain, host_experience(world, env_schedule, True, **settings), strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-3, atol=1e-3)
