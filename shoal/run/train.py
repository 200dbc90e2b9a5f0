"""`shoal train` and `shoal resume`: a trainer in a run folder, with progress, checkpoints and a clean end."""

import json
import signal
import time
import typing
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from shoal.core.settings import read_setting
from shoal.core.world import World
from shoal.errors import ShoalError, unknown
from shoal.policy import Policy
from shoal.run.build import by_group, make_policies, make_world
from shoal.run.checkpoint import Checkpoint, compare, load_checkpoint, load_latest
from shoal.run.config import Job, load_job, make_job, pick_device, to_count
from shoal.run.evaluate import Evaluation, RandomPolicy, Watch, evaluate
from shoal.run.folder import RunFolder, write_whole
from shoal.run.groups import loads, parse_load, same_group
from shoal.run.memory import estimate, out_of_memory
from shoal.run.metrics import MetricsWriter
from shoal.run.progress import Progress
from shoal.run.trainer import BadNumbers, Trainer, part_of

CHECKPOINTS_PER_RUN = 5


class Stopped(Exception):
    """A signal asked the run to end; it has been saved."""

    def __init__(self, number: int, path: Path):
        self.exit_code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} and saved; continue with `shoal resume {path}`.")


class SaveFailed(ShoalError):
    """The last checkpoint could not be written."""

    exit_code = 1


class Run:
    """A finished or interrupted run: its folder, its job and the policy of every group."""

    def __init__(self, folder: RunFolder, job: Job, policies: dict[str, Policy]):
        self.folder, self.job, self.policies = folder, job, policies

    @property
    def path(self) -> Path:
        return self.folder.path

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def evaluate(
        self, episodes: int = 100, seed: int | None = None, sample: bool | None = None, watch: Watch | None = None
    ) -> Evaluation:
        """Whole episodes in fresh envs, scored per group, with the weights that are here.

        After training those are the last ones; `load_run` reads the best. `watch` looks on: see `shoal.view.maps`.
        """
        return evaluate(self.job, self.policies, episodes, seed, sample, watch=watch)


def train(world: str, **settings: Any) -> Run:
    """Train on a world and return the run: `shoal.train("cartpole", total_steps=1e6)`.

    Settings are those of the command line, with underscores; `world_config=dict(...)` sets the world's own.
    """
    return train_job(make_job(world, **settings))


def train_job(job: Job) -> Run:
    """Train a job in a new run folder."""
    folder = RunFolder.create(job)
    try:
        session = _Session(job, folder, None)
    except BaseException:
        folder.discard()
        raise
    try:
        return session.run()
    finally:
        folder.unlock()


def resume(path: Path | str, total_steps: int | str | None = None, quiet: bool = False) -> Run:
    """Continue a run from its newest good checkpoint; without a new `total_steps`, bit for bit as if never stopped."""
    folder = RunFolder.open(path)
    job = load_job(folder.path)
    if total_steps is not None:
        job = replace(job, train=replace(job.train, total_steps=to_count("total_steps", total_steps)))
    job = replace(job, train=replace(job.train, quiet=quiet or job.train.quiet))
    folder.lock()
    try:
        progress = Progress(1, quiet=True)
        checkpoint = load_latest(folder.checkpoints, job.train.device, progress.warn)
        if checkpoint.steps >= job.train.total_steps:
            raise ShoalError(
                f"{folder.path} is finished ({checkpoint.steps} of {job.train.total_steps} env steps); "
                "give a larger --total-steps to train on."
            )
        write_whole(folder.path / "config.json", job.to_json())
        folder.trim(checkpoint.steps)
        return _Session(job, folder, checkpoint).run()
    finally:
        folder.unlock()


def load_run(
    path: Path | str,
    which: str = "best",
    device: str | None = None,
    random: Sequence[str] = (),
    others: Sequence[str] = (),
    settings: Sequence[str] = (),
) -> Run:
    """A run with the weights of one of its checkpoints (`best`, `last` or a step number), for playing.

    `random` names groups that play at random instead, `others` groups that another run plays for: "runner=RUN".
    `settings` are other ones of the world: "max_steps=100".
    """
    folder = RunFolder.open(path)
    job = _elsewhere(load_job(folder.path), settings)
    wanted = pick_device(device or "auto")
    job = replace(job, train=replace(job.train, device=wanted))
    checkpoint = load_checkpoint(folder.pick(which), wanted)
    world = make_world(job, 1)
    policies = make_policies(job, world)
    for name, policy in policies.items():
        _take_weights(policy, checkpoint, name)
    played = by_group(job, policies)
    for entry in others:
        name, other = parse_load(entry)
        if name not in played:
            raise unknown("group to load:", name, played)
        guest = load_run(other, device=wanted)
        played[name] = guest.policies[same_group(guest.job, name, other)]
    for name in random:
        if name not in played:
            raise unknown("group to play at random:", name, played)
        played[name] = RandomPolicy(world.group(name)).to(world.device)
    return Run(folder, job, played)


def _elsewhere(job: Job, settings: Sequence[str]) -> Job:
    """The job with other settings of its world, NAME=VALUE each."""
    hints = typing.get_type_hints(type(job.world_config))
    changed = {}
    for entry in settings:
        name, equals, text = entry.partition("=")
        key = name.replace("-", "_")
        if not equals:
            raise ShoalError(f"--set must be NAME=VALUE, got {entry!r}.")
        if key not in {f.name for f in fields(job.world_config)}:
            raise unknown(f"setting of {job.world}", name, [f.name for f in fields(job.world_config)])
        changed[key] = read_setting(f"--set {entry}", text, hints[key])
    return replace(job, world_config=replace(job.world_config, **changed))


def _take_weights(policy: Policy, checkpoint: Checkpoint, name: str) -> None:
    """Fill a policy from a checkpoint, or list what does not fit."""
    saved = part_of(checkpoint.state, f"policy.{name}.")
    compare(saved, policy.state_dict(), checkpoint.path)
    policy.load_state_dict(saved)


def _load_others(job: Job, trainer: Trainer) -> None:
    """Give the groups that `--load` names the best policy of another run."""
    for name, path in loads(job).items():
        other = load_job(path)
        group = same_group(other, name, path)
        checkpoint = load_checkpoint(RunFolder.open(path).pick("best"), job.train.device)
        _take_weights(trainer.policies[name], checkpoint, other.policy_of(group))
        if name in trainer.learners:
            trainer.learners[name].adopt()


class _Session:
    """One process's work on one run."""

    def __init__(self, job: Job, folder: RunFolder, checkpoint: Checkpoint | None):
        self.job, self.folder = job, folder
        self.signal: int | None = None
        config = job.train
        self.progress = Progress(config.total_steps, checkpoint.steps if checkpoint else 0, config.quiet)
        self.progress.say(f"{job.world} with {config.algo.upper()} on {_device_name(config.device)}, run {folder.path}")
        start = time.monotonic()
        self.progress.say(str(estimate(job)))
        self.progress.say("compiling kernels (seconds the first time, cached afterwards)")
        try:
            self.trainer = Trainer(job)
        except torch.cuda.OutOfMemoryError:
            raise out_of_memory(job) from None
        if checkpoint is None:
            _load_others(job, self.trainer)
        for remark in self.trainer.collector.remarks():
            self.progress.say(remark)
        for name, learner in self.trainer.learners.items():
            self.progress.say((f"{name}: " if len(self.trainer.learners) > 1 else "") + learner.remark())
        self.progress.say(f"ready after {time.monotonic() - start:.1f} s")
        if checkpoint is not None:
            own = self.trainer.state_dict()
            compare(checkpoint.state, own, checkpoint.path)
            self.trainer.load_state_dict(checkpoint.state, checkpoint.iteration)
            self.progress.say(f"resumed at {checkpoint.steps} env steps from {checkpoint.path}")
        self.writer = MetricsWriter(folder.path, self.progress.warn)
        self.stage: World | None = None
        """Where this run is evaluated, if it is kept."""

    def run(self) -> Run:
        """Train to the end, to a signal or to an error; whatever happens, what was learnt is on the disk."""
        handlers = self._catch_signals()
        try:
            self._loop()
        except BadNumbers as error:
            where = ""
            if error.env_state:
                dump = self.folder.path / "bad_env.json"
                dump.write_text(json.dumps(error.env_state, indent=1) + "\n")
                where = f" The env's state is in {dump}."
            if any(self.folder.checkpoints.glob("step_*")):
                where += " The last good checkpoint stands."
            raise ShoalError(f"{error}{where}") from None
        except torch.cuda.OutOfMemoryError:
            raise out_of_memory(self.job) from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self.writer.close()
            self.progress.close()
            self.trainer.world.close()
            if self.stage is not None:
                self.stage.close()
        if self.signal is not None:
            raise Stopped(self.signal, self.folder.path)
        return Run(self.folder, self.job, by_group(self.job, self.trainer.policies))

    def _loop(self) -> None:
        trainer, config = self.trainer, self.job.train
        device = trainer.world.device
        every = config.checkpoint_every or max(1, config.total_steps // CHECKPOINTS_PER_RUN)
        next_save = (trainer.steps // every + 1) * every
        self._start = self._logged_at = time.monotonic()
        self._first_steps = self._logged_steps = trainer.steps
        marks: list[torch.cuda.Event] = []
        while not trainer.done and self.signal is None:
            trainer.iterate()
            if device.type == "cuda":
                # Stay at most two iterations ahead of the GPU, so that signals and logs are served in time.
                marks.append(torch.cuda.Event())
                marks[-1].record()
                if len(marks) > 2:
                    marks.pop(0).synchronize()
            if time.monotonic() - self._logged_at >= config.log_every or trainer.done:
                self._log()
            if trainer.steps >= next_save and not trainer.done:
                next_save += every
                self._checkpoint(final=False)
        if self._logged_steps < trainer.steps:
            self._log()
        self._checkpoint(final=True)

    def _log(self) -> None:
        trainer = self.trainer
        values = trainer.read_metrics()
        now = time.monotonic()
        elapsed = max(1e-9, now - self._logged_at)
        steps = trainer.steps
        fps = (steps - self._logged_steps) / elapsed
        overall = (steps - self._first_steps) / max(1e-9, now - self._start)
        values["time/fps"] = fps
        values["time/agent_fps"] = fps * trainer.agent_steps / max(1, steps)
        values["time/agent_steps"] = trainer.agent_steps
        values["time/elapsed"] = now - self._start
        left = (self.job.train.total_steps - steps) / max(overall, 1e-9)
        self.writer.write(steps, values)
        self.progress.update(steps, {**values, "time/left": max(0.0, left)})
        self._logged_at, self._logged_steps = now, steps

    def _checkpoint(self, final: bool) -> None:
        """Save, then evaluate. A failed save is tried twice, warned of, and only the final one is an error."""
        trainer = self.trainer
        trainer.check_finite()
        path = None
        for attempt in range(2):
            try:
                path = self.folder.save(trainer.state_dict(), trainer.iteration, trainer.steps)
                break
            except OSError as error:
                self.progress.warn(f"The checkpoint at {trainer.steps} steps could not be saved: {error}.")
                time.sleep(0.5 * (1 - attempt))
        if self.signal is None and self.job.train.eval_episodes:
            self._evaluate(path)
        if final and path is None:
            raise SaveFailed(f"The final checkpoint of {self.folder.path} could not be saved; free some space.")

    def _evaluate(self, checkpoint: Path | None) -> None:
        started = time.monotonic()
        try:
            count = self.job.train.eval_episodes
            policies = by_group(self.job, self.trainer.policies)
            if self.trainer.world.slow_to_open and self.stage is None:
                self.stage = make_world(self.job, count, "playing")
            scores = evaluate(self.job, policies, count, stop=lambda: self.signal is not None, world=self.stage)
        except ShoalError as error:
            self.progress.warn(f"No evaluation: {error}")
            return
        if self.signal is not None:
            return
        for line in scores.brief():
            self.progress.say(f"evaluation at {self.trainer.steps} env steps: {line}")
        try:
            self.folder.record_score(self.trainer.steps, scores, checkpoint)
        except OSError as error:
            self.progress.warn(f"The evaluation could not be written: {error}.")
        figures = {f"eval/{name}": score.mean for name, score in scores.reports.items()}
        self.writer.write(self.trainer.steps, {"eval/mean_reward": scores.mean, **figures})
        spent = time.monotonic() - started  # evaluation is no training: it does not count as such
        self._start += spent
        self._logged_at += spent

    def _catch_signals(self) -> dict[int, Any]:
        def note(number: int, frame: Any) -> None:
            self.signal = number

        handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                handlers[number] = signal.signal(number, note)
            except ValueError:  # not the main thread: the caller handles signals
                break
        return handlers


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    from shoal.core.launch import cpu_threads

    return f"{cpu_threads()} CPU core(s)"
