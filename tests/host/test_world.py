import json
import os
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from shoal.core.errors import ShoalError
from shoal.core.spaces import Discrete, Mixed
from shoal.core.world_loading import world_class
from shoal.draw.canvas import Canvas
from shoal.host.vector_env import env_seeds
from tests.host.envs import Hunt, Walk

HERE = Path(__file__).parent / "envs.py"


def make(name, num_envs, **more):
    cls = world_class(name)
    inside = {key: more.pop(key) for key in ("time_limit", "action_repeat") if key in more}
    return cls(num_envs, "cpu", cls.Config(**{"desync_steps": 0, "num_workers": 2, **more}), **inside)


def own(name, num_envs, **settings):
    return make(f"{HERE}:{name}", num_envs, **settings)


class Reference:
    """The same envs, stepped in a plain loop."""

    def __init__(self, envs, seed, limit=None):
        self.envs, self.limit = envs, limit
        seeds = env_seeds(seed, 0, len(envs))
        self.seen = [env.reset(seed=int(s))[0] for env, s in zip(envs, seeds, strict=True)]
        self.length = [0] * len(envs)

    def step(self, actions):
        rows = []
        for i, env in enumerate(self.envs):
            seen, reward, terminated, truncated, _ = env.step(int(actions[i]))
            self.length[i] += 1
            truncated = truncated or self.length[i] == self.limit
            final = seen
            if terminated or truncated:
                seen, self.length[i] = env.reset()[0], 0
            self.seen[i] = seen
            rows.append((seen, reward, terminated, truncated, final))
        return [np.array(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize("backend", ["serial", "processes"])
@pytest.mark.parametrize("env_schedule", ["lockstep", "auto"])
def test_envs_do_what_they_do_alone(backend, env_schedule):
    world = make("gym:CartPole-v1", 7, time_limit=15, vec_backend=backend, env_schedule=env_schedule)
    reference = Reference([gym.make("CartPole-v1").unwrapped for _ in range(7)], seed=3, limit=15)
    np.testing.assert_array_equal(world.reset(3).groups["agent"].observation[:, 0], np.array(reference.seen))
    random = np.random.default_rng(0)
    ends = 0
    for _ in range(60):
        actions = random.integers(0, 2, 7)
        out = world.step(torch.tensor(actions, dtype=torch.int32)[:, None])
        seen, reward, terminated, truncated, final = reference.step(actions)
        group = out.groups["agent"]
        np.testing.assert_array_equal(group.observation[:, 0], seen)
        np.testing.assert_array_equal(group.reward[:, 0], reward)
        np.testing.assert_array_equal(out.terminated, terminated)
        np.testing.assert_array_equal(out.truncated, truncated)
        over = terminated | truncated
        ends += over.sum()
        np.testing.assert_array_equal(group.final_observation[over, 0], final[over])
    stats = world.statistics()
    assert int(stats.episodes.sum()) == ends
    assert float(stats.return_sum["agent"].sum()) == pytest.approx(float(stats.length_sum.sum()))
    world.close()


def test_an_env_does_not_depend_on_its_neighbors_or_workers():
    few, many = (
        own("Walk", 2, vec_backend="processes", num_workers=1),
        own("Walk", 9, vec_backend="processes", num_workers=2),
    )
    few.reset(5)
    many.reset(5)
    for t in range(30):
        action = torch.tensor([[t % 2]] * 9, dtype=torch.int32)
        a, b = few.step(action[:2].contiguous()), many.step(action)
        torch.testing.assert_close(a.groups["agent"].observation, b.groups["agent"].observation[:2], rtol=0, atol=0)
    few.close()
    many.close()


def test_the_registry_s_time_limit_truncates():
    world = make("gym:Pendulum-v1", 2, vec_backend="serial")
    assert world.time_limit == 200
    world.reset(0)
    for t in range(200):
        out = world.step(torch.zeros(2, 1, 1))
        assert bool(out.truncated.any()) == (t == 199)
    assert float(world.last_episode().length[0]) == 200


def test_action_repeat_adds_rewards_up_and_stops_at_the_end():
    world = own("Walk", 3, vec_backend="serial", action_repeat=4)
    references = [Walk() for _ in range(3)]
    for env, seed in zip(references, env_seeds(2, 0, 3), strict=True):
        env.reset(seed=int(seed))
    world.reset(2)
    for _ in range(12):
        out = world.step(torch.ones(3, 1, dtype=torch.int32))
        for i, env in enumerate(references):
            total, over = 0.0, False
            for _ in range(4):
                if not over:
                    _, reward, over, _, _ = env.step(1)
                    total += reward
            if over:
                env.reset()
            assert float(out.groups["agent"].reward[i, 0]) == pytest.approx(total, rel=1e-5)
            assert bool(out.terminated[i]) == over


def test_hold_and_restart_touch_only_the_envs_they_name():
    world = own("Walk", 4, vec_backend="processes")
    world.reset(1)
    before = world.outputs.groups["agent"].observation.clone()
    held = torch.tensor([True, False, True, False])
    world.step(torch.ones(4, 1, dtype=torch.int32), hold=held)
    after = world.outputs.groups["agent"].observation.clone()
    assert torch.equal(after[held], before[held])
    assert bool((after[~held] != before[~held]).any(-1).all())
    world.restart(held)
    shown = world.outputs.groups["agent"].observation
    assert torch.equal(shown[~held], after[~held])
    assert bool((shown[held][:, 0, 1] == 0).all())
    assert bool((shown[held][:, 0, 0] != after[held][:, 0, 0]).all())
    world.close()


def test_desync_is_reproducible():
    shown = []
    for workers in (1, 2):
        world = own("Walk", 16, vec_backend="processes", desync_steps=10, num_workers=workers)
        world.reset(4)
        shown.append(world.outputs.groups["agent"].observation.clone())
        world.close()
    assert torch.equal(*shown)
    assert len(shown[0][:, 0, 1].unique()) > 3
    assert int(world_class("gym:CartPole-v1").for_evaluation(world.config).desync_steps) == 0


@pytest.mark.parametrize("backend", ["native", "processes"])
def test_episodes_before_the_first_step_are_not_counted(backend):
    world = make("gym:CartPole-v1", 8, vec_backend=backend, desync_steps=100)
    world.reset(0)
    stats = world.statistics()
    assert int(stats.episodes.sum()) == int(stats.length_sum.sum()) == 0
    assert float(stats.return_sum["agent"].abs().sum()) == 0.0


def test_arguments_of_envs():
    world = own("Walk", 8, env_kwargs={"longest": 3, "truncate": True}, vec_backend="serial")
    world.reset(0)
    for _ in range(3):
        out = world.step(torch.zeros(8, 1, dtype=torch.int32))
    assert bool(out.truncated.all())
    with pytest.raises(ShoalError, match="JSON"):
        world_class("gym:CartPole-v1").Config(env_kwargs="{longest}")
    with pytest.raises(ShoalError, match="unexpected keyword"):
        own("Walk", 2, env_kwargs={"shortest": 3})


def test_dicts_and_mixed_actions():
    world = own("Picnic", 3, vec_backend="processes")
    group = world.groups[0]
    assert isinstance(group.action, Mixed)
    assert [name for name, _ in group.observation.parts] == ["place", "bag.0", "bag.1", "kind"]
    world.reset(0)
    for t in range(20):
        action = torch.tensor([[[0.5, -0.5, t % 3, t % 2, t % 4]]] * 3, dtype=torch.float32)
        out = world.step(action)
        assert float(out.groups["agent"].reward[0, 0]) == t % 3 + 1
    world.close()


def test_a_parallel_environment_against_a_plain_loop():
    world = own("Hunt", 5, vec_backend="processes")
    assert [(g.name, g.agents, g.action) for g in world.groups] == [
        ("hunter", 2, Discrete(2)),
        ("deer", 1, Discrete(4)),
    ]
    out = world.reset(9)
    references = [Hunt() for _ in range(5)]
    seen = [env.reset(seed=int(s))[0] for env, s in zip(references, env_seeds(9, 0, 5), strict=True)]
    random = np.random.default_rng(1)
    ends = 0
    for _ in range(40):
        hunters, deer = random.integers(0, 2, (5, 2)), random.integers(0, 4, (5, 1))
        out = world.step({"hunter": torch.tensor(hunters).int(), "deer": torch.tensor(deer).int()})
        for i, env in enumerate(references):
            actions = {"hunter_0": hunters[i, 0], "hunter_1": hunters[i, 1], "deer": deer[i, 0]}
            playing = list(env.agents)
            seen, rewards, terms, truncs, _ = env.step({a: actions[a] for a in playing})
            for group, names in (("hunter", ["hunter_0", "hunter_1"]), ("deer", ["deer"])):
                assert out.groups[group].reward[i].tolist() == [rewards.get(a, 0.0) for a in names]
            over = not env.agents
            cut = over and any(truncs.values())
            assert (bool(out.terminated[i]), bool(out.truncated[i])) == (over and not cut, cut)
            if over:
                ends += 1
                for group, names in (("hunter", ["hunter_0", "hunter_1"]), ("deer", ["deer"])):
                    wanted = [a in playing and not terms[a] for a in names]
                    assert out.groups[group].final_alive[i].tolist() == wanted
                    for k, a in enumerate(names):
                        if a in seen:
                            np.testing.assert_array_equal(out.groups[group].final_observation[i, k], seen[a])
                env.reset()
            for group, names in (("hunter", ["hunter_0", "hunter_1"]), ("deer", ["deer"])):
                assert out.groups[group].alive[i].tolist() == [a in env.agents for a in names]
    assert ends > 10
    world.close()


def test_reading_the_groups_of_a_world_starts_no_process():
    world = own("Walk", 4, vec_backend="processes")
    assert world.groups[0].observation.shape == (3,)
    assert world._vector_env is None
    with pytest.raises(ShoalError, match="before reset"):
        world.step(torch.zeros(4, 1, dtype=torch.int32))
    world.close()


def test_steps_after_close_and_wrong_actions_are_refused():
    world = own("Walk", 2, vec_backend="serial")
    world.reset(0)
    with pytest.raises(ShoalError, match="shape"):
        world.step(torch.zeros(3, 1, dtype=torch.int32))
    with pytest.raises(ShoalError, match="int32"):
        world.step(torch.zeros(2, 1))
    world.close()
    with pytest.raises(ShoalError, match="after close"):
        world.step(torch.zeros(2, 1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gym:CartPole-v9", "CartPole"),
        ("gym:CartPol-v1", "did you mean 'CartPole-v1'"),
        ("gym:NoSuch-v1", r"no Gymnasium environment 'NoSuch-v1'; choose one of: .*-v\d, .* and \d+ more\.$"),
        ("zoo:sisl.nothing_v1", "no PettingZoo module"),
        ("ale:pongg", "did you mean 'pong'"),
    ],
)
def test_unknown_names_get_the_nearest_one(name, message):
    pytest.importorskip("ale_py" if name.startswith("ale") else "pettingzoo" if name.startswith("zoo") else "gymnasium")
    with pytest.raises(ShoalError, match=message):
        make(name, 1)


def test_a_missing_library_is_one_sentence_with_the_extra_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco", None)
    with pytest.raises(ShoalError, match=r"^gym:HalfCheetah-v5 needs mujoco, .*: pip install 'shoal\[mujoco\]'\.$"):
        make("gym:HalfCheetah-v5", 1)
    world = make("gym:CartPole-v1", 1, vec_backend="serial", render=True)
    world.reset(0)
    monkeypatch.setitem(sys.modules, "pygame", None)
    with pytest.raises(ShoalError, match=r"^A picture of gym:CartPole-v1 needs pygame, .* 'shoal\[gym\]'\.$"):
        world.picture(Canvas(), 0)
    world.close()


def test_an_environment_that_cannot_be_made_says_why():
    cls = world_class(f"{HERE}:Broken")
    with pytest.raises(ShoalError, match="no such luck"):
        cls.groups_of(cls.Config())


def test_the_native_batch_of_cartpole_has_reset_only_steps():
    world = make("gym:CartPole-v1", 16, vec_backend="native", env_schedule="lockstep")
    world.reset(0)
    assert "native" in world.vector_env.runner.describe()
    sits = torch.zeros(16, dtype=torch.bool)
    for t in range(120):
        out = world.step(torch.full((16, 1), t % 2, dtype=torch.int32))
        group = out.groups["agent"]
        over = out.terminated | out.truncated
        assert torch.equal(group.reward[:, 0] == 0, sits)
        assert torch.equal(group.alive[:, 0], ~over)
        assert torch.equal(group.final_observation[over], group.observation[over])
        sits = over
    stats = world.statistics()
    assert int(stats.episodes.sum()) > 20
    assert float(stats.return_sum["agent"].sum()) == float(stats.length_sum.sum())


def test_workers_import_no_torch():
    import subprocess
    import sys

    code = "import shoal.host.worker, shoal.host.envs, sys; assert not {'torch', 'warp'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ})


def test_config_survives_json():
    config = world_class("gym:CartPole-v1").Config(env_kwargs={"a": 1})
    assert json.loads(config.env_kwargs) == {"a": 1}


def test_envpool_has_reset_only_steps_and_is_reproducible():
    pytest.importorskip("envpool")
    seen = []
    for _ in range(2):
        world = make("envpool:CartPole-v1", 8, env_schedule="lockstep")
        world.reset(7)
        for _ in range(60):
            out = world.step(torch.ones(8, 1, dtype=torch.int32))
        seen.append(out.groups["agent"].observation.clone())
        stats = world.statistics()
        assert int(stats.episodes.sum()) > 20
        assert float(stats.return_sum["agent"].sum()) == float(stats.length_sum.sum())
        world.close()
    assert torch.equal(*seen)
    with pytest.raises(ShoalError, match="native batch only"):
        make("envpool:CartPole-v1", 2, vec_backend="processes").reset(0)
