"""The Triton kernel of small policies in Triton's interpreter, without a GPU."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: make gpu-build installs it")


def test_interpreted_kernel_acts_as_torch_does():
    """fp32 sums differ only in order, which rarely changes a rounding to bf16."""
    program = Path(__file__).with_name("interpreted_fused.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 4
    for row in rows:
        assert row["equal_actions"] >= 0.99, row
        assert max(row["log_prob_error"], row["value_error"]) < 2e-3, row
