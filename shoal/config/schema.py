"""Settings of a run: one frozen dataclass, checked before anything is allocated."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.config.counts import AUTO, Count, EnvCount
from shoal.core.errors import ShoalError
from shoal.core.settings import MOST_THREADS, check_settings

WIDEST, DEEPEST = 2**16, 256
"""Limits of a network's layers."""

MOST = dict(
    num_envs=2**31 - 1,
    rollout_steps=2**31 - 1,
    action_repeat=2**20,
    frame_stack=2**10,
    rnn_size=WIDEST,
    rnn_layers=DEEPEST,
    eval_episodes=2**31 - 1,
    gpus=MOST_THREADS,
    processes=MOST_THREADS,
    threads=MOST_THREADS,
)
"""The largest values of settings that sizes and numbers of threads are made of."""


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
    rollout_steps: Count = 32
    """Steps of each env between two updates."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    gpus: int | None = None
    """Train on so many GPUs of this machine, one process each."""
    processes: int = 1
    """Processes that share out the envs and average their gradients, on CPU cores or on the GPUs there are. All other
    numbers mean the whole run. Under torchrun or srun, those that were started."""
    sync_frac: float = 0.0
    """Of several processes with envs on the host, those that have made a quarter of their rollout end it when this
    share of all has finished (0: never; 0.6 is good). Nobody waits for a straggler, but runs do not repeat."""
    run_dir: Path | None = None
    """Folder of this run (default: a new one under runs/)."""
    torch_deterministic: bool = False
    """Make torch refuse operations that do not repeat bit for bit."""
    encoder: str = "auto"
    """Encoder: mlp, nature (CNN), impala (ResNet), se-resnet9, se-resnet9-small, auto (nature for images, else mlp), or
    your own nn.Module as my_file.py:Net, built as Net(observation_shape)."""
    hidden: tuple[int, ...] = (64, 64)
    """Widths of the MLP's layers."""
    activation: Literal["tanh", "relu", "elu", "silu"] = "tanh"
    """Activation of the MLP."""
    shared_encoder: bool = False
    """Let policy and value share one encoder."""
    rnn: Literal["none", "lstm", "gru"] = "none"
    """Memory of an episode between encoder and heads; policy and value then share one encoder."""
    rnn_size: int = 256
    """Width of the core."""
    rnn_layers: int = 1
    """Layers of the core, each on top of the one before."""
    log_std_init: float = 0.0
    """Logarithm of the first spread of Box actions, in halves of their range."""
    normalize_obs: bool = False
    """Shift and scale observations by their running mean and deviation."""
    obs_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
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
    max_policy_lag: int = 2
    """Maximum policy lag: updates allowed between acting and learning (0: synchronous)."""
    learner_device: str | None = None
    """Asynchronously, learn on another device than --device, which then only acts: cuda:1; cuda with --device cpu."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile networks and losses (auto: on a GPU, and on a CPU for runs long enough to win the time back)."""
    cuda_graphs: bool = True
    """On a GPU, replay rollout and update as CUDA graphs."""
    threads: int | None = None
    """Threads that share an operation of torch on a CPU (none: all cores); small networks are faster with 1."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the products inside networks (auto: bf16 on a GPU, fp32 on a CPU)."""
    eval_episodes: int = 100
    """Episodes of each evaluation; they run at every checkpoint, in envs of their own (0: none)."""
    eval_stochastic: bool = False
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
        for name in ("total_steps", "num_envs", "rollout_steps", "action_repeat", "frame_stack"):
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
        for name in ("rnn_size", "rnn_layers"):
            if getattr(self, name) < 1:
                raise ShoalError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}.")
        for name in ("gpus", "processes"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ShoalError(f"--{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.sync_frac < 1:
            raise ShoalError(f"--sync-frac must be at least 0 and below 1, got {self.sync_frac}.")
        if self.sync_frac and self.asynchronous:
            raise ShoalError("--sync-frac is for rollouts that all processes wait for: use it or --asynchronous.")
        if self.max_policy_lag < 0:
            raise ShoalError(f"--max-policy-lag must not be negative, got {self.max_policy_lag}.")
        if self.learner_device is not None and not self.asynchronous:
            raise ShoalError("--learner-device is for training with --asynchronous: otherwise one device does both.")
        if self.threads is not None and self.threads < 1:
            raise ShoalError(f"--threads must be at least 1, got {self.threads}.")
        if any(not 1 <= width <= WIDEST for width in self.hidden) or len(self.hidden) > DEEPEST:
            raise ShoalError(f"--hidden must hold up to {DEEPEST} widths from 1 to {WIDEST}, got {self.hidden}.")

    @property
    def steps_per_iteration(self) -> int:
        return self.num_envs * self.rollout_steps

    @property
    def iterations(self) -> int:
        return -(-self.total_steps // self.steps_per_iteration)


POLICY_SETTINGS = (
    "encoder",
    "hidden",
    "activation",
    "shared_encoder",
    "rnn",
    "rnn_size",
    "rnn_layers",
    "log_std_init",
    "normalize_obs",
)
"""Settings of a run that make a policy; like the learner's, they can differ between groups."""
