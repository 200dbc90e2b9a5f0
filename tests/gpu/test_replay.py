"""On a GPU: a replay draws as on the CPU, and recorded graphs equal the eager path."""

import pytest
import torch

from shoal.core import Box, Discrete, Group
from shoal.core.graph import Graphed
from shoal.learn.replay import Replay
from shoal.learn.rollout import Rollout, allocate

STEPS, ENVS, AGENTS = 8, 33, 2


def make(device: str, dtype: torch.dtype, stack: int) -> Rollout:
    group = Group("g", Box((3, 5), dtype=dtype), Discrete(3), AGENTS, masked=True, can_leave=True, stack=stack)
    return allocate([group], STEPS, ENVS, STEPS, torch.device(device), state_size=4)


def refill(rollout: Rollout, seed: int) -> None:
    """Random experience, the same on every device; rows are independent of one another."""
    rng = torch.Generator().manual_seed(seed)
    for name in ("observation", "action", "reward", "final_observation", "state"):
        tensor = getattr(rollout, name)
        tensor.copy_(torch.randint(0, 3, tensor.shape, generator=rng))
    for name, share in dict(terminated=0.1, truncated=0.1, alive=0.9, final_alive=0.7, action_mask=0.7).items():
        tensor = getattr(rollout, name)
        tensor.copy_(torch.rand(tensor.shape, generator=rng) < share)
    if rollout.age is not None:
        rollout.age.copy_(torch.randint(0, rollout.stack, rollout.age.shape, generator=rng))


def drawn(
    rollout: Rollout, graph: bool, prioritized: bool, sequences: int, device_bytes: int | None = None
) -> list[torch.Tensor]:
    """The results of several draws, and the final state."""
    replay = Replay(
        rollout, 64, 3, 0.9, prioritized=prioritized, seed=5, sequences=sequences, device_bytes=device_bytes
    )
    assert replay.on_host == (device_bytes is not None)
    found, last = [], []

    def draw() -> None:
        last.clear()
        sample = replay.sample_sequences(500, 8, 8, 0.4) if sequences else replay.sample(500, 0.4)
        error = sample.reward.sum(0) if sequences else sample.reward
        replay.update_priorities(sample.index, error)
        last.extend(tensor for tensor in vars(sample).values() if tensor is not None)

    append, sampling = Graphed(replay.append, replay.device, graph), Graphed(draw, replay.device, graph)
    for turn in range(14):
        refill(rollout, turn)
        append()
        if turn >= 5:
            sampling()
            found += [tensor.cpu().clone() for tensor in last]
    return found + [tensor.cpu() for tensor in replay.state_dict().values()]


def compare(one: list[torch.Tensor], other: list[torch.Tensor], exact: bool) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        if exact or not a.is_floating_point():
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sequences", [0, 16])
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize(("dtype", "stack"), [(torch.float32, 1), (torch.uint8, 3), (torch.bfloat16, 2)])
def test_graphs_and_the_eager_path_draw_the_same(dtype, stack, prioritized, sequences):
    """Nine draws, of which a graph replays seven; bit for bit."""
    found = [drawn(make("cuda", dtype, stack), graph, prioritized, sequences) for graph in (False, True)]
    compare(*found, exact=True)


@pytest.mark.usefixtures("cpu_kernels")
@pytest.mark.parametrize("sequences", [0, 16])
@pytest.mark.parametrize(("dtype", "stack"), [(torch.float32, 1), (torch.uint8, 3)])
def test_cpu_and_gpu_draw_the_same(dtype, stack, sequences):
    """Uniform draws: powers of priorities may differ in their last bit, and so may draws."""
    found = [drawn(make(device, dtype, stack), False, False, sequences) for device in ("cpu", "cuda")]
    compare(*found, exact=False)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize(("dtype", "stack"), [(torch.float32, 1), (torch.uint8, 3), (torch.bfloat16, 2)])
def test_observations_in_the_host_s_memory_are_the_same(dtype, stack, graph):
    found = [drawn(make("cuda", dtype, stack), graph, True, 0, limit) for limit in (None, 1000)]
    compare(*found, exact=True)
