"""Checkpoints: tensors as safetensors, a manifest with checksums, written atomically. No pickle anywhere.

What is played, the policies, is in one file, and the rest that training goes on from in another, which can be many
times as large (a replay) and is not kept for long.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shoal.errors import ShoalError

POLICY, STATE = "policy.safetensors", "state.safetensors"
"""The files for policies and for the rest."""

MANIFEST = "manifest.json"
FORMAT = 2

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint folder held, checked."""

    path: Path
    state: dict[str, torch.Tensor]
    """Of the policies alone, if no more was asked for."""
    iteration: int
    steps: int


def save_checkpoint(folder: Path, state: dict[str, torch.Tensor], iteration: int, steps: int) -> Path:
    """Write `folder/step_N`: first under a temporary name, then renamed, so that a half-written one is never seen."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step_{steps:012d}"
    temporary = folder / f".writing_{steps:012d}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        # Copies: safetensors refuses tensors that share memory, and the flat parameters are all views of one vector.
        tensors = {name: _on_host(tensor.detach()) for name, tensor in state.items()}
        files = {POLICY: {}, STATE: {}}
        for name, tensor in tensors.items():
            files[POLICY if name.startswith("policy.") else STATE][name] = tensor
        for file, part in files.items():
            try:
                save_file(part, temporary / file)
            except SafetensorError as error:  # how it reports a full disk
                raise OSError(str(error)) from None
        manifest = dict(
            format=FORMAT,
            iteration=iteration,
            steps=steps,
            sha256={file: _checksum(temporary / file) for file in files},
            tensors={name: [str(t.dtype), list(t.shape)] for name, t in tensors.items()},
        )
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for file in (*files, MANIFEST):
            _sync(temporary / file)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        _sync(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory: what comes from a GPU is one already."""
    return tensor.cpu().contiguous() if tensor.is_cuda else tensor.clone(memory_format=torch.contiguous_format)


def strip_checkpoint(path: Path) -> None:
    """Keep of a checkpoint only what is played. The large file goes first: the disk may be full."""
    (path / STATE).unlink(missing_ok=True)
    with suppress(ShoalError):  # damaged: whoever wants it will be told
        manifest = _manifest(path)
        if manifest["sha256"].pop(STATE, None) is not None:
            write_whole(path / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def check_checkpoint(path: Path, files: tuple[str, ...] = (POLICY, STATE)) -> tuple[int, int]:
    """Iteration and env steps of a checkpoint, or in one sentence what is wrong with which file."""
    manifest = _manifest(path)
    for file in files:
        if file not in manifest["sha256"]:
            raise ShoalError(f"{path} is too old to be gone on from: only its policy is kept, for playing.")
        if not (path / file).is_file():
            raise ShoalError(f"{path / file} is missing.")
        if _checksum(path / file) != manifest["sha256"][file]:
            raise ShoalError(f"{path / file} is damaged: its SHA-256 is not the one in the manifest.")
    return manifest["iteration"], manifest["steps"]


def _manifest(path: Path) -> dict[str, Any]:
    try:
        found = json.loads((path / MANIFEST).read_text())
        if found["format"] != FORMAT:
            raise ShoalError(f"{path / MANIFEST} has format {found['format']}; this version reads {FORMAT}.")
        return dict(found, sha256=dict(found["sha256"]), iteration=int(found["iteration"]), steps=int(found["steps"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShoalError(f"{path / MANIFEST} is damaged or missing ({error}).") from None


def load_checkpoint(path: Path, device: torch.device | str, files: tuple[str, ...] = (POLICY, STATE)) -> Checkpoint:
    """Read one checkpoint, or some files of it, or say in one sentence what is wrong with which file."""
    iteration, steps = check_checkpoint(path, files)
    state: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            state.update(load_file(path / file, device=str(device)))
        except SafetensorError as error:
            raise ShoalError(f"{path / file} is damaged: {error}.") from None
    return Checkpoint(path, state, iteration, steps)


def load_latest(folder: Path, device: torch.device | str, warn) -> Checkpoint:
    """The newest good checkpoint of a run; damaged ones are passed over with a warning each."""
    return _newest(folder, lambda path: load_checkpoint(path, device), warn)


def latest_steps(folder: Path) -> int:
    """Env steps of the newest good checkpoint of a run."""
    return _newest(folder, check_checkpoint, lambda text: None)[1]


def _newest(folder: Path, read: Callable[[Path], T], warn: Callable[[str], None]) -> T:
    for leftover in folder.glob(".writing_*"):
        shutil.rmtree(leftover, ignore_errors=True)
    found = sorted(folder.glob("step_*"), reverse=True)
    if not found:
        raise ShoalError(f"{folder} holds no checkpoint yet; start the run again with `shoal train`.")
    candidates = [path for path in found if not _is_stripped(path)]
    if not candidates:
        raise ShoalError(f"{folder} holds policies only, for playing; start another run, with --load from this one.")
    problems = []
    for path in candidates:
        try:
            return read(path)
        except ShoalError as error:
            problems.append(str(error))
            warn(f"{error} Trying the one before it.")
    raise ShoalError(f"{folder} holds no good checkpoint. {problems[0]}")


def _is_stripped(path: Path) -> bool:
    try:
        return STATE not in _manifest(path)["sha256"]
    except ShoalError:
        return False


def compare(saved: dict[str, torch.Tensor], own: dict[str, torch.Tensor], path: Path) -> None:
    """Refuse a state of another world, policy or shape; every differing field is listed and nothing is loaded."""
    differences = []
    for name in sorted(saved.keys() | own.keys()):
        if name not in own:
            differences.append(f"{name}: only in the checkpoint")
        elif name not in saved:
            differences.append(f"{name}: not in the checkpoint")
        elif saved[name].shape != own[name].shape or saved[name].dtype != own[name].dtype:
            differences.append(
                f"{name}: {saved[name].dtype} {tuple(saved[name].shape)} in the checkpoint, "
                f"{own[name].dtype} {tuple(own[name].shape)} here"
            )
    if differences:
        raise ShoalError(f"{path} does not fit this run:\n  " + "\n  ".join(differences))


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one go: a process killed meanwhile leaves the old one."""
    temporary = path.with_name(f".{path.name}.writing")
    temporary.write_text(text)
    _sync(temporary)
    os.replace(temporary, path)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Make sure that a file or folder has reached the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
