"""One process of a run: a trainer with progress, metrics, checkpoints, evaluation and signal handling."""

import json
import math
import signal
import time
from pathlib import Path
from typing import Any

import torch

from shoal.config.job import Job
from shoal.core.errors import FileError, ShoalError
from shoal.core.launch_info import find_launch_info
from shoal.core.machine import device_name
from shoal.core.user_code import UserCode
from shoal.core.world import World
from shoal.runs.checkpoint import POLICY, Checkpoint, compare, load_checkpoint, load_latest
from shoal.runs.config_file import load_job
from shoal.runs.evaluation import evaluate, evaluation_seed
from shoal.runs.files import write_text
from shoal.runs.folder import RunFolder
from shoal.runs.interrupts import StopRequests, end_signals, is_listening
from shoal.runs.jobs import loads, same_group
from shoal.runs.metrics import MetricsWriter
from shoal.runs.progress import Progress
from shoal.runs.run import Run, take_weights
from shoal.training.a3c import SharedTrainer
from shoal.training.build import by_group, make_world
from shoal.training.make_trainer import make_trainer
from shoal.training.memory_estimate import estimate, out_of_memory
from shoal.training.processes import Communicator, LeaderError
from shoal.training.trainer import InvalidDataError, Trainer

CHECKPOINTS_PER_RUN = 5


class Stopped(Exception):
    """A signal stopped the run after it was saved."""

    def __init__(self, number: int, path: Path):
        self.exit_code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} and saved; continue with `shoal resume {path}`.")


class SaveFailed(ShoalError):
    """The last checkpoint could not be written."""

    exit_code = 1


class FolderLost(ShoalError):
    """The run folder disappeared; the run is saved in another one."""

    exit_code = 1


def refuse_finished(folder: RunFolder, steps: int, total_steps: int) -> None:
    """Raise ShoalError if a run has reached `total_steps`."""
    if steps >= total_steps:
        raise ShoalError(
            f"{folder.path} has made {steps} of {total_steps} env steps; give a larger --total-steps to train on."
        )


def _load_others(job: Job, trainer: Trainer | SharedTrainer) -> None:
    """Load the best policy of another run into each group that `--load-policy` names."""
    for name, path in loads(job).items():
        other = load_job(path, job.run.trust)
        group = same_group(other, name, path)
        checkpoint = load_checkpoint(RunFolder.open(path).pick("best"), job.hardware.device, (POLICY,))
        take_weights(trainer.policies[name], checkpoint, other.policy_of(group))
        if name in trainer.learners:
            trainer.learners[name].on_weights_loaded()


class Session:
    """One process of a run."""

    def __init__(self, job: Job, folder: RunFolder, processes: Communicator, config_job: Job, resumes: bool):
        """Build the trainer and load the newest checkpoint, if any.

        Args:
            job: The job with this process's device.
            config_job: The job for config.json.
            resumes: Require a checkpoint and remaining steps; config.json is rewritten once the checkpoint is read.
        """
        self.job, self.folder, self.processes, self.config_job = job, folder, processes, config_job
        self.lost_folder: Path | None = None
        """Path of a run folder that disappeared during training."""
        self.signal: int | None = None
        loaded: list[Checkpoint] = []
        resumed, steps = processes.on_leader(lambda: self._load(loaded, resumes))
        self.progress = Progress(job.run.total_steps, steps, job.run.quiet or not processes.is_leader)
        where = device_name(job.hardware.device) + (f", {processes.size} processes" if processes.size > 1 else "")
        self.progress.say(f"{job.world} with {job.run.algo.upper()} on {where}, run {folder.path}")
        made, wanted = job.run.iterations * job.run.steps_per_iteration - steps, job.run.total_steps - steps
        if processes.is_leader and made > 2 * wanted:
            self.progress.warn(
                f"This run makes {made:,} env steps instead of {wanted:,}, since an iteration has "
                f"{job.run.num_envs:,} envs x {job.run.rollout_steps} steps; lower one of them or raise --total-steps."
            )
        start = time.monotonic()
        self.share = processes.share(job)
        """This process's share of the job, for memory estimates."""
        costs = estimate(self.share)
        self.progress.say(("each process: " if processes.size > 1 else "") + str(costs))
        costs.check()
        self.progress.say("compiling kernels (seconds the first time, cached afterwards)")
        try:
            self.trainer = make_trainer(job, processes)
        except torch.cuda.OutOfMemoryError:
            raise out_of_memory(self.share) from None
        if not resumed:
            _load_others(job, self.trainer)
        for line in self.trainer.collector.describe_stepping():
            self.progress.say(line)
        for name, learner in self.trainer.learners.items():
            self.progress.say((f"{name}: " if len(self.trainer.learners) > 1 else "") + learner.describe())
        self.progress.say(f"ready after {time.monotonic() - start:.1f} s")
        if resumed:
            self._restore(loaded[0] if loaded else None)
        self.eval_world: World | None = None
        """World of the evaluations, if it is reused."""
        if self.trainer.world.reuse_eval_world and job.evaluation.eval_episodes:
            try:
                processes.on_leader(self._make_eval_world)
            except BaseException:
                self.trainer.close()
                raise
        self.writer = MetricsWriter(folder.path, self.progress.warn) if processes.is_leader else None

    def _make_eval_world(self) -> None:
        """Build the world of evaluations; its errors appear now, not after hours of training."""
        self.progress.say("preparing the scenes of evaluations")
        self.eval_world = make_world(self.job, self.job.evaluation.eval_episodes, "evaluation")
        try:
            self.eval_world.prepare(evaluation_seed(self.job, None))
        except BaseException:
            self.eval_world.close()
            raise

    def _load(self, loaded: list[Checkpoint], resumes: bool) -> tuple[bool, int]:
        """Load the newest valid checkpoint, if any, and drop what was written after it.

        Returns:
            Whether there is a checkpoint, and its env steps.
        """
        folder, job = self.folder, self.job
        if resumes or folder.holds_checkpoints:
            loaded.append(load_latest(folder.checkpoints, job.hardware.device, Progress(1, quiet=True).warn))
        steps = loaded[0].steps if loaded else 0
        if resumes:
            refuse_finished(folder, steps, job.run.total_steps)
            folder.write_config(self.config_job)
        folder.trim(steps)
        return bool(loaded), steps

    def _restore(self, checkpoint: Checkpoint | None) -> None:
        """Load the leader's checkpoint; every process gets its shard."""
        trainer, processes = self.trainer, self.processes
        own, axes = trainer.state_dict(), trainer.env_axes()

        def fits() -> tuple[int, str]:
            assert checkpoint is not None
            compare(checkpoint.state, processes.unsharded(own, axes), checkpoint.path)
            return checkpoint.iteration, f"{checkpoint.steps} env steps from {checkpoint.path}"

        iteration, where = processes.on_leader(fits)
        state = processes.scatter(None if checkpoint is None else checkpoint.state, own, axes)
        trainer.load_state_dict(state, iteration)
        info = find_launch_info()
        again = " after a process died" if info is not None and info.restarts else ""
        self.progress.say(f"resumed{again} at {where}")

    def run(self) -> Run:
        """Train until the end, a signal or an error.

        Raises:
            Stopped: After a signal, when the run has been saved.
        """
        handlers = self._catch_signals()
        try:
            with UserCode("Training failed", exit_code=1):
                self._loop()
        except InvalidDataError as error:
            where = ""
            if not self.processes.is_leader:
                raise LeaderError(str(error), error.exit_code) from None
            if error.env_state:
                dump = self.folder.path / "bad_env.json"
                try:
                    write_text(dump, json.dumps(error.env_state, indent=1) + "\n")
                    where = f" The env's state is in {dump}."
                except FileError as problem:
                    where = f" The env's state could not be saved: {problem}"
            if self.folder.holds_checkpoints:
                where += " The last checkpoint is kept."
            raise ShoalError(f"{error}{where}") from None
        except torch.cuda.OutOfMemoryError:
            raise out_of_memory(self.share) from None
        finally:
            self.progress.close()
            self.trainer.close()
            if self.eval_world is not None:
                self.eval_world.close()
            _restore(handlers)
        if self.signal is not None:
            raise Stopped(self.signal, self.folder.path)
        return Run(self.folder, self.job, by_group(self.job, self.trainer.policies))

    def _loop(self) -> None:
        trainer, run = self.trainer, self.job.run
        device = trainer.world.device
        every = run.checkpoint_every or max(1, run.total_steps // CHECKPOINTS_PER_RUN)
        next_save = (trainer.steps // every + 1) * every
        self._start = self._logged_at = time.monotonic()
        self._first_steps = self._logged_steps = trainer.steps
        marks: list[torch.cuda.Event] = []
        stop = 0
        while not trainer.done and not stop:
            trainer.iterate()
            if device.type == "cuda":
                # sync: run at most two iterations ahead of the GPU, so that signals and logs are handled in time
                marks.append(torch.cuda.Event())
                marks[-1].record()
                if len(marks) > 2:
                    marks.pop(0).synchronize()
            late = self.processes.is_leader and time.monotonic() - self._logged_at >= run.log_every_seconds
            stop, log = self.processes.decide(self.signal or 0, int(late or trainer.done))
            if stop:
                self.signal = stop
            if log:
                self._log()
            if trainer.steps >= next_save and not trainer.done:
                next_save += every
                with trainer.paused():
                    self._checkpoint(final=False)
        if self._logged_steps < trainer.steps:
            self._log()
        with trainer.paused():
            self._checkpoint(final=True)
            trainer.close()  # before a thread begins another rollout

    def _log(self) -> None:
        trainer = self.trainer
        values = trainer.read_metrics()
        now = time.monotonic()
        elapsed = max(1e-9, now - self._logged_at)
        steps = trainer.steps
        fps = values.get("time/collected_fraction", 1.0) * (steps - self._logged_steps) / elapsed
        overall = (steps - self._first_steps) / max(1e-9, now - self._start)
        values["time/fps"] = fps
        values["time/agent_fps"] = fps * trainer.agent_steps / max(1, steps)
        values["time/agent_steps"] = trainer.agent_steps
        values["time/elapsed"] = now - self._start
        left = (self.job.run.total_steps - steps) / max(overall, 1e-9)
        if self.writer is not None:
            self.writer.write(steps, values)
        self.progress.update(steps, {**values, "time/left": max(0.0, left)})
        self._logged_at, self._logged_steps = now, steps

    def _checkpoint(self, final: bool) -> None:
        """Gather the state on the leader, which saves and evaluates while the others wait."""
        trainer = self.trainer
        trainer.check_finite()
        state = self.processes.gather(trainer.state_dict(), trainer.env_axes())
        self.processes.on_leader(lambda: self._save_and_evaluate(state, final))

    def _save_and_evaluate(self, state: dict[str, torch.Tensor], final: bool) -> None:
        """Save, then evaluate. Two failed attempts to save are a warning, and an error at the end of training."""
        trainer, path = self.trainer, None
        for attempt in range(2):
            try:
                if not self.folder.is_intact:
                    self._move()
                path = self.folder.save(state, trainer.iteration, trainer.steps)
                break
            except FileError as error:
                self.progress.warn(f"The checkpoint at {trainer.steps} steps could not be saved: {error}")
                time.sleep(0.5 * (1 - attempt))
        if self.signal is None and self.job.evaluation.eval_episodes:
            self._evaluate(path)
        if final and path is None:
            raise SaveFailed(f"The final checkpoint of {self.folder.path} could not be saved; free some space.")
        if final and self.lost_folder is not None:
            raise FolderLost(
                f"{self.lost_folder} disappeared during training; the run is saved in {self.folder.path}: continue it "
                f"with `shoal resume {self.folder.path}`."
            )

    def _move(self) -> None:
        """Continue in a new folder, since the run's has disappeared."""
        self.lost_folder = self.lost_folder or self.folder.path
        self.folder.move(self.config_job)
        self.progress.warn(f"{self.lost_folder} has disappeared; the run continues in {self.folder.path}.")
        self.writer = MetricsWriter(self.folder.path, self.progress.warn)

    def _evaluate(self, checkpoint: Path | None) -> None:
        started = time.monotonic()
        try:
            count = self.job.evaluation.eval_episodes
            policies = by_group(self.job, self.trainer.acting_policies)
            with UserCode("it failed"):
                scores = evaluate(
                    self.job, policies, count, stop=lambda: self.signal is not None, world=self.eval_world
                )
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
            self.progress.warn(f"The evaluation could not be saved: {error}")
        figures = {f"eval/{name}": score.mean for name, score in scores.reports.items()}
        assert self.writer is not None
        self.writer.write(self.trainer.steps, {"eval/mean_reward": scores.mean, **figures})
        spent = time.monotonic() - started  # exclude evaluation from the speed
        self._start += spent
        self._logged_at += spent

    def _catch_signals(self) -> dict[int, Any]:
        """Handle stop signals; returns the old handlers.

        The first signal ends training. A second one is raised again for the caller, unless a thread or a launcher ends
        this process.
        """
        requests = StopRequests()
        reraises = not is_listening() and find_launch_info() is None
        handlers = {}

        def note(number: int, frame: Any) -> None:
            self.signal = self.signal or number
            if reraises and requests.add(number, "a second signal interrupts this program."):
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
