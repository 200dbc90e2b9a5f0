"""Facts about this machine: devices, processor, the commit of the code."""

import platform
import subprocess
from pathlib import Path

import torch

from shoal.core.errors import ShoalError, unknown
from shoal.core.launch import cpu_threads


def pick_device(name: str, flag: str = "--device") -> str:
    """Check the value of a device flag and return it, with `auto` resolved."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "gpu":
        raise ShoalError(f"{flag} gpu: a GPU is called cuda; use {flag} cuda.")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise unknown("device", name, ["auto", "cpu", "cuda"]) from None
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and device.index is not None):
        raise unknown("device", name, ["auto", "cpu", "cuda"])
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ShoalError(f"{flag} {name}: torch sees no usable GPU here; use cpu or update the driver.")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise ShoalError(f"{flag} {name}: this machine has {torch.cuda.device_count()} GPU(s), counted from 0.")
    return name


def device_name(device: str) -> str:
    """The name of a GPU, or the number of CPU cores."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{cpu_threads()} CPU core(s)"


def commit() -> str:
    """The checkout's commit, or "unknown" outside of one."""
    here = Path(__file__).parent
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    return asked.stdout.strip() or "unknown"


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
