"""Choose the trainer of an algorithm."""

from shoal.algos.a2c import A3CConfig
from shoal.config.job import Job
from shoal.training.a3c import SharedTrainer
from shoal.training.asynchronous import AsyncTrainer
from shoal.training.processes import Communicator
from shoal.training.trainer import Trainer


def make_trainer(job: Job, processes: Communicator | None = None) -> Trainer | SharedTrainer:
    """Build the trainer of a job: synchronous, asynchronous, or A3C."""
    if isinstance(job.learn, A3CConfig):
        return SharedTrainer(job, processes)
    return (AsyncTrainer if job.schedule.asynchronous else Trainer)(job, processes)
