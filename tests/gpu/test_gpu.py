"""On a GPU: it walks like the CPU, and recorded graphs do what the plain path does."""

import pytest
import torch

from shoal.run.config import make_job
from shoal.run.trainer import Trainer
from shoal.worlds import WORLDS, world_class

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cuda GPU")


def random_action(group, envs, generator):
    shape = (envs, group.agents, *group.action.shape)
    if group.action.dtype == torch.int32:
        return torch.randint(0, group.action.n, shape, generator=generator, dtype=torch.int32)
    return torch.empty(shape).uniform_(group.action.low, group.action.high, generator=generator)


@pytest.mark.parametrize("name", sorted(WORLDS))
def test_cpu_and_gpu_agree_step_by_step(name):
    """From the same state: integers and flags exactly, floats to 1e-5 per step. Restarts are in it."""
    envs = 512
    cpu, gpu = world_class(name)(envs, "cpu"), world_class(name)(envs, "cuda")
    cpu.reset(5)
    gpu.reset(5)
    generator = torch.Generator().manual_seed(1)
    ended = 0
    for _ in range(60):
        action = random_action(cpu.groups[0], envs, generator)
        cpu.store.step_count += torch.randint(0, 20, (envs,), generator=generator, dtype=torch.int32)
        gpu.load_state_dict({k: v.cuda() for k, v in cpu.state_dict().items()})
        cpu.step(action)
        gpu.step(action.cuda())
        for field, tensor in cpu.store.tensors.items():
            other = gpu.store[field].cpu()
            if tensor.is_floating_point():
                torch.testing.assert_close(other, tensor, rtol=1e-5, atol=1e-5, msg=lambda m, f=field: f"{f}: {m}")
            else:
                assert torch.equal(other, tensor), field
        ended += int(cpu.store.ended.sum())
    assert ended > 0


def test_env_of_a_small_and_a_large_batch_walks_alike():
    worlds = [world_class("cartpole")(n, "cuda") for n in (8, 8192)]
    for world in worlds:
        world.reset(3)
    for step in range(200):
        for world in worlds:
            action = ((torch.arange(world.num_envs) * 7 + step * 5) % 3 > 1).int().view(-1, 1).cuda()
            world.step(action)
    assert torch.equal(worlds[0].store.x, worlds[1].store.x[:8])
    assert torch.equal(worlds[0].store.episode, worlds[1].store.episode[:8])


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        ("cartpole", dict(algo="ppo")),
        ("cartpole", dict(algo="a2c")),
        ("pendulum", dict(algo="ppo", normalise_observation=True, normalise_reward=True, target_kl=0.02)),
        ("cartpole", dict(algo="ppo", action_repeat=2, frame_stack=2, time_limit=20)),
    ],
)
def test_graphs_and_the_plain_path_make_the_same_numbers(world, settings):
    """Six iterations, of which a graph replays four. Without compiling, both launch the very same kernels."""
    weights, rewards = [], []
    for graph in (False, True):
        common = dict(num_envs=256, rollout=16, total_steps=1e9, device="cuda", compile="off", precision="fp32")
        trainer = Trainer(make_job(world, graph=graph, **common, **settings))
        for _ in range(6):
            trainer.iterate()
        (learner,) = trainer.learners.values()
        (rollout,) = trainer.collector.rollouts.values()
        weights.append(learner.adam.flat.clone())
        rewards.append(rollout.reward.clone())
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rewards[0], rewards[1], rtol=1e-5, atol=1e-5)


def test_compiled_bf16_learns_cartpole():
    trainer = Trainer(make_job("cartpole", device="cuda", total_steps=4e6, num_envs=2048))
    while not trainer.done:
        trainer.iterate()
    from shoal.run.evaluate import evaluate

    assert evaluate(trainer.job, trainer.policies, 100)["cart"].mean >= 475


def test_resume_on_a_gpu_is_exact(tmp_path):
    import shoal
    from shoal.run.checkpoint import load_checkpoint

    settings = dict(num_envs=256, rollout=16, device="cuda", quiet=True, eval_episodes=4, anneal_lr=False)
    one = 256 * 16
    whole = shoal.train("cartpole", total_steps=8 * one, run_dir=tmp_path / "whole", **settings)
    shoal.train("cartpole", total_steps=4 * one, run_dir=tmp_path / "cut", **settings)
    resumed = shoal.resume(tmp_path / "cut", total_steps=8 * one)
    a, b = (load_checkpoint(r.folder.pick("last"), "cpu").state for r in (whole, resumed))
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
