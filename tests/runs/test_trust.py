"""A run folder is data: nothing that it names is imported unless this user trained with it here, or says so."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import shoal
from shoal.config.counts import AUTO
from shoal.config.schema import SECTION_OF
from shoal.core.errors import ShoalError
from shoal.core.registry import HOST_KINDS, WORLDS
from shoal.core.user_files import load_object
from shoal.runs.config_file import load_job
from shoal.runs.jobs import make_job
from shoal.runs.trust import key_path
from tests.damage import places_of

SMALL = dict(num_envs=8, rollout_steps=8, total_steps=64, eval_episodes=0, quiet=True, device="cpu")

WORLD = """
from dataclasses import dataclass
from pathlib import Path
import torch
from shoal.core import Box, Discrete, Field, Group, KernelWorld

(Path(__file__).parent / "executed").touch()

class Own(KernelWorld):
    @dataclass(frozen=True)
    class Config:
        max_steps: int = 4

    state = dict(clock=Field(float))
    groups = (Group("agent", observation=Box(1), action=Discrete(2)),)

    def step(self, s):
        s.clock += 1.0
        s.reward[:, 0] = 1.0

    def reset(self, s):
        return dict(clock=torch.zeros_like(s.clock))

    def observe(self, s):
        return s.clock.unsqueeze(-1)

class Net(torch.nn.Sequential):
    def __init__(self, shape):
        super().__init__(torch.nn.Linear(shape[0], 8))
"""


@pytest.fixture(autouse=True)
def own_key(tmp_path, monkeypatch):
    """A key for each test: the user's own is left alone."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run of a bundled world."""
    return shoal.train("cartpole", run_dir=tmp_path_factory.mktemp("plain") / "run", **SMALL).path


@pytest.fixture
def own(tmp_path):
    """A file of the user's and a run that was trained with it."""
    file = tmp_path / "own.py"
    file.write_text(WORLD)
    run = shoal.train(f"{file}:Own", encoder=f"{file}:Net", run_dir=tmp_path / "run", **SMALL)
    _forget(file)
    return file, run.path


def _forget(file: Path) -> None:
    """As in a new process: what this one has executed is not known."""
    load_object.cache_clear()
    shoal.core.world_loading.world_class.cache_clear()
    shoal.core.user_files._EXECUTED.clear()
    (file.parent / "executed").unlink(missing_ok=True)


def change(path: Path, **parts) -> None:
    """Other values in a config.json: world=…, world_config=dict(…), or settings such as encoder=…."""
    config = json.loads((path / "config.json").read_text())
    for name, value in parts.items():
        if name in SECTION_OF:
            config[SECTION_OF[name]][name] = value
        else:
            config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (path / "config.json").write_text(json.dumps(config))


def ways_to_open(path: Path):
    return {
        "eval and record": lambda: shoal.load_run(path),
        "resume": lambda: shoal.resume(path, total_steps=128),
        "train --load-policy": lambda: make_job("cartpole", load_policy=(f"cart={path}",), device="cpu"),
        "eval --load-policy": lambda: shoal.load_run(path.parent / "other", others=(f"cart={path}",)),
    }


EVIL = {
    "a function of Python": dict(world="os:system", world_config={"env_kwargs": '{"command": "touch executed"}'}),
    "a module in this folder": dict(world="evil:X"),
    "a file in this folder": dict(world="evil.py:X"),
    "a file by its path": dict(world="HERE/evil.py:X"),
    "an env's module": dict(world="gym:evil:X-v0"),
    "an env's module inside a package": dict(world="gym:evil_package.inner:X-v0"),
    "a PettingZoo module": dict(world="zoo:evil"),
    "a module above PettingZoo": dict(world="zoo:..evil"),
    "a network": dict(encoder="evil.py:Net"),
    "a network of a module": dict(encoder="evil:Net"),
    "a network of one group": dict(group_settings=["cart.encoder=evil.py:Net"]),
}


@pytest.mark.parametrize("evil", EVIL.values(), ids=list(EVIL))
def test_no_reference_of_a_run_folder_is_imported(tmp_path, monkeypatch, plain, evil):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    bomb = f"open({str(tmp_path / 'executed')!r}, 'w')"
    (tmp_path / "evil.py").write_text(bomb)
    (tmp_path / "evil_package").mkdir()
    (tmp_path / "evil_package" / "__init__.py").write_text(bomb)
    (tmp_path / "evil_package" / "inner.py").write_text(bomb)
    for name in ("run", "other"):
        shutil.copytree(plain, tmp_path / name, symlinks=True)
    change(tmp_path / "run", **json.loads(json.dumps(evil).replace("HERE", str(tmp_path))))
    for way, open_it in ways_to_open(tmp_path / "run").items():
        with pytest.raises(ShoalError) as refused:
            open_it()
        assert not (tmp_path / "executed").exists(), way
        assert refused.value.exit_code == 2
        assert "\n" not in str(refused.value)
    assert not {"evil", "evil_package"} & set(sys.modules)


def test_a_run_of_this_user_opens_as_before(own):
    file, path = own
    stated = json.loads((path / "config.json").read_text())["code"]
    assert {entry["reference"] for entry in stated} == {f"{file}:Own", f"{file}:Net"}
    shoal.load_run(path)
    assert (file.parent / "executed").exists()
    shoal.resume(path, total_steps=128)


def test_a_run_of_another_user_needs_trust_and_says_what_would_run(own, tmp_path, monkeypatch):
    file, path = own
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    with pytest.raises(ShoalError, match=rf"would execute {file}:Net \(in {file}\), {file}:Own .* --trust"):
        shoal.load_run(path)
    assert not (file.parent / "executed").exists()
    shoal.load_run(path, trust=True)
    _forget(file)
    shoal.resume(path, total_steps=128, trust=True)  # now it is this user's
    _forget(file)
    shoal.load_run(path)


@pytest.mark.parametrize(
    "forged",
    [
        dict(world_config=dict(max_steps=5)),
        dict(signature="0" * 64),
        dict(signature=None),
        dict(code=[]),
        dict(code="all"),
        dict(code=[{"reference": 3}]),
        dict(group_settings=["agent.encoder=other.py:Net"]),
    ],
    ids=str,
)
def test_signed_content_cannot_be_changed(own, forged):
    file, path = own
    change(path, **forged)
    with pytest.raises(ShoalError):
        shoal.load_run(path)
    assert not (file.parent / "executed").exists()


def test_an_edited_file_is_named_with_its_hash(own):
    file, path = own
    file.write_text(WORLD + "\n# edited\n")
    with pytest.raises(ShoalError, match=rf"{file}: its SHA-256 \w+… differs since training .* --trust"):
        shoal.load_run(path)
    assert not (file.parent / "executed").exists()
    shoal.resume(path, total_steps=128, trust=True)
    _forget(file)
    shoal.load_run(path)


def test_a_compiled_copy_beside_a_file_is_not_executed(tmp_path):
    """Python would take __pycache__/own.pyc, whose content no SHA-256 of the source speaks for."""
    file = tmp_path / "own.py"
    file.write_text("class X:\n    source = 'evil'\n")
    subprocess.run([sys.executable, "-m", "py_compile", str(file)], check=True)
    times = file.stat()
    file.write_text("class X:\n    source = 'good'\n")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert any((tmp_path / "__pycache__").iterdir())
    assert load_object(f"{file}:X", "world").source == "good"


def test_the_key_is_the_owners_alone(own):
    assert stat.S_IMODE(key_path().stat().st_mode) == 0o600
    key_path().chmod(0o644)
    with pytest.raises(ShoalError, match="--trust"):
        shoal.load_run(own[1])


def test_without_a_key_a_run_trains_with_a_warning_and_opens_with_trust(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    file = tmp_path / "own.py"
    file.write_text(WORLD)
    with pytest.warns(UserWarning, match="cannot be signed"):
        path = shoal.train(f"{file}:Own", run_dir=tmp_path / "run", **SMALL).path
    with pytest.raises(ShoalError, match="--trust"):
        shoal.load_run(path)
    shoal.load_run(path, trust=True)


def test_bundled_worlds_and_installed_environments_need_no_code(plain):
    assert json.loads((plain / "config.json").read_text())["code"] == []
    for world in [*WORLDS, "gym:CartPole-v1", "ale:pong", "zoo:sisl.pursuit_v5", "zoo:pettingzoo.sisl.pursuit_v5"]:
        assert shoal.runs.trust.needed_code(world, ["auto", "mlp"]) == {}
    assert set(HOST_KINDS) == {"gym", "ale", "zoo", "envpool"}, "a new kind: say in trust.py what it imports"


def test_the_command_line_has_trust(own, tmp_path):
    _, path = own
    base = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "another")}
    command = [sys.executable, "-m", "shoal", "eval", str(path), "--episodes", "2"]
    refused = subprocess.run(command, capture_output=True, text=True, env=base)
    assert refused.returncode == 2
    assert re.fullmatch(r"shoal: .* give --trust to run it\.\n", refused.stderr)
    assert subprocess.run([*command, "--trust"], capture_output=True, env=base).returncode == 0


VALUES = [None, True, -1, 0, 2**63, 10**30, 0.5, "1e400", "-1e400", "NaN", "", "x" * 5000, [], [[]], {}, {"a": {}}]


def test_every_value_of_a_config_is_checked_by_the_schema(plain, tmp_path):
    """Each setting in turn gets values at the edge, or is missing: a valid job, or one sentence."""
    text = (plain / "config.json").read_text()
    path = tmp_path / "config.json"

    def refusal(changed: str) -> str:
        path.write_text(changed)
        try:
            load_job(tmp_path)
        except ShoalError as error:
            return str(error)
        return ""

    tried = refused = 0
    for place in list(places_of(json.loads(text)))[1:]:
        for value in [*VALUES, "absent"]:
            config = json.loads(text)
            inner = config
            for key in place[:-1]:
                inner = inner[key]
            if value == "absent":
                del inner[place[-1]]
            else:
                inner[place[-1]] = value
            tried += 1
            message = refusal(re.sub(r'"(-?1e400|NaN)"', r"\1", json.dumps(config)))
            assert "\n" not in message
            assert len(message) < 1500
            refused += bool(message)
    assert tried > 1000
    assert refused > tried // 2


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "[" * 100_000, '{"a":' * 100_000, "\0", "{}", '{"world": 1}'])
def test_a_config_that_is_none_is_refused_in_one_sentence(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ShoalError, match=r"config\.json"):
        load_job(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        dict(hidden=[10**30]),
        dict(hidden=[10**7, 10**7]),
        dict(hidden=[64] * 10_000),
        dict(action_repeat=10**30),
        dict(action_repeat=10**9),
        dict(rnn_size=10**9),
        dict(num_envs=2**40),
        dict(num_envs=AUTO),
        dict(eval_episodes=2**61),
        dict(threads=10**9),
        dict(processes=10**9),
    ],
    ids=lambda value: textwrap.shorten(str(value), 40),
)
def test_sizes_that_cannot_be_are_refused(plain, tmp_path, settings):
    shutil.copytree(plain, tmp_path / "run", symlinks=True)
    change(tmp_path / "run", **settings)
    with pytest.raises(ShoalError, match=next(iter(settings)).replace("_", "[-_]")):
        load_job(tmp_path / "run")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (dict(device="meta"), "There is no device 'meta'"),
        (dict(device="hpu"), "There is no device 'hpu'"),
        (dict(device="cpu:7"), "There is no device 'cpu:7'"),
        (dict(device="cuda:99"), r"config\.json: device cuda:99: "),
        (dict(device="gpu"), "a GPU is called cuda"),
        (dict(asynchronous=True, learner_device="meta"), "There is no device 'meta'"),
        (dict(freeze_groups=["cart"]), "no policy is left to train"),
        (dict(freeze_groups=["missing"]), "group to freeze"),
        (dict(group_settings=["missing.lr=1"]), "group in --group-settings"),
        (dict(rnn="lstm", num_envs=3), "divide"),
        (dict(sync_frac=0.5), "--sync-frac is for envs on the CPU"),
    ],
    ids=str,
)
def test_resume_checks_settings_as_train_does(plain, tmp_path, settings, says):
    shutil.copytree(plain, tmp_path / "run", symlinks=True)
    change(tmp_path / "run", **settings)
    before = (tmp_path / "run/config.json").read_text()
    with pytest.raises(ShoalError, match=says):
        shoal.resume(tmp_path / "run", total_steps=128)
    assert (tmp_path / "run/config.json").read_text() == before


def test_resume_resolves_auto(plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run", symlinks=True)
    change(tmp_path / "run", device="auto", precision="auto", compile="auto")
    shoal.resume(tmp_path / "run", total_steps=128)
    hardware = json.loads((tmp_path / "run/config.json").read_text())["hardware"]
    assert "auto" not in (hardware["device"], hardware["precision"], hardware["compile"])
