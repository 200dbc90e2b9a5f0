"""The trainer that an algorithm needs."""

from shoal.algos.a2c import A3CConfig
from shoal.config.job import Job
from shoal.training.a3c import SharedTrainer
from shoal.training.asynchronous import AsyncTrainer
from shoal.training.processes import Processes
from shoal.training.trainer import Trainer


def make_trainer(job: Job, processes: Processes | None = None) -> Trainer | SharedTrainer:
    """The trainer for a job: acting and learning in turns, at the same time, or by several at once."""
    if isinstance(job.learn, A3CConfig):
        return SharedTrainer(job, processes)
    return (AsyncTrainer if job.schedule.asynchronous else Trainer)(job, processes)
