"""Memory that this process may use: the machine's, within the limits of the process and of its control group."""

import contextlib
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

PROCESS = Path("/proc/self")
GROUPS = Path("/sys/fs/cgroup")

RESOURCES = {resource.RLIMIT_AS: "VmSize", resource.RLIMIT_DATA: "VmData"}
"""Resource limit -> entry of /proc/self/status with the bytes that count against it."""

VERSIONS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""Control groups version 2 and 1: folder, file of the limit, file of the usage, reclaimable part of the usage."""


def available_memory() -> int:
    """Bytes that this process can still allocate, including reclaimable file caches."""
    found = _number(Path("/proc/meminfo"), "MemAvailable:")
    machine = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if found is None else 1024 * found
    return max(0, min([machine, *_left_by_resources(), *(limit - used for limit, used in _groups())]))


def whole_memory() -> int:
    """Bytes that this process could allocate if no other process used memory."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([machine, *_left_by_resources(), *(limit for limit, _ in _groups())]))


def _left_by_resources() -> Iterator[int]:
    for number, name in RESOURCES.items():
        limit = resource.getrlimit(number)[0]
        mapped = _number(PROCESS / "status", f"{name}:")
        if limit != resource.RLIM_INFINITY and mapped is not None:
            yield limit - 1024 * mapped


def _groups() -> Iterator[tuple[int, int]]:
    """Limit and usage [bytes] of this process's control group and of its ancestors, where they are readable."""
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (PROCESS / "cgroup").read_text().splitlines()
    for line in lines:
        _, kinds, path = line.split(":", 2)
        for kind in VERSIONS.keys() & set(kinds.split(",")):
            base, limits, usages, reclaimable = VERSIONS[kind]
            # In a container the path may be the host's; then the container's group is the topmost one.
            for parts in range(len(Path(path).parts), 0, -1):
                group = GROUPS.joinpath(base, *Path(path).parts[1:parts])
                limit, used = _number(group / limits), _number(group / usages)
                if limit is not None and used is not None:
                    yield limit, used - (_number(group / "memory.stat", f"{reclaimable} ") or 0)


def _number(path: Path, name: str = "") -> int | None:
    """The number after a name at the start of a line; None if there is none."""
    try:
        found = re.search(rf"^{name}\s*(\d+)", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])
