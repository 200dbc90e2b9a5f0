"""`shoal train` and `shoal resume`: a trainer in a run folder, with progress, checkpoints and a clean end."""

import json
import math
import signal
import time
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from shoal.core.settings import read_setting
from shoal.core.world import World
from shoal.errors import NEVER_BEGAN, FileError, ShoalError, unknown
from shoal.learn import A3CConfig
from shoal.learn.learner import part_of
from shoal.policy import Policy
from shoal.run.asynchronous import AsyncTrainer
from shoal.run.build import by_group, make_policies, make_world
from shoal.run.checkpoint import (
    POLICY,
    Checkpoint,
    compare,
    latest_steps,
    load_checkpoint,
    load_latest,
)
from shoal.run.config import CONFIG, Job, load_job, make_job, pick_device, settle, to_count
from shoal.run.evaluate import Evaluation, RandomPolicy, Watch, evaluate, evaluation_seed
from shoal.run.files import write_text
from shoal.run.folder import RunFolder
from shoal.run.groups import loads, parse_load, same_group
from shoal.run.interrupts import Requests, end_signals, listens
from shoal.run.memory import estimate, out_of_memory
from shoal.run.metrics import MetricsWriter
from shoal.run.processes import STOPPED, Processes, Told, find_place, joined, launch
from shoal.run.progress import Progress
from shoal.run.shared import SharedTrainer
from shoal.run.trainer import BadNumbers, Trainer
from shoal.user_code import UserCode

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


class FolderLost(ShoalError):
    """The run folder has disappeared; what was trained is saved in another one."""

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
    """Train a job in a new run folder, with as many processes as it says.

    Processes that are started again, after one of them died, go on in the folder that they have made before.
    """
    if _starts_others(job):
        folder = RunFolder.create(job)
        try:
            return _with_others(job, folder)
        except BaseException:
            if not folder.holds_checkpoints:
                folder.discard()
            raise

    def open_folder() -> RunFolder:
        before = _of_this_launch(job)
        if before is None:
            return RunFolder.create(job)
        if before.holds_checkpoints:
            before.lock()
            return before
        return RunFolder.create(replace(job, train=replace(job.train, run_dir=before.path)))

    return _in_folder(job, open_folder, discard=True)


def resume(
    path: Path | str,
    total_steps: int | str | None = None,
    quiet: bool = False,
    processes: int | None = None,
    gpus: int | None = None,
    trust: bool = False,
) -> Run:
    """Continue a run from its newest good checkpoint; without a new `total_steps`, bit for bit as if never stopped.

    The number of `processes`, or of `gpus`, may be another one than before: then the same but for rounding. With
    `trust`, code of a run that was trained by others or elsewhere, or has changed since, is executed; the run is then
    yours.
    """
    folder = RunFolder.open(path)
    job = load_job(folder.path, trust)
    config = job.train
    if total_steps is not None:
        config = replace(config, total_steps=to_count("total_steps", total_steps))
    if processes is not None or gpus is not None:
        config = replace(config, processes=1 if processes is None else processes, gpus=gpus)
    config = replace(config, quiet=quiet or config.quiet)
    device = pick_device(config.device, f"{folder.path / CONFIG}: device")
    job = settle(replace(job, train=config), device, saved=True)

    def open_folder() -> RunFolder:
        folder.lock()
        return folder

    if not _starts_others(job):
        return _in_folder(job, open_folder, resumes=True)
    open_folder()
    try:
        _refuse_finished(folder, latest_steps(folder.checkpoints), config.total_steps)
        folder.write_config(job)
        return _with_others(job, folder)
    finally:
        folder.unlock()


def continue_run(path: Path | str, trust: bool = False) -> Run:
    """Train the run of a folder from wherever it stands: what the processes do that another one has started.

    `trust` is about the runs that `--load` names; the folder is this user's.
    """
    folder = RunFolder.open(path)

    def open_folder() -> RunFolder:
        folder.lock()
        return folder

    job = load_job(folder.path)
    return _in_folder(replace(job, train=replace(job.train, trust=trust)), open_folder)


def _starts_others(job: Job) -> bool:
    """Whether this process does not train itself, but starts those that do."""
    return job.train.processes > 1 and find_place() is None


def _with_others(job: Job, folder: RunFolder) -> Run:
    """Let processes of their own train in a folder, and wait for them."""
    folder.unlock()  # the first of them locks it
    outcome = launch(folder, job.train.processes, job.train.trust)
    if outcome is None:
        return load_run(folder.path, "last", job.train.device)
    if outcome.saved:
        raise Stopped(outcome.exit_code - 128, folder.path)
    began = folder.holds_checkpoints or outcome.message != STOPPED
    error = ShoalError(outcome.message if began else NEVER_BEGAN)
    error.exit_code = outcome.exit_code
    raise error


def _in_folder(job: Job, open_folder: Callable[[], RunFolder], discard: bool = False, resumes: bool = False) -> Run:
    """Train here, in the folder that the leading process opens, from its newest good checkpoint if it has any.

    With `discard`, a folder whose run cannot begin is taken back; if it `resumes`, there must be something left to do.
    """
    asked = job
    with joined(job) as (job, processes):
        opened: list[RunFolder] = []

        def opens() -> str:
            opened.append(open_folder())
            return str(opened[0].path)

        path = processes.lead(opens)
        folder = opened[0] if opened else RunFolder(Path(path))
        try:
            try:
                session = _Session(job, folder, processes, asked, resumes)
            except BaseException:
                if discard and processes.leads and not folder.holds_checkpoints:
                    folder.discard()
                raise
            return session.run()
        finally:
            folder.unlock()


def _of_this_launch(job: Job) -> RunFolder | None:
    """The folder that these processes have made before they were started again, if they have."""
    place = find_place()
    if place is None:
        return None
    asked = job.train.run_dir
    others = sorted(Path("runs").glob("*"), reverse=True) if place.restarts else []
    for path in [asked] if asked is not None else others:
        folder = RunFolder(path)
        if folder.launch == place.launch:
            return folder
    return None


def _refuse_finished(folder: RunFolder, steps: int, total_steps: int) -> None:
    """A run that has come to its end, or beyond another one, needs a later one."""
    if steps >= total_steps:
        raise ShoalError(
            f"{folder.path} has made {steps} of {total_steps} env steps; give a larger --total-steps to train on."
        )


def load_run(
    path: Path | str,
    which: str = "best",
    device: str | None = None,
    random: Sequence[str] = (),
    others: Sequence[str] = (),
    settings: Sequence[str] = (),
    trust: bool = False,
) -> Run:
    """A run with the weights of one of its checkpoints (`best`, `last` or a step number), for playing.

    `random` names groups that play at random instead, `others` groups that another run plays for: "runner=RUN".
    `settings` are other ones of the world: "max_steps=100". Code of a run that this user has not trained on this
    machine, or that has changed since, is executed with `trust` alone.
    """
    folder = RunFolder.open(path)
    job = _elsewhere(load_job(folder.path, trust), settings)
    wanted = pick_device(device or "auto")
    job = replace(job, train=replace(job.train, device=wanted))
    checkpoint = load_checkpoint(folder.pick(which), wanted, (POLICY,))
    world = make_world(job, 1)
    policies = make_policies(job, world)
    for name, policy in policies.items():
        _take_weights(policy, checkpoint, name)
    played = by_group(job, policies)
    for entry in others:
        name, other = parse_load(entry)
        if name not in played:
            raise unknown("group to load:", name, played)
        guest = load_run(other, device=wanted, trust=trust)
        played[name] = guest.policies[same_group(guest.job, name, other)]
        own, its = world.group(name), played[name].group
        if (own.seen.shape, own.action) != (its.seen.shape, its.action):
            raise ShoalError(
                f"{other} cannot play for {name}, who sees {tuple(own.seen.shape)} and does {own.action}: it sees "
                f"{tuple(its.seen.shape)} and does {its.action}."
            )
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


def make_trainer(job: Job, processes: Processes | None = None) -> Trainer | SharedTrainer:
    """The trainer for a job: acting and learning in turns, at the same time, or by several at once."""
    if isinstance(job.learn, A3CConfig):
        return SharedTrainer(job, processes)
    return (AsyncTrainer if job.train.asynchronous else Trainer)(job, processes)


def _load_others(job: Job, trainer: Trainer | SharedTrainer) -> None:
    """Give the groups that `--load` names the best policy of another run."""
    for name, path in loads(job).items():
        other = load_job(path, job.train.trust)
        group = same_group(other, name, path)
        checkpoint = load_checkpoint(RunFolder.open(path).pick("best"), job.train.device, (POLICY,))
        _take_weights(trainer.policies[name], checkpoint, other.policy_of(group))
        if name in trainer.learners:
            trainer.learners[name].adopt()


class _Session:
    """One process's work on one run."""

    def __init__(self, job: Job, folder: RunFolder, processes: Processes, asked: Job, resumes: bool):
        """`asked` is the job as config.json has it; with `resumes`, it is written there once a checkpoint is read."""
        self.job, self.folder, self.processes, self.asked = job, folder, processes, asked
        self.lost: Path | None = None
        """The run folder that has disappeared, if it has."""
        self.signal: int | None = None
        config = job.train
        loaded: list[Checkpoint] = []
        begun, steps = processes.lead(lambda: self._load(loaded, resumes))
        self.progress = Progress(config.total_steps, steps, config.quiet or not processes.leads)
        where = _device_name(config.device) + (f", {processes.size} processes" if processes.size > 1 else "")
        self.progress.say(f"{job.world} with {config.algo.upper()} on {where}, run {folder.path}")
        made, wanted = config.iterations * config.steps_per_iteration - steps, config.total_steps - steps
        if processes.leads and made > 2 * wanted:
            self.progress.warn(
                f"This run makes {made:,} env steps instead of {wanted:,}, since an iteration has "
                f"{config.num_envs:,} envs x {config.rollout} steps; lower one of them or raise --total-steps."
            )
        start = time.monotonic()
        self.share = processes.share(job)
        """The job as this process alone would have it, to tell what it costs."""
        costs = estimate(self.share)
        self.progress.say(("each process: " if processes.size > 1 else "") + str(costs))
        costs.check()
        self.progress.say("compiling kernels (seconds the first time, cached afterwards)")
        try:
            self.trainer = make_trainer(job, processes)
        except torch.cuda.OutOfMemoryError:
            raise out_of_memory(self.share) from None
        if not begun:
            _load_others(job, self.trainer)
        for remark in self.trainer.collector.remarks():
            self.progress.say(remark)
        for name, learner in self.trainer.learners.items():
            self.progress.say((f"{name}: " if len(self.trainer.learners) > 1 else "") + learner.remark())
        self.progress.say(f"ready after {time.monotonic() - start:.1f} s")
        if begun:
            self._restore(loaded[0] if loaded else None)
        self.stage: World | None = None
        """Where this run is evaluated, if it is kept."""
        if self.trainer.world.slow_to_open and config.eval_episodes:
            try:
                processes.lead(self._set_stage)
            except BaseException:
                self.trainer.close()
                raise
        self.writer = MetricsWriter(folder.path, self.progress.warn) if processes.leads else None

    def _set_stage(self) -> None:
        """Make the world of evaluations; what is wrong with it is told now, not after hours of training."""
        self.progress.say("preparing the scenes of evaluations")
        self.stage = make_world(self.job, self.job.train.eval_episodes, "playing")
        try:
            self.stage.get_ready(evaluation_seed(self.job, None))
        except BaseException:
            self.stage.close()
            raise

    def _load(self, loaded: list[Checkpoint], resumes: bool) -> tuple[bool, int]:
        """Read the newest good checkpoint, if there is any, and forget what was written after it."""
        folder, config = self.folder, self.job.train
        if resumes or folder.holds_checkpoints:
            loaded.append(load_latest(folder.checkpoints, config.device, Progress(1, quiet=True).warn))
        steps = loaded[0].steps if loaded else 0
        if resumes:
            _refuse_finished(folder, steps, config.total_steps)
            folder.write_config(self.asked)
        folder.trim(steps)
        return bool(loaded), steps

    def _restore(self, checkpoint: Checkpoint | None) -> None:
        """Go on where the leader's checkpoint stands: every process gets its part of it."""
        trainer, processes = self.trainer, self.processes
        own, axes = trainer.state_dict(), trainer.env_axes()

        def fits() -> tuple[int, str]:
            assert checkpoint is not None
            compare(checkpoint.state, processes.whole(own, axes), checkpoint.path)
            return checkpoint.iteration, f"{checkpoint.steps} env steps from {checkpoint.path}"

        iteration, where = processes.lead(fits)
        state = processes.scatter(None if checkpoint is None else checkpoint.state, own, axes)
        trainer.load_state_dict(state, iteration)
        place = find_place()
        again = " after a process died" if place is not None and place.restarts else ""
        self.progress.say(f"resumed{again} at {where}")

    def run(self) -> Run:
        """Train to the end, to a signal or to an error; whatever happens, what was learnt is on the disk."""
        handlers = self._catch_signals()
        try:
            with UserCode("Training failed", exit_code=1):
                self._loop()
        except BadNumbers as error:
            where = ""
            if not self.processes.leads:
                raise Told(str(error), error.exit_code) from None
            if error.env_state:
                dump = self.folder.path / "bad_env.json"
                try:
                    write_text(dump, json.dumps(error.env_state, indent=1) + "\n")
                    where = f" The env's state is in {dump}."
                except FileError as problem:
                    where = f" The env's state is lost: {problem}"
            if self.folder.holds_checkpoints:
                where += " The last good checkpoint stands."
            raise ShoalError(f"{error}{where}") from None
        except torch.cuda.OutOfMemoryError:
            raise out_of_memory(self.share) from None
        finally:
            self.progress.close()
            self.trainer.close()
            if self.stage is not None:
                self.stage.close()
            _restore(handlers)
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
        stop = 0
        while not trainer.done and not stop:
            trainer.iterate()
            if device.type == "cuda":
                # Stay at most two iterations ahead of the GPU, so that signals and logs are served in time.
                marks.append(torch.cuda.Event())
                marks[-1].record()
                if len(marks) > 2:
                    marks.pop(0).synchronize()
            late = self.processes.leads and time.monotonic() - self._logged_at >= config.log_every
            stop, log = self.processes.decide(self.signal or 0, int(late or trainer.done))
            if stop:
                self.signal = stop
            if log:
                self._log()
            if trainer.steps >= next_save and not trainer.done:
                next_save += every
                with trainer.still():
                    self._checkpoint(final=False)
        if self._logged_steps < trainer.steps:
            self._log()
        with trainer.still():
            self._checkpoint(final=True)
            trainer.close()  # before anybody begins another rollout

    def _log(self) -> None:
        trainer = self.trainer
        values = trainer.read_metrics()
        now = time.monotonic()
        elapsed = max(1e-9, now - self._logged_at)
        steps = trainer.steps
        fps = values.get("time/made", 1.0) * (steps - self._logged_steps) / elapsed
        overall = (steps - self._first_steps) / max(1e-9, now - self._start)
        values["time/fps"] = fps
        values["time/agent_fps"] = fps * trainer.agent_steps / max(1, steps)
        values["time/agent_steps"] = trainer.agent_steps
        values["time/elapsed"] = now - self._start
        left = (self.job.train.total_steps - steps) / max(overall, 1e-9)
        if self.writer is not None:
            self.writer.write(steps, values)
        self.progress.update(steps, {**values, "time/left": max(0.0, left)})
        self._logged_at, self._logged_steps = now, steps

    def _checkpoint(self, final: bool) -> None:
        """Save and evaluate: all processes hand in what they have, and wait for the leader to see to the rest."""
        trainer = self.trainer
        trainer.check_finite()
        state = self.processes.gather(trainer.state_dict(), trainer.env_axes())
        self.processes.lead(lambda: self._keep(state, final))

    def _keep(self, state: dict[str, torch.Tensor], final: bool) -> None:
        """Save, then evaluate. A failed save is tried twice, warned of, and only the final one is an error."""
        trainer, path = self.trainer, None
        for attempt in range(2):
            try:
                if not self.folder.is_here:
                    self._move()
                path = self.folder.save(state, trainer.iteration, trainer.steps)
                break
            except FileError as error:
                self.progress.warn(f"The checkpoint at {trainer.steps} steps could not be saved: {error}")
                time.sleep(0.5 * (1 - attempt))
        if self.signal is None and self.job.train.eval_episodes:
            self._evaluate(path)
        if final and path is None:
            raise SaveFailed(f"The final checkpoint of {self.folder.path} could not be saved; free some space.")
        if final and self.lost is not None:
            raise FolderLost(
                f"{self.lost} disappeared during training; the run is saved in {self.folder.path}: continue it with "
                f"`shoal resume {self.folder.path}`."
            )

    def _move(self) -> None:
        """Continue in a new folder beside the run's, which has disappeared."""
        self.lost = self.lost or self.folder.path
        self.folder.move(self.asked)
        self.progress.warn(f"{self.lost} has disappeared; the run continues in {self.folder.path}.")
        self.writer = MetricsWriter(self.folder.path, self.progress.warn)

    def _evaluate(self, checkpoint: Path | None) -> None:
        started = time.monotonic()
        try:
            count = self.job.train.eval_episodes
            policies = by_group(self.job, self.trainer.players)
            with UserCode("it failed"):
                scores = evaluate(self.job, policies, count, stop=lambda: self.signal is not None, world=self.stage)
        except ShoalError as error:
            self.progress.warn(f"No evaluation: {error}")
            return
        if self.signal is not None:
            return
        for line in scores.brief():
            self.progress.say(f"evaluation at {self.trainer.steps} env steps: {line}")
        if not math.isfinite(scores.mean):
            self.progress.warn(f"No evaluation: the returns at {self.trainer.steps} env steps are not finite.")
            return
        try:
            self.folder.record_score(self.trainer.steps, scores, checkpoint)
        except FileError as error:
            self.progress.warn(f"The evaluation is lost: {error}")
        figures = {f"eval/{name}": score.mean for name, score in scores.reports.items()}
        assert self.writer is not None
        self.writer.write(self.trainer.steps, {"eval/mean_reward": scores.mean, **figures})
        spent = time.monotonic() - started  # evaluation is no training: it does not count as such
        self._start += spent
        self._logged_at += spent

    def _catch_signals(self) -> dict[int, Any]:
        """Note the first signal. A second one is for the caller, unless a thread or a launcher ends this process."""
        requests = Requests()
        calls = not listens() and find_place() is None
        handlers = {}

        def note(number: int, frame: Any) -> None:
            self.signal = self.signal or number
            if calls and requests.add(number, "a second signal interrupts this program."):
                _restore(handlers)
                signal.raise_signal(number)

        for number in end_signals():
            try:
                handlers[number] = signal.signal(number, note)
            except ValueError:  # not the main thread: the caller handles signals
                break
        return handlers


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _device_name(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    from shoal.core.launch import cpu_threads

    return f"{cpu_threads()} CPU core(s)"
