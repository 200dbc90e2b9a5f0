"""Several groups in one run: whose policy acts, who learns, with which settings, and what it costs in memory."""

from dataclasses import replace

import pytest
import torch

import shoal
from shoal.core.errors import ShoalError
from shoal.runs.checkpoint import load_checkpoint
from shoal.runs.evaluation import RandomPolicy
from shoal.runs.jobs import make_job
from shoal.runs.run import load_run
from shoal.training.memory_estimate import estimate
from shoal.training.trainer import Trainer

GRID = dict(
    world_config=dict(size=4, max_steps=8, random_start=True), num_envs=8, rollout_steps=8, device="cpu", hidden=(8,)
)
SQUARE = dict(
    world_config=dict(num_taggers=3, num_runners=6, size=4.0, max_steps=10, tag_distance=0.1, num_neighbors=3),
    num_envs=8,
    rollout_steps=8,
    hidden=(8,),
    device="cpu",
    total_steps=1e6,
)


def job(world="tag-continuous", **changes):
    return make_job(world, **{**(GRID if world == "tag-grid" else SQUARE), "total_steps": 1e6, **changes})


def test_one_policy_acts_for_all_groups():
    """Their agents stand side by side in one rollout; each group gets what its slots say."""
    trainer = Trainer(job("tag-grid", one_policy=True))
    assert list(trainer.policies) == list(trainer.learners) == ["all"]
    trainer.collect()
    rollout = trainer.collector.rollouts["all"]
    assert rollout.reward.shape == (8, 8, 5)
    tagger_flags, runner_flags = rollout.observation[1, :, :4, 2::4], rollout.observation[1, :, 4:, 2::4]
    assert torch.equal(tagger_flags[:, 0], runner_flags[:, 0])
    me = rollout.observation[3, :, :, 3:20:4]
    assert torch.equal(me, torch.eye(5).expand(8, 5, 5))


def test_one_policy_needs_the_same_spaces():
    with pytest.raises(ShoalError, match="one-policy"):
        make_job("pandemic", one_policy=True, device="cpu")


def test_one_policy_walks_as_two_copies_of_it_would():
    """From the same weights and noise, a shared policy makes the experience that it makes for each group."""
    shared = Trainer(job("tag-grid", one_policy=True))
    shared.collect()
    rollout = shared.collector.rollouts["all"]
    policy = shared.policies["all"]
    params = policy.distribution(rollout.observation[0].flatten(0, 1))
    log_prob, _ = policy.head.log_prob_and_entropy(params, rollout.action[0].flatten())
    torch.testing.assert_close(log_prob, rollout.log_prob[0].flatten())


def test_groups_have_separate_settings():
    made = job(group_settings=("runner.lr=5e-3", "runner.hidden=4,6", "tagger.normalize-obs=true"), lr=1e-3)
    trainer = Trainer(made)
    assert trainer.learners["runner"].config.lr == 5e-3
    assert trainer.learners["tagger"].config.lr == 1e-3
    assert [layer.out_features for layer in trainer.policies["runner"].policy_encoder.layers[::2]] == [4, 6]
    assert trainer.policies["tagger"].normalize
    assert not trainer.policies["runner"].normalize


def test_a_flag_for_all_groups_beats_a_world_s_setting_for_one():
    assert make_job("tag-continuous", algo="a2c", device="cpu").for_policy("runner").learn.lr == 5e-3
    assert make_job("tag-continuous", algo="a2c", device="cpu", lr=0.1).for_policy("runner").learn.lr == 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(group_settings="runer.lr=1"), "runner"),
        (dict(group_settings="runner.rl=1"), "lr"),
        (dict(group_settings="runner.lr=fast"), "fast"),
        (dict(group_settings="runner.lr=-1"), "lr must be above 0"),
        (dict(group_settings="lr=1"), "GROUP.SETTING=VALUE"),
        (dict(freeze_groups="runer"), "runner"),
        (dict(freeze_groups=("runner", "tagger")), "no policy is left"),
        (dict(load_policy="runner"), "GROUP=RUN"),
        (dict(load_policy="runner=nowhere"), "nowhere"),
        (dict(num_envs=-3), "num-envs"),
    ],
)
def test_mistakes_are_named_before_anything_is_allocated(changes, message):
    with pytest.raises(ShoalError, match=message):
        job(**changes)


def test_a_frozen_group_acts_but_does_not_learn():
    trainer = Trainer(job(freeze_groups="runner"))
    before = {name: [p.clone() for p in policy.parameters()] for name, policy in trainer.policies.items()}
    for _ in range(3):
        trainer.iterate()
    same = {
        name: all(torch.equal(a, b) for a, b in zip(before[name], policy.parameters(), strict=True))
        for name, policy in trainer.policies.items()
    }
    assert same == {"tagger": False, "runner": True}
    assert trainer.collector.rollouts["runner"].action.any()


def test_a_group_starts_with_the_policy_of_another_run(tmp_path):
    """Its network comes along, even where this run's is another; frozen, it stays as it is; resumed, too."""
    short = dict(total_steps=256, eval_episodes=4, quiet=True)
    shoal.train("tag-continuous", **{**SQUARE, **short}, run_dir=tmp_path / "one", seed=3)
    settings = {
        **SQUARE,
        **short,
        "hidden": (5, 5),
        "load_policy": f"runner={tmp_path / 'one'}",
        "freeze_groups": "runner",
    }
    shoal.train("tag-continuous", **settings, run_dir=tmp_path / "two", seed=4)
    states = [load_checkpoint(load_run(tmp_path / n).folder.pick("last"), "cpu").state for n in ("one", "two")]
    names = [name for name in states[0] if name.startswith("policy.runner.")]
    assert names
    for name in names:
        assert torch.equal(states[0][name], states[1][name]), name
    assert states[1]["policy.tagger.policy_encoder.layers.0.weight"].shape[0] == 5
    resumed = shoal.resume(tmp_path / "two", total_steps=512, quiet=True)
    after = load_checkpoint(resumed.folder.pick("last"), "cpu").state
    assert all(torch.equal(states[0][name], after[name]) for name in names)


def test_players_can_be_random_or_come_from_another_run(tmp_path):
    short = dict(total_steps=256, eval_episodes=0, quiet=True)
    for name, seed in (("one", 1), ("two", 2)):
        shoal.train("tag-continuous", **{**SQUARE, **short}, run_dir=tmp_path / name, seed=seed)
    run = load_run(tmp_path / "one", device="cpu", random=["runner"], others=[f"tagger={tmp_path / 'two'}"])
    assert isinstance(run.policies["runner"], RandomPolicy)
    other = load_run(tmp_path / "two", device="cpu").policies["tagger"]
    assert torch.equal(run.policies["tagger"].value_head.weight, other.value_head.weight)
    found = run.evaluate(episodes=8)
    assert set(found) == {"tagger", "runner"}
    assert 0.0 <= found.reports["tagged"].mean <= 6.0
    with pytest.raises(ShoalError, match="runner"):
        load_run(tmp_path / "one", device="cpu", random=["runer"])


def test_random_players_choose_evenly():
    world = Trainer(job()).world
    policy = RandomPolicy(world.group("runner"))
    params = policy.distribution(torch.randn(2000, world.group("runner").observation.size))
    actions, log_probs = policy.head.sample(params, torch.rand(2000, 2, generator=torch.Generator().manual_seed(0)))
    counts = torch.bincount(actions[:, 1], minlength=21)
    assert counts.min() > 50
    torch.testing.assert_close(log_probs, torch.full((2000,), -2 * torch.log(torch.tensor(21.0))))


@pytest.mark.parametrize("algo", ["a2c", "ppo"])
def test_a_tagged_runner_never_appears_in_a_loss_again(algo):
    """In a real game: the rows of runners that have left do not change the update, bit for bit.

    The same change to a runner in the game does make a difference: the test can fail.
    """
    weights = {}
    for spoil in ("nothing", "out", "in"):
        trainer = Trainer(
            job(algo=algo, rollout_steps=10, num_minibatches=4) if algo == "ppo" else job(algo=algo, rollout_steps=10)
        )
        trainer.iterate()
        trainer.collect()
        rollout = trainer.collector.rollouts["runner"]
        alive = rollout.alive[:-1]
        assert 0 < int((~alive).sum()) < alive.numel()
        if spoil != "nothing":
            rows = ~alive if spoil == "out" else alive
            rollout.observation[:-1][rows] = 37.0
            rollout.action[rows] = 1
            rollout.log_prob[rows] = -3.0
            rollout.reward[rows] = 100.0
        trainer.update()
        weights[spoil] = trainer.learners["runner"].optimizer.flat.clone()
    assert torch.equal(weights["nothing"], weights["out"])
    assert not torch.equal(weights["nothing"], weights["in"])


def test_rewards_of_agents_that_are_out_are_zero_and_unseen_by_statistics():
    trainer = Trainer(job(rollout_steps=10))
    for _ in range(3):
        trainer.collect()
        rollout = trainer.collector.rollouts["runner"]
        assert not rollout.reward[~rollout.alive[:-1]].any()


@pytest.mark.parametrize("world", ["tag-grid", "tag-continuous", "pandemic"])
@pytest.mark.parametrize("algo", ["a2c", "ppo"])
def test_updates_in_passes_equal_an_update_at_once(world, algo):
    weights = []
    for micro_batch_size in (None, 40):
        changes = dict(
            algo=algo, num_envs=4, rollout_steps=10, micro_batch_size=micro_batch_size, hidden=(8,), device="cpu"
        )
        if algo == "ppo":
            changes["num_minibatches"] = 2
        made = make_job(world, total_steps=1e6, **changes) if world == "pandemic" else job(world, **changes)
        trainer = Trainer(made)
        trainer.iterate()
        weights.append(torch.cat([learner.optimizer.flat for learner in trainer.learners.values()]))
    torch.testing.assert_close(weights[0], weights[1], rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("world", ["cartpole", "pendulum", "tag-grid", "tag-continuous", "pandemic"])
@pytest.mark.parametrize("algo", ["a2c", "ppo"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_memory_estimate_is_printed_first(world, algo, kind):
    """The estimate equals what a trainer allocates, to two per cent."""
    made = make_job(world, algo=algo, num_envs=64, rollout_steps=16, total_steps=1e6, device="cpu", obs_dtype=kind)
    costs = estimate(made)
    trainer = Trainer(made)
    held = trainer.collector.nbytes + sum(learner.nbytes for learner in trainer.learners.values())
    assert costs.rollout == pytest.approx(held / 64, rel=0.02)
    assert costs.state == pytest.approx(trainer.world.bytes_per_env, rel=0.1)


@pytest.mark.parametrize("algo", ["a2c", "ppo"])
@pytest.mark.parametrize(
    "changes",
    [dict(frame_stack=4), dict(rnn="lstm", rnn_size=7), dict(vtrace=True)],
    ids=["stacked", "recurrent", "vtrace"],
)
def test_memory_estimate_of_carried_rows_is_exact(algo, changes):
    made = make_job("tag-grid", algo=algo, num_envs=64, rollout_steps=16, total_steps=1e6, device="cpu", **changes)
    trainer = Trainer(made)
    held = trainer.collector.nbytes + sum(learner.nbytes for learner in trainer.learners.values())
    assert estimate(made).rollout == held // 64


def test_the_most_envs_that_fit(monkeypatch):
    monkeypatch.setattr("shoal.training.memory_estimate.free_memory", lambda device: 10**9)
    made = job(num_envs="auto", num_minibatches=3, algo="ppo", total_steps=1e12)
    costs = estimate(made, 10**9)
    assert made.run.num_envs % 3 == 0
    assert 0.9 * costs.fits <= made.run.num_envs <= costs.fits
    full = job(
        num_envs="auto", num_minibatches=3, algo="ppo", total_steps=1e12, rollout_steps=32
    ).run.steps_per_iteration
    for total_steps in (10, 20_000, 100_000, full - 1, full, full + 1, 3 * full + 5, 1e12):
        few = job(num_envs="auto", num_minibatches=3, algo="ppo", total_steps=total_steps, rollout_steps=32).run
        assert few.num_envs % 3 == 0
        assert few.steps_per_iteration <= full
        assert few.iterations == -(-total_steps // full)  # no more than with all envs that fit
        assert few.iterations * few.steps_per_iteration <= max(96, 1.26 * total_steps)
    monkeypatch.setattr("shoal.training.memory_estimate.free_memory", lambda device: 10**4)
    with pytest.raises(ShoalError, match="Not one env"):
        job(num_envs="auto")


def test_a_planner_chooses_at_its_own_pace():
    """Between its decisions the planner's last action stays in force, in the world and for the learner."""
    made = make_job(
        "pandemic", num_envs=2, rollout_steps=40, total_steps=1e6, device="cpu", hidden=(8,), num_minibatches=1
    )
    made = replace(made, world_config=replace(made.world_config, planner_interval=15))
    trainer = Trainer(made)
    trainer.iterate()
    rollout = trainer.collector.rollouts["planner"]
    assert rollout.is_decision_step[:-1, 0, 0].nonzero().flatten().tolist() == [0, 15, 30]
    trainer.collect()
    assert rollout.is_decision_step[:-1, 0, 0].nonzero().flatten().tolist() == [5, 20, 35]
