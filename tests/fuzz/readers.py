"""Fuzzed readers: valid files of each, mutations of them, and the command that reads them.

Input `number` of a reader is always the same: its choices come from a random generator seeded by both.
"""

import copy
import gzip
import hashlib
import json
import os
import shutil
import tempfile
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import hypothesis
import hypothesis.strategies as st
import numpy as np

import shoal
from shoal.algos.registry import LEARNERS
from shoal.config.schema import SECTIONS
from shoal.core.registry import WORLDS
from shoal.core.world_loading import world_class
from shoal.nav.episode_files import read_episodes
from shoal.nav.episodes import check_episodes
from tests.damage import CONTENTS, DAMAGES
from tests.fuzz.mutations import EDGES, mutate_bytes, mutate_json, mutate_tensors, to_json
from tests.nav.rooms import pathfinder, room
from tests.scene.meshes import FOUR, Gltf, picture_bytes

SMALL = dict(
    num_envs=8,
    rollout_steps=8,
    total_steps=192,
    checkpoint_every=64,
    eval_episodes=2,
    hidden=(8, 8),
    log_every_seconds=0.0,
    quiet=True,
)
STEPS = 192


@dataclass(frozen=True)
class Input:
    """One input and how it is read."""

    label: str
    """What was done to which file."""
    read: list[str] | Callable[[], Any]
    """Words of the command line, or a call that may return an exit code."""
    intact: bool
    """Whether it passes the outer checks: JSON that can be parsed, checksums that fit."""


Make = Callable[[Random, Path, Path], Input]
"""(choices, folder of valid files, empty folder for the input) -> the input."""


# --- run folders -----------------------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "ppo": dict(world="cartpole"),
    "dqn": dict(world="cartpole", algo="dqn", buffer_size=256, batch_size=16, learning_starts=32),
    "lstm": dict(world="pendulum", rnn="lstm", rnn_size=8, normalize_obs=True, normalize_reward=True),
    "tag": dict(world="tag-continuous", world_config=dict(num_taggers=2, num_runners=3, max_steps=20)),
    "grid": dict(world="tag-grid", algo="a2c", num_envs=4),
    "pandemic": dict(world="pandemic", num_envs=2, world_config=dict(max_steps=20)),
    "r2d2": dict(world="cartpole", algo="r2d2", buffer_size=512, batch_size=8, learning_starts=64, rnn_size=8)
    | dict(burn_in=8, sequence_length=8),
    "host": dict(world="gym:CartPole-v1", world_config=dict(vec_backend="serial")),
}
"""Settings of the runs that are damaged."""

COMMANDS: dict[str, list[str]] = {
    "eval": ["eval", "RUN", "--episodes", "1", "--device", "cpu"],
    "record": ["record", "RUN", "--envs", "1", "--steps", "2", "--out", "OUT/sheet.png", "--device", "cpu"],
    "plot": ["plot", "RUN", "--out", "OUT/curve.png"],
    "resume": ["resume", "RUN", "--total-steps", str(2 * STEPS), "--quiet"],
    "load": [
        "train",
        "WORLD",
        "--load-policy",
        "GROUP=RUN",
        "--run-dir",
        "OUT/other",
        *"--num-envs 8 --rollout-steps 8".split(),
    ]
    + "--hidden 8 8 --total-steps 64 --eval-episodes 0 --quiet --device cpu".split(),
}
"""What reads run folders."""

READ_BY = {
    "config.json": ["eval", "record", "resume", "load", "plot"],
    "manifest.json": ["eval", "resume", "load"],
    "policy.safetensors": ["eval", "resume", "load"],
    "state.safetensors": ["resume"],
    "metrics.jsonl": ["plot", "resume"],
    "eval.jsonl": ["plot", "resume"],
}
"""Which commands read a file."""


def make_runs(folder: Path) -> None:
    """Train the runs that are damaged later."""
    for name, settings in RUNS.items():
        shoal.train(**(SMALL | settings), run_dir=folder / name, device="cpu", compile="off")


def run_file(file: str) -> Make:
    """Damage to the content of one file of a run; in a checkpoint, mostly with checksums that fit."""

    def make(rng: Random, base: Path, folder: Path) -> Input:
        name, path = _copy_run(rng, base, folder)
        target = path / file
        if file in READ_BY and not target.exists():
            target = sorted((path / "checkpoints").glob("step_*"))[-1] / file
        data = target.read_bytes()
        intact = rng.random() < 0.7
        if not intact:
            data, done = mutate_bytes(rng, data)
        elif file.endswith(".json"):
            tree, done = mutate_json(rng, json.loads(data))
            data = to_json(tree)
        elif file.endswith(".jsonl"):
            rows = [json.loads(line) for line in data.splitlines()]
            rows, done = mutate_json(rng, rows)
            data = b"".join(to_json(row) + b"\n" for row in (rows if isinstance(rows, list) else [rows]))
        else:
            data, done = mutate_tensors(rng, data)
        target.write_bytes(data)
        if file.endswith(".safetensors") and (intact or rng.random() < 0.5):
            manifest = json.loads((target.parent / "manifest.json").read_text())
            manifest["sha256"][file] = hashlib.sha256(data).hexdigest()
            (target.parent / "manifest.json").write_text(json.dumps(manifest))
        if file == "manifest.json" or (file.endswith(".safetensors") and rng.random() < 0.5):
            for other in path.joinpath("checkpoints").glob("step_*"):  # nothing to fall back to
                if other != target.parent:
                    shutil.rmtree(other)
        return _command(rng, name, path, folder, READ_BY[file], f"{file}: {done}", intact)

    return make


def run_folder(rng: Random, base: Path, folder: Path) -> Input:
    """Files replaced by pipes, links and other things; entries that do not belong there."""
    name, path = _copy_run(rng, base, folder)
    precious = folder / "precious"
    precious.write_text("precious")
    done = []
    for _ in range(rng.choice((1, 1, 2, 4))):
        entries = sorted(entry for entry in path.rglob("*") if "/tb" not in str(entry))
        if not entries:
            break
        target = rng.choice(entries)
        action = rng.choice((*DAMAGES, "link", "stray", "stray"))
        if action == "link":
            shutil.rmtree(target) if target.is_dir() and not target.is_symlink() else target.unlink()
            target.symlink_to(precious)
        elif action == "stray":
            words = ("step_foo", "step_-1", "step_" + "9" * 30, "step_000000000064.tmp", ".writing_1", "damaged_x", "é")
            stray = (target if target.is_dir() else target.parent) / rng.choice((*words, "manifest.json", "lock", "tb"))
            if not os.path.lexists(stray):
                rng.choice((os.mkdir, os.mkfifo, Path.touch, lambda p: p.symlink_to(path)))(stray)
        elif action not in CONTENTS or (target.is_file() and not target.is_symlink() and target.stat().st_size):
            DAMAGES[action](target)
        done.append(f"{target.relative_to(path)} {action}")
    found = _command(rng, name, path, folder, list(COMMANDS), "; ".join(done), False)

    def check() -> int:
        code = shoal.cli.main(found.read)
        assert precious.read_text() == "precious", "a file outside of the run has changed"
        return code

    return Input(found.label, check, False)


def _copy_run(rng: Random, base: Path, folder: Path) -> tuple[str, Path]:
    name = rng.choice(list(RUNS))
    shutil.copytree(base / name, folder / "run", symlinks=True)
    return name, folder / "run"


def _command(rng: Random, name: str, path: Path, folder: Path, commands: list[str], label: str, intact: bool) -> Input:
    command = rng.choice(commands)
    world = RUNS[name]["world"]
    groups = {"cartpole": "cart", "pendulum": "pendulum", "tag-continuous": "runner", "tag-grid": "tagger"}
    names = {"RUN": str(path), "WORLD": world, "GROUP=RUN": f"{groups.get(world, 'agent')}={path}"}
    words = [names.get(word, word.replace("OUT", str(folder))) for word in COMMANDS[command]]
    return Input(f"{command} of {name}, {label}", words, intact)


# --- scenes ----------------------------------------------------------------------------------------------------------


def make_scenes(folder: Path) -> None:
    """One small mesh in every format, with textures."""
    made = Gltf()
    picture = made.texture(picture_bytes(FOUR))
    uv = made.accessor(np.array([[0, 0], [1, 0], [1, 1], [0, 1]], np.float32))
    material = {"pbrMetallicRoughness": {"baseColorTexture": {"index": picture}, "baseColorFactor": [1, 0.5, 1, 1]}}
    for _ in range(2):
        made.mesh(material={**material, "alphaMode": "MASK", "alphaCutoff": 0.5}, TEXCOORD_0=uv, name="wall")
    made.append("nodes", {"mesh": 0, "children": [1], "translation": [0, 0, 1], "name": "a"})
    made.append("nodes", {"mesh": 1, "rotation": [0, 0, 0, 1], "scale": [1, 2, 1], "extras": {"class": "wall"}})
    made.save(folder / "mesh.glb")
    made.save_apart(folder / "mesh.gltf")
    (folder / "picture.png").write_bytes(picture_bytes(FOUR))
    (folder / "mesh.mtl").write_text("newmtl a\nKd 1 0.5 0.2\nmap_Kd -s 2 2 picture.png\nnewmtl b\nd 0.5\nTr 0.1\n")
    (folder / "mesh.obj").write_text(
        "mtllib mesh.mtl\no wall\nv 0 0 0\nv 1 0 0 1 0 0\nv 1 1 0\nv 0 1 0\nvt 0 0\nvt 1 0\nvt 1 1\nvn 0 0 1\n"
        "g one\nusemtl a\nf 1/1/1 2/2/1 3/3/1\ns off\nusemtl b\nf 1 3 4\nf -4 -3 -2 -1\nl 1 2\n"
    )
    header = (
        "ply\nformat {} 1.0\ncomment made by hand\nelement vertex 4\nproperty float x\nproperty float y\n"
        "property float z\nproperty uchar red\nproperty uchar green\nproperty uchar blue\nelement face 2\n"
        "property list uchar int vertex_indices\nend_header\n"
    )
    corners = [(0, 0, 0, 255, 0, 0), (1, 0, 0, 0, 255, 0), (1, 1, 0, 0, 0, 255), (0, 1, 0, 9, 9, 9)]
    text = "".join(" ".join(map(str, row)) + "\n" for row in corners) + "3 0 1 2\n3 0 2 3\n"
    (folder / "mesh.ply").write_text(header.format("ascii") + text)
    binary = b"".join(np.array(row[:3], "<f4").tobytes() + bytes(row[3:]) for row in corners)
    faces = b"".join(b"\3" + np.array(row, "<i4").tobytes() for row in ((0, 1, 2), (0, 2, 3)))
    (folder / "binary.ply").write_bytes(header.format("binary_little_endian").encode() + binary + faces)


def gltf(rng: Random, base: Path, folder: Path) -> Input:
    """Mutated JSON in .gltf and .glb with right lengths, mutated buffers and pictures."""
    for file in ("mesh.bin", "mesh.gltf", "mesh.glb"):
        shutil.copy(base / file, folder)
    made = Gltf()
    made.tree, made.binary = json.loads((base / "mesh.gltf").read_text()), (base / "mesh.bin").read_bytes()
    if rng.random() < 0.7:
        made.tree, done = mutate_json(rng, made.tree)
        intact = True
    else:
        made.binary, done = mutate_bytes(rng, made.binary)
        intact = False
    file = folder / rng.choice(("mesh.glb", "mesh.gltf"))
    if rng.random() < 0.15:
        data, done = mutate_bytes(rng, file.read_bytes())
        file.write_bytes(data)
        intact = False
    elif file.suffix == ".glb":
        if intact and isinstance(made.tree, dict) and isinstance(buffers := made.tree.get("buffers"), list):
            for buffer in buffers[:1]:
                if isinstance(buffer, dict):
                    buffer.pop("uri", None)
        file.write_bytes(made.frame(to_json(made.tree)))
    else:
        (folder / "mesh.bin").write_bytes(made.binary)
        file.write_bytes(to_json(made.tree))
    return _scene_command(rng, file, f"{file.suffix}: {done}", intact)


def mesh(*files: str) -> Make:
    """Mutated bytes in one of some files."""

    def make(rng: Random, base: Path, folder: Path) -> Input:
        for file in ("mesh.obj", "mesh.mtl", "picture.png", "mesh.ply", "binary.ply"):
            shutil.copy(base / file, folder)
        changed = folder / rng.choice(files)
        data, done = mutate_bytes(rng, changed.read_bytes())
        changed.write_bytes(data)
        opened = changed if changed.suffix in (".obj", ".ply") else folder / "mesh.obj"
        return _scene_command(rng, opened, f"{changed.name}: {done}", False)

    return make


def _scene_command(rng: Random, file: Path, label: str, intact: bool) -> Input:
    words = ["scene", "info", str(file)]
    if rng.random() < 0.2:
        sheet = str(file.with_name("sheet.png"))
        words = ["scene", "render", str(file), "--views", "1", "--size", "16x16", "--device", "cpu", "--out", sheet]
    return Input(label, words, intact)


def scene_cache(rng: Random, base: Path, folder: Path) -> Input:
    """Damage to a prepared scene in the cache."""
    os.environ["SHOAL_CACHE"] = str(folder / "cache")
    shutil.copy(base / "mesh.ply", folder)
    words = ["scene", "info", str(folder / "mesh.ply")]
    shoal.cli.main(words)
    (entry,) = (folder / "cache").iterdir()
    damage = rng.choice((*DAMAGES, "bytes", "bytes", "bytes"))
    if damage == "bytes":
        data, damage = mutate_bytes(rng, entry.read_bytes())
        entry.write_bytes(data)
    else:
        DAMAGES[damage](entry)
    return Input(f"cache: {damage}", words, False)


# --- episode files ---------------------------------------------------------------------------------------------------


def make_episode_file(folder: Path) -> None:
    """A file in Habitat's format."""
    entry = dict(
        episode_id="7",
        scene_id="rooms/room.obj",
        start_position=[1.0, 0.0, -3.0],
        start_rotation=[0.0, 0.0, 0.0, 1.0],
        goals=[dict(position=[2.0, 0.0, -4.0], radius=0.2)],
        info=dict(geodesic_distance=1.5),
        shortest_paths=None,
    )
    tree = {"episodes": [entry, {**entry, "episode_id": "8", "start_position": [4.0, 0.0, -3.0]}]}
    (folder / "val.json").write_text(json.dumps(tree))


def episodes(rng: Random, base: Path, folder: Path) -> Input:
    """Mutated JSON, compressed or not; mutated bytes of both. The result is placed on the floor of a room."""
    data = (base / "val.json").read_bytes()
    intact = rng.random() < 0.75
    if intact:
        tree, done = mutate_json(rng, json.loads(data))
        data = to_json(tree)
    else:
        data, done = mutate_bytes(rng, data)
    file = folder / rng.choice(("val.json", "val.json.gz"))
    if file.suffix == ".gz":
        data = gzip.compress(data)
        if not intact and rng.random() < 0.5:
            data, done = mutate_bytes(rng, data)
    file.write_bytes(data)

    def read() -> None:
        finder = pathfinder(room())
        for found in read_episodes(file).values():
            check_episodes(finder, found)

    return Input(done, read, intact)


# --- settings --------------------------------------------------------------------------------------------------------

WORDS = ["", "auto", "none", "true", "nan", "é", "\x1b[31m", "x" * 3000, "cpu", "cuda:99", "mlp", "lstm", "os:system"]
WORDS += ["nothere.py:Net", "1e3", "cart.lr=1", "agent.hidden=8,8", "cart=/tmp", "--", "house:1", "{}", '{"a": 1}']

NAMED = [*WORLDS, "gym:CartPole-v1", "gym:NoSuch-v1", "gym:os:X-v0", "ale:pong", "ale:../x", "zoo:os", "os:system", ""]
NAMED += ["nothere.py:World", "cart pole", "a\0b", "x" * 300]
"""Names of worlds."""

JSON_VALUES = st.recursive(
    st.builds(lambda number: copy.deepcopy([*EDGES, *WORDS][number]), st.integers(0, len(EDGES) + len(WORDS) - 1))
    | st.integers()
    | st.floats()
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def values_of(hint: Any) -> st.SearchStrategy:
    """Values of a setting's declared type, near its bounds and far beyond."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return values_of(parts[0])
    if origin is Literal:
        return st.sampled_from(parts)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values_of(part) for part in parts))
    if origin is tuple:
        return st.lists(values_of(parts[0]), max_size=4)
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(-1, 5) | st.sampled_from((16, 64, 256)) | st.integers(-(2**70), 2**70)
    if hint is float:
        return st.floats(0, 1) | st.sampled_from((0, 1, 1e-320, 1e30, -1e308)) | st.floats()
    return st.none() if hint is type(None) else st.sampled_from(WORDS) | st.text(max_size=12)


@st.composite
def jobs(draw: Any) -> tuple[str, str, dict[str, Any], dict[str, Any], bool]:
    """World, algorithm, settings, settings of the world, and whether they are given as flags."""
    world = draw(st.sampled_from(NAMED)) if draw(st.integers(0, 3)) == 0 else draw(st.sampled_from(list(WORLDS)))
    algo = draw(st.sampled_from(list(LEARNERS)))
    kinds = [*SECTIONS.values(), LEARNERS[algo][0]]
    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind, include_extras=True).items()}
    of_world = get_type_hints(world_class(world).Config) if world in WORLDS else {}

    def some(hints: dict[str, Any]) -> dict[str, Any]:
        names = draw(st.lists(st.sampled_from(sorted(hints)), max_size=4, unique=True)) if hints else []
        return {n: draw(JSON_VALUES if draw(st.integers(0, 5)) == 0 else values_of(hints[n])) for n in names}

    return (
        world,
        algo,
        some({n: h for n, h in hints.items() if n not in ("algo", "device")}),
        some(of_world),
        draw(st.booleans()),
    )


def example(strategy: st.SearchStrategy, number: int) -> Any:
    """What hypothesis draws for a seed."""
    drawn = []

    @hypothesis.seed(number)
    @hypothesis.settings(
        max_examples=5, database=None, phases=[hypothesis.Phase.generate], suppress_health_check=hypothesis.HealthCheck
    )
    @hypothesis.given(strategy)
    def collect(value: Any) -> None:
        drawn.append(value)

    collect()
    return drawn[-1]  # the first ones are the simplest that there are


def settings(rng: Random, base: Path, folder: Path) -> Input:
    """Names and values as flags and from Python, of the declared types and of others."""
    world, algo, given, inner, as_flags = example(jobs(), rng.randrange(2**32))
    if not as_flags:
        call = partial(shoal.runs.jobs.make_job, world, algo=algo, device="cpu", world_config=inner, **given)
        return Input(f"make_job {world} {algo} {given} {inner}", call, True)
    words = ["--algo", algo, "--device", "cpu"]
    for name, value in [*given.items(), *((f"world.{name}", value) for name, value in inner.items())]:
        parts = value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *(str(part) for part in parts if part is not True)]
    return Input(f"shoal train {world} {' '.join(words)}", partial(_parse, world, words), True)


def _parse(world: str, words: list[str]) -> None:
    shoal.runs.jobs.parse_job(world, words)


def make_base(folder: Path) -> None:
    """Everything that is damaged later."""
    make_runs(folder)
    make_scenes(folder)
    make_episode_file(folder)


READERS: dict[str, tuple[Make, int]] = {
    "config.json": (run_file("config.json"), 4000),
    "manifest.json": (run_file("manifest.json"), 2000),
    "policy.safetensors": (run_file("policy.safetensors"), 2000),
    "state.safetensors": (run_file("state.safetensors"), 1000),
    "metrics.jsonl": (run_file("metrics.jsonl"), 800),
    "eval.jsonl": (run_file("eval.jsonl"), 800),
    "run folder": (run_folder, 1400),
    "glTF": (gltf, 2500),
    "OBJ": (mesh("mesh.obj", "mesh.obj", "mesh.mtl", "picture.png"), 1250),
    "PLY": (mesh("mesh.ply", "binary.ply"), 1250),
    "scene cache": (scene_cache, 300),
    "episodes": (episodes, 1500),
    "settings": (settings, 1200),
}
"""Name -> what makes an input, and how many of 20,000 inputs are of it."""


def make_input(reader: str, number: int, seed: int, base: Path, folder: Path) -> Input:
    """Input `number` of a reader, its files in `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    tempfile.tempdir = None
    return READERS[reader][0](Random(f"{seed}/{reader}/{number}"), base, folder)
