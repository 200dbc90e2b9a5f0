"""What tests on a GPU need of a machine."""

import pytest
import torch
import warp as wp


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a cuda GPU")


@pytest.fixture
def cpu_kernels():
    """For tests that compare with the CPU; some builds of Warp compile for GPUs alone."""
    if not wp.is_cpu_available():
        pytest.skip("needs Warp's compiler for CPUs")
