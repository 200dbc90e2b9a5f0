"""Check a world for common mistakes by stepping replicas of it with the same random actions.

After each step, every replica's arrays are compared with the base world's: a second instance, a smaller batch, envs
drawn at random before each step, the other device, an instance that loaded a saved state. Rules (`check_rules.py`)
check the base world alone. First, another process looks for indices out of range (`check_debug.py`), which may abort
it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import torch
import tyro
import warp as wp

from shoal.config.options import CheckOptions
from shoal.core.errors import ShoalError
from shoal.core.kernel_world import KernelWorld
from shoal.core.launch import init_warp
from shoal.core.machine import pick_device
from shoal.core.world_loading import world_class
from shoal.runs.jobs import make_job
from shoal.tools import check_rules as rules
from shoal.tools.check_debug import check_indices
from shoal.tools.check_rules import (
    Arrays,
    Finding,
    StepSnapshot,
    array_name,
    draw_noise,
    error_line,
    first_index,
    on_host,
    step_rows,
    to_actions,
)


def check_world(world: str | type[KernelWorld], config: Any = None, **options: Any) -> list[Finding]:
    """Check a world and return all findings.

    Args:
        world: A class, a bundled name or `my_world.py:Chase`.
        config: The world's config; None: its defaults.
        options: Fields of CheckOptions.
    """
    return list(findings(world, config, CheckOptions(**options)))


def findings(world: str | type[KernelWorld], config: Any, options: CheckOptions) -> Iterator[Finding]:
    """Check a world and yield the findings as they come."""
    cls = _class_of(world)
    device = pick_device(options.device)
    init_warp()
    if device == "cpu" and not wp.is_cpu_available():
        raise ShoalError("Warp has no CPU compiler on this machine; check the world on a GPU: --device cuda.")
    config = cls.Config() if config is None else config
    try:
        base = cls(options.envs, device, config)
    except ShoalError:
        raise
    except Exception as error:
        yield Finding("FAIL", f"the world cannot be built: {error_line(error, cls)}")
        return
    if options.debug:
        found = check_indices(world, config, options.steps, options.seed)
        yield found
        if found.kind == "FAIL":
            yield Finding("note", "all other checks were left out, since this error affects them")
            return
    checker = WorldChecker(base, config, options)
    checker.run()
    yield from checker.report()


def _class_of(world: str | type[KernelWorld]) -> type[KernelWorld]:
    cls = world_class(world) if isinstance(world, str) else world
    if not (isinstance(cls, type) and issubclass(cls, KernelWorld)):
        raise ShoalError(f"{world} is not a KernelWorld; only worlds with a store of arrays can be checked.")
    return cls


@dataclass
class Replica:
    """Another instance of the world with some of the base world's envs, which must do the same."""

    topic: str
    ok_text: str
    """Text of the finding if nothing differs."""
    label: str
    """Describes the replica in a difference: "in a batch of 8"."""
    hint: str
    """The likely cause of a difference."""
    world: KernelWorld
    rows: torch.Tensor
    """int64 [replica env]: index of the base world's env."""
    start: int = 0
    """Step before which it loads the base world's state; 0: it resets itself."""
    redraws: bool = False
    """Load the states of randomly drawn envs before each step: neighbors change, so a rare dependence on them shows."""
    allow_rounding: bool = False
    """Floats may differ by rounding, since the device is another one."""
    problem: str = ""
    rounded: str = ""


class WorldChecker:
    """Steps a base world and its replicas, and records differences and violated rules."""

    def __init__(self, base: KernelWorld, config: Any, options: CheckOptions):
        self.base, self.config, self.options = base, config, options
        self.replicas, self.device_note = self._replicas()
        self.fresh = self._build_world(options.envs)
        """Starts each episode from reset arrays, without traces of earlier episodes."""
        self.other_seed = self._build_world(options.envs)
        self.draws = torch.Generator().manual_seed(options.seed)
        """Draws envs for replicas with `redraws`; actions use another generator."""
        all_rules = (
            rules.check_spaces,
            rules.check_counters,
            rules.check_masks,
            rules.check_alive,
            rules.check_any_alive,
        )
        self.violations: dict[Callable[[StepSnapshot], str], str] = dict.fromkeys(all_rules, "")
        self.start_arrays = [*base.state, *(array_name(base.groups, g, "observation") for g in base.groups)]
        """Arrays that define the start of an episode."""
        self.raised = self.leftover = ""
        self.ends = 0
        self.envs_differ = self.episodes_differ = self.seeds_differ = False

    def _build_world(self, envs: int, device: Any = None) -> KernelWorld:
        return type(self.base)(envs, device or self.base.device, self.config)

    def _replicas(self) -> tuple[list[Replica], str]:
        """The replicas, and the reason why another device is left out ("": it is not)."""
        n = self.options.envs
        few, every = max(1, n // 8), torch.arange(n)
        again = Replica(
            topic="determinism",
            ok_text="the same seed and actions give the same numbers",
            label="the second time",
            hint="the world uses a value that is neither in the store nor one of its random numbers",
            world=self._build_world(n),
            rows=every,
        )
        smaller = Replica(
            topic="batch size",
            ok_text=f"the first {few} envs do the same without the other {n - few}",
            label=f"in a batch of {few}",
            hint="an env depends on others of its batch",
            world=self._build_world(few),
            rows=every[:few],
        )
        single = Replica(
            topic="single envs",
            ok_text="an env does the same alone",
            label="alone",
            hint="an env depends on others of its batch",
            world=self._build_world(1),
            rows=every[-1:],
            redraws=True,
        )
        shuffled = Replica(
            topic="slices",
            ok_text="envs do the same among other neighbors",
            label="among other neighbors",
            hint="an env depends on others of its batch, or on its index there",
            world=self._build_world(n - 1),
            rows=every[1:],
            redraws=True,
        )
        loaded = Replica(
            topic="saved state",
            ok_text="a world that loads it continues bit for bit",
            label="after loading the state",
            hint="the world keeps state outside of its store",
            world=self._build_world(n),
            rows=every,
            start=max(1, self.options.steps // 2),
        )
        replicas = [again, smaller]
        if self.base.resumable:
            replicas += [single, shuffled, loaded]
        if self.base.device.type == "cpu":
            return replicas, "--device cpu" if torch.cuda.is_available() else "this machine has no GPU"
        if not self.base.resumable:
            return replicas, "each device preprocesses the loaded scenes"
        if not wp.is_cpu_available():
            return replicas, "Warp has no CPU compiler on this machine"
        other_device = Replica(
            topic="devices",
            ok_text="GPU and CPU agree bit for bit",
            label="on the CPU",
            hint="that is more than rounding",
            world=self._build_world(n, "cpu"),
            rows=every,
            allow_rounding=True,
        )
        return [*replicas, other_device], ""

    # --- stepping -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Take all steps, or stop at the first error that the world raises."""
        generator = torch.Generator().manual_seed(self.options.seed)
        step = 0
        try:
            self.base.reset(self.options.seed)
            self.other_seed.reset(self.options.seed + 1)
            now = self.at_reset = on_host(self.base.state_dict())
            self._check_step(StepSnapshot(0, self.base.groups, now, now), {})
            for step in range(1, self.options.steps + 1):
                noise = draw_noise(self.base, generator)
                actions = to_actions(self.base, noise, self.base.outputs)
                if not self.seeds_differ:
                    step_rows(self.other_seed, to_actions(self.base, noise, self.other_seed.outputs))
                step_rows(self.base, actions)
                before, now = now, on_host(self.base.state_dict())
                self._check_step(StepSnapshot(step, self.base.groups, now, before), actions)
        except Exception as error:
            place = f"step {step}" if step else "reset"
            self.raised = f"the world raised {error_line(error, type(self.base))}, at {place}"

    def _check_step(self, snapshot: StepSnapshot, actions: Arrays) -> None:
        for rule, violation in self.violations.items():
            self.violations[rule] = violation or rule(snapshot)
        for replica in self.replicas:
            if not replica.problem and replica.start <= snapshot.step:
                self._advance(replica, snapshot, actions)
        self._check_starts(snapshot)
        if not self.seeds_differ:
            other = self.other_seed.state_dict()
            self.seeds_differ = any(not same(snapshot.now[name], other[name].cpu()) for name in other if name != "seed")

    def _advance(self, replica: Replica, snapshot: StepSnapshot, actions: Arrays) -> None:
        """Take the same step in a replica and compare; the author's `state` first, where differences begin."""
        try:
            if snapshot.step == 0:
                replica.world.reset(self.options.seed, int(replica.rows[0]))
            else:
                if replica.redraws:
                    drawn = torch.randperm(self.options.envs, generator=self.draws)
                    replica.rows = drawn[: replica.world.num_envs]
                if replica.redraws or replica.rounded or replica.start == snapshot.step:
                    replica.world.load_state_dict(
                        {name: tensor[replica.rows] for name, tensor in snapshot.before.items()}
                    )
                step_rows(replica.world, actions, replica.rows)
        except Exception as error:
            replica.problem = (
                f"{replica.label}, at step {snapshot.step}, it raised {error_line(error, type(self.base))}"
            )
            return
        other = {name: tensor.cpu() for name, tensor in replica.world.state_dict().items()}
        differ, far_apart = {}, {}
        for name in sorted(other, key=lambda name: name not in self.base.state):
            mine = snapshot.now[name][replica.rows]
            if not same(mine, other[name]):
                differ[name] = differing(mine, other[name])
                more = beyond_rounding(mine, other[name]) if replica.allow_rounding else differ[name]
                if bool(more.any()):
                    far_apart[name] = more
        wrong = far_apart or differ
        if not wrong:
            return
        name, *others = wrong
        index = first_index(wrong[name])
        mine_at = (int(replica.rows[index[0]]), *index[1:])
        values = f"{snapshot.now[name][mine_at].item()}, but {other[name][index].item()} {replica.label}"
        text = f"{snapshot.describe(name, mine_at)} is {values}"
        if far_apart:
            also = f" (differing too: {', '.join(others[:4])})" if others else ""
            replica.problem = f"{text}; {replica.hint}{also}"
        else:
            replica.rounded = replica.rounded or text

    def _check_starts(self, snapshot: StepSnapshot) -> None:
        """Check that episodes start differently, without traces of the previous episode."""
        if snapshot.step == 0:
            self.envs_differ = any(
                bool(differing(snapshot.now[n], snapshot.now[n][:1]).any()) for n in self.start_arrays
            )
        if not bool(snapshot.ended.any()):
            return
        self.ends += int(snapshot.ended.sum())
        self.episodes_differ |= any(
            bool(differing(snapshot.now[n], self.at_reset[n])[snapshot.ended].any()) for n in self.start_arrays
        )
        if not self.leftover:
            self.fresh.reset(self.options.seed)
            self.fresh.store.episode.copy_(self.base.store.episode - 1)
            self.fresh.restart(torch.ones_like(self.fresh.store.ended))
            for name in self.start_arrays:
                bad = differing(snapshot.now[name], self.fresh.store[name].cpu())
                self.leftover = self.leftover or snapshot.first(name, bad & rules.per_env(snapshot.ended, bad))

    # --- findings -----------------------------------------------------------------------------------------------------

    def report(self) -> Iterator[Finding]:
        """One finding per check."""
        if self.raised:
            yield Finding("FAIL", self.raised)
            return
        groups = self.base.groups
        yield self._verdict(rules.check_spaces, "spaces", "observations, rewards and end flags are as declared")
        for replica in self.replicas:
            if replica.problem and replica is not self.replicas[0] and self.replicas[0].problem:
                yield Finding("note", f"{replica.topic}: cannot be judged, since the world is not deterministic")
            elif replica.problem:
                yield Finding("FAIL", f"{replica.topic}: {replica.problem}")
            elif replica.rounded:
                yield Finding("note", f"{replica.topic}: GPU and CPU agree to rounding; {replica.rounded}")
            else:
                yield Finding("ok", f"{replica.topic}: {replica.ok_text}")
        if not self.base.resumable:
            yield Finding("note", "single envs, slices, saved state: left out, since another batch has other scenes")
        if self.device_note:
            yield Finding("note", f"devices: GPU against CPU was left out ({self.device_note})")
        yield self._verdict(rules.check_counters, "resets", "a new episode begins after an end, and only then")
        yield from self._episode_findings()
        if any(g.masked for g in groups):
            yield self._verdict(rules.check_masks, "masks", "every living agent has a choice")
        if any(g.can_leave for g in groups):
            ok_text = "agents that have left stay absent until the episode ends, and get no reward"
            yield self._verdict(rules.check_alive, "alive", ok_text)
        if empty := self.violations[rules.check_any_alive]:
            yield Finding("note", f"alive: no agent is alive, but the episode continues: {empty}")

    def _verdict(self, rule: Callable[[StepSnapshot], str], topic: str, ok_text: str) -> Finding:
        violation = self.violations[rule]
        return Finding("FAIL" if violation else "ok", f"{topic}: {violation or ok_text}")

    def _episode_findings(self) -> Iterator[Finding]:
        if self.ends:
            yield Finding("ok", f"ends: {self.ends} episodes ended within {self.options.steps} steps")
        else:
            more = "take more steps (--steps) or shorten episodes (--world.max-steps)"
            yield Finding("note", f"ends: no episode ended within {self.options.steps} steps; {more}")
        if self.leftover and not self.replicas[0].problem:  # without determinism it differs anyway
            yield Finding("note", f"starts: {self.leftover}, left from the previous episode; `reset` does not set it")
        if not self.envs_differ and not self.episodes_differ:
            yield Finding("note", "starts: every episode starts alike; `reset` draws no random numbers")
        elif self.ends and not self.episodes_differ:
            yield Finding("note", "starts: every episode of an env starts like its first")
        else:
            yield Finding("ok", "starts: episodes start differently")
        if self.seeds_differ:
            yield Finding("ok", "seeds: another seed gives other numbers")
        else:
            yield Finding("note", "seeds: another seed changes nothing; the world draws no random numbers")


def bits(array: torch.Tensor) -> torch.Tensor:
    """View floats as integers: NaN then equals itself, and -0.0 differs from 0.0."""
    return array.view(torch.int32 if array.element_size() == 4 else torch.int16) if array.is_floating_point() else array


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two arrays are equal bit for bit."""
    return torch.equal(bits(one), bits(other))


def differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where the bits differ."""
    return bits(one) != bits(other)


def beyond_rounding(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two devices differ by more than rounding."""
    if one.is_floating_point():
        return ~torch.isclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    return one != other


def check_command(world: str, flags: list[str]) -> int:
    """`shoal check WORLD`: one line per check; 1 if any of them failed."""
    torch.set_num_threads(1)  # the arrays are small
    cls = _class_of(world)
    defaults = make_job(world).world_config
    parts = [
        ("check", tyro.conf.OmitArgPrefixes[CheckOptions], field(default=CheckOptions())),
        ("world", cls.Config, field(default=defaults)),
    ]
    options = tyro.cli(
        make_dataclass("Options", parts, frozen=True),
        prog=f"shoal check {world}",
        description=f"Step {world} with random actions and check it for common mistakes.",
        args=flags,
    )
    failed = False
    for found in findings(world, options.world, options.check):
        print(found, flush=True)
        failed |= found.kind == "FAIL"
    return int(failed)
