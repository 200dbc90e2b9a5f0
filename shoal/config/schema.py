"""Settings of a run: frozen dataclasses, checked before anything is allocated.

`SECTIONS` lists them. No two have a field of the same name, so a flag or a keyword argument needs no prefix.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from shoal.algos.registry import LEARNERS
from shoal.config.counts import Count, EnvCount
from shoal.core.errors import ShoalError
from shoal.core.settings import INT32, MAX_THREADS, Bounds, NonNegative, NonNegativeFloat, Positive, check_settings
from shoal.policy.config import PolicyConfig

Processes = Annotated[int, Bounds(ge=1, le=MAX_THREADS)]


@dataclass(frozen=True)
class RunConfig:
    """What is trained, for how long, and what is written."""

    algo: Literal[tuple(LEARNERS)] = "ppo"
    """Algorithm."""
    total_steps: Annotated[Count, Bounds(ge=1)] = 1_000_000
    """Total number of env steps (1e8 is fine)."""
    num_envs: EnvCount = 256
    """Number of parallel envs (auto: the most that fit in memory)."""
    rollout_steps: Annotated[Count, Bounds(ge=1, le=INT32)] = 32
    """Steps of each env per rollout, between two updates."""
    seed: Annotated[int, Bounds(ge=0, le=INT32)] = 1
    """Random seed; the same seed, device and versions give the same numbers."""
    run_dir: Path | None = None
    """Folder of this run (default: a new one under runs/)."""
    checkpoint_every: Annotated[Count, Bounds(ge=1)] | None = None
    """Env steps between checkpoints (default: a fifth of the run)."""
    log_every_seconds: NonNegativeFloat = 0.5
    """Seconds between two rows of metrics."""
    quiet: bool = False
    """Show no progress on the terminal."""
    trust: bool = False
    """Execute code that the runs named by --load-policy need, although you have not trained them on this machine."""

    def __post_init__(self):
        check_settings(self)

    @property
    def steps_per_iteration(self) -> int:
        """Env steps of one rollout."""
        return self.num_envs * self.rollout_steps

    @property
    def iterations(self) -> int:
        """Rollouts of the run."""
        return -(-self.total_steps // self.steps_per_iteration)


@dataclass(frozen=True)
class HardwareConfig:
    """Where and how the run computes."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    gpus: Processes | None = None
    """Number of GPUs of this machine, with one data-parallel process each."""
    processes: Processes = 1
    """Number of data-parallel processes. Envs are split evenly and gradients averaged; all other settings are totals.
    Under torchrun or srun, the number that was started."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of matrix products inside networks (auto: bf16 on a GPU, fp32 on a CPU)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile networks and losses with torch.compile (auto: on a GPU, and on a CPU for runs long enough to gain)."""
    cuda_graphs: bool = True
    """On a GPU, replay rollout and update as CUDA graphs."""
    threads: Annotated[int, Bounds(ge=1, le=MAX_THREADS)] | None = None
    """Threads of a torch operation on a CPU (none: all cores); small networks are faster with 1."""
    torch_deterministic: bool = False
    """Make torch refuse operations that do not repeat bit for bit."""

    def __post_init__(self):
        check_settings(self)


@dataclass(frozen=True)
class ScheduleConfig:
    """Schedule of acting, learning and processes."""

    asynchronous: bool = False
    """Act and learn at the same time; the acting policy is then some updates old."""
    max_policy_lag: NonNegative = 2
    """Maximum policy lag: updates allowed between acting and learning (0: synchronous)."""
    learner_device: str | None = None
    """With --asynchronous, device of the learner; --device then only acts (cuda:1; cuda with --device cpu)."""
    sync_frac: Annotated[float, Bounds(ge=0, lt=1)] = 0.0
    """Preempt rollouts of slow processes once this fraction of processes has finished (DD-PPO's `sync_frac`; 0: off,
    0.6: typical). Runs are then not reproducible."""

    def __post_init__(self):
        check_settings(self)
        if self.sync_frac and self.asynchronous:
            raise ShoalError("--sync-frac is for rollouts that all processes wait for: use it or --asynchronous.")
        if self.learner_device is not None and not self.asynchronous:
            raise ShoalError("--learner-device is for training with --asynchronous: otherwise one device does both.")


@dataclass(frozen=True)
class WrapperConfig:
    """Wrappers around the world."""

    action_repeat: Annotated[int, Bounds(ge=1, le=2**20)] = 1
    """Repeat each action this many times."""
    frame_stack: Annotated[int, Bounds(ge=1, le=2**10)] = 1
    """Stack this many of the latest observations."""
    time_limit: Positive | None = None
    """Truncate episodes after this many steps of the policy, besides the world's own limit."""
    obs_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type in which float observations are kept; the short ones halve the memory."""

    def __post_init__(self):
        check_settings(self)


@dataclass(frozen=True)
class MultiAgentConfig:
    """Which policy acts for which group of agents."""

    one_policy: bool = False
    """Use one policy for all groups; their spaces must be equal."""
    group_settings: tuple[str, ...] = ()
    """Settings of single groups: runner.lr=5e-3 tagger.hidden=64,64."""
    freeze_groups: tuple[str, ...] = ()
    """Groups whose policies act but do not learn."""
    load_policy: tuple[str, ...] = ()
    """Groups that start with the policy of another run: runner=RUN."""

    def __post_init__(self):
        check_settings(self)


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluations during training; they run at every checkpoint, in envs of their own."""

    eval_episodes: Annotated[int, Bounds(ge=0, le=INT32)] = 100
    """Episodes per evaluation (0: no evaluations)."""
    eval_stochastic: bool = False
    """Sample actions in evaluations instead of taking the most likely ones."""

    def __post_init__(self):
        check_settings(self)


SECTIONS: dict[str, Any] = dict(
    run=RunConfig,
    hardware=HardwareConfig,
    policy=PolicyConfig,
    schedule=ScheduleConfig,
    wrappers=WrapperConfig,
    multi_agent=MultiAgentConfig,
    evaluation=EvaluationConfig,
)
"""Sections of a run's settings, by their name in a Job and in config.json."""

SECTION_OF: dict[str, str] = {f.name: section for section, kind in SECTIONS.items() for f in fields(kind)}
"""Section of every setting."""


def make_sections(values: dict[str, Any]) -> dict[str, Any]:
    """All sections, from settings by name; the rest have their defaults."""
    parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in values.items():
        parts[SECTION_OF[name]][name] = value
    return {section: SECTIONS[section](**part) for section, part in parts.items()}
