"""Collecting from host worlds: who waits for whom while policies act on the device and envs step on CPU cores.

Envs come in bunches (see shoal/host/engines.py). In *lockstep* all of them act and step together; *alternating*, the
policies act for one part, mostly a half, while the others step; *first-come*, the bunches that are done first act
first. What an env does depends on its own observations and noise alone, so all three make the same experience.
"""

import time
from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import torch

from shoal.core.errors import ShoalError
from shoal.core.graph import WARM_UP_CALLS, Graphed, records
from shoal.host.config import Schedule
from shoal.host.engines import split
from shoal.host.world import HostWorld
from shoal.learn.rollout import stacked
from shoal.training.collector import Collector
from shoal.training.processes import FinishLine

TRIAL_SECONDS = 0.4
"""How long each schedule is tried before one is chosen."""

TRIAL_STEPS = 8

TRIAL_SEED = 500_009
"""Added to the seed where schedules are tried: an env that fails there does not fail again in training."""

CLEARLY = 1.03
"""How much faster than lockstep, the simplest, another schedule must be."""

LEAST_SHARE = 4
"""A rollout that is cut short has one step in so many of a whole one, or more."""

ENOUGH, MOST = 4, 2
"""First-come, bunches act as soon as a quarter of them is ready, and no more than half of them at once."""


def _never(steps: int) -> bool:
    return False


def _nothing() -> None:
    pass


class HostCollector(Collector):
    """Fills rollouts from a host world, by the schedule that its settings name."""

    world: HostWorld

    def __init__(self, *given, graph: bool = True, line: FinishLine | None = None, **named):
        """With a `line`, rollouts end where others have finished theirs."""
        super().__init__(*given, cuts=line is not None, **named)
        self.line = line
        self.renew: Callable[[], None] = _nothing
        """Called before the policies act: they may get newer weights in the middle of a rollout."""
        self._made: list[float] = []
        """Share of each rollout since the last reading that was made."""
        self.schedule = self.world.config.schedule
        self._measured = ""
        self._graphs = (
            graph and len(self.world.bunches) > 0 and self.world.pinned
        )  # a graph can copy from and to pinned memory alone
        self._pool = torch.cuda.graph_pool_handle() if self._graphs and self.world.device.type == "cuda" else None
        self._turns: dict[tuple[int, int, int, bool], Graphed] = {}
        self._batch: _Batch | None = None
        self._all_rows = self._row(slice(None))
        self._envs = np.arange(self.world.num_envs)
        self._taken = np.zeros(self.world.num_envs, dtype=np.int64)
        """Slots for final observations that each env has used in this rollout."""

    def _keep_all(self) -> list:
        """Nothing: the host knows which episodes were cut off, and keeps just those (`_keep_final`)."""
        return []

    def start(self, seed: int, first_env: int = 0) -> None:
        if self.schedule == "auto":
            self._choose_schedule(seed, first_env)
        super().start(seed, first_env)

    def remarks(self) -> list[str]:
        return [f"envs are stepped {self.world.describe()}; schedule: {self.schedule}{self._measured}"]

    def collect(self) -> None:
        self._begin()
        self._taken[:] = 0
        if self.line is None:
            self._serve(self.schedule, self.steps)
        else:
            self._race(self.line)
        self.counter.add_(1)

    # --- rollouts that are cut short -------------------------------------------------------------------------------

    def _race(self, line: FinishLine) -> None:
        """Make a rollout, or as much of it as there is time for until enough others have finished theirs."""
        least = -(-self.steps // LEAST_SHARE)
        made = self._serve(self.schedule, self.steps, lambda t: least <= t <= self._latest and line.passed())
        line.cross()
        each = np.repeat(made, self._sizes)
        self._made.append(float(each.mean()) / self.steps)
        for steps in {*made} - {self.steps}:
            self._cut_short(steps, (each == steps).nonzero()[0])

    def _cut_short(self, steps: int, envs: np.ndarray) -> None:
        """Envs have made only so many steps. What they see then is kept, as if episodes under way were truncated."""
        flags, where = next(iter(self.rollouts.values())), torch.from_numpy(envs).to(self.world.device)
        over = (flags.terminated[steps - 1, where] | flags.truncated[steps - 1, where]).cpu().numpy()
        going = envs[~over]
        for name, r in self.rollouts.items():
            assert r.alive is not None
            self._final[name][where] = r.observation[steps + r.stack - 1, where]
            self._final_alive[name][where] = r.alive[steps, where]
            if len(going):
                self._keep_final(name, np.full(len(going), steps - 1), going)
            r.preempt(steps, where, torch.from_numpy(going).to(where))

    @property
    def _latest(self) -> int:
        """The most steps after which a rollout can be cut short."""
        return min(r.latest_cut for r in self.rollouts.values())

    def read_made(self) -> float:
        """Of the steps that the rollouts since the last reading were to have, the share that was made."""
        made, self._made = self._made, []
        return sum(made) / max(1, len(made))

    @property
    def _sizes(self) -> list[int]:
        """Envs of each bunch."""
        return [rows.stop - rows.start for rows in self.world.bunches]

    # --- schedules -------------------------------------------------------------------------------------------------

    def _serve(self, schedule: str, steps: int, stops: Callable[[int], bool] = _never) -> list[int]:
        """So many steps of all envs, or fewer if it `stops` after some; returns how many each bunch has made."""
        count = len(self.world.bunches)
        if schedule == "first-come":
            return self._first_come(steps, stops)
        turns = min(self.world.config.turns, count) if schedule == "alternating" else 1
        parts = [range(part.start, part.stop) for part in split(count, turns)]
        return [self._in_turn(parts, steps, stops)] * count

    def _in_turn(self, parts: list[range], steps: int, stops: Callable[[int], bool]) -> int:
        """One part after the other acts and is sent off; by the time it is awaited, the others have acted."""
        t, last = -1, False
        while not last:
            t += 1
            last = t == steps or stops(t)
            if not last:
                self.renew()
            for part in parts:
                if t:
                    self.world.take(part, len(part))
                self._turn(part, t, last)
                if not last:
                    self.world.wait_for_actions()
                    self.world.send(part)
        return t

    def _turn(self, part: range, t: int, last: bool) -> None:
        """Put what a part brought into its row; then, but for the last time, its agents choose what to do next.

        What the device has to do for that is the same every time, and recorded as a graph.
        """
        bunches = self.world.bunches
        rows = slice(bunches[part[0]].start, bunches[part[-1]].stop)
        lost = self._ends(t - 1, rows) if t else None
        key = (rows.start, rows.stop, t, last)
        if key not in self._turns:
            self._turns[key] = Graphed(
                lambda: self._on_device(t, rows, last), self.world.device, self._graphs, self._pool
            )
        if lost is None:
            self._turns[key]()
        else:
            self._on_device(t, rows, last, lost)

    def _on_device(self, t: int, rows: slice, last: bool, lost: "Lost | None" = None) -> None:
        if t:
            self._settle(t - 1, rows, lost)
        if not last:
            for name in self.policies:
                with torch.no_grad():
                    self._act(self.policies[name], *self._views(name, t, rows))
            self.world.give(self._actions(t, rows), rows)

    def _first_come(self, steps: int, stops: Callable[[int], bool]) -> list[int]:
        """Whenever enough bunches are ready, they act; every bunch makes the same number of steps.

        Unless it stops: then each ends after the step it is at. What a bunch brought is put into its row when it acts
        next, and at the end for all of them at once.
        """
        count = len(self.world.bunches)
        at, ends, asked = np.zeros(count, dtype=np.int64), np.full(count, steps), 0
        most = -(-count // MOST)
        ready, running = list(range(count)), set()
        while ready or running:
            enough = -(-(len(ready) + len(running)) // ENOUGH)
            if len(ready) >= enough:
                batch, ready = sorted(ready[:most]), ready[most:]
                self._go(batch, at[batch])
                running.update(batch)
                continue
            done = self.world.take(running, enough - len(ready))
            running.difference_update(done)
            at[done] += 1
            if at.sum() // count > asked:  # once per step of all
                asked = int(at.sum()) // count
                if stops(asked):
                    begun = np.array([max(1, t + (bunch in running)) for bunch, t in enumerate(at)])
                    ends = np.where(begun <= self._latest, begun, steps)
            ready = [bunch for bunch in (*ready, *done) if at[bunch] < ends[bunch]]
        self.world.look_for_lost(range(count))
        if (at == steps).all():
            self._turn(range(count), steps, last=True)
        else:
            before = np.repeat(at - 1, self._sizes)
            self._settle_each(before, self._envs, self._ends(before, self._envs))
        return at.tolist()

    def _go(self, bunches: list[int], at: np.ndarray) -> None:
        """The policies act for these bunches, each at its step; then they are set going."""
        world = self.world
        world.look_for_lost(bunches)
        self.renew()
        if len(world.bunches) <= MOST:  # one at a time: a range at one step, as in turns
            self._turn(range(bunches[0], bunches[0] + 1), int(at[0]), last=False)
            world.wait_for_actions()
        else:
            if self._batch is None:
                self._batch = _Batch(self)
            self._batch.turn(bunches, at)
        world.send(bunches)

    def _choose_schedule(self, seed: int, first_env: int) -> None:
        """Try each schedule for a moment; the run begins afterwards from the same seed, whichever is chosen."""
        world = self.world
        times: dict[Schedule, float] = {}
        for number, schedule in enumerate(get_args(Schedule)[1:] if len(world.bunches) > 1 else ()):
            world.reset(seed + TRIAL_SEED + number, first_env, phase=0)
            self.show_current()
            self._begin()
            few = min(TRIAL_STEPS, self.steps)
            for _ in range(WARM_UP_CALLS + 1 if self._graphs else 1):  # compiles, and records graphs
                self._try(schedule, few)
            turns, spent = 0, 0.0
            while spent < TRIAL_SECONDS:
                spent += self._try(schedule, few)
                turns += 1
            times[schedule] = spent / (turns * few)
        best: Schedule = "lockstep"
        for schedule, seconds in times.items():
            if seconds * CLEARLY < times[best]:
                best = schedule
        self.schedule = best
        world.use(best)
        self._turns.clear()
        self._batch = None
        told = ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())
        self._measured = f" (a step of all envs: {told})" if told else ""

    def _try(self, schedule: str, steps: int) -> float:
        """Seconds that so many steps take."""
        self._taken[:] = 0
        start = time.perf_counter()
        self._serve(schedule, steps)
        self.world.wait_for_actions()
        return time.perf_counter() - start

    # --- acting and receiving --------------------------------------------------------------------------------------

    def _views(self, name: str, t: int, rows: slice) -> tuple[torch.Tensor | None, ...]:
        """What a policy reads and writes at step t of some envs."""
        r = self.rollouts[name]
        frames, age = r.window(t)
        world_action = self._world_action.get(name)
        return (
            frames[:, rows],
            None if age is None else age[:, rows],
            None if r.rnn_state is None else r.rnn_state[-1][rows],
            None if r.action_mask is None else r.action_mask[t][rows],
            self._noise_by_env(name)[t, rows].flatten(0, 1),
            r.action[t][rows],
            r.log_prob[t][rows],
            r.value[t][rows] if r.valued else None,
            None if world_action is None else world_action[rows],
        )

    def _noise_by_env(self, name: str) -> torch.Tensor:
        """[T, N, A, width]"""
        return self._noise[name].unflatten(1, (self.world.num_envs, -1))

    def _actions(self, t: int, rows: slice) -> dict[str, torch.Tensor]:
        """What some envs are to do, by group."""
        actions = {}
        for name, slots in self._slots.items():
            chosen = self._world_action.get(name)
            chosen = self.rollouts[name].action[t] if chosen is None else chosen
            actions.update({group: chosen[rows, place] for group, place in slots.items()})
        return actions

    def _ends(self, t: int | np.ndarray, rows: slice | np.ndarray) -> "Lost | None":
        """See to episodes that step t of these envs ended; returns which were lost in it, if any."""
        cut, lost = self.world.cut(rows), self.world.lost[rows]
        if np.count_nonzero(cut):
            steps, envs = self._at(t, rows, cut)
            self.world.show_final(envs, self._all_rows)
            for name in self.rollouts:
                self._keep_final(name, steps, envs)
            self._taken[envs] += 1
        return self._at(t, rows, lost) if np.count_nonzero(lost) else None

    def _at(self, t: int | np.ndarray, rows: slice | np.ndarray, which: np.ndarray) -> "Lost":
        """Steps and numbers of the envs among these rows that a mask names."""
        envs = self._envs[rows]
        return np.broadcast_to(t, envs.shape)[which], envs[which]

    def _settle(self, t: int | torch.Tensor, rows: slice | torch.Tensor, lost: "Lost | None" = None) -> None:
        """What step t of these envs brought, in its place."""
        if isinstance(t, int):
            self.world.show(rows, self._rows[t])
        else:
            self.world.show(rows, self._all_rows, t)
        if lost is not None:
            self._drop(*lost)
        for rollout in self.rollouts.values():
            rollout.settle(t, rows, self.world.sits_out)

    def _settle_each(self, steps: np.ndarray, envs: np.ndarray, lost: "Lost | None") -> None:
        """The same for envs that have each made another step."""
        t, rows = torch.from_numpy(np.stack([steps, envs])).to(self.world.device)
        self._settle(t, rows, lost)

    def _keep_final(self, name: str, steps: np.ndarray, envs: np.ndarray) -> None:
        """Put what was seen last into the next free slot of each env that was cut off in its step."""
        rollout, slots = self.rollouts[name], self._taken[envs]
        if slots.max() >= rollout.final_observation.shape[0]:
            raise ShoalError(
                f"{self.world.name}: env {envs[slots.argmax()]} was truncated {slots.max() + 1} times within "
                f"{self.steps} steps, more often than its limit of {self.world.time_limit} steps allows; "
                "say that it has rules of its own: --own-truncation."
            )
        t, where, slot = torch.from_numpy(np.stack([steps, envs, slots])).to(self.world.device)
        place = slot, where
        stack, final = rollout.stack, self._final[name][where].unsqueeze(0)
        age = None
        if rollout.age is not None:
            age = (rollout.age[t, where] + 1).clamp(max=stack - 1).unsqueeze(0)
            before = t + torch.arange(1, stack, device=t.device).unsqueeze(1)
            final = torch.cat([rollout.observation[before, where], final])
        kept = rollout.final_observation
        kept[place] = stacked(final, age).view(len(envs), *kept.shape[2:])
        if rollout.final_alive is not None:
            rollout.final_alive[place] = self._final_alive[name][where]
        if rollout.rnn_state is not None and rollout.final_state is not None:
            rollout.final_state[place] = rollout.rnn_state[-1][where]

    def _drop(self, steps: np.ndarray, envs: np.ndarray) -> None:
        """Envs were lost in their steps: no loss, statistic or normalizer sees what is left of their last episodes."""
        for rollout in self.rollouts.values():
            for t, env in zip(steps.tolist(), envs.tolist(), strict=True):
                ends = (rollout.terminated[:t, env] | rollout.truncated[:t, env]).cpu().numpy()
                first = int(ends.nonzero()[0][-1]) + 1 if ends.any() else 0
                if rollout.alive is not None:
                    rollout.alive[first : t + 1, env] = False
                rollout.terminated[t, env] = True
                rollout.truncated[t, env] = False
                rollout.reward[t, env] = 0.0


Lost = tuple[np.ndarray, np.ndarray]
"""Steps of a rollout, and the envs that were lost in them."""


class _Batch:
    """Envs that act together wherever they stand: what policies read is gathered, what they write is scattered.

    One graph serves them all, so its size is fixed. Fewer envs are filled up with the last one of them, which then
    does the same several times.
    """

    def __init__(self, collector: HostCollector):
        self.collector = collector
        device, bunches = collector.world.device, collector.world.bunches
        self._rows = [np.arange(rows.start, rows.stop) for rows in bunches]
        self._sizes = np.array(collector._sizes)
        most = -(-len(bunches) // MOST)
        size = int(np.sort(self._sizes)[-most:].sum())
        self._asked = torch.zeros(2, size, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._places = self._asked.to(device)
        """[2, size]: steps and envs; on a CPU, this is what is asked itself."""
        self._stages = [_Stage(collector, name, size) for name in collector.policies]
        self._run = Graphed(self._serve, device, collector._graphs, collector._pool)

    def turn(self, bunches: list[int], at: np.ndarray) -> None:
        """Put what these bunches brought into its place; then their agents choose what they do at these steps."""
        collector, asked = self.collector, self._asked.numpy()
        steps, envs = np.repeat(at, self._sizes[bunches]), np.concatenate([self._rows[bunch] for bunch in bunches])
        count = len(envs)
        asked[0, :count], asked[1, :count] = steps, envs
        if count < asked.shape[1]:
            asked[:, count:] = asked[:, count - 1 : count]
        begun = steps > 0
        before, which = (steps - 1, envs) if begun.all() else ((steps - 1)[begun], envs[begun])
        lost = collector._ends(before, which)
        if lost is None and which is envs:
            self._run()
        else:
            self._upload()
            if len(which):
                collector._settle_each(before, which, lost)
            self._act()
        collector.world.wait_for_actions()
        for stage in self._stages:
            collector.world.give({group: action[:count] for group, action in stage.actions.items()}, envs)

    def _serve(self) -> None:
        self._upload()
        t, envs = self._places
        self.collector._settle(t - 1, envs)
        self._act()

    def _upload(self) -> None:
        self._places.copy_(self._asked, non_blocking=True)

    def _act(self) -> None:
        t, envs = _array(self._places)
        for stage in self._stages:
            stage.act(t, envs)


class _Stage:
    """Memory of its own for one policy and so many envs, and the ways there and back."""

    def __init__(self, collector: HostCollector, name: str, size: int):
        self.collector, self.policy = collector, collector.policies[name]
        r, memory = collector.rollouts[name], collector._views(name, 0, slice(0, size))
        self.memory = [None if view is None else torch.zeros_like(view) for view in memory]
        frames, age, state, mask, noise, action, log_prob, value, world_action = self.memory
        noise = None if noise is None else noise.unflatten(0, (size, -1))
        remembered = None if r.rnn_state is None else r.rnn_state[-1]
        self.back = _array(torch.arange(r.stack, device=r.observation.device).unsqueeze(1))
        self.frames = _arrays((frames, r.observation))
        self.read = _arrays((age, r.age), (mask, r.action_mask), (noise, collector._noise_by_env(name)))
        self.written = _arrays((action, r.action), (log_prob, r.log_prob), (value, r.value))
        self.state = _arrays((state, remembered))
        chosen = action if world_action is None else world_action
        assert chosen is not None
        self.chosen = chosen
        self.host = torch.zeros_like(chosen, device="cpu", pin_memory=True) if chosen.is_cuda else chosen
        self.actions = {group: self.host[:, place] for group, place in collector._slots[name].items()}
        """What the world is to do, by group, on the host."""

    def act(self, t: Any, envs: Any) -> None:
        """Gather what the policy reads at these steps of these envs, let it act, and put what it wrote in its place."""
        for own, rows in self.frames:
            own[...] = rows[t + self.back, envs]
        for own, rows in self.read:
            own[...] = rows[t, envs]
        for own, rows in self.state:
            own[...] = rows[envs]
        with torch.no_grad():
            self.collector._act(self.policy, *self.memory)
        for own, rows in self.written:
            rows[t, envs] = own
        for own, rows in self.state:
            rows[envs] = own
        self.host.copy_(self.chosen, non_blocking=True)


def _arrays(*pairs: tuple[torch.Tensor | None, torch.Tensor | None]) -> list[tuple[Any, Any]]:
    """Those pairs of which both are there."""
    return [(_array(own), _array(rows)) for own, rows in pairs if own is not None and rows is not None]


def _array(tensor: torch.Tensor) -> Any:
    """A tensor to gather from and scatter to; on a CPU as an array, since NumPy does that faster and in this thread."""
    if records(tensor.device):
        return tensor
    # NumPy does not know bfloat16, but its bits.
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
