"""Load states of runs and compare them bit for bit."""

from collections.abc import Mapping
from pathlib import Path

import torch

from shoal.runs.checkpoint import load_checkpoint
from shoal.runs.folder import RunFolder


def last_state(path: Path | str) -> dict[str, torch.Tensor]:
    """The tensors of the newest checkpoint of a run, on the CPU."""
    return load_checkpoint(RunFolder(Path(path)).pick("last"), "cpu").state


def assert_equal_states(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> None:
    """Fail, naming the tensors that differ, unless both have the same names and bits."""
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different
