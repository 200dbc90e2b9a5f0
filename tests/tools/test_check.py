"""`shoal check`: good worlds pass, and each kind of mistake is named with its array, step and env."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import warp as wp

from shoal import core
from shoal.cli import main
from shoal.config.options import CheckOptions
from shoal.core import Box, Discrete, Field, Group, KernelWorld
from shoal.core.errors import ShoalError
from shoal.tools.check import Replica, WorldChecker, check_world
from shoal.tools.check_debug import check_indices

ROOT = Path(__file__).parents[2]

# --- one good world, and children of it that make one mistake each ----------------------------------------------------


class Pair(KernelWorld):
    """Two agents on a line, of whom the second leaves at step 2. One name: all children share compiled kernels."""

    name = "pair"

    @dataclass(frozen=True)
    class Config:
        max_steps: int = 6
        push: float = 1.0

    state = dict(at=Field(float, (2,), unit="m"))
    groups = (Group("walker", Box(1, -10.0, 10.0), Discrete(3), agents=2, masked=True, can_leave=True),)

    def step(self, s):
        s.at += s.config.push * (s.action - 1.0)
        s.alive[:, 1] &= s.step_count < 2
        s.reward.copy_(s.at)

    def reset(self, s):
        return dict(at=self.uniform(-1.0, 1.0, (2,)))

    def observe(self, s):
        return dict(observation=s.at[..., None], action_mask=torch.ones_like(s.action_mask))


def at(s, step: int, env: int, agent: int = 1) -> torch.Tensor:
    """[env, agent], True in one place."""
    here = torch.zeros_like(s.alive)
    here[:, agent] = (s.step_count == step) & (s.env_id == env) & (s.episode == 0)
    return here


class Random(Pair):
    def step(self, s):
        Pair._author_step(self, s)
        s.at += torch.where(at(s, 3, 5), torch.rand(()), 0.0)


class RandomStart(Pair):
    def reset(self, s):
        return dict(at=torch.rand_like(s.at))


class Counter(Pair):
    calls = 0

    def step(self, s):
        Counter.calls += 1
        s.at += 0.001 * Counter.calls


class ReadsEnvZero(Pair):
    def step(self, s):
        Pair._author_step(self, s)
        s.at += 0.1 * s.at[:1]


class ReadsAll(Pair):
    def step(self, s):
        Pair._author_step(self, s)
        s.at += 0.1 * s.at.sum(0, keepdim=True).clamp(-1.0, 1.0)


class NotANumber(Pair):
    def observe(self, s):
        return dict(Pair._author_observe(self, s), observation=torch.where(at(s, 3, 5), torch.nan, s.at)[..., None])


class LeavesItsBox(Pair):
    def observe(self, s):
        return dict(Pair._author_observe(self, s), observation=torch.where(at(s, 4, 2, 0), 11.5, s.at)[..., None])


class BadEnd(Pair):
    """Only the last thing that is seen of an episode is wrong."""

    def observe(self, s):
        return dict(Pair._author_observe(self, s), observation=torch.where(at(s, 6, 3), torch.inf, s.at)[..., None])


class NoReward(Pair):
    def step(self, s):
        s.reward.copy_(torch.where(at(s, 1, 7, 0), torch.nan, s.at))


class NothingAllowed(Pair):
    def observe(self, s):
        return dict(Pair._author_observe(self, s), action_mask=~at(s, 3, 4, 0)[..., None].expand_as(s.action_mask))


class Resurrects(Pair):
    def step(self, s):
        Pair._author_step(self, s)
        s.alive[:, 1] |= s.step_count >= 4


class WritesEpisode(Pair):
    def step(self, s):
        Pair._author_step(self, s)
        s.episode += at(s, 2, 9).any(1)


class RemembersElsewhere(Pair):
    steps = 0

    def step(self, s):
        self.steps += 1
        s.at += 0.001 * self.steps


class Raises(Pair):
    def step(self, s):
        if int(s.step_count[0]) == 3:
            raise ValueError("no third step")


class RaisesWhenSmall(Pair):
    def step(self, s):
        s.at[15] = 1.0


class Forgets(Pair):
    """`reset` leaves one of the two where it was."""

    def reset(self, s):
        return dict(at=torch.stack([Pair._author_reset(self, s)["at"][:, 0], s.at[:, 1]], 1))


class Plain(Pair):
    """Nothing is random, and all agents leave."""

    def step(self, s):
        s.alive.copy_(s.step_count[:, None] < 3)

    def reset(self, s):
        return dict(at=torch.zeros_like(s.at))


def lines(world, kind: str, **options) -> list[str]:
    """Texts of the findings of one kind, without debug mode, which takes seconds."""
    found = check_world(world, **{"steps": 14, "envs": 16, "device": "cpu", "debug": False, **options})
    return [finding.text for finding in found if finding.kind == kind]


def test_a_good_world_passes():
    assert lines(Pair, "FAIL") == []
    topics = {text.partition(":")[0] for text in lines(Pair, "ok")}
    assert topics >= {"spaces", "determinism", "batch size", "single envs", "slices", "saved state", "resets", "masks"}
    assert {"alive", "ends", "starts", "seeds"} <= topics
    notes = lines(Pair, "note")
    assert len(notes) == 1
    assert notes[0].startswith("devices: GPU against CPU was left out")


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (Random, "determinism: at at step 3, env 5, element 1 is "),
        (Counter, "determinism: at at step 1, env 0, element 0 is "),
        (ReadsEnvZero, "slices: at at step 1, env "),
        (ReadsAll, "batch size: at at step 1, env 0, element 0 is "),
        (NotANumber, "spaces: observation at step 3, env 5, agent 1, element 0 is nan"),
        (LeavesItsBox, "spaces: observation at step 4, env 2, agent 0, element 0 is 11.5, outside of its Box from -10"),
        (BadEnd, "spaces: final_observation at step 6, env 3, agent 1, element 0 is inf"),
        (NoReward, "spaces: reward at step 1, env 7, agent 0 is nan"),
        (NothingAllowed, "masks: action_mask at step 3, env 4, agent 0 allows no choice"),
        (Resurrects, "alive: alive at step 4, env 0, agent 1 is True again"),
        (WritesEpisode, "resets: episode at step 2, env 9 is 1, which does not fit the end flags"),
        (RemembersElsewhere, "saved state: at at step 7, env 0, element 0 is "),
        (RaisesWhenSmall, "batch size: in a batch of 2, at step 1, it raised IndexError: "),
    ],
)
def test_a_mistake_is_named_with_its_place(world, expected):
    failures = lines(world, "FAIL")
    assert any(text.startswith(expected) for text in failures), failures


def test_nondeterminism_is_reported_once():
    assert len(lines(Random, "FAIL")) == 1
    assert "slices: cannot be judged, since the world is not deterministic" in lines(Counter, "note")


def test_unseeded_starts_are_not_blamed_on_the_episode_before():
    assert any(text.startswith("determinism: at after reset") for text in lines(RandomStart, "FAIL"))
    assert not [text for text in lines(RandomStart, "note") if "left from the previous episode" in text]


def test_a_world_that_raises_is_a_failure_with_the_line():
    (failure,) = lines(Raises, "FAIL")
    assert failure.startswith(f"the world raised ValueError: no third step ({__file__}:")
    assert failure.endswith("), at step 3")


def test_notes():
    """What may be meant so is said, and is no failure."""
    assert lines(Plain, "FAIL") == []
    plain = " | ".join(lines(Plain, "note"))
    assert "every episode starts alike" in plain
    assert "another seed changes nothing" in plain
    assert "no agent is alive, but the episode continues: step_count at step 3, env 0 is 3" in plain
    assert any(text.startswith("starts: at at step 6, env 0, element 1 is ") for text in lines(Forgets, "note"))
    assert any("no episode ended within 3 steps" in text for text in lines(Pair, "note", steps=3))


@pytest.mark.parametrize(("push", "said"), [(1.0, ""), (1.0 + 1e-6, "rounded"), (1.01, "problem")])
def test_devices_may_differ_by_rounding_only(push, said):
    """A second world with slightly other numbers takes the place of another device."""
    base, config = Pair(16), Pair.Config()
    checker = WorldChecker(base, config, CheckOptions(steps=14, envs=16, device="cpu"))
    other = Pair(16, "cpu", replace(config, push=push))
    checker.replicas = [
        Replica("devices", "equal", "on the CPU", "more than rounding", other, torch.arange(16), allow_rounding=True)
    ]
    checker.device_note = ""
    checker.run()
    (replica,) = checker.replicas
    assert [name for name in ("rounded", "problem") if getattr(replica, name)] == ([said] if said else [])
    kinds = [finding.kind for finding in checker.report() if finding.text.startswith("devices")]
    assert kinds == [{"": "ok", "rounded": "note", "problem": "FAIL"}[said]]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a cuda GPU")
def test_gpu_against_cpu():
    found = check_world("cartpole", steps=50, device="cuda", debug=False)
    assert [f.text for f in found if f.kind == "FAIL"] == []
    assert any(f.text.startswith("devices: GPU") for f in found)


# --- neighbors that are read in rare cases ----------------------------------------------------------------------------


@wp.func
def copy_neighbor(env: int, rng: core.Random, action: wp.array[int], wraps: int, x: wp.array2d[float]):
    x[env, 0] = x[env, 0] + 0.1 * core.uniform(rng, 0, 0.0, 1.0)
    if action[env] == 1 and x[env, 1] > 0.95:
        other = wp.max(env - 1, 0)
        if wraps == 1:
            other = (env + 1) % x.shape[0]
        x[env, 0] = x[other, 0]


@wp.func
def draw_both(env: int, rng: core.Random, x: wp.array2d[float]):
    x[env, 0] = core.uniform(rng, 0, 0.0, 1.0)
    x[env, 1] = core.uniform(rng, 1, 0.0, 1.0)


@wp.func
def show_first(env: int, x: wp.array2d[float], observation: wp.array2d[float]):
    observation[env, 0] = x[env, 0]


class CopiesNeighbor(KernelWorld):
    """In 5 % of its episodes, an env copies a number of the env before it (`wraps` 0) or after it (1)."""

    @dataclass(frozen=True)
    class Config:
        max_steps: int = 5
        wraps: int = 0

    state = dict(x=Field(float, (2,)))
    groups = (Group("walker", Box(1), Discrete(2)),)
    step, reset, observe = copy_neighbor, draw_both, show_first


@pytest.mark.parametrize("wraps", [0, 1])
@pytest.mark.parametrize("seed", range(1, 7))
def test_a_neighbor_that_is_read_in_rare_cases_is_found(wraps, seed):
    config = CopiesNeighbor.Config(wraps=wraps)
    failures = lines(CopiesNeighbor, "FAIL", config=config, seed=seed, steps=200, envs=64)
    assert any(text.startswith("slices: ") for text in failures), failures


# --- indices, in another process -------------------------------------------------------------------------------------


@wp.func
def march(env: int, at: wp.array[int], seen: wp.array2d[float]):
    at[env] = at[env] + 1
    seen[env, at[env]] = 1.0


@wp.func
def home(env: int, at: wp.array[int]):
    at[env] = 0


@wp.func
def look(env: int, at: wp.array[int], observation: wp.array2d[float]):
    observation[env, 0] = float(at[env])


class WalksOff(KernelWorld):
    """Runs off the end of `seen` at step 4."""

    state = dict(at=Field(int), seen=Field(float, (4,)))
    groups = (Group("walker", Box(1), Discrete(2)),)
    step, reset, observe = march, home, look


def test_an_index_out_of_range_is_found_with_its_function():
    found = check_world(WalksOff, steps=8, device="cpu")
    assert found[0].kind == "FAIL"
    assert "an index is out of range in `march` at step 4" in found[0].text
    assert "all other checks were left out" in found[1].text


def test_a_class_that_no_other_process_can_import_is_not_walked_there():
    class Local(Pair):
        pass

    found = check_indices(Local, Local.Config(), 3, 1)
    assert found.kind == "note"
    assert "Local" in found.text


# --- the command line -------------------------------------------------------------------------------------------------


def test_a_users_file_from_the_command_line(tmp_path, capsys):
    rocket = (ROOT / "examples" / "rocket_torch.py").read_text()
    good, bad = tmp_path / "good.py", tmp_path / "bad.py"
    good.write_text(rocket)
    bad.write_text(rocket.replace("0.05 * s.speed]", "s.speed / (s.step_count != 2)]"))
    flags = ["--steps", "12", "--envs", "16", "--device", "cpu", "--world.max-steps", "5"]
    assert main(["check", f"{good}:Rocket", *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok   ", "note ")) for line in printed)
    assert printed[0].startswith("ok   indices: none is out of range (12 steps")
    assert "ok   ends: 32 episodes ended within 12 steps" in printed
    assert main(["check", f"{bad}:Rocket", *flags, "--no-debug"]) == 1
    assert "FAIL spaces: observation at step 2, env 0, agent 0, element 1 is -inf" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["cartpol"], "did you mean 'cartpole'"),
        (["cartpole", "--envs", "1"], "--envs must be at least 2"),
        (["cartpole", "--steps", "0"], "--steps must be at least 1"),
        (["cartpole", "--device", "tpu"], "There is no device 'tpu'"),
        (["cartpole", "--world.max-steps", "0"], "max_steps must be at least 1"),
        (["tests/helpers.py:CountingReference"], "CountingReference is not a KernelWorld"),
    ],
)
def test_bad_input_exits_2(words, answer, capsys):
    assert main(["check", *words]) == 2
    assert answer in capsys.readouterr().err


def test_other_worlds_are_refused():
    with pytest.raises(ShoalError, match="is not a KernelWorld"):
        check_world(int)
