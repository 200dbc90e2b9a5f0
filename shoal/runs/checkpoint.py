"""Checkpoints: tensors as safetensors, a manifest with checksums, written atomically, without pickle.

Policies are in one file. The rest of the training state is in another, which can be many times as large (a replay) and
is kept for the newest checkpoints only.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from shoal.core.errors import FileError, ShoalError, excerpt, writing
from shoal.runs import files

POLICY, STATE = "policy.safetensors", "state.safetensors"
"""Files of the policies and of the rest of the training state."""

MANIFEST = "manifest.json"
FORMAT = 4

POLICY_PREFIX = "policy."
"""Prefix of the names of policy tensors."""

WRITING = ".writing_"
"""Prefix of the folder of an incomplete checkpoint."""

HEADER = 2**24
"""Maximum bytes of a file in addition to its tensors."""

DTYPES = {
    str(dtype): dtype
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8)
    + (torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64)
}

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """The verified content of a checkpoint folder."""

    path: Path
    state: dict[str, torch.Tensor]
    """Tensors of the files that were requested."""
    iteration: int
    steps: int


def save_checkpoint(folder: Path, state: dict[str, torch.Tensor], iteration: int, steps: int) -> Path:
    """Write `folder/step_N` under a temporary name, then rename it: it is complete or absent."""
    files.make_folder(folder)
    final = folder / _name(steps)
    temporary = folder / f"{WRITING}{steps:012d}"
    files.remove(temporary)
    try:
        with writing(final):
            temporary.mkdir()
            mode = temporary.stat().st_mode & 0o666  # safetensors writes files with mode 600
            # safetensors refuses tensors that share memory, and the parameters are views of one flat vector.
            tensors = {name: _on_host(tensor.detach()) for name, tensor in state.items()}
            parts = {POLICY: {}, STATE: {}}
            for name, tensor in tensors.items():
                parts[POLICY if name.startswith(POLICY_PREFIX) else STATE][name] = tensor
            for file, part in parts.items():
                try:
                    save_file(part, temporary / file)
                except SafetensorError as error:  # a full disk among others
                    raise OSError(str(error)) from None
                (temporary / file).chmod(mode)
            manifest = dict(
                format=FORMAT,
                iteration=iteration,
                steps=steps,
                sha256={file: files.sha256(temporary / file) for file in parts},
                tensors=_describe(tensors),
            )
            files.write_text(temporary / MANIFEST, json.dumps(manifest, indent=1) + "\n")
            for file in parts:
                files.sync(temporary / file)
            files.remove(final)
            os.replace(temporary, final)
            files.sync(folder)
    finally:
        files.remove(temporary)
    return final


def _name(steps: int) -> str:
    return f"step_{steps:012d}"


def _describe(tensors: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Dtype and shape by name, in the manifest's form."""
    return {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}


def find_checkpoints(folder: Path) -> dict[int, Path]:
    """Env steps -> path of every checkpoint in a folder, ascending; warns of other entries `step_…`."""
    found, strange = {}, []
    for name in files.list_folder(folder):
        if name.startswith("step_"):
            digits = re.fullmatch(r"step_([0-9]{12,18})", name)
            if digits and name == _name(int(digits[1])) and files.is_folder(folder / name):
                found[int(digits[1])] = folder / name
            else:
                strange.append(name)
    if strange:
        warnings.warn(f"{folder} holds {excerpt(', '.join(strange))}: no checkpoint, left alone.", stacklevel=1)
    return dict(sorted(found.items()))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU copy. For a GPU tensor `cpu()` is the copy; a CPU tensor is cloned, since `cpu()` returns it."""
    return tensor.cpu().contiguous() if tensor.is_cuda else tensor.clone(memory_format=torch.contiguous_format)


def strip_checkpoint(path: Path) -> None:
    """Reduce a checkpoint to its policies. The large file goes first, since the disk may be full."""
    files.remove(path / STATE)
    with suppress(FileError):  # damaged, or a full disk: reading the checkpoint reports it
        manifest = _read_manifest(path)
        if manifest["sha256"].pop(STATE, None) is not None:
            files.write_text(path / MANIFEST, json.dumps(manifest, indent=1) + "\n")


def check_checkpoint(path: Path, wanted: tuple[str, ...] = (POLICY, STATE)) -> dict[str, Any]:
    """Verify files of a checkpoint against its manifest, and return the manifest.

    Raises:
        ShoalError: Names the file and its fault.
    """
    manifest = _read_manifest(path)
    largest = HEADER + sum(DTYPES[dtype].itemsize * math.prod(shape) for dtype, shape in manifest["tensors"].values())
    for file in wanted:
        if file not in manifest["sha256"]:
            raise ShoalError(f"{path} is too old to resume from: only its policies are kept.")
        if not os.path.lexists(path / file):
            raise FileError(f"{path / file} is missing.")
        if files.size(path / file) > largest or files.sha256(path / file) != manifest["sha256"][file]:
            raise FileError(f"{path / file} is damaged: its SHA-256 is not the one in the manifest.")
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read and validate the manifest of a checkpoint."""
    file = path / MANIFEST
    found = files.read_json(file)
    if not isinstance(found, dict):
        raise FileError(f"{file} must hold a JSON object.")
    for name, (is_good, rule) in MANIFEST_RULES.items():
        if name not in found or not is_good(found[name]):
            raise FileError(f"{file} is damaged: {name} must be {rule}, got {excerpt(found.get(name, 'nothing'))}.")
    if path.name != _name(found["steps"]):
        raise FileError(f"{file} belongs to another checkpoint, with {found['steps']} steps.")
    return found


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _are_checksums(value: Any) -> bool:
    return isinstance(value, dict) and all(
        file in (POLICY, STATE) and isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{64}", digest)
        for file, digest in value.items()
    )


def _are_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(entry, list)
        and len(entry) == 2
        and isinstance(entry[0], str)
        and entry[0] in DTYPES
        and isinstance(entry[1], list)
        and len(entry[1]) <= 64
        and all(_is_count(length) for length in entry[1])
        for entry in value.values()
    )


MANIFEST_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "format": (lambda value: type(value) is int and value == FORMAT, f"{FORMAT}, which this version reads"),
    "iteration": (_is_count, "a whole number from 0 on"),
    "steps": (_is_count, "a whole number from 0 on"),
    "sha256": (_are_checksums, "checksums by file"),
    "tensors": (_are_tensors, "dtype and shape by name"),
}


def load_checkpoint(path: Path, device: torch.device | str, wanted: tuple[str, ...] = (POLICY, STATE)) -> Checkpoint:
    """Read files of a checkpoint.

    Raises:
        ShoalError: Names the file and its fault.
    """
    manifest = check_checkpoint(path, wanted)
    state: dict[str, torch.Tensor] = {}
    for file in wanted:
        try:
            state.update(load_file(path / file, device=str(device)))
        except (SafetensorError, TypeError, ValueError, OSError) as error:
            raise FileError(f"{path / file} is damaged: {excerpt(error)}.") from None
    expected = {name: entry for name, entry in manifest["tensors"].items() if name in state}
    if _describe(state) != expected:
        raise FileError(f"{path} is damaged: its tensors are not those in the manifest.")
    weights = ((name, tensor) for name, tensor in state.items() if name.startswith(POLICY_PREFIX))
    if bad := [name for name, tensor in weights if not bool(torch.isfinite(tensor).all())]:
        raise FileError(f"{path / POLICY} holds non-finite weights: {excerpt(', '.join(bad), 1000)}.")
    return Checkpoint(path, state, manifest["iteration"], manifest["steps"])


def load_latest(folder: Path, device: torch.device | str, warn: Callable[[str], None]) -> Checkpoint:
    """Load the newest valid checkpoint of a run; skips damaged ones with a warning each."""
    return _newest(folder, lambda path: load_checkpoint(path, device), warn)


def latest_steps(folder: Path) -> int:
    """Env steps of the newest valid checkpoint of a run."""
    return _newest(folder, check_checkpoint, lambda text: None)["steps"]


def _newest(folder: Path, read: Callable[[Path], T], warn: Callable[[str], None]) -> T:
    for name in files.list_folder(folder):
        if name.startswith(WRITING):
            files.remove(folder / name)
    found = list(find_checkpoints(folder).values())
    if not found:
        raise ShoalError(f"{folder} holds no checkpoint yet; start the run again with `shoal train`.")
    candidates = [path for path in reversed(found) if not _is_stripped(path)]
    if not candidates:
        raise ShoalError(f"{folder} holds policies only; start another run, with --load-policy from this one.")
    problems = []
    for path in candidates:
        try:
            return read(path)
        except ShoalError as error:
            problems.append(str(error))
            warn(f"{error} Trying the previous one.")
    raise ShoalError(f"{folder} holds no valid checkpoint. {problems[0]}")


def _is_stripped(path: Path) -> bool:
    try:
        return STATE not in _read_manifest(path)["sha256"]
    except FileError:
        return False


def compare(saved: dict[str, torch.Tensor], own: dict[str, torch.Tensor], path: Path) -> None:
    """Raise ShoalError unless names, shapes and dtypes agree; the message lists every difference."""
    differences = []
    for name in sorted(saved.keys() | own.keys()):
        if name not in own:
            differences.append(f"{excerpt(name)}: only in the checkpoint")
        elif name not in saved:
            differences.append(f"{name}: not in the checkpoint")
        elif saved[name].shape != own[name].shape or saved[name].dtype != own[name].dtype:
            differences.append(
                f"{name}: {saved[name].dtype} {tuple(saved[name].shape)} in the checkpoint, "
                f"{own[name].dtype} {tuple(own[name].shape)} here"
            )
    if differences:
        raise ShoalError(f"{path} does not fit this run:\n  " + "\n  ".join(differences))
