"""Train a job or resume a run, in this process or in several that it launches."""

from collections.abc import Callable
from pathlib import Path

from shoal.config.counts import to_count
from shoal.config.job import Job
from shoal.config.resolve import resolve
from shoal.core.errors import NEVER_BEGAN, ShoalError
from shoal.core.global_random import seeded
from shoal.core.launch_info import find_launch_info
from shoal.core.machine import pick_device
from shoal.runs.checkpoint import latest_steps
from shoal.runs.config_file import CONFIG, load_job
from shoal.runs.folder import RunFolder
from shoal.runs.jobs import complete
from shoal.runs.launching import STOPPED, launch
from shoal.runs.run import Run, load_run
from shoal.runs.session import Session, Stopped, refuse_finished
from shoal.training.processes import join_processes


def train_job(job: Job) -> Run:
    """Train a job in a new run folder, with the job's number of processes.

    Restarted processes of a launch continue in the folder of that launch.
    """
    if _launches_processes(job):
        folder = RunFolder.create(job)
        try:
            return _train_in_processes(job, folder)
        except BaseException:
            if not folder.holds_checkpoints:
                folder.discard()
            raise

    def open_folder() -> RunFolder:
        before = _folder_of_launch(job)
        if before is None:
            return RunFolder.create(job)
        if before.holds_checkpoints:
            before.lock()
            return before
        return RunFolder.create(job.change(run_dir=before.path))

    return _train_in_folder(job, open_folder, discard=True)


def resume(
    path: Path | str,
    total_steps: int | str | None = None,
    quiet: bool = False,
    processes: int | None = None,
    gpus: int | None = None,
    trust: bool = False,
) -> Run:
    """Continue a run from its newest valid checkpoint.

    With the same settings, the result equals an uninterrupted run bit for bit; with another number of processes, up to
    rounding.

    Args:
        total_steps: New number of env steps; None: the run's.
        processes: New number of processes.
        gpus: New number of GPUs, one process each.
        trust: Execute the run's code even if this user has not trained with it on this machine, or it has changed; the
            run is then signed as this user's.
    """
    folder = RunFolder.open(path)
    job = load_job(folder.path, trust)
    job = job.change(quiet=quiet or job.run.quiet)
    if total_steps is not None:
        job = job.change(total_steps=to_count("total_steps", total_steps))
    if processes is not None or gpus is not None:
        job = job.change(processes=1 if processes is None else processes, gpus=gpus)
    device = pick_device(job.hardware.device, f"{folder.path / CONFIG}: device")
    job = complete(resolve(job, device), saved=True)

    def open_folder() -> RunFolder:
        folder.lock()
        return folder

    if not _launches_processes(job):
        return _train_in_folder(job, open_folder, resumes=True)
    open_folder()
    try:
        refuse_finished(folder, latest_steps(folder.checkpoints), job.run.total_steps)
        folder.write_config(job)
        return _train_in_processes(job, folder)
    finally:
        folder.unlock()


def continue_run(path: Path | str, trust: bool = False) -> Run:
    """Train the run of a folder from its newest checkpoint or from the start, in a process of a launch.

    Args:
        trust: Execute code of the runs that `--load-policy` names; the folder itself is this user's.
    """
    folder = RunFolder.open(path)

    def open_folder() -> RunFolder:
        folder.lock()
        return folder

    job = load_job(folder.path)
    return _train_in_folder(job.change(trust=trust), open_folder)


def _launches_processes(job: Job) -> bool:
    """Whether this process launches the training processes instead of training."""
    return job.hardware.processes > 1 and find_launch_info() is None


def _train_in_processes(job: Job, folder: RunFolder) -> Run:
    """Launch processes that train in a folder, and wait for them."""
    folder.unlock()  # the first of them locks it
    outcome = launch(folder, job.hardware.processes, job.run.trust)
    if outcome is None:
        return load_run(folder.path, "last", job.hardware.device)
    if outcome.saved:
        raise Stopped(outcome.exit_code - 128, folder.path)
    began = folder.holds_checkpoints or outcome.message != STOPPED
    error = ShoalError(outcome.message if began else NEVER_BEGAN)
    error.exit_code = outcome.exit_code
    raise error


def _train_in_folder(
    job: Job, open_folder: Callable[[], RunFolder], discard: bool = False, resumes: bool = False
) -> Run:
    """Train in this process, in the folder that the leader opens, from its newest checkpoint if there is one.

    Args:
        discard: Remove the folder if the run cannot start.
        resumes: As in Session.
    """
    config_job = job
    with join_processes(job) as (job, processes):
        opened: list[RunFolder] = []

        def opens() -> str:
            opened.append(open_folder())
            return str(opened[0].path)

        path = processes.on_leader(opens)
        folder = opened[0] if opened else RunFolder(Path(path))
        try:
            with seeded(job.run.seed):
                try:
                    session = Session(job, folder, processes, config_job, resumes)
                except BaseException:
                    if discard and processes.is_leader and not folder.holds_checkpoints:
                        folder.discard()
                    raise
                return session.run()
        finally:
            folder.unlock()


def _folder_of_launch(job: Job) -> RunFolder | None:
    """The folder that this launch created before a restart, if any."""
    info = find_launch_info()
    if info is None:
        return None
    run_dir = job.run.run_dir
    others = sorted(Path("runs").glob("*"), reverse=True) if info.restarts else []
    for path in [run_dir] if run_dir is not None else others:
        folder = RunFolder(path)
        if folder.launch == info.launch:
            return folder
    return None
