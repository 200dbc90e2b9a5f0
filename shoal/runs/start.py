"""Train a job, resume a run: in this process, or in several that this one starts."""

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
from shoal.training.processes import joined


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
        return RunFolder.create(job.change(run_dir=before.path))

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

    if not _starts_others(job):
        return _in_folder(job, open_folder, resumes=True)
    open_folder()
    try:
        refuse_finished(folder, latest_steps(folder.checkpoints), job.run.total_steps)
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
    return _in_folder(job.change(trust=trust), open_folder)


def _starts_others(job: Job) -> bool:
    """Whether this process does not train itself, but starts those that do."""
    return job.hardware.processes > 1 and find_launch_info() is None


def _with_others(job: Job, folder: RunFolder) -> Run:
    """Let processes of their own train in a folder, and wait for them."""
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
            with seeded(job.run.seed):
                try:
                    session = Session(job, folder, processes, asked, resumes)
                except BaseException:
                    if discard and processes.leads and not folder.holds_checkpoints:
                        folder.discard()
                    raise
                return session.run()
        finally:
            folder.unlock()


def _of_this_launch(job: Job) -> RunFolder | None:
    """The folder that these processes have made before they were started again, if they have."""
    place = find_launch_info()
    if place is None:
        return None
    asked = job.run.run_dir
    others = sorted(Path("runs").glob("*"), reverse=True) if place.restarts else []
    for path in [asked] if asked is not None else others:
        folder = RunFolder(path)
        if folder.launch == place.launch:
            return folder
    return None
