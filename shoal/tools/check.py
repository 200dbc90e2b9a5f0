"""Checking a world: what its author may have overlooked, found by walking copies of it side by side.

Every copy takes the same random actions and is held against the first one after each step, array by array: the same
once more, a smaller batch, envs drawn at random for each step, the other device, one that goes on from a saved state.
Rules (`check_rules.py`) look at the first copy alone. Before all that, another process looks for indices out of range
(`check_debug.py`), which might bring this one down.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import torch
import tyro
import warp as wp

from shoal.config.counts import Count
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
    Moment,
    array_name,
    draw,
    first_index,
    on_host,
    take,
    to_actions,
    told,
)


@dataclass(frozen=True)
class CheckConfig:
    """How long and where a world is checked."""

    steps: Count = 200
    """Steps to walk, with random actions."""
    envs: Count = 64
    """Envs of the batch that others are compared with."""
    seed: int = 1
    """Seed of the world and of the actions."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N; on a GPU the world is also compared with the CPU."""
    debug: bool = True
    """Look for indices out of range, in Warp's debug mode, which takes some seconds."""

    def __post_init__(self):
        if self.steps < 1:
            raise ShoalError(f"--steps must be at least 1, got {self.steps}.")
        if self.envs < 2:
            raise ShoalError(f"--envs must be at least 2, since batches of two sizes are compared; got {self.envs}.")
        if not 0 <= self.seed < 2**31 - 1:
            raise ShoalError(f"--seed must be between 0 and 2147483646, got {self.seed}.")


def check_world(world: str | type[KernelWorld], config: Any = None, **options: Any) -> list[Finding]:
    """All findings about a world: a class, a bundled name or `my_world.py:Chase`; options are those of CheckConfig."""
    return list(findings(world, config, CheckConfig(**options)))


def findings(world: str | type[KernelWorld], config: Any, options: CheckConfig) -> Iterator[Finding]:
    """The findings one by one, as they come."""
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
        yield Finding("FAIL", f"the world cannot be made: {told(error, cls)}")
        return
    if options.debug:
        found = check_indices(world, config, options.steps, options.seed)
        yield found
        if found.kind == "FAIL":
            yield Finding("note", "all other checks were left out; they mean little before this is mended")
            return
    walk = Walk(base, config, options)
    walk.run()
    yield from walk.report()


def _class_of(world: str | type[KernelWorld]) -> type[KernelWorld]:
    cls = world_class(world) if isinstance(world, str) else world
    if not (isinstance(cls, type) and issubclass(cls, KernelWorld)):
        raise ShoalError(f"{world} is not a KernelWorld; only worlds with a store of arrays can be checked.")
    return cls


@dataclass
class Copy:
    """Another copy of the world, which holds some envs of the first one and must walk like them."""

    topic: str
    fine: str
    """What is true if nothing differs."""
    here: str
    """Where the second value of a difference comes from."""
    hint: str
    """What an author should look for."""
    world: KernelWorld
    rows: torch.Tensor
    """int64 [its envs]: which envs of the first copy it holds."""
    start: int = 0
    """The step before which it takes over the first one's state; 0 means a reset of its own."""
    redraws: bool = False
    """Before each step it takes over the state of envs drawn at random: a dependence shows up when it acts, however
    rare that is, since every env has other neighbors then."""
    rounds: bool = False
    """Its floats may differ by rounding, being another device's."""
    problem: str = ""
    rounded: str = ""


class Walk:
    """The first copy of a world, the others beside it, and what was found on the way."""

    def __init__(self, base: KernelWorld, config: Any, options: CheckConfig):
        self.base, self.config, self.options = base, config, options
        self.copies, self.no_devices = self._copies()
        self.fresh = self._another(options.envs)
        """Begins each episode in arrays that know nothing of the one before."""
        self.other_seed = self._another(options.envs)
        self.draws = torch.Generator().manual_seed(options.seed)
        """Of envs for copies that redraw theirs; the actions have another generator."""
        every = (rules.check_spaces, rules.check_counters, rules.check_masks, rules.check_alive, rules.check_somebody)
        self.breaches: dict[Callable[[Moment], str], str] = dict.fromkeys(every, "")
        self.shown = [*base.state, *(array_name(base.groups, g, "observation") for g in base.groups)]
        """What an episode starts with."""
        self.raised = self.carried = ""
        self.ends = 0
        self.envs_differ = self.episodes_differ = self.seeds_differ = False

    def _another(self, envs: int, device: Any = None) -> KernelWorld:
        return type(self.base)(envs, device or self.base.device, self.config)

    def _copies(self) -> tuple[list[Copy], str]:
        """What is compared with the first copy, and why another device is not, if so."""
        n = self.options.envs
        few, every = max(1, n // 8), torch.arange(n)
        again = Copy(
            topic="determinism",
            fine="the same seed and actions give the same numbers",
            here="the second time",
            hint="something is used that is neither in the store nor one of the world's random numbers",
            world=self._another(n),
            rows=every,
        )
        smaller = Copy(
            topic="batch size",
            fine=f"the first {few} envs do the same without the other {n - few}",
            here=f"in a batch of {few}",
            hint="an env depends on others of its batch",
            world=self._another(few),
            rows=every[:few],
        )
        single = Copy(
            topic="single envs",
            fine="an env does the same alone",
            here="alone",
            hint="an env depends on others of its batch",
            world=self._another(1),
            rows=every[-1:],
            redraws=True,
        )
        shuffled = Copy(
            topic="slices",
            fine="envs do the same among other neighbors",
            here="among other neighbors",
            hint="an env depends on others of its batch, or on its place there",
            world=self._another(n - 1),
            rows=every[1:],
            redraws=True,
        )
        loaded = Copy(
            topic="saved state",
            fine="a world that loads it goes on bit for bit",
            here="after loading the state",
            hint="the world keeps something outside of its store",
            world=self._another(n),
            rows=every,
            start=max(1, self.options.steps // 2),
        )
        copies = [again, smaller]
        if self.base.resumable:
            copies += [single, shuffled, loaded]
        if self.base.device.type == "cpu":
            return copies, "--device cpu" if torch.cuda.is_available() else "there is no GPU here"
        if not self.base.resumable:
            return copies, "what the world has loaded is found by each device for itself"
        if not wp.is_cpu_available():
            return copies, "Warp has no CPU compiler on this machine"
        other_device = Copy(
            topic="devices",
            fine="GPU and CPU agree bit for bit",
            here="on the CPU",
            hint="that is more than rounding",
            world=self._another(n, "cpu"),
            rows=every,
            rounds=True,
        )
        return [*copies, other_device], ""

    # --- walking ------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Walk all steps, or until the world raises an error."""
        generator = torch.Generator().manual_seed(self.options.seed)
        step = 0
        try:
            self.base.reset(self.options.seed)
            self.other_seed.reset(self.options.seed + 1)
            now = self.at_reset = on_host(self.base.state_dict())
            self._look(Moment(0, self.base.groups, now, now), {})
            for step in range(1, self.options.steps + 1):
                noise = draw(self.base, generator)
                actions = to_actions(self.base, noise, self.base.outputs)
                if not self.seeds_differ:
                    take(self.other_seed, to_actions(self.base, noise, self.other_seed.outputs))
                take(self.base, actions)
                before, now = now, on_host(self.base.state_dict())
                self._look(Moment(step, self.base.groups, now, before), actions)
        except Exception as error:
            place = f"step {step}" if step else "reset"
            self.raised = f"the world raised {told(error, type(self.base))}, at {place}"

    def _look(self, m: Moment, actions: Arrays) -> None:
        for rule, breach in self.breaches.items():
            self.breaches[rule] = breach or rule(m)
        for copy in self.copies:
            if not copy.problem and copy.start <= m.step:
                self._advance(copy, m, actions)
        self._look_at_starts(m)
        if not self.seeds_differ:
            other = self.other_seed.state_dict()
            self.seeds_differ = any(not same(m.now[name], other[name].cpu()) for name in other if name != "seed")

    def _advance(self, copy: Copy, m: Moment, actions: Arrays) -> None:
        """Take the same step in a copy, and compare: the author's own arrays first, where a difference begins."""
        try:
            if m.step == 0:
                copy.world.reset(self.options.seed, int(copy.rows[0]))
            else:
                if copy.redraws:
                    drawn = torch.randperm(self.options.envs, generator=self.draws)
                    copy.rows = drawn[: copy.world.num_envs]
                if copy.redraws or copy.rounded or copy.start == m.step:
                    copy.world.load_state_dict({name: tensor[copy.rows] for name, tensor in m.before.items()})
                take(copy.world, actions, copy.rows)
        except Exception as error:
            copy.problem = f"{copy.here}, at step {m.step}, it raised {told(error, type(self.base))}"
            return
        other = {name: tensor.cpu() for name, tensor in copy.world.state_dict().items()}
        differ, apart = {}, {}
        for name in sorted(other, key=lambda name: name not in self.base.state):
            mine = m.now[name][copy.rows]
            if not same(mine, other[name]):
                differ[name] = differing(mine, other[name])
                more = far(mine, other[name]) if copy.rounds else differ[name]
                if bool(more.any()):
                    apart[name] = more
        wrong = apart or differ
        if not wrong:
            return
        name, *others = wrong
        index = first_index(wrong[name])
        mine_at = (int(copy.rows[index[0]]), *index[1:])
        values = f"{m.now[name][mine_at].item()}, but {other[name][index].item()} {copy.here}"
        text = f"{m.place(name, mine_at)} is {values}"
        if apart:
            also = f" (differing too: {', '.join(others[:4])})" if others else ""
            copy.problem = f"{text}; {copy.hint}{also}"
        else:
            copy.rounded = copy.rounded or text

    def _look_at_starts(self, m: Moment) -> None:
        """Whether episodes start differently, and owe nothing to the one before."""
        if m.step == 0:
            self.envs_differ = any(bool(differing(m.now[n], m.now[n][:1]).any()) for n in self.shown)
        if not bool(m.ended.any()):
            return
        self.ends += int(m.ended.sum())
        self.episodes_differ |= any(bool(differing(m.now[n], self.at_reset[n])[m.ended].any()) for n in self.shown)
        if not self.carried:
            self.fresh.reset(self.options.seed)
            self.fresh.store.episode.copy_(self.base.store.episode - 1)
            self.fresh.restart(torch.ones_like(self.fresh.store.ended))
            for name in self.shown:
                bad = differing(m.now[name], self.fresh.store[name].cpu())
                self.carried = self.carried or m.first(name, bad & rules.per_env(m.ended, bad))

    # --- what was found -----------------------------------------------------------------------------------------------

    def report(self) -> Iterator[Finding]:
        """One finding per check."""
        if self.raised:
            yield Finding("FAIL", self.raised)
            return
        groups = self.base.groups
        yield self._verdict(rules.check_spaces, "spaces", "observations, rewards and end flags are as declared")
        for copy in self.copies:
            if copy.problem and copy is not self.copies[0] and self.copies[0].problem:
                yield Finding("note", f"{copy.topic}: cannot be judged, since the world does not repeat itself")
            elif copy.problem:
                yield Finding("FAIL", f"{copy.topic}: {copy.problem}")
            elif copy.rounded:
                yield Finding("note", f"{copy.topic}: GPU and CPU agree to rounding; {copy.rounded}")
            else:
                yield Finding("ok", f"{copy.topic}: {copy.fine}")
        if not self.base.resumable:
            yield Finding(
                "note", "single envs, slices, saved state: left out; another batch has other scenes, and begins anew"
            )
        if self.no_devices:
            yield Finding("note", f"devices: GPU against CPU was left out ({self.no_devices})")
        yield self._verdict(rules.check_counters, "resets", "after an end, and only then, a new episode begins")
        yield from self._about_episodes()
        if any(g.masked for g in groups):
            yield self._verdict(rules.check_masks, "masks", "every agent in the game has a choice")
        if any(g.can_leave for g in groups):
            fine = "who has left stays away until the episode ends, and gets nothing"
            yield self._verdict(rules.check_alive, "alive", fine)
        if nobody := self.breaches[rules.check_somebody]:
            yield Finding("note", f"alive: nobody is in the game, yet the episode goes on: {nobody}")

    def _verdict(self, rule: Callable[[Moment], str], topic: str, fine: str) -> Finding:
        breach = self.breaches[rule]
        return Finding("FAIL" if breach else "ok", f"{topic}: {breach or fine}")

    def _about_episodes(self) -> Iterator[Finding]:
        if self.ends:
            yield Finding("ok", f"ends: {self.ends} episodes ended within {self.options.steps} steps")
        else:
            more = "walk further (--steps) or shorten episodes (--world.max-steps)"
            yield Finding("note", f"ends: no episode ended within {self.options.steps} steps; {more}")
        if self.carried and not self.copies[0].problem:  # a world that does not repeat itself differs anyway
            yield Finding("note", f"starts: {self.carried}, left from the episode before; `reset` does not set it anew")
        if not self.envs_differ and not self.episodes_differ:
            yield Finding("note", "starts: every episode starts alike; `reset` draws no random numbers")
        elif self.ends and not self.episodes_differ:
            yield Finding("note", "starts: every episode of an env starts like its first")
        else:
            yield Finding("ok", "starts: episodes start differently")
        if self.seeds_differ:
            yield Finding("ok", "seeds: another seed makes another walk")
        else:
            yield Finding("note", "seeds: another seed changes nothing; the world draws no random numbers")


def bits(array: torch.Tensor) -> torch.Tensor:
    """Floats as whole numbers: NaN then equals itself, and -0.0 is not 0.0."""
    return array.view(torch.int32 if array.element_size() == 4 else torch.int16) if array.is_floating_point() else array


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two arrays are equal bit for bit."""
    return torch.equal(bits(one), bits(other))


def differing(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where the bits differ."""
    return bits(one) != bits(other)


def far(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two devices differ by more than rounding."""
    if one.is_floating_point():
        return ~torch.isclose(one, other, rtol=1e-5, atol=1e-6, equal_nan=True)
    return one != other


def check_command(world: str, flags: list[str]) -> int:
    """`shoal check WORLD`: one line per check; 1 if any of them failed."""
    torch.set_num_threads(1)  # many small arrays: more threads would only wait for one another
    cls = _class_of(world)
    shipped = make_job(world).world_config
    parts = [
        ("check", tyro.conf.OmitArgPrefixes[CheckConfig], field(default=CheckConfig())),
        ("world", cls.Config, field(default=shipped)),
    ]
    options = tyro.cli(
        make_dataclass("Options", parts, frozen=True),
        prog=f"shoal check {world}",
        description=f"Walk {world} with random actions and look for mistakes in it.",
        args=flags,
    )
    failed = False
    for found in findings(world, options.world, options.check):
        print(found, flush=True)
        failed |= found.kind == "FAIL"
    return int(failed)
