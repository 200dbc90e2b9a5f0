"""Collecting from host worlds: who waits for whom while policies act on the device and envs step on CPU cores.

Envs come in bunches (see shoal/host/engines.py). In *lockstep* all of them act and step together; *alternating*, one
half steps while the policies act for the other; *first-come*, the bunches that are done first act first. What an env
does depends on its own observations and noise alone, so all three make the same experience.
"""

import time
from collections.abc import Callable
from typing import NamedTuple, get_args

import numpy as np
import torch

from shoal.core.graph import WARM_UP_CALLS, Graphed
from shoal.errors import ShoalError
from shoal.host.config import Schedule
from shoal.host.world import HostWorld
from shoal.learn.rollout import stacked
from shoal.run.collect import Collector
from shoal.run.processes import FinishLine

TRIAL_SECONDS = 0.4
"""How long each schedule is tried before one is chosen."""

TRIAL_STEPS = 8

CLEARLY = 1.03
"""How much faster than lockstep, the simplest, another schedule must be."""

LEAST_SHARE = 4
"""A rollout that is cut short has one step in so many of a whole one, or more."""


class Span(NamedTuple):
    """Neighbouring envs that stand at the same step of a rollout."""

    t: int
    rows: slice


def _never(steps: int) -> bool:
    return False


class HostCollector(Collector):
    """Fills rollouts from a host world, by the schedule that its settings name."""

    world: HostWorld

    def __init__(self, *given, graph: bool = True, line: FinishLine | None = None, **named):
        """With a `line`, rollouts end where others have finished theirs."""
        super().__init__(*given, cuts=line is not None, **named)
        self.line = line
        self._made: list[float] = []
        """Share of each rollout since the last reading that was made."""
        self.schedule = self.world.config.schedule
        self._measured = ""
        self._graphs = (
            graph and len(self.world.bunches) > 0 and self.world.pinned
        )  # a graph can copy from and to pinned memory alone
        self._pool = torch.cuda.graph_pool_handle() if self._graphs else None
        self._turns: dict[tuple[int, int, int, bool], Graphed] = {}
        self._stages: list[_Stage] = []
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
        each = np.repeat(made, [rows.stop - rows.start for rows in self.world.bunches])
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
                self._keep_final(name, steps - 1, going)
            r.cut_short(steps, where, torch.from_numpy(going).to(where))

    @property
    def _latest(self) -> int:
        """The most steps after which a rollout can be cut short."""
        return min(r.latest_cut for r in self.rollouts.values())

    def read_made(self) -> float:
        """Of the steps that the rollouts since the last reading were to have, the share that was made."""
        made, self._made = self._made, []
        return sum(made) / max(1, len(made))

    # --- schedules -------------------------------------------------------------------------------------------------

    def _serve(self, schedule: str, steps: int, stops: Callable[[int], bool] = _never) -> list[int]:
        """So many steps of all envs, or fewer if it `stops` after some; returns how many each bunch has made."""
        count = len(self.world.bunches)
        if schedule == "first-come":
            return self._first_come(steps, stops)
        halves = [range(count // 2), range(count // 2, count)]
        return [self._in_turn(halves if schedule == "alternating" else [range(count)], steps, stops)] * count

    def _in_turn(self, parts: list[range], steps: int, stops: Callable[[int], bool]) -> int:
        """One part after the other acts and is sent off; by the time it is awaited, the others have acted."""
        t, last = -1, False
        while not last:
            t += 1
            last = t == steps or stops(t)
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
        lost = self._ends(rows, t - 1) if t else False
        key = (rows.start, rows.stop, t, last)
        if key not in self._turns:
            self._turns[key] = Graphed(
                lambda: self._on_device(Span(t, rows), last), self.world.device, self._graphs, self._pool
            )
        if lost:
            self._on_device(Span(t, rows), last)
        else:
            self._turns[key]()

    def _on_device(self, span: Span, last: bool) -> None:
        t, rows = span
        if t:
            self._settle(Span(t - 1, rows))
        if not last:
            for name in self.policies:
                with torch.no_grad():
                    self._act(self.policies[name], *self._views(name, span))
            self.world.give(self._actions(span), rows)

    def _first_come(self, steps: int, stops: Callable[[int], bool]) -> list[int]:
        """Whenever half of the bunches are ready, they act; every bunch makes the same number of steps.

        Unless it stops: then each ends after the step it is at.
        """
        count = len(self.world.bunches)
        enough, at = -(-count // 2), [0] * count
        ends, asked = [steps] * count, 0
        ready, running = list(range(count)), set()
        while ready or running:
            if len(ready) >= enough or not running:
                batch, ready = sorted(ready[:enough]), ready[enough:]
                self._send(batch, [at[b] for b in batch])
                running.update(batch)
                continue
            done = self.world.take(running, min(enough - len(ready), len(running)))
            self._finish(done, [at[b] for b in done])
            running.difference_update(done)
            for bunch in done:
                at[bunch] += 1
            ready += [bunch for bunch in done if at[bunch] < ends[bunch]]
            if sum(at) // count > asked:  # once per step of all
                asked = sum(at) // count
                if stops(asked):
                    begun = [max(1, t + (bunch in running)) for bunch, t in enumerate(at)]
                    ends = [t if t <= self._latest else steps for t in begun]
                    ready = [bunch for bunch in ready if at[bunch] < ends[bunch]]
        return at

    def _choose_schedule(self, seed: int, first_env: int) -> None:
        """Try each schedule for a moment; the run begins afterwards from the same seed, whichever is chosen."""
        world = self.world
        times: dict[Schedule, float] = {}
        for schedule in get_args(Schedule)[1:] if len(world.bunches) > 1 else ():
            world.reset(seed, first_env, phase=0)
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

    def _send(self, bunches: list[int], at: list[int]) -> None:
        """The policies act for these bunches, each at its step; then they are set going."""
        spans = self._spans(bunches, at)
        if not self._stages:
            self._stages = [_Stage(self, name, self._most) for name in self.policies]
        for stage in self._stages:
            stage.act(spans)
        for span in spans:
            self.world.give(self._actions(span), span.rows)
        self.world.wait_for_actions()
        self.world.send(bunches)

    def _spans(self, bunches, at: list[int]) -> list[Span]:
        """The bunches, joined where they are neighbours at the same step."""
        spans: list[Span] = []
        for bunch, t in zip(bunches, at, strict=True):
            rows = self.world.bunches[bunch]
            if spans and spans[-1].t == t and spans[-1].rows.stop == rows.start:
                spans[-1] = Span(t, slice(spans[-1].rows.start, rows.stop))
            else:
                spans.append(Span(t, rows))
        return spans

    def _views(self, name: str, span: Span) -> tuple[torch.Tensor | None, ...]:
        """What a policy reads and writes for the envs of a span."""
        r, (t, rows) = self.rollouts[name], span
        frames, age = r.window(t)
        noise = self._noise[name][t].unflatten(0, (self.world.num_envs, -1))[rows]
        world_action = self._world_action.get(name)
        return (
            frames[:, rows],
            None if age is None else age[:, rows],
            None if r.state is None else r.state[-1][rows],
            None if r.action_mask is None else r.action_mask[t][rows],
            noise.flatten(0, 1),
            r.action[t][rows],
            r.log_prob[t][rows],
            r.value[t][rows] if r.valued else None,
            None if world_action is None else world_action[rows],
        )

    def _actions(self, span: Span) -> dict[str, torch.Tensor]:
        """What the world is to do, by group, for all envs (those of the span are new)."""
        actions = {}
        for name, slots in self._slots.items():
            chosen = self._world_action.get(name)
            chosen = self.rollouts[name].action[span.t] if chosen is None else chosen
            actions.update({group: chosen[:, place] for group, place in slots.items()})
        return actions

    @property
    def _most(self) -> int:
        """The most envs that act at once when half of the bunches do: one graph serves whichever they are."""
        sizes = sorted((rows.stop - rows.start for rows in self.world.bunches), reverse=True)
        return sum(sizes[: -(-len(sizes) // 2)])

    def _finish(self, bunches: list[int], at: list[int]) -> None:
        """Put what bunches brought into their rows."""
        for span in self._spans(bunches, at):
            self._ends(span.rows, span.t)
            self._settle(span)

    def _ends(self, rows: slice, t: int) -> bool:
        """See to episodes that step t of these envs ended; returns whether any env was lost in it."""
        self.world.show_final(rows, self._rows[t])
        cut = self.world.cut(rows)
        if len(cut):
            for name in self.rollouts:
                self._keep_final(name, t, cut)
            self._taken[cut] += 1
        return bool(self.world.lost[rows].any())

    def _settle(self, span: Span) -> None:
        """What step t of these envs brought, in its place."""
        t, rows = span
        self.world.show(rows, self._rows[t])
        lost = self.world.lost[rows].nonzero()[0] + rows.start
        if len(lost):
            self._drop(t, lost)
        for rollout in self.rollouts.values():
            rollout.settle(t, rows)

    def _keep_final(self, name: str, t: int, envs: np.ndarray) -> None:
        """Put what was seen last into the next free slot of each env that was cut off."""
        rollout, slots = self.rollouts[name], self._taken[envs]
        if slots.max() >= rollout.final_observation.shape[0]:
            raise ShoalError(
                f"{self.world.name}: env {envs[slots.argmax()]} was truncated {slots.max() + 1} times within "
                f"{self.steps} steps, more often than its limit of {self.world.time_limit} steps allows; "
                "say that it has rules of its own: --own-truncation."
            )
        device = self.world.device
        where = torch.from_numpy(envs).to(device)
        place = torch.from_numpy(slots).to(device), where
        stack, final = rollout.stack, self._final[name][where].unsqueeze(0)
        age = None
        if rollout.age is not None:
            age = (rollout.age[t, where] + 1).clamp(max=stack - 1).unsqueeze(0)
            final = torch.cat([rollout.observation[t + 1 : t + stack][:, where], final])
        kept = rollout.final_observation
        kept[place] = stacked(final, age).view(len(envs), *kept.shape[2:])
        if rollout.final_alive is not None:
            rollout.final_alive[place] = self._final_alive[name][where]
        if rollout.state is not None and rollout.final_state is not None:
            rollout.final_state[place] = rollout.state[-1][where]

    def _drop(self, t: int, envs: np.ndarray) -> None:
        """Envs were lost in step t: no loss, statistic or normaliser sees what is left of their last episodes."""
        for rollout in self.rollouts.values():
            ended = (rollout.terminated[:t, envs] | rollout.truncated[:t, envs]).cpu().numpy()
            for env, ends in zip(envs.tolist(), ended.T, strict=True):
                first = int(ends.nonzero()[0][-1]) + 1 if ends.any() else 0
                if rollout.alive is not None:
                    rollout.alive[first : t + 1, env] = False
                rollout.terminated[t, env] = True
                rollout.truncated[t, env] = False
                rollout.reward[t, env] = 0.0


class _Stage:
    """Memory of its own for one policy and so many envs: what a graph needs, and what spans are gathered in."""

    def __init__(self, collector: HostCollector, name: str, size: int):
        self.collector, self.name, self.size = collector, name, size
        whole = collector._views(name, Span(0, slice(0, collector.world.num_envs)))
        self.axes = [1, 1, 0, 0, None, 0, 0, 0, 0]
        """Along which axis of each of `_views` the envs stand; noise has a row per agent."""
        agents = collector.rollouts[name].reward.shape[2]
        self.agents = agents
        self.memory: list[torch.Tensor | None] = []
        for view, axis in zip(whole, self.axes, strict=True):
            if view is None:
                self.memory.append(None)
                continue
            shape = list(view.shape)
            shape[axis or 0] = size if axis is not None else size * agents
            self.memory.append(torch.zeros(shape, dtype=view.dtype, device=view.device))
        self.run = Graphed(self._act, collector.world.device, collector._graphs, collector._pool)

    def _act(self) -> None:
        with torch.no_grad():
            self.collector._act(self.collector.policies[self.name], *self.memory)

    def act(self, spans: list[Span]) -> None:
        """Gather what the policy reads, let it act, and put what it wrote in its place."""
        views = [self.collector._views(self.name, span) for span in spans]
        self._copy(spans, views, range(5), inwards=True)
        self.run()
        self._copy(spans, views, (2, 5, 6, 7, 8), inwards=False)

    def _copy(self, spans: list[Span], views, which, inwards: bool) -> None:
        start = 0
        for span, parts in zip(spans, views, strict=True):
            count = span.rows.stop - span.rows.start
            for index in which:
                memory, part, axis = self.memory[index], parts[index], self.axes[index]
                if memory is None or part is None:
                    continue
                scale = 1 if axis is not None else self.agents
                own = memory.narrow(axis or 0, start * scale, count * scale)
                (own if inwards else part).copy_(part if inwards else own)
            start += count
