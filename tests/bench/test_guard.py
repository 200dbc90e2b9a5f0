"""The graph guard (bench/guard.py) finds a fault of each kind, names its line, and accepts correct code."""

import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import warp as wp

from bench.graph_guard import guard_cell, replay_cell
from bench.guard import Finding, Guard
from bench.ratchet import Cell
from shoal.core.graph import Graphed
from shoal.core.launch import Plan, bind, init_warp
from shoal.core.wrappers import TransformReward
from shoal.host.device_bridge import DeviceBridge
from shoal.learn import losses
from shoal.learn.replay import Replay
from shoal.policy import ActorCritic, mlp_encoder
from shoal.policy.heads import CategoricalHead
from shoal.training.collector import Collector
from tests.helpers import Counting

CPU = torch.device("cpu")
HERE = f"tests/bench/{Path(__file__).name}"


@wp.func
def scale(env: int, factor: float, x: wp.array[float], y: wp.array[float]):
    y[env] = factor * x[env]


@wp.kernel
def double(x: wp.array(dtype=float), factor: float):
    x[wp.tid()] = factor * x[wp.tid()]


def state() -> SimpleNamespace:
    """Data of the faulty functions; `turn` counts the calls."""
    x, y = torch.arange(6.0), torch.zeros(6)

    def plan(factor: float, x: torch.Tensor) -> Plan:
        return bind("scale", scale, CPU, 6, dict(factor=factor, x=x, y=y))

    return SimpleNamespace(
        turn=0,
        x=x,
        y=y,
        matrix=torch.ones(2, 3),
        host=torch.from_numpy(np.ones(6, np.float32)),
        plan=plan(1.0, x),
        other_number=plan(2.0, x),
        other_memory=plan(1.0, x.clone()),
    )


def guarded(function: Callable[[SimpleNamespace], Any], calls: int = 5, replay: bool = False) -> list[Finding]:
    """The guard's findings when a function is called several times as a graph."""
    init_warp()
    with Guard(replay) as guard:
        s = state()
        call = Graphed(lambda: function(s), CPU)
        for _ in range(calls):
            call()
            s.turn += 1
    return guard.findings


# --- faults: the line that a finding must name ends with the kind of finding -----------------------------------------


def item(s):
    s.y.add_(s.x[0].item())  # host read


def boolean(s):
    if s.x.sum() > 0:  # host read
        s.y.add_(1.0)


def to_list(s):
    s.y.fill_(len(s.x.tolist()))  # host read


def to_numpy(s):
    s.x.numpy()  # host read


def as_array(s):
    np.asarray(s.x)  # host read


def formatted(s):
    str(f"{s.x[0]:.2f}")  # host read


def nonzero(s):
    s.y[: len(s.x.nonzero())] = 1.0  # host read


def mask_index(s):
    s.y.add_(s.x[s.x > 2].sum())  # host read


def mask_assignment(s):
    s.y[s.x > 2] = s.x[:3]  # host read


def tensor_as_index(s):
    s.y.add_(s.matrix[s.x[1].long(), 0])  # host read


def repeats(s):
    torch.repeat_interleave(s.x.long())  # host read


def dlpack(s):
    torch.from_dlpack(s.x)  # host read


def dlpack_capsule(s):
    torch.utils.dlpack.to_dlpack(s.x)  # host read


def in_backward(s):
    class Reads(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float(gradient.sum())  # host read

    x = s.x.detach().requires_grad_()
    s.y.copy_(torch.autograd.grad(Reads.apply(x).sum(), x)[0])


def from_list(s):
    s.y.add_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))  # Python data


def from_array(s):
    s.y.add_(torch.from_numpy(np.ones(6, np.float32)))  # Python data


def new_tensor(s):
    s.y.add_(s.x.new_tensor([1.0]))  # Python data


def list_index(s):
    s.y[:2] = s.x[[0, 1]]  # Python data


def to_cpu(s):
    s.y.add_(s.x.cpu())  # move


def to_named_device(s):
    s.y.add_(s.x.to("cpu"))  # move


def without_device(s):
    s.y.add_(torch.arange(6))  # move


def host_memory(s):
    s.y.add_(s.host)  # move


def blocking_copy(s):
    s.y.copy_(s.host)  # move


def blocking_move(s):
    s.y.copy_(s.host.to(CPU))  # move


def replaced_tensor(s):
    s.y.add_(s.x)  # moved address
    s.x = s.x + 1.0


def replaced_view(s):
    s.y[:3].add_(s.matrix[s.turn % 2])  # frozen value


def python_number(s):
    s.y.add_(0.5 * s.turn)  # frozen value


def python_assignment(s):
    s.y[0] = 0.5 * s.turn  # frozen value


def python_branch(s):
    if s.turn < 4:
        s.y.add_(1.0)
    else:
        s.y.mul_(2.0)  # frozen value


def python_loop(s):
    for _ in range(s.turn):
        s.y.add_(1.0)  # frozen value


def shorter_loop(s):
    for _ in range(10 - s.turn):
        s.y.add_(1.0)  # frozen value


def other_shape(s):
    s.y.add_(s.x[: s.turn].sum())  # frozen value


def graph_in_graph(s):
    Graphed(lambda: s.y.add_(1.0), CPU)()  # frozen value


# Warp


def number_of_a_launch(s):
    plan = s.plan if s.turn < 4 else s.other_number
    plan()  # frozen value


def memory_of_a_launch(s):
    plan = s.plan if s.turn < 4 else s.other_memory
    plan()  # moved address


def plan_by_address(s):
    plans = {s.x.data_ptr(): s.plan}  # moved address
    s.x = s.x.clone()
    next(iter(plans.values()))()


def launch_left_out(s):
    if s.turn < 4:
        s.plan()
    s.y.add_(1.0)  # frozen value


def launch_more(s):
    s.y.add_(1.0)
    if s.turn == 4:
        s.plan()  # frozen value


def number_of_a_direct_launch(s):
    inputs = [wp.from_torch(s.y), 1.0 + s.turn]
    wp.launch(double, 6, inputs, device="cpu", stream=None)  # frozen value


def stream_of_warp(s):
    wp.launch(double, 6, [wp.from_torch(s.y), 2.0], device="cpu")  # move


def warp_numpy(s):
    wp.from_torch(s.x).numpy()  # host read


def warp_memory(s):
    wp.zeros(6, dtype=float, device="cpu")  # moved address


def warp_waits(s):
    wp.synchronize()  # host read


TORCH = (
    item, boolean, to_list, to_numpy, as_array, formatted, nonzero, mask_index, mask_assignment, tensor_as_index,
    repeats, dlpack, dlpack_capsule, in_backward, from_list, from_array, new_tensor, list_index, to_cpu,
    to_named_device, without_device, host_memory, blocking_copy, blocking_move, replaced_tensor, replaced_view,
    python_number, python_assignment, python_branch, python_loop, shorter_loop, other_shape, graph_in_graph,
)  # fmt: skip
WARP = (
    number_of_a_launch, memory_of_a_launch, plan_by_address, launch_left_out, launch_more, number_of_a_direct_launch,
    stream_of_warp, warp_numpy, warp_memory, warp_waits,
)  # fmt: skip


@pytest.mark.parametrize("fault", [*TORCH, *WARP], ids=lambda fault: fault.__name__)
def test_a_fault_is_found_and_its_line_named(fault):
    lines, first = inspect.getsourcelines(fault)
    marked = [(number, line) for number, line in enumerate(lines) if "  # " in line]
    ((number, line),) = marked
    kind = line.split("  # ")[1].strip()
    assert (kind, f"{HERE}:{first + number}") in [(found.kind, found.place) for found in guarded(fault)]


def test_a_fault_is_found_once_and_described_in_a_sentence():
    (found,) = guarded(python_number)
    assert str(found) == (
        f"{found.place}: frozen value: add_.Tensor gets argument 1 = 1.5, but 1.0 was recorded: a graph replays the "
        "first; keep it in a tensor"
    )


# --- code that a recording allows ------------------------------------------------------------------------------------


def good(s):
    s.y[0] = 3.0
    s.y[s.x > 2] = 1.0  # a mask with a number is masked_fill
    s.y[1:].add_(torch.where(s.x[1:] > 2, 0.0, s.x[1:]))
    s.y.copy_(s.host, non_blocking=True)
    s.y.add_(s.host.to(CPU, non_blocking=True))
    s.y.add_(torch.arange(6, device=s.x.device)).add_(torch.zeros_like(s.x))
    s.y.add_(s.matrix[torch.zeros_like(s.x, dtype=torch.int64), 0])
    s.plan()
    own = s.x * 2.0
    bind("scale", scale, CPU, 6, dict(factor=2.0, x=own, y=s.y))()
    wp.launch(double, 6, [wp.from_torch(own), 2.0], device="cpu", stream=None)
    s.kept = own  # a graph's memory keeps its address
    assert s.x.is_cuda
    assert not s.host.is_cuda


def test_code_that_a_recording_allows_has_no_findings():
    assert guarded(good) == []


def reads_at_first(s):
    if s.turn < 2:
        s.x.sum().item()
    s.y.add_(1.0)


def test_warm_up_calls_are_not_checked():
    assert guarded(reads_at_first) == []


def test_code_that_is_not_recorded_is_not_guarded():
    with Guard() as guard:
        call = Graphed(lambda: torch.ones(1).item() and None, CPU, enabled=False)
        for _ in range(5):
            call()
    assert guard.findings == []
    assert guard.regions == []


def test_replaced_functions_are_restored():
    before = Plan.__call__, torch.from_numpy, torch.Tensor.to, wp.launch, wp.array.numpy
    guarded(good)
    assert before == (Plan.__call__, torch.from_numpy, torch.Tensor.to, wp.launch, wp.array.numpy)
    function = lambda: None  # noqa: E731
    assert Graphed(function, CPU).function is function


# --- replays ---------------------------------------------------------------------------------------------------------


def test_a_replay_repeats_the_recording():
    with Guard(replay=True) as guard:
        s = state()
        turns = []

        def step() -> None:
            turns.append(s.turn)
            total = (s.x * 2.0).sum()
            s.y.add_(total + s.turn)
            s.total = total

        call = Graphed(step, CPU)
        for s.turn in range(5):
            call()
            s.x.add_(1.0)
    assert turns == [0, 1, 2]  # a replay does not run Python
    totals = [2.0 * (15.0 + 6.0 * turn) for turn in range(5)]
    assert float(s.total) == totals[-1]  # allocations of the recording are computed again
    assert float(s.y[0]) == sum(totals) + 0 + 1 + 2 + 2 + 2  # but Python's number is frozen
    assert guard.findings == []


# --- trainings -------------------------------------------------------------------------------------------------------


Q = "--batch-size 32 --learning-starts 64 --buffer-size 2000 --replay-ratio 1"

SHORT = {
    "ppo": Cell("cartpole", "--algo ppo --epochs 1 --num-minibatches 2", num_envs=8, rollout_steps=4),
    "recurrent": Cell("cartpole", "--algo a2c --rnn lstm --rnn-size 8", num_envs=8, rollout_steps=4),
    "rainbow": Cell("cartpole", f"--algo rainbow {Q}", num_envs=8, rollout_steps=8),
    "sac": Cell("mountain-car-continuous", f"--algo sac {Q}", num_envs=8, rollout_steps=8),
    "groups": Cell("tag-grid", "--algo a2c", num_envs=2, rollout_steps=4),
    "host": Cell(
        "gym:CartPole-v1", "--algo a2c --vec-backend serial --env-schedule alternating", num_envs=4, rollout_steps=4
    ),
    "first-come": Cell(
        "gym:CartPole-v1", "--algo a2c --vec-backend serial --env-schedule first-come", num_envs=4, rollout_steps=4
    ),
}


@pytest.mark.parametrize("name", SHORT)
def test_a_training_can_be_recorded(name, tmp_path):
    result = guard_cell(SHORT[name], tmp_path, iterations=5, episodes=1)
    assert result.findings == []
    assert result.graphs >= 2


@pytest.mark.parametrize("name", ["ppo", "rainbow"])
def test_replays_of_a_training_give_the_same_numbers(name, tmp_path):
    assert replay_cell(SHORT[name], tmp_path, iterations=5, episodes=1).findings == []


def test_a_world_that_reads_on_the_host_is_found(tmp_path):
    def shaped(reward: torch.Tensor) -> torch.Tensor:
        return reward / max(1.0, float(reward.max()))  # host read

    with Guard() as guard:
        world = TransformReward(Counting(4), shaped)
        policies = {
            g.name: ActorCritic(g, mlp_encoder((8,), "tanh"), shared_encoder=False, normalize=False, log_std_init=0.0)
            for g in world.groups
        }
        collector = Collector(world, policies, steps=2, seed=0)
        collector.start(0)
        collect = Graphed(collector.collect, CPU)
        for _ in range(3):
            collect()
    line = inspect.getsourcelines(shaped)[1] + 1
    assert [(found.kind, found.place) for found in guard.findings] == [("host read", f"{HERE}:{line}")]


FAULTY = {
    "rollout": ("ppo", CategoricalHead, "sample"),
    "update": ("ppo", losses, "clipped_policy_loss"),
    "store": ("rainbow", Replay, "append"),
    "host rows": ("host", DeviceBridge, "write_rollout"),
    "evaluation": ("ppo", CategoricalHead, "mode"),
}
"""Recorded code -> a short training, and a function that the code calls."""


@pytest.mark.parametrize("what", FAULTY)
def test_a_fault_in_a_training_is_found(what, tmp_path, monkeypatch):
    cell, owner, name = FAULTY[what]
    original, number = getattr(owner, name), itertools.count()

    def faulty(*given, **named):
        torch.ones((), device=CPU).item()  # host read
        torch.ones((), device=CPU).mul_(next(number))  # frozen value
        return original(*given, **named)

    monkeypatch.setattr(owner, name, faulty)
    result = guard_cell(SHORT[cell], tmp_path, iterations=5, episodes=1)
    first = inspect.getsourcelines(faulty)[1]
    assert sorted(finding.partition(": ")[0] for finding in result.findings) == [f"{HERE}:{first + i}" for i in (1, 2)]
    assert sorted(finding.split(": ")[1] for finding in result.findings) == ["frozen value", "host read"]
