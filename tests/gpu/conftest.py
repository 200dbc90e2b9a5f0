"""Requirements of tests on a GPU."""

import pytest
import torch
import warp as wp


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a cuda GPU")


@pytest.fixture
def cpu_kernels():
    """For tests that compare with the CPU; some builds of Warp compile only for GPUs."""
    if not wp.is_cpu_available():
        pytest.skip("needs Warp's compiler for CPUs")
