"""The command line of `shoal train` as a job: flags over the presets of the world, the algorithm and the device."""

from dataclasses import field, fields, make_dataclass
from typing import Any, get_args, get_type_hints

import tyro

from shoal.algos.registry import LEARNERS
from shoal.config.job import Job
from shoal.config.resolve import merge_group_overrides, resolve, starting_point
from shoal.config.schema import SECTION_OF, SECTIONS, make_sections
from shoal.core.user_code import UserCode
from shoal.core.user_files import full_path
from shoal.core.world_loading import world_class


def job_from_flags(world: str, arguments: list[str], command: str = "shoal train") -> Job:
    """A job from the command line: flags over the tuned settings of the world, the learner and the device."""
    cls = world_class(world)
    with UserCode(f"The settings of {world} cannot be read", cls.Config, (SystemExit,)):
        early = _peek_flags(arguments, ("--algo", "--device"))
        start = starting_point(cls, early.get("--algo", "ppo"), early.get("--device", "auto"))
        parsed, arguments = _parse(world, arguments, start, command)
    _, device, run, _, _ = start
    given = [word.partition("=")[0].removeprefix("--").replace("-", "_") for word in arguments if word[:2] == "--"]
    shipped = run.get("per_group", ())
    chosen = () if parsed.multi_agent.per_group == shipped else parsed.multi_agent.per_group
    sections = {name: getattr(parsed, name) for name in SECTIONS}
    job = Job(full_path(world), parsed.learn, parsed.world, **sections)
    return resolve(job.change(per_group=merge_group_overrides(shipped, chosen, given)), device)


def _parse(world: str, arguments: list[str], start: tuple, command: str) -> tuple[Any, list[str]]:
    """The sections, `learn` and `world` with the values of flags, and the arguments with full names of flags."""
    algo, _, run, learn, sizes = start
    learn_class, world_config = LEARNERS[algo][0], world_class(world).Config
    arguments = _add_world_prefix(arguments, world_config, {*SECTION_OF, *(f.name for f in fields(learn_class))})
    arguments = _with_none(arguments, [*SECTIONS.values(), learn_class])
    parts = make_sections({**run, "algo": algo})
    options = make_dataclass(
        "Options",
        [
            *((name, tyro.conf.OmitArgPrefixes[SECTIONS[name]], field(default=part)) for name, part in parts.items()),
            ("learn", tyro.conf.OmitArgPrefixes[learn_class], field(default=learn_class(**learn))),
            ("world", world_config, field(default=world_config(**sizes))),
        ],
        frozen=True,
    )
    parsed = tyro.cli(
        options,
        prog=f"{command} {world}",
        description=f"Train {algo.upper()} on {world}. Defaults are the ones tuned for this world on this device. "
        "--world.NAME may be written --NAME where nothing else has that name.",
        args=arguments,
    )
    return parsed, arguments


def _with_none(arguments: list[str], kinds: list[Any]) -> list[str]:
    """`--huber-delta none` means None, where a setting can be that and not the word."""
    hints = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    flags = {f"--{name.replace('_', '-')}" for name, hint in hints.items() if type(None) in get_args(hint)}
    found: list[str] = []
    for word in arguments:
        name, _, value = word.partition("=")
        if word.lower() == "none" and found and found[-1] in flags:
            word = "None"
        elif value.lower() == "none" and name in flags:
            word = f"{name}=None"
        found.append(word)
    return found


def _is_bare(hint: Any) -> bool:
    """Whether a setting of a world is a flag without the prefix already."""
    return any(getattr(note, "prefix_name", None) is False for note in getattr(hint, "__metadata__", ()))


def _add_world_prefix(arguments: list[str], world_config: Any, taken: set[str]) -> list[str]:
    """`--scenes` as `--world.scenes`: settings of the world need no prefix where nothing else has their name."""
    hints = get_type_hints(world_config, include_extras=True)
    bare = {name for name, hint in hints.items() if _is_bare(hint)}
    own = {f.name.replace("_", "-") for f in fields(world_config) if f.name not in taken | bare}
    words = []
    for word in arguments:
        name = word.partition("=")[0].removeprefix("--").replace("_", "-")
        ours = word.startswith("--") and (name in own or name.removeprefix("no-") in own)
        words.append(f"--world.{word[2:]}" if ours else word)
    return words


def _peek_flags(arguments: list[str], flags: tuple[str, ...]) -> dict[str, str]:
    """Flags that decide which others there are, read before the rest."""
    found = {}
    for i, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in flags:
            found[flag] = value if equals else (arguments[i + 1] if i + 1 < len(arguments) else "")
    return found
