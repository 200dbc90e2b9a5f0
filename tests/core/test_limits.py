"""Memory of a process: the minimum over the machine, the limits of the process and its control groups."""

import resource

import pytest
import torch

from shoal.core import limits
from shoal.core.errors import shortage
from shoal.core.limits import available_memory, whole_memory
from shoal.core.store import SHARE, free_memory
from tests.commands import run

GIB = 2**30
NONE = str(2**63 - 4096)
"""No limit, as version 1 writes it."""

GROUPS = {
    "version 2": ("0::/job/step", {"job/step": ("max", GIB, 0), "job": (3 * GIB, 2 * GIB, GIB)}, ""),
    "version 1": ("7:cpu:/\n4:memory:/job", {"job": (NONE, GIB, 0), "": (3 * GIB, 2 * GIB, GIB)}, "memory"),
    "version 1, in a container": ("4:hugetlb,memory:/docker/1", {"": (3 * GIB, 2 * GIB, GIB)}, "memory"),
}


@pytest.fixture
def system(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "PROCESS", tmp_path)
    monkeypatch.setattr(limits, "GROUPS", tmp_path / "groups")
    (tmp_path / "status").write_text(f"Name:\tx\nVmSize:\t {GIB // 1024} kB\nVmData:\t {GIB // 2048} kB\n")
    return tmp_path


@pytest.mark.parametrize("how", GROUPS)
def test_limits_of_control_groups_count(how, system, monkeypatch):
    """1 GiB of a group's 2 GiB is a cache; the limits of its ancestors count too."""
    text, groups, base = GROUPS[how]
    (system / "cgroup").write_text(text)
    _, limit_file, use_file, freed = limits.VERSIONS[base]
    for name, (limit, used, cached) in groups.items():
        folder = system / "groups" / base / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / limit_file).write_text(f"{limit}\n")
        (folder / use_file).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{freed} {cached}\n")
    monkeypatch.setattr(limits.os, "sysconf", lambda name: 2**20)
    assert whole_memory() == 3 * GIB
    assert available_memory() <= 2 * GIB
    (system / "groups" / base / "memory.stat").unlink(missing_ok=True)
    (system / "groups" / base / "job" / "memory.stat").unlink(missing_ok=True)
    assert available_memory() <= GIB


@pytest.mark.parametrize("number", limits.RESOURCES)
def test_limits_of_the_process_count(number, system, monkeypatch):
    before = available_memory()
    monkeypatch.setattr(
        limits.resource, "getrlimit", lambda n: (GIB + 2**20 if n == number else resource.RLIM_INFINITY,) * 2
    )
    left = 2**20 + (GIB // 2 if number == resource.RLIMIT_DATA else 0)
    assert whole_memory() == left
    assert available_memory() == min(before, left)
    assert free_memory("cpu") == int(SHARE["cpu"] * available_memory())


def full_memory():
    torch.empty(2**60, dtype=torch.uint8)


def no_threads():
    raise RuntimeError("can't start new thread")


def from_loader():
    try:
        raise ImportError("libx.so: failed to map segment from shared object")
    except ImportError as error:
        raise ImportError("a long text") from error


def refused(number):
    def call():
        raise OSError(number, "refused")

    return call


@pytest.mark.parametrize(
    ("cause", "remedy"),
    [
        (full_memory, "--num-envs"),
        (lambda: bytearray(2**60), "--num-envs"),
        (from_loader, "--num-envs"),
        (refused(12), "--num-envs"),
        (refused(24), "ulimit -n"),
        (refused(23), "ulimit -n"),
        (refused(11), "ulimit -u"),
        (no_threads, "ulimit -u"),
    ],
)
def test_what_the_system_refuses_is_one_sentence(cause, remedy):
    with pytest.raises(Exception) as caught:  # noqa: PT011
        cause()
    said = shortage(caught.value)
    assert said is not None
    assert remedy in said
    assert "\n" not in said


def test_other_errors_are_no_shortage():
    for error in (ValueError("x"), FileNotFoundError(2, "No such file"), RuntimeError("can't start")):
        assert shortage(error) is None


@pytest.mark.parametrize(
    ("limit", "answer"),
    [({resource.RLIMIT_NOFILE: 16}, "No more files"), ({resource.RLIMIT_AS: 2**24}, "memory")],
    ids=str,
)
def test_commands_under_limits_end_with_one_sentence(limit, answer, tmp_path):
    words = ["train", "cartpole", "--num-envs", "8", "--quiet", "--device", "cpu", "--total-steps", "1000"]
    assert run([words], tmp_path, limits=limit) == [1]
    (line,) = (tmp_path / "err").read_text().splitlines()
    assert answer in line
