"""Parse the command line of `shoal train`: flags over the presets of world, algorithm and device."""

from dataclasses import field, fields, make_dataclass
from typing import Any, get_args, get_type_hints

import tyro

from shoal.algos.registry import LEARNERS
from shoal.config.job import Job
from shoal.config.resolve import Preset, merge_group_overrides, resolve, select_preset
from shoal.config.schema import SECTION_OF, SECTIONS, make_sections
from shoal.core.user_code import UserCode
from shoal.core.user_files import full_path
from shoal.core.world_loading import world_class


def job_from_flags(world: str, arguments: list[str], command: str = "shoal train") -> Job:
    """A job from flags, over the presets of world, algorithm and device."""
    cls = world_class(world)
    with UserCode(f"The settings of {world} cannot be read", cls.Config, (SystemExit,)):
        peeked = _peek_flags(arguments, ("--algo", "--device"))
        preset = select_preset(cls, peeked.get("--algo", "ppo"), peeked.get("--device", "auto"))
        parsed, arguments = _parse(world, arguments, preset, command)
    given = [word.partition("=")[0].removeprefix("--").replace("-", "_") for word in arguments if word[:2] == "--"]
    preset_overrides = preset.run.get("group_settings", ())
    chosen = () if parsed.multi_agent.group_settings == preset_overrides else parsed.multi_agent.group_settings
    sections = {name: getattr(parsed, name) for name in SECTIONS}
    job = Job(full_path(world), parsed.learn, parsed.world, **sections)
    return resolve(job.change(group_settings=merge_group_overrides(preset_overrides, chosen, given)), preset.device)


def _parse(world: str, arguments: list[str], preset: Preset, command: str) -> tuple[Any, list[str]]:
    """The sections, `learn` and `world` with the values of flags, and the arguments with full names of flags."""
    algo, learn_class, world_config = preset.algo, LEARNERS[preset.algo][0], world_class(world).Config
    arguments = _add_world_prefix(arguments, world_config, {*SECTION_OF, *(f.name for f in fields(learn_class))})
    arguments = _with_none(arguments, [*SECTIONS.values(), learn_class])
    parts = make_sections({**preset.run, "algo": algo})
    options = make_dataclass(
        "Options",
        [
            *((name, tyro.conf.OmitArgPrefixes[SECTIONS[name]], field(default=part)) for name, part in parts.items()),
            ("learn", tyro.conf.OmitArgPrefixes[learn_class], field(default=learn_class(**preset.learn))),
            ("world", world_config, field(default=world_config(**preset.world))),
        ],
        frozen=True,
    )
    parsed = tyro.cli(
        options,
        prog=f"{command} {world}",
        description=f"Train {algo.upper()} on {world}. Defaults are the presets of this world on this device. "
        "--world.NAME may be written --NAME where no other flag has that name.",
        args=arguments,
    )
    return parsed, arguments


def _with_none(arguments: list[str], kinds: list[Any]) -> list[str]:
    """Read `none` as None where a setting is optional: `--huber-delta none`."""
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
    """Whether the flag of a world's setting is declared without the prefix."""
    return any(getattr(note, "prefix_name", None) is False for note in getattr(hint, "__metadata__", ()))


def _add_world_prefix(arguments: list[str], world_config: Any, taken: set[str]) -> list[str]:
    """Turn `--scenes` into `--world.scenes`: world settings need no prefix where their name is unique."""
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
    """Values of flags that determine which other flags exist."""
    found = {}
    for i, word in enumerate(arguments):
        flag, equals, value = word.partition("=")
        if flag in flags:
            found[flag] = value if equals else (arguments[i + 1] if i + 1 < len(arguments) else "")
    return found
