"""Rank and world size of this process, from the environment variables of torchrun, SLURM or Shoal."""

import os
import re
import socket
from dataclasses import dataclass

from shoal.core.errors import ShoalError

STORE = "SHOAL_STORE"
"""Environment variable: the file of the store through which processes that Shoal starts find one another."""

FIRST_PORT, PORTS = 15_000, 20_000
"""Rendezvous ports of SLURM jobs; the job id selects one."""


@dataclass(frozen=True)
class LaunchInfo:
    """This process as its launcher describes it."""

    rank: int
    size: int
    local_rank: int
    """Rank among the processes on this machine."""
    local_size: int
    launch: str
    """Identifier of this launch, the same after a restart."""
    restarts: int
    """Number of restarts of all processes."""
    bound: bool
    """Whether the launcher assigns cores to processes."""
    store: str | None = None
    """File of the rendezvous store, if Shoal started the processes."""

    def export(self) -> None:
        """Set the environment variables that torch.distributed reads; the rendezvous address only if it is missing."""
        known = dict(RANK=self.rank, WORLD_SIZE=self.size, LOCAL_RANK=self.local_rank, LOCAL_WORLD_SIZE=self.local_size)
        for name, value in known.items():
            os.environ[name] = str(value)
        if "MASTER_ADDR" not in os.environ:
            os.environ["MASTER_ADDR"] = first_host(os.environ.get("SLURM_STEP_NODELIST", "localhost"))
        if "MASTER_PORT" not in os.environ:
            os.environ["MASTER_PORT"] = str(FIRST_PORT + int(os.environ.get("SLURM_JOB_ID", "0")) % PORTS)


def find_launch_info() -> LaunchInfo | None:
    """What torchrun, SLURM or Shoal set for this process; None without a launcher."""
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        if not (
            env["RANK"].isdecimal() and env["WORLD_SIZE"].isdecimal() and int(env["RANK"]) < int(env["WORLD_SIZE"])
        ):
            raise ShoalError(
                f"RANK must be a number below WORLD_SIZE, got {env['RANK']!r} and {env['WORLD_SIZE']!r}; unset both to "
                "train in one process."
            )
        rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
        launch = env.get("TORCHELASTIC_RUN_ID", "none")
        if launch == "none":  # torchrun's default; the parent process stays the same over restarts
            launch = f"{socket.gethostname()}:{os.getppid()}"
        restarts = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
        local = int(env.get("LOCAL_RANK", "0")), int(env.get("LOCAL_WORLD_SIZE", "1"))
        return LaunchInfo(rank, size, *local, launch, restarts, "TORCHELASTIC_RUN_ID" not in env, env.get(STORE))
    # Set by srun for its tasks, and not by sbatch or salloc for a single command.
    if int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and "SLURM_PROCID" in env:
        tasks = env.get("SLURM_STEP_TASKS_PER_NODE", "1")
        local = int(env.get("SLURM_LOCALID", "0")), int(re.match(r"\d+", tasks)[0])  # type: ignore[index]
        launch = f"slurm:{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
        restarts = int(env.get("SLURM_RESTART_COUNT", "0"))
        return LaunchInfo(int(env["SLURM_PROCID"]), int(env["SLURM_STEP_NUM_TASKS"]), *local, launch, restarts, True)
    return None


def first_host(nodes: str) -> str:
    """The first host of a SLURM node list: gpu003 of gpu[003-006,9]."""
    found = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    return "localhost" if found is None else found[1] + (found[2] or "")


def is_follower() -> bool:
    """Whether this process is not the leader (rank > 0): only the leader prints."""
    info = find_launch_info()
    return info is not None and info.rank > 0
