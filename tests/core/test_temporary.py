"""Temporary folders: none is left after any end of a process."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.core import temporary
from shoal.core.errors import ShoalError
from shoal.core.temporary import OWNER, TemporaryFolder, remove_abandoned

MAKE = """
import sys, os, signal
from pathlib import Path
from shoal.core.temporary import TemporaryFolder
kept = [TemporaryFolder("kernels"), TemporaryFolder("scenes", [Path(sys.argv[1])])]
for folder in kept:
    (folder.path / "file").write_text("x")
print(*(folder.path for folder in kept), flush=True)
"""

ENDS = {
    "returns": "pass",
    "sys.exit": "sys.exit(3)",
    "raises": "1 / 0",
    "interrupted": "os.kill(os.getpid(), signal.SIGINT)",
    "a fork exits": "os.fork() or sys.exit(0); os.wait(); assert kept[0].path.exists()",
}


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The system's folder for temporary files and the one in memory, both empty."""
    ordinary, memory = tmp_path / "tmp", tmp_path / "shm"
    ordinary.mkdir()
    memory.mkdir()
    monkeypatch.setenv("TMPDIR", str(ordinary))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(temporary, "MEMORY", memory)
    return ordinary, memory


def start(end, memory):
    return subprocess.Popen(
        [sys.executable, "-c", MAKE + end, str(memory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=-3,
        text=True,
    )


@pytest.mark.parametrize("end", ENDS)
def test_folders_are_removed_at_the_end(places, end):
    process = start(ENDS[end], places[1])
    output, _ = process.communicate(timeout=60)
    assert len(output.split()) == 2
    assert [list(place.iterdir()) for place in places] == [[], []]


def test_folders_of_a_killed_process_are_removed_by_the_next_start(places):
    living, killed = (start("sys.stdin.read()", places[1]) for _ in range(2))
    theirs = [[Path(word) for word in process.stdout.readline().split()] for process in (living, killed)]
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    assert all(path.is_dir() for path in theirs[1])
    own = TemporaryFolder("launch")
    assert not any(path.exists() for path in theirs[1])
    assert all((path / "file").exists() for path in theirs[0])
    living.communicate(timeout=60)
    own.close()
    own.close()
    assert [list(place.iterdir()) for place in places] == [[], []]


def test_folders_of_the_user_are_left_alone(places, tmp_path):
    folder = places[0] / "shoal-runs"
    folder.mkdir()
    (folder / "precious").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / OWNER).touch()
    (places[0] / "shoal-link").symlink_to(tmp_path / "elsewhere")
    (places[1] / "shoal-linked").mkdir()
    (places[1] / "shoal-linked" / OWNER).symlink_to(folder / "precious")
    (places[1] / "shoal-file").touch()
    remove_abandoned()
    assert (folder / "precious").exists()
    assert (tmp_path / "elsewhere" / OWNER).exists()
    assert {path.name for path in places[1].iterdir()} == {"shoal-linked", "shoal-file"}


def test_a_folder_removed_before_it_is_locked_is_recreated(places, monkeypatch):
    lock, taken = temporary.fcntl.flock, []

    def flock(descriptor, operation):
        if not taken:  # another start of Shoal comes first
            taken.append(descriptor)
            monkeypatch.setattr(temporary.fcntl, "flock", lock)
            remove_abandoned()
        lock(descriptor, operation)

    monkeypatch.setattr(temporary.fcntl, "flock", flock)
    with TemporaryFolder("launch") as path:
        assert taken
        assert (path / OWNER).exists()


def test_no_place_for_temporary_folders_is_one_sentence(tmp_path):
    places = [tmp_path / "nowhere", Path("/proc")]
    with pytest.raises(ShoalError, match=r"can be created in .*nowhere \(No such .* or /proc \(.*\); set TMPDIR"):
        TemporaryFolder("launch", places)
    with TemporaryFolder("launch", [*places, tmp_path]) as path:
        assert path.parent == tmp_path


def test_every_temporary_folder_of_the_package_is_one_of_these():
    package = Path(shoal.__file__).parent
    makers = re.compile(r"\b(mkdtemp|TemporaryDirectory)\b")
    found = [str(path.relative_to(package)) for path in package.rglob("*.py") if makers.search(path.read_text())]
    assert found == ["core/temporary.py"]
