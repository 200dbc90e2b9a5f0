"""What a run is made of: one frozen dataclass, checked before anything is allocated, saved with the run."""

import json
import math
import os
import shutil
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro

from shoal.core.settings import MOST_THREADS, check_settings, make_settings
from shoal.errors import ShoalError, excerpt, unknown
from shoal.run.files import read_json
from shoal.user_code import UserCode
from shoal.worlds import full_path, kind_of_world, world_class


def parse_count(text: str) -> int:
    """A whole number, also written 1e8 or 20_000."""
    text = text.replace("_", "")
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def to_count(name: str, value: Any) -> int:
    """The same for a value given from Python."""
    try:
        return parse_count(str(value))
    except ValueError as error:
        raise ShoalError(f"{name} must be a whole number: {error}.") from None


Count = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="COUNT",
        instance_from_str=lambda args: parse_count(args[0]),
        is_instance=lambda instance: isinstance(instance, int),
        str_from_instance=lambda instance: [str(instance)],
    ),
]


AUTO = -(2**62)
"""What `--num-envs auto` is until it is decided: a number that nobody asks for."""

EnvCount = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="COUNT|auto",
        instance_from_str=lambda args: parse_envs(args[0]),
        is_instance=lambda instance: isinstance(instance, int),
        str_from_instance=lambda instance: [str(instance)],
    ),
]


def parse_envs(text: str) -> int:
    """A number of envs, or "auto"."""
    return AUTO if text == "auto" else parse_count(text)


WIDEST, DEEPEST = 2**16, 256
"""Limits of a network's layers."""

MOST = dict(
    num_envs=2**31 - 1,
    rollout=2**31 - 1,
    action_repeat=2**20,
    frame_stack=2**10,
    core_size=WIDEST,
    core_layers=DEEPEST,
    eval_episodes=2**31 - 1,
    gpus=MOST_THREADS,
    processes=MOST_THREADS,
    threads=MOST_THREADS,
)
"""The largest values of settings that sizes and numbers of threads are made of."""

COMPILE_FROM_STEPS = 20_000_000
"""Length of a CPU run from which compiling (20 s) pays."""


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a training run. Each world ships tuned ones for CPU and for GPU."""

    algo: Literal["ppo", "a2c", "a3c", "appo", "impala", "dqn", "rainbow", "r2d2", "ddpg", "td3", "sac"] = "ppo"
    """Learner."""
    seed: int = 1
    """Seed of everything: the same seed, device and versions give the same numbers."""
    total_steps: Count = 1_000_000
    """Env steps to train for (1e8 is fine)."""
    num_envs: EnvCount = 256
    """Copies of the world that are stepped together (auto: the most that fit in memory)."""
    rollout: Count = 32
    """Steps of each env between two updates."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    gpus: int | None = None
    """Train on so many GPUs of this machine, one process each."""
    processes: int = 1
    """Processes that share out the envs and average their gradients, on CPU cores or on the GPUs there are. All other
    numbers mean the whole run. Under torchrun or srun, those that were started."""
    cut_short: float = 0.0
    """Of several processes with envs on the host, those that have made a quarter of their rollout end it when this
    share of all has finished (0: never; 0.6 is good). Nobody waits for a straggler, but runs do not repeat."""
    run_dir: Path | None = None
    """Folder of this run (default: a new one under runs/)."""
    deterministic: bool = False
    """Make torch refuse operations that do not repeat bit for bit."""
    policy: str = "auto"
    """Torso: mlp, nature (CNN), impala (ResNet), se-resnet9, se-resnet9-small, auto (nature for images, else mlp), or
    your own nn.Module as my_file.py:Net, built as Net(observation_shape)."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the MLP's layers."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Activation of the MLP."""
    shared: bool = False
    """Let policy and value share one torso."""
    core: Literal["none", "lstm", "gru"] = "none"
    """Memory of an episode between torso and heads; policy and value then share one torso."""
    core_size: int = 256
    """Width of the core."""
    core_layers: int = 1
    """Layers of the core, each on top of the one before."""
    log_std: float = 0.0
    """Logarithm of the first spread of Box actions, in halves of their range."""
    normalise_observation: bool = False
    """Shift and scale observations by their running mean and deviation."""
    observation_type: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type that float observations are kept in; the short ones halve the memory."""
    one_policy: bool = False
    """Let one policy act for all groups, whose spaces must be the same."""
    per_group: tuple[str, ...] = ()
    """Settings of single groups: runner.lr=5e-3 tagger.hidden=64,64."""
    freeze: tuple[str, ...] = ()
    """Groups whose policies act but do not learn."""
    load: tuple[str, ...] = ()
    """Groups that start with the policy of another run: runner=RUN."""
    action_repeat: int = 1
    """Take each action this many times."""
    frame_stack: int = 1
    """Show the last so many observations at once."""
    time_limit: int | None = None
    """Truncate episodes after this many steps of the policy, besides the world's own limit."""
    asynchronous: bool = False
    """Act and learn at the same time: rollouts are made by policies that are some updates old."""
    max_lag: int = 2
    """Asynchronously, rollouts that are learnt from, at most, between the acting and the learning from it (0: none)."""
    learn_device: str | None = None
    """Asynchronously, learn on another device than --device, which then only acts: cuda:1; cuda with --device cpu."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile networks and losses (auto: on a GPU, and on a CPU for runs long enough to win the time back)."""
    graph: bool = True
    """On a GPU, replay rollout and update as CUDA graphs."""
    threads: int | None = None
    """Threads that share an operation of torch on a CPU (none: all cores); small networks are faster with 1."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the products inside networks (auto: bf16 on a GPU, fp32 on a CPU)."""
    eval_episodes: int = 100
    """Episodes of each evaluation; they run at every checkpoint, in envs of their own (0: none)."""
    eval_sample: bool = False
    """In evaluations, draw actions instead of taking the likeliest, which go round in circles in some games."""
    checkpoint_every: Count | None = None
    """Env steps between checkpoints (default: a fifth of the run)."""
    log_every: float = 0.5
    """Seconds between two lines of metrics."""
    quiet: bool = False
    """No progress on the terminal."""
    trust: bool = False
    """Execute code that the runs named by --load need, although you have not trained them on this machine."""

    def __post_init__(self):
        check_settings(self)
        for name in ("total_steps", "num_envs", "rollout", "action_repeat", "frame_stack"):
            if getattr(self, name) < 1 and (name, getattr(self, name)) != ("num_envs", AUTO):
                raise ShoalError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}.")
        for name, most in MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise ShoalError(f"--{name.replace('_', '-')} must be at most {most}, got {value}.")
        if self.time_limit is not None and self.time_limit < 1:
            raise ShoalError(f"--time-limit must be at least 1, got {self.time_limit}.")
        if not 0 <= self.seed < 2**31:
            raise ShoalError(f"--seed must be between 0 and 2147483647, got {self.seed}.")
        if self.log_every < 0:
            raise ShoalError(f"--log-every must not be negative, got {self.log_every}.")
        if self.eval_episodes < 0:
            raise ShoalError(f"--eval-episodes must not be negative, got {self.eval_episodes}.")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ShoalError(f"--checkpoint-every must be at least 1, got {self.checkpoint_every}.")
        for name in ("core_size", "core_layers"):
            if getattr(self, name) < 1:
                raise ShoalError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}.")
        for name in ("gpus", "processes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ShoalError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.cut_short < 1:
            raise ShoalError(f"--cut-short must be at least 0 and below 1, got {self.cut_short}.")
        if self.cut_short and self.asynchronous:
            raise ShoalError("--cut-short is for rollouts that all processes wait for: use it or --asynchronous.")
        if self.max_lag < 0:
            raise ShoalError(f"--max-lag must not be negative, got {self.max_lag}.")
        if self.learn_device is not None and not self.asynchronous:
            raise ShoalError("--learn-device is for training with --asynchronous: otherwise one device does both.")
        if self.threads is not None and self.threads < 1:
            raise ShoalError(f"--threads must be at least 1, got {self.threads}.")
        if any(not 1 <= width <= WIDEST for width in self.hidden) or len(self.hidden) > DEEPEST:
            raise ShoalError(f"--hidden must hold up to {DEEPEST} widths from 1 to {WIDEST}, got {self.hidden}.")

    @property
    def steps_per_iteration(self) -> int:
        return self.num_envs * self.rollout

    @property
    def iterations(self) -> int:
        return -(-self.total_steps // self.steps_per_iteration)


POLICY_SETTINGS = (
    "policy",
    "hidden",
    "activation",
    "shared",
    "core",
    "core_size",
    "core_layers",
    "log_std",
    "normalise_observation",
)
"""Settings of a run that make a policy; like the learner's, they can differ between groups."""

CONFIG = "config.json"
"""The file of a run folder that holds its settings."""

NOT_SAVED = {"run_dir", "trust"}
"""Settings of a run that belong to one command, not to its folder."""

ONE_POLICY = "all"
"""Name of the policy that acts for all groups."""


@dataclass(frozen=True)
class Job:
    """A world by name, its settings, the run's and the learner's: everything that `shoal train` needs."""

    world: str
    train: TrainConfig
    learn: Any
    """Settings of the learner that `train.algo` names."""
    world_config: Any
    """Settings of the world: an instance of its Config."""

    @property
    def groups(self) -> tuple[Any, ...]:
        """Who acts."""
        cls = world_class(self.world)
        with UserCode(f"The groups of {self.world} cannot be read", cls):
            return cls.groups_of(self.world_config)

    def teams(self) -> dict[str, list[Any]]:
        """Name of a policy -> the groups it acts for."""
        if self.train.one_policy:
            return {ONE_POLICY: list(self.groups)}
        return {group.name: [group] for group in self.groups}

    def policy_of(self, group: str) -> str:
        """The name of the policy that acts for a group."""
        return ONE_POLICY if self.train.one_policy else group

    def for_policy(self, name: str) -> "Job":
        """The job with one policy's own settings in place of the common ones."""
        from shoal.run.groups import overrides

        own = overrides(self).get(name, {})
        run = {k: v for k, v in own.items() if k in POLICY_SETTINGS}
        learn = {k: v for k, v in own.items() if k not in POLICY_SETTINGS}
        return replace(self, train=replace(self.train, **run), learn=replace(self.learn, **learn))

    def check_samples(self) -> None:
        """Refuse rollouts of a size that a learner cannot use."""
        for name, groups in self.teams().items():
            own = self.for_policy(name)
            core = own.train.core != "none"
            lanes = self.train.num_envs * sum(group.agents for group in groups)
            own.learn.check_rollout(self.train.rollout, lanes, core)
            count = self.train.processes
            own.learn.check_processes(self.train.rollout, lanes // count, core, count)

    def check_cuts(self) -> None:
        """Refuse --cut-short where rollouts cannot be cut short."""
        if not self.train.cut_short:
            return
        if world_class(self.world).on_device:
            raise ShoalError(
                f"--cut-short is for envs on the host: a rollout of {self.world} is made in one go; leave it out."
            )
        for name in self.teams():
            own = self.for_policy(name)
            own.learn.check_cuts(own.train.core != "none")

    def to_json(self) -> str:
        """What config.json holds: all settings, and which code of the user's they need."""
        from shoal.run.trust import state_code

        train = {name: value for name, value in asdict(self.train).items() if name not in NOT_SAVED}
        parts = {"world": self.world, "train": train, "learn": asdict(self.learn)}
        parts["world_config"] = asdict(self.world_config)
        # As JSON gives them back: what is signed is what will be read.
        parts = json.loads(json.dumps(parts, default=str))
        return json.dumps(parts | state_code(parts), indent=2) + "\n"


def pick_device(name: str, flag: str = "--device") -> str:
    """The device that a flag means, or one sentence why there is none."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "gpu":
        raise ShoalError(f"{flag} gpu: a GPU is called cuda here.")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise unknown("device", name, ["auto", "cpu", "cuda"]) from None
    if device.type not in ("cpu", "cuda"):
        raise unknown("device", name, ["auto", "cpu", "cuda"])
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ShoalError(f"{flag} {name}: torch sees no usable GPU here; use {flag} cpu or update the driver.")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ShoalError(f"{flag} {name}: this machine has {torch.cuda.device_count()} GPU(s), counted from 0.")
    return name


def tuned(world: Any, algo: str, device: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The tuned settings that a world ships, split into the run's, the learner's and the world's own (`world`).

    Sections, each over the one before: common, the kind of device (cpu, gpu), the learner (ppo), both (ppo_cpu). What
    a learner needs of every run goes over the first two, which are not about it; and one that is like another has that
    one's settings before its own.
    """
    from shoal.learn import LEARNERS

    kind = "gpu" if device.startswith("cuda") else "cpu"
    found: dict[str, Any] = {}
    learner = LEARNERS[algo][0]
    own = [section for name in (learner.like, algo) if name for section in (name, f"{name}_{kind}")]
    for section in ("common", kind, learner.run, *own):
        found.update(world.settings.get(section, {}) if isinstance(section, str) else section)
    run_names = {f.name for f in fields(TrainConfig)}
    learn_names = {f.name for f in fields(learner)}
    run = {k: v for k, v in found.items() if k in run_names}
    learn = {k: v for k, v in found.items() if k in learn_names}
    return run, learn, found.get("world", {})


def _starting_point(world: Any, algo: str, device: str) -> tuple[str, str, dict[str, Any], dict[str, Any], Any]:
    """Learner and device, checked, and the settings tuned for them: what other settings go over."""
    from shoal.learn import LEARNERS

    if algo not in LEARNERS:
        raise unknown("algorithm", algo, LEARNERS)
    device = pick_device(device)
    return algo, device, *tuned(world, algo, device)


def make_job(world: str, **overrides: Any) -> Job:
    """A job from Python: names of the run, of the learner, or `world_config=dict(...)`, over the tuned settings."""
    from shoal.learn import LEARNERS

    cls = world_class(world)
    world_overrides = overrides.pop("world_config", {})
    start = _starting_point(cls, overrides.get("algo", "ppo"), overrides.get("device", "auto"))
    algo, device, run, learn, sizes = start
    shipped = run.get("per_group", ())
    run_names = {f.name for f in fields(TrainConfig)}
    learn_names = {f.name for f in fields(LEARNERS[algo][0])}
    world_names = {f.name for f in fields(cls.Config)}
    for key, value in overrides.items():
        if key == "num_envs" and value == "auto":
            value = AUTO
        elif key in ("total_steps", "num_envs", "rollout", "checkpoint_every") and value is not None:
            value = to_count(key, value)
        if key in ("per_group", "freeze", "load") and isinstance(value, str):
            value = (value,)
        if key in run_names:
            run[key] = value
        elif key in learn_names:
            learn[key] = value
        elif key in world_names:
            raise ShoalError(f"{key} is a setting of the world: give it as world_config=dict({key}={value!r}).")
        else:
            raise unknown("setting", key, run_names | learn_names)
    for key in world_overrides:
        if key not in world_names:
            raise unknown(f"setting of {world}", key, world_names)
    chosen = run["per_group"] if "per_group" in overrides else ()
    run["per_group"] = _joined(shipped, chosen, overrides)
    world_config = make_settings(cls.Config, {**sizes, **world_overrides}, "world.")
    return _settled(Job(full_path(world), TrainConfig(**run), LEARNERS[algo][0](**learn), world_config), device)


def parse_job(world: str, arguments: list[str], command: str = "shoal train") -> Job:
    """A job from the command line: flags over the tuned settings of the world, the learner and the device."""
    with UserCode(f"The settings of {world} cannot be read", world_class(world).Config, (SystemExit,)):
        return _parsed(world, arguments, command)


def _parsed(world: str, arguments: list[str], command: str) -> Job:
    from shoal.learn import LEARNERS

    cls = world_class(world)
    early = _early(arguments, ("--algo", "--device"))
    start = _starting_point(cls, early.get("--algo", "ppo"), early.get("--device", "auto"))
    algo, device, run, learn, sizes = start
    learn_class = LEARNERS[algo][0]
    arguments = _spelled_out(
        arguments, cls.Config, {f.name for kind in (TrainConfig, learn_class) for f in fields(kind)}
    )
    arguments = _with_none(arguments, [TrainConfig, learn_class])
    options = make_dataclass(
        "Options",
        [
            ("train", tyro.conf.OmitArgPrefixes[TrainConfig], field(default=TrainConfig(**{**run, "algo": algo}))),
            ("learn", tyro.conf.OmitArgPrefixes[learn_class], field(default=learn_class(**learn))),
            ("world", cls.Config, field(default=cls.Config(**sizes))),
        ],
        frozen=True,
    )
    parsed = tyro.cli(
        options,
        prog=f"{command} {world}",
        description=f"Train {algo.upper()} on {world}. Defaults are the ones tuned for this world on this device. "
        "--world.NAME may be written --NAME where nothing else has that name.",
        args=arguments,
    )
    given = [word.partition("=")[0].removeprefix("--").replace("-", "_") for word in arguments if word[:2] == "--"]
    shipped = run.get("per_group", ())
    chosen = () if parsed.train.per_group == shipped else parsed.train.per_group
    train = replace(parsed.train, per_group=_joined(shipped, chosen, given))
    return _settled(Job(full_path(world), train, parsed.learn, parsed.world), device)


def _with_none(arguments: list[str], kinds: list[Any]) -> list[str]:
    """`--huber none` means None, where a setting can be that and not the word."""
    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    flags = {f"--{name.replace('_', '-')}" for name, hint in hints.items() if type(None) in get_args(hint)}
    found: list[str] = []
    for word in arguments:
        name, _, value = word.partition("=")
        if word.lower() == "none" and found and found[-1] in flags:
            word = "None"
        elif value.lower() == "none" and name in flags:
            word = f"{name}=None"
        found.append(word)
    return found


def _joined(shipped: tuple[str, ...], chosen: tuple[str, ...], given: Any) -> tuple[str, ...]:
    """A world's settings of single groups, less those that the user has set for all groups, then the user's own."""
    left = [entry for entry in shipped if entry.partition("=")[0].rpartition(".")[2] not in given]
    return (*left, *(entry for entry in chosen if entry not in left))


def _is_bare(hint: Any) -> bool:
    """Whether a setting of a world is a flag without the prefix already."""
    return any(getattr(note, "prefix_name", None) is False for note in getattr(hint, "__metadata__", ()))


def _spelled_out(arguments: list[str], world_config: Any, taken: set[str]) -> list[str]:
    """`--scenes` as `--world.scenes`: settings of the world need no prefix where nothing else has their name."""
    hints = get_type_hints(world_config, include_extras=True)
    bare = {name for name, hint in hints.items() if _is_bare(hint)}
    own = {f.name.replace("_", "-") for f in fields(world_config) if f.name not in taken | bare}
    words = []
    for word in arguments:
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        ours = word.startswith("--") and (name in own or name.removeprefix("no-") in own)
        words.append(f"--world.{word[2:]}" if ours else word)
    return words


def _early(arguments: list[str], flags: tuple[str, ...]) -> dict[str, str]:
    """Flags that decide which others there are, read before the rest."""
    found = {}
    for i, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in flags:
            found[flag] = value if equals else (arguments[i + 1] if i + 1 < len(arguments) else "")
    return found


def load_job(folder: Path, trust: bool = False) -> Job:
    """The job of a run folder, as it was saved; code that it needs must be this user's, or trusted."""
    from shoal.learn import LEARNERS
    from shoal.run.trust import check_code

    path = folder / CONFIG
    if not os.path.lexists(path):
        raise ShoalError(f"{folder} is not a run: it has no config.json.")
    try:
        parts = read_json(path)
        world, train, learn, world_config = _parts_of(path, parts)
        kind_of_world(world)
        check_code(path, parts, trust)
        cls = world_class(world)
        learn_class = LEARNERS[train.get("algo", TrainConfig.algo)][0]
        for name, values, kind in (("train", train, TrainConfig), ("learn", learn, learn_class)):
            _check_names(path, name, values, kind)
        _check_names(path, "world_config", world_config, cls.Config)
        train.update(run_dir=folder, trust=trust)
        return Job(world, TrainConfig(**train), learn_class(**learn), make_settings(cls.Config, world_config, "world."))
    except ShoalError as error:
        raise ShoalError(str(error) if str(folder) in str(error) else f"{path}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError, OSError) as error:
        raise ShoalError(f"{path} cannot be read as a run's settings: {excerpt(error, 200)}.") from None


def _parts_of(path: Path, parts: Any) -> tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """World, and settings of the run, the learner and the world, of the types that they must have."""
    if not isinstance(parts, dict):
        raise ShoalError(f"{path} must hold a JSON object.")
    world, *settings = [parts.get(name) for name in ("world", "train", "learn", "world_config")]
    if not isinstance(world, str) or not all(isinstance(part, dict) for part in settings):
        raise ShoalError(f"{path} must name a world, and hold objects called train, learn and world_config.")
    train, learn, world_config = (_with_tuples(values) for values in settings)
    for name, kind in (("policy", str), ("algo", str)):
        if not isinstance(train.get(name, ""), kind):
            raise ShoalError(f"{path}: {name} must be a {kind.__name__}, got {excerpt(train[name])}.")
    if train.get("num_envs") == AUTO:
        raise ShoalError(f"{path}: num_envs must be at least 1, got {AUTO}.")
    if not all(isinstance(entry, str) for entry in train.get("per_group", ())):
        raise ShoalError(f"{path}: per_group must be a list of texts.")
    return world, train, learn, world_config


def _check_names(path: Path, part: str, values: dict[str, Any], kind: Any) -> None:
    """Every setting must be there, by its name, and no other."""
    known = {f.name for f in fields(kind)}
    for name in values:
        if name not in known:
            raise unknown(f"setting in {part} of {path}:", name, known)
    if absent := known - values.keys() - NOT_SAVED:
        raise ShoalError(f"{path} lacks {', '.join(sorted(absent))} in {part}.")


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where settings have tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def _settled(job: Job, device: str) -> Job:
    """With every "auto" decided, so that a resumed run computes as it did before.

    Compiled: always on a GPU; on a CPU only long runs, and only where there is a C++ compiler.
    """
    from shoal.run.groups import checked
    from shoal.run.processes import settled as share_out

    config = share_out(replace(job.train, device=device))
    gpu = device.startswith("cuda")
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    compile_it = gpu or (compiler is not None and config.total_steps >= COMPILE_FROM_STEPS)
    if config.learn_device is not None:
        pick_device(config.learn_device, "--learn-device")
    settled = replace(
        config,
        device=device,
        compile=config.compile if config.compile != "auto" else "on" if compile_it else "off",
        policy=full_path(config.policy),
        precision=config.precision if config.precision != "auto" else "bf16" if gpu else "fp32",
    )
    job = checked(replace(job, train=settled))
    if job.train.num_envs == AUTO:
        from shoal.run.memory import most_envs

        job = replace(job, train=replace(job.train, num_envs=most_envs(job)))
    job.check_samples()
    job.check_cuts()
    return job
