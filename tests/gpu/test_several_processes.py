"""On GPUs: sums of NCCL inside graphs, processes that share a GPU, processes with one GPU each."""

import socket

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.core.graph import Graphed
from shoal.core.reduce import GroupReducer
from shoal.runs.checkpoint import load_checkpoint
from shoal.runs.folder import RunFolder

SETTINGS = dict(
    num_envs=256, rollout_steps=16, total_steps=2 * 256 * 16, epochs=2, num_minibatches=1, eval_episodes=8,
    device="cuda", precision="fp32", compile="off", quiet=True, normalize_obs=True, normalize_reward=True,
)  # fmt: skip


@pytest.fixture
def group():
    """NCCL with one process: its operations can be recorded, and change nothing."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    dist.init_process_group("nccl", init_method=f"tcp://localhost:{port}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_sums_over_processes_are_part_of_a_graph(group):
    reducer = GroupReducer(group, 0, 1, through_host=False)
    x, total = torch.zeros(1024, device="cuda"), torch.zeros(1024, device="cuda")  # a power of two has an exact mean
    pooled = torch.zeros(3, device="cuda")

    def update() -> None:
        x.add_(1.0)
        gradient = x * 2.0
        reducer.average(gradient)
        reducer.maximum(gradient)
        total.add_(gradient)
        count = torch.full((), 5.0, device="cuda")
        pooled.copy_(torch.stack(reducer.pooled(count, x.mean(), x.var())))

    recorded = Graphed(update, torch.device("cuda"))
    for _ in range(6):
        recorded()
    assert recorded.graph is not None
    assert total.eq(2.0 * 21).all()
    assert pooled.tolist() == [5.0, 6.0, 0.0]
    del recorded


@pytest.mark.parametrize("count", [2, 4])
def test_processes_learn_as_one_does_with_one_gpu_or_several(tmp_path, count):
    """Two on one GPU sum through the host; with one GPU per process NCCL is inside the graphs."""
    one = shoal.train("cartpole", **SETTINGS, run_dir=tmp_path / "one")
    many = shoal.train("cartpole", **SETTINGS, run_dir=tmp_path / "many", processes=count)
    states = [load_checkpoint(RunFolder(run.path).pick("last"), "cpu").state for run in (one, many)]
    for name in [name for name in states[0] if name.startswith("policy.")]:  # experience depends on the last bit
        torch.testing.assert_close(states[0][name], states[1][name], rtol=5e-3, atol=5e-3)
