"""Damaged, foreign and half-written checkpoints, full disks and locked folders."""

import json
import pickle
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import shoal
from shoal.core.errors import FileError, ShoalError
from shoal.runs import checkpoint, files
from shoal.runs.checkpoint import POLICY, compare, load_checkpoint, load_latest, save_checkpoint, strip_checkpoint
from shoal.runs.evaluation import Evaluation, Score
from shoal.runs.folder import RunFolder
from shoal.runs.jobs import make_job
from shoal.runs.run import load_run
from tests.damage import places_of

STATE = {"policy.cart.weights": torch.arange(12.0).view(3, 4), "steps": torch.tensor(7)}
SMALL = dict(num_envs=16, rollout_steps=8, eval_episodes=2, quiet=True, device="cpu")


@pytest.fixture
def saved(tmp_path):
    save_checkpoint(tmp_path, STATE, 1, 100)
    save_checkpoint(tmp_path, {**STATE, "steps": torch.tensor(8)}, 2, 200)
    return tmp_path


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "flipped":
        data[-5] ^= 0x10
        path.write_bytes(data)
    elif how == "missing":
        path.unlink()


def test_round_trip(saved):
    found = load_checkpoint(saved / "step_000000000200", "cpu")
    assert (found.iteration, found.steps) == (2, 200)
    assert found.state.keys() == STATE.keys()
    torch.testing.assert_close(found.state["policy.cart.weights"], STATE["policy.cart.weights"])
    assert load_checkpoint(saved / "step_000000000200", "cpu", (POLICY,)).state.keys() == {"policy.cart.weights"}


@pytest.mark.parametrize("how", ["truncated", "empty", "flipped", "missing"])
@pytest.mark.parametrize("name", ["policy.safetensors", "state.safetensors", "manifest.json"])
def test_damage_is_refused_by_name_and_the_one_before_is_used(saved, name, how):
    if (name, how) == ("manifest.json", "flipped"):
        (saved / "step_000000000200" / name).write_text("{}")
    else:
        damage(saved / "step_000000000200" / name, how)
    with pytest.raises(ShoalError, match=name):
        load_checkpoint(saved / "step_000000000200", "cpu")
    warnings = []
    assert load_latest(saved, "cpu", warnings.append).steps == 100
    assert name in warnings[0]


def test_pickle_is_refused_and_not_executed(saved, tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "executed"), "w"))

    file = saved / "step_000000000200" / "state.safetensors"
    file.write_bytes(pickle.dumps(Trap()))
    manifest = file.with_name("manifest.json")
    facts = json.loads(manifest.read_text())
    facts["sha256"]["state.safetensors"] = files.sha256(file)
    manifest.write_text(json.dumps(facts))
    with pytest.raises(ShoalError, match="damaged"):
        load_checkpoint(saved / "step_000000000200", "cpu")
    assert not (tmp_path / "executed").exists()


def test_killed_while_saving_leaves_the_previous_one(saved, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(saved, STATE, 3, 300)
    assert load_latest(saved, "cpu", pytest.fail).steps == 200
    (saved / ".writing_000000000300").mkdir()  # as a process killed outright would leave it
    load_latest(saved, "cpu", pytest.fail)
    assert not list(saved.glob(".writing_*"))


def test_a_full_disk_is_a_warning_but_an_error_at_the_final_save(tmp_path):
    """A real limit on the size of files, in a separate process; safetensors raises another error than OSError."""
    code = (
        "import resource, signal, sys\n"
        "from shoal.cli import main\n"
        "folder, flags = sys.argv[1], sys.argv[2:]\n"
        "assert main(['train', 'cartpole', '--run-dir', folder + '/fine', *flags]) == 0  # compiles all kernels\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))\n"
        "sys.exit(main(['train', 'cartpole', '--run-dir', folder + '/run', *flags]))\n"
    )
    sizes = "--total-steps 512 --checkpoint-every 128 --num-envs 16 --rollout-steps 8"
    flags = f"{sizes} --eval-episodes 2 --device cpu".split()
    command = [sys.executable, "-c", code, str(tmp_path), *flags]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1
    assert "The checkpoint at 128 steps could not be saved" in result.stderr
    assert "The final checkpoint" in result.stderr
    assert RunFolder(tmp_path / "run").metrics()[-1]["steps"] == 512


def test_other_shapes_are_all_listed_and_nothing_is_loaded(tmp_path):
    run = shoal.train("cartpole", total_steps=256, run_dir=tmp_path / "run", **SMALL)
    config = run.path / "config.json"
    facts = json.loads(config.read_text())
    facts["policy"]["hidden"] = [32, 64]
    config.write_text(json.dumps(facts))
    with pytest.raises(ShoalError) as error:
        load_run(run.path, device="cpu")
    assert "policy_encoder.layers.0.weight" in str(error.value)
    assert "(64, 4) in the checkpoint" in str(error.value)
    assert "value_encoder.layers.2.weight" in str(error.value)
    with pytest.raises(ShoalError, match="does not fit this run"):
        shoal.resume(run.path, total_steps=1024)


def test_second_writer_is_refused(tmp_path):
    job = make_job("cartpole", run_dir=tmp_path / "run", **SMALL)
    first = RunFolder.create(job)
    with pytest.raises(ShoalError, match="Another process is writing"):
        RunFolder.create(job)
    first.unlock()
    RunFolder.create(job).unlock()  # no checkpoint yet: started again
    first.save(STATE, 0, 0)
    with pytest.raises(ShoalError, match="already holds a run"):
        RunFolder.create(job)


def test_of_old_checkpoints_the_policies_stay_and_of_very_old_ones_the_best(tmp_path):
    job = make_job("cartpole", run_dir=tmp_path / "run", **SMALL)
    run = RunFolder.create(job)
    for i in range(20):
        path = run.save(STATE, i, i * 100)
        run.record_score(i * 100, Evaluation({"cart": Score(9.0 if i == 1 else i / 10, 0.0, 1, 1.0)}, {}), path)
    kept = {int(p.name.removeprefix("step_")): p for p in run.checkpoints.glob("step_*")}
    assert sorted(kept) == [100, *range(800, 2000, 100)]
    assert sorted(steps for steps, p in kept.items() if (p / "state.safetensors").exists()) == [1800, 1900]
    assert run.pick("best").name.endswith("100")
    assert run.pick("last").name.endswith("1900")
    for p in kept.values():
        assert load_checkpoint(p, "cpu", (POLICY,)).state.keys() == {"policy.cart.weights"}
    with pytest.raises(ShoalError, match=r"step_0+100 is too old to resume from"):
        load_checkpoint(kept[100], "cpu")


def test_old_checkpoints_can_be_evaluated_but_not_resumed(tmp_path):
    """Not even where no other is left that is good."""
    run = shoal.train("cartpole", run_dir=tmp_path / "run", total_steps=128 * 5, checkpoint_every=128, **SMALL)
    assert load_run(run.path, "128").evaluate(episodes=2)["cart"].episodes == 2
    for steps in (512, 640):
        damage(run.folder.checkpoints / f"step_{steps:012d}" / "state.safetensors", "truncated")
    with pytest.raises(ShoalError, match=r"no valid checkpoint.*000640/state.safetensors is damaged"):
        shoal.resume(run.path, total_steps=128 * 8)


def test_a_damaged_checkpoint_is_renamed_and_its_links_move(tmp_path):
    """It neither counts as one that can be gone on from nor as the best; from then on there are two good ones again."""
    settings = {**SMALL, "eval_episodes": 4}
    run = shoal.train("cartpole", run_dir=tmp_path / "run", total_steps=128 * 4, checkpoint_every=128, **settings)
    newest = run.folder.pick("last")
    run.folder._point("best", newest)
    damage(newest / "state.safetensors", "flipped")
    again = shoal.resume(run.path, total_steps=128 * 6 + 64)
    whole = [p for p in run.folder.checkpoints.glob("step_*") if (p / "state.safetensors").exists()]
    assert len(whole) == 2
    for path in whole:
        load_checkpoint(path, "cpu")
    assert (run.folder.checkpoints / f"damaged_{newest.name}").is_dir()
    rows = [json.loads(line) for line in (run.path / "eval.jsonl").read_text().splitlines()]
    best = max(rows, key=lambda row: row["mean"])
    assert again.folder.pick("best").name == f"step_{best['steps']:012d}"


def test_a_full_disk_while_old_ones_are_stripped_spoils_no_save(tmp_path, monkeypatch):
    job = make_job("cartpole", run_dir=tmp_path / "run", **SMALL)
    run = RunFolder.create(job)

    write_text = files.write_text

    def full(path, text):
        if path.parent.name.startswith("step_"):
            raise FileError("No space left on device")
        write_text(path, text)

    monkeypatch.setattr(files, "write_text", full)
    for i in range(4):
        assert run.save(STATE, i, i * 100) == run.pick("last")
    whole = [p.name for p in run.checkpoints.glob("step_*") if (p / "state.safetensors").exists()]
    assert sorted(whole) == ["step_000000000200", "step_000000000300"]
    assert load_checkpoint(run.pick("100"), "cpu", (POLICY,)).steps == 100


def test_a_folder_with_policies_only_is_refused(saved):
    for path in saved.glob("step_*"):
        strip_checkpoint(path)
    with pytest.raises(ShoalError, match="holds policies only; start another run, with --load-policy"):
        load_latest(saved, "cpu", pytest.fail)


# --- values at the edge ----------------------------------------------------------------------------------------------

VALUES = [None, True, -1, 0, 2**63, 10**30, 0.5, "1e400", "NaN", "", "x" * 5000, [], [[]], {}, {"a": {}}, ["BIG", [2]]]


def test_every_value_of_a_manifest_is_checked(saved):
    """A checkpoint whose manifest has another value anywhere is refused by name, and the one before is used."""
    path = saved / "step_000000000200"
    manifest = path / "manifest.json"
    text = manifest.read_text()
    for place in list(places_of(json.loads(text)))[1:]:
        for value in [*VALUES, "absent"]:
            facts = json.loads(text)
            inner = facts
            for key in place[:-1]:
                inner = inner[key]
            same = inner[place[-1]] == value and type(inner[place[-1]]) is type(value)
            if value == "absent":
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
            changed = re.sub(r'"(1e400|NaN)"', r"\1", json.dumps(facts))
            manifest.write_text(changed.replace('"BIG"', "9" * 5000))
            if same or (place == ("iteration",) and value == 0):  # no more than another good number
                continue
            with pytest.raises(ShoalError) as refused:
                load_checkpoint(path, "cpu")
            assert str(path) in str(refused.value)
            assert "\n" not in str(refused.value)
            assert len(str(refused.value)) < 500
    assert load_latest(saved, "cpu", lambda text: None).steps == 100


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, '{"a":' * 100_000, "\0", "{}", "\xff"])
def test_a_manifest_that_is_none_is_refused_in_one_sentence(saved, text):
    (saved / "step_000000000200" / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(ShoalError, match=r"^[^\n]*manifest\.json[^\n]*$"):
        load_checkpoint(saved / "step_000000000200", "cpu")


def forge(path, file, change):
    """Change tensors of a checkpoint and let its manifest agree."""
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file)
    facts = json.loads((path / "manifest.json").read_text())
    facts["sha256"][file] = files.sha256(path / file)
    for name, tensor in tensors.items():
        facts["tensors"][name] = [str(tensor.dtype), list(tensor.shape)]
    (path / "manifest.json").write_text(json.dumps(facts))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value):
    run = shoal.train("cartpole", total_steps=256, checkpoint_every=128, run_dir=tmp_path / "run", **SMALL)

    def spoil(tensors):
        tensors["policy.cart.value_encoder.layers.2.weight"][3, 4] = value

    forge(run.folder.pick("last"), POLICY, spoil)
    run.folder._point("best", run.folder.pick("last"))
    sentence = r"holds non-finite weights: policy\.cart\.value_encoder\.layers\.2\.weight\.$"
    with pytest.raises(ShoalError, match=sentence):  # eval and record
        load_run(run.path)
    with pytest.raises(ShoalError, match=sentence):
        load_run(run.path, "128", others=(f"cart={run.path}",))
    with pytest.raises(ShoalError, match=sentence):
        shoal.train("cartpole", total_steps=128, run_dir=tmp_path / "new", load_policy=(f"cart={run.path}",), **SMALL)
    assert not (tmp_path / "new").exists()
    assert shoal.resume(run.path, total_steps=384).folder.scores()  # from the checkpoint before
    assert (run.folder.checkpoints / "damaged_step_000000000256").is_dir()


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update(more=torch.zeros(2)),
        lambda tensors: tensors.pop("steps"),
        lambda tensors: tensors.update(steps=torch.zeros(2, dtype=torch.float8_e5m2)),
        lambda tensors: tensors.update(steps=torch.zeros(0, 2**40)),
        lambda tensors: tensors.update({"policy.cart.weights": torch.full((3, 4), float("nan"))}),
    ],
    ids=["more", "fewer", "another dtype", "overflow", "weights in the other file"],
)
def test_tensors_that_the_checksums_agree_with_are_checked_all_the_same(saved, change):
    path = saved / "step_000000000200"
    forge(path, "state.safetensors", change)
    with pytest.raises(ShoalError, match=str(path)):
        compare(load_checkpoint(path, "cpu").state, STATE, path)


def test_a_file_that_is_larger_than_its_tensors_is_not_read(saved):
    path = saved / "step_000000000200"
    with (path / "state.safetensors").open("r+b") as file:
        file.truncate(2**40)
    with pytest.raises(ShoalError, match=r"state\.safetensors is damaged"):
        load_checkpoint(path, "cpu")


@pytest.mark.parametrize("name", ["head", "filled", "final_count"])
@pytest.mark.parametrize("value", [-(2**30), 2**30, 3])
def test_a_replay_that_points_beyond_its_rows_is_refused(tmp_path, name, value):
    settings = {**SMALL, "eval_episodes": 0}
    run = shoal.train("cartpole", algo="dqn", buffer_size=1024, total_steps=128, run_dir=tmp_path / "run", **settings)
    forge(run.folder.pick("last"), "state.safetensors", lambda t: t[f"learner.cart.replay.{name}"].fill_(value))
    if (name, value) in (("filled", 3), ("final_count", 3), ("final_count", 2**30)):  # as good as any other
        shoal.resume(run.path, total_steps=256)
        return
    with pytest.raises(ShoalError, match=f"The saved replay buffer is damaged: {name} must be within"):
        shoal.resume(run.path, total_steps=256)


@pytest.mark.parametrize("value", [-1, 2, 2**31 - 1])
def test_a_replay_with_actions_that_cannot_be_is_refused(tmp_path, value):
    settings = {**SMALL, "eval_episodes": 0}
    run = shoal.train("cartpole", algo="dqn", buffer_size=1024, total_steps=128, run_dir=tmp_path / "run", **settings)
    forge(run.folder.pick("last"), "state.safetensors", lambda t: t["learner.cart.replay.action"][3].fill_(value))
    with pytest.raises(ShoalError, match=f"An action of the saved replay must be within Discrete.*got {value}"):
        shoal.resume(run.path, total_steps=256)
