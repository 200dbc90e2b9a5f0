"""Observations of images, numbers and the last action: SE-ResNet9 with an RNN, Lamb, micro-batches, whole runs."""

from dataclasses import dataclass

import pytest
import torch
import warp as wp

import shoal
from shoal.algos.a2c import A2C, A2CConfig
from shoal.algos.ppo import PPO, PPOConfig
from shoal.core import Box, Discrete, Field, Group, KernelWorld, Random
from shoal.core.random import integer
from shoal.policy import ActorCritic, choose_encoder, rnn_maker
from shoal.runs.checkpoint import load_checkpoint
from shoal.runs.evaluation import evaluate
from shoal.runs.jobs import make_job, parse_job
from shoal.training.collector import Collector
from shoal.training.memory_estimate import estimate
from shoal.training.trainer import Trainer

SIDE = wp.constant(16)
PARTS = (("depth", (16, 16, 1)), ("rgb", (16, 16, 3)), ("speed", (2,)), ("last", (4,)))


@wp.func
def guess(
    env: int,
    wall: wp.array[int],
    last: wp.array[int],
    clock: wp.array[int],
    action: wp.array[int],
    reward: wp.array[float],
    terminated: wp.array[wp.bool],
):
    reward[env] = wp.where(action[env] == wall[env], 1.0, 0.0)
    last[env] = action[env] + 1
    clock[env] = clock[env] + 1
    terminated[env] = clock[env] == 3 + wall[env]


@wp.func
def new_wall(env: int, rng: Random, wall: wp.array[int], last: wp.array[int], clock: wp.array[int]):
    wall[env] = integer(rng, 0, 3)
    last[env] = 0
    clock[env] = 0


@wp.func
def look(env: int, wall: wp.array[int], last: wp.array[int], clock: wp.array[int], observation: wp.array2d[float]):
    pixels = SIDE * SIDE
    for y in range(SIDE):
        for x in range(SIDE):
            here = x * 3 / SIDE == wall[env]
            at = y * SIDE + x
            observation[env, at] = wp.where(here, 2.5, 30.0)
            for c in range(3):
                observation[env, pixels + 3 * at + c] = wp.where(here and c == 0, 200.0, 40.0)
    observation[env, 4 * pixels] = float(clock[env])
    observation[env, 4 * pixels + 1] = 0.5
    for i in range(4):
        observation[env, 4 * pixels + 2 + i] = wp.where(i == last[env], 1.0, 0.0)


class Walls(KernelWorld):
    """A wall is in one third of the view; naming that third gives reward 1, so guessing gives 1/3 on average."""

    @dataclass(frozen=True)
    class Config:
        max_steps: int = 4

    state = dict(wall=Field(int), last=Field(int), clock=Field(int))
    groups = (
        Group(
            "eye",
            observation=Box(4 * 256 + 6, parts=PARTS, kinds=dict(depth="depth", last="choice")),
            action=Discrete(3),
        ),
    )
    step, reset, observe = guess, new_wall, look


WALLS = f"{__file__}:Walls"


def collected(layers: int, kind: str = "lstm", envs: int = 8) -> tuple[ActorCritic, Collector]:
    world = Walls(envs, "cpu")
    group = world.groups[0]
    torch.manual_seed(0)
    core = rnn_maker(kind, 8, layers)
    policy = ActorCritic(group, choose_encoder("se-resnet9-small", group, (8,), "tanh"), True, False, 0.0, core)
    made = Collector(world, {"eye": policy}, 6, 0)
    made.start(0)
    made.collect()
    return policy, made


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("kind", [A2C, PPO])
@pytest.mark.parametrize("layers", [0, 2], ids=["no memory", "two layers"])
def test_one_pass_and_four_give_the_same_update(kind, optimizer, layers):
    """For images and sequences of images, including the running moments of colors."""
    results = []
    for passes in (1, 4):
        policy, made = collected(layers, "lstm" if layers else "none")
        settings = dict(lr=1e-3, optimizer=optimizer, micro_batch_size=48 // passes, max_grad_norm=1e3)
        config = A2CConfig(**settings) if kind is A2C else PPOConfig(**settings, epochs=1, num_minibatches=1)
        learner = kind(policy, made.rollouts["eye"], config)
        assert len(learner._passes(learner.units, learner._samples_per_unit)) == passes
        learner.set_progress(0.0)
        start = learner.optimizer.flat.clone()
        learner.update()
        moments = policy.policy_encoder.pictures["1"].moments
        assert float(moments.count) == 48 * 256
        results.append((learner.optimizer.flat - start, learner.optimizer.first, moments.mean, moments.var))
    assert results[0][0].abs().max() > 1e-4
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-3, atol=1e-6)
    for one, other in zip(results[0][2:], results[1][2:], strict=True):
        torch.testing.assert_close(one, other)
    # Adam's first step is g / (|g| + eps), whose sign is arbitrary where the gradient is rounding error.
    large = results[0][1].abs() > 1e-5
    torch.testing.assert_close(results[0][0][large], results[1][0][large], rtol=1e-2, atol=2e-5)


PAPER = dict(
    optimizer="lamb",
    lr=5e-4,
    lr_scaling="sqrt",
    lr_warmup=0.01,
    lr_schedule="cosine",
    lr_final_fraction=0.01,
    epochs=1,
    num_minibatches=2,
    clip_range=0.2,
    vf_coef=0.5,
    ent_coef=0.01,
    gamma=0.99,
    gae_lambda=0.95,
    normalize_advantage=False,
    max_grad_norm=1.0,
)


def test_the_settings_of_large_batches_are_flags():
    flags = """--encoder se-resnet9 --rnn lstm --rnn-size 512 --rnn-layers 2 --rollout-steps 32 --num-envs 64
        --optimizer lamb --weight-decay 0.01 --lr 5e-4 --lr-scaling sqrt --lr-reference-batch 256 --lr-warmup 0.01
        --lr-schedule cosine --lr-final-fraction 0.01 --epochs 1 --num-minibatches 2 --clip-range 0.2
        --vf-coef 0.5 --ent-coef 0.01 --gamma 0.99 --gae-lambda 0.95
        --no-normalize-advantage --max-grad-norm 1.0 --device cpu"""
    job = parse_job(WALLS, flags.split())
    learn = job.learn
    for name, value in PAPER.items():
        assert getattr(learn, name) == value
    assert (learn.clip_range_vf, learn.resolved_weight_decay, learn.adam_eps) == (None, 0.01, 1e-5)
    assert learn.peak_lr(learn.batch(64 * 32)) == pytest.approx(5e-4 * 2.0)
    assert (job.policy.rnn_layers, job.run.rollout_steps) == (2, 32)


@pytest.mark.parametrize(("optimizer", "lr"), [("adam", 2e-3), pytest.param("lamb", 3e-2, marks=pytest.mark.slow)])
def test_it_learns_from_images(optimizer, lr):
    settings = dict(PAPER, optimizer=optimizer, lr=lr, lr_scaling="none", epochs=2, encoder="se-resnet9-small")
    job = make_job(WALLS, num_envs=32, rollout_steps=8, total_steps=30 * 256, device="cpu", **settings)
    assert "envs x 1 agent(s)" in str(estimate(job, 2**30))
    trainer = Trainer(job)
    while not trainer.done:
        trainer.iterate()
    score = evaluate(job, trainer.policies, episodes=60)["eye"].mean
    assert score > 2.9  # of 3.5 or so


@pytest.mark.parametrize("algo", ["ppo", "a2c"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, algo):
    """Lamb's state and the moments of colors are saved: an interrupted run ends with the same numbers."""
    small = dict(
        num_envs=8,
        rollout_steps=6,
        eval_episodes=2,
        quiet=True,
        device="cpu",
        log_every_seconds=0.0,
        lr_schedule="none",
    )
    small.update(algo=algo, encoder="se-resnet9-small", rnn="lstm", rnn_size=8, rnn_layers=2, optimizer="lamb")
    whole = shoal.train(WALLS, total_steps=4 * 48, run_dir=tmp_path / "whole", **small)
    shoal.train(WALLS, total_steps=2 * 48, run_dir=tmp_path / "cut", **small)
    resumed = shoal.resume(tmp_path / "cut", total_steps=4 * 48)
    one, other = (load_checkpoint(run.folder.pick("last"), "cpu").state for run in (whole, resumed))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert float(one["policy.eye.policy_encoder.pictures.1.moments.count"]) == 4 * 48 * 256
