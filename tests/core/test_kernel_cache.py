"""The cache of compiled kernels: damage of any kind to any file is found before code runs, and repaired."""

import errno
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
import warp as wp

from shoal.core import kernel_cache
from shoal.core.errors import ShoalError
from shoal.core.kernel_cache import CHECKSUMS, find_damage
from shoal.core.kernels import Program
from shoal.core.launch import Plan, init_warp
from shoal.core.temporary import OWNER
from tests.damage import DAMAGES


@wp.kernel(enable_backward=False, module="unique", module_options={"optimization_level": 0})
def count_up(first: int, out: wp.array[int]):
    i = first + wp.tid()
    out[i] = out[i] + 7


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache for the test. The kernel is unloaded before and after."""
    init_warp()
    monkeypatch.setattr(wp.config, "kernel_cache_dir", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    count_up.module.unload()
    yield tmp_path / "cache"
    count_up.module.unload()


def run() -> list[str]:
    """Load the kernel as a new process would, check its result, and return the warnings."""
    count_up.module.unload()
    out = torch.zeros(3, dtype=torch.int32)
    plan = Plan(torch.device("cpu"), 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan.add_kernel(count_up, 3, [wp.from_torch(out)], unit=1, block=64)
    plan()
    assert out.tolist() == [7, 7, 7]
    return [str(warning.message) for warning in caught]


def only(folder: Path) -> tuple[Path, str]:
    """The one entry of a cache and the name of its binary."""
    (entry,) = folder.iterdir()
    (binary,) = (path.name for path in entry.glob("*.o"))
    return entry, binary


def test_every_damage_to_every_file_is_found_and_repaired(cache):
    assert run() == []
    entry, binary = only(cache)
    assert find_damage(entry, binary) is None
    good = shutil.copytree(entry, cache.parent / "good")
    files = sorted(path.name for path in good.iterdir())
    assert {Path(name).suffix for name in files} == {".o", ".meta", ".cpp", CHECKSUMS}
    for file in files:
        for kind, damage in DAMAGES.items():
            damage(entry / file)
            problem = find_damage(entry, binary)
            if file.endswith(".cpp"):  # never read
                assert problem is None, kind
            elif file.endswith(CHECKSUMS) and kind == "missing":  # as left by a process that was killed while writing
                assert problem == ""
            elif file.endswith(CHECKSUMS) and kind == "longer":
                assert "holds no checksums" in str(problem)
            else:
                assert problem, (file, kind)
                assert file in problem or file.endswith(CHECKSUMS), (file, kind, problem)
            compiled = shutil.copytree(good, cache.parent / "compiled")
            kernel_cache._publish(compiled, entry, binary)
            shutil.rmtree(compiled)
            assert find_damage(entry, binary) is None, (file, kind)
    for kind in ("missing", "text", "a dangling link", "a pipe"):
        shutil.rmtree(entry)
        entry.touch()
        DAMAGES[kind](entry)
        problem = find_damage(entry, binary)
        assert problem == "" if kind == "missing" else problem, kind
        compiled = shutil.copytree(good, cache.parent / "compiled")
        kernel_cache._publish(compiled, entry, binary)
        shutil.rmtree(compiled)
        assert find_damage(entry, binary) is None, kind


@pytest.mark.parametrize(("ending", "kind"), [(".o", "flipped"), (".meta", "empty"), (".o", "a folder")])
def test_a_damaged_kernel_is_compiled_again_with_one_warning(cache, ending, kind):
    assert run() == []
    entry, _ = only(cache)
    (file,) = entry.glob(f"*{ending}")
    DAMAGES[kind](file)
    (warning,) = run()
    assert "kernel cache was damaged" in warning
    assert str(file) in warning
    assert run() == [], "the next start is clean"
    assert [path.name for path in cache.iterdir()] == [entry.name], "no private folder is left"


def test_a_file_with_a_valid_checksum_that_does_not_load_is_compiled_again(cache):
    run()
    entry, binary = only(cache)
    (entry / binary).write_bytes(b"not machine code")
    compiled = shutil.copytree(entry, cache.parent / "compiled")
    kernel_cache._publish(compiled, entry, binary)
    assert find_damage(entry, binary) is None
    (warning,) = run()
    assert "cannot be loaded" in warning
    assert run() == []


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "\0"], ids=["a list", "deep", "a null"])
def test_invalid_checksum_files_are_replaced(cache, text):
    run()
    entry, binary = only(cache)
    (entry / f"{binary}{CHECKSUMS}").write_text(text)
    (warning,) = run()
    assert "holds no checksums" in warning
    assert run() == []


def test_a_binary_without_checksums_is_never_run(cache):
    run()
    entry, binary = only(cache)
    (entry / f"{binary}{CHECKSUMS}").unlink()
    (entry / binary).write_bytes(b"left by another program")
    assert run() == []
    assert find_damage(entry, binary) is None


@pytest.mark.parametrize("call", ["mkdtemp", "replace"])
def test_kernels_run_without_a_writable_cache(cache, monkeypatch, call):
    """Compiling needs neither a private folder in the cache nor publishing."""
    owner = tempfile if call == "mkdtemp" else os
    real = getattr(owner, call)

    def refuse(*arguments, **options):
        if cache in (options.get("dir"), *(Path(argument).parents[1] for argument in arguments)):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **options)

    monkeypatch.setattr(owner, call, refuse)
    (warning,) = run()
    assert f"{cache} cannot be written" in warning
    assert list(cache.glob("shoal-*")) == []


def test_private_folders_of_killed_processes_are_removed(cache):
    left = cache / "shoal-kernels-left"
    left.mkdir()
    (left / OWNER).touch()
    run()
    assert not left.exists()


def test_an_error_that_no_folder_fixes_is_an_error_of_the_author(cache, monkeypatch):
    folders = []

    def fail(*_):
        folders.append(Path(wp.config.kernel_cache_dir))
        raise RuntimeError("CPU kernel build failed")

    monkeypatch.setattr(count_up.module, "load", fail)
    plan = Plan(torch.device("cpu"), 3)
    with pytest.raises(ShoalError, match=r"A function of the world does not compile.*build failed"):
        plan.add_program(Program(count_up, ()), {})
    assert [folder.parent == cache for folder in folders] == [True, False]
    assert not any(folder.exists() for folder in folders)
    assert wp.config.kernel_cache_dir == str(cache)


def test_headers_of_the_compiler_are_in_a_temporary_folder_of_shoal(cache, tmp_path, monkeypatch):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    kernel_cache._headers.cache_clear()
    assert run() == []
    (left,) = temporary.iterdir()
    assert left.name.startswith("shoal-headers-")
    assert any(path.name != OWNER for path in left.iterdir())
    kernel_cache._headers().close()
    kernel_cache._headers.cache_clear()
    assert not any(temporary.iterdir())
