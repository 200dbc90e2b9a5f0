"""Integers on the command line, also written 1e8, 20_000 or auto."""

import math
from typing import Annotated, Any

import tyro

from shoal.core.errors import ShoalError
from shoal.core.settings import Bounds


def parse_count(text: str) -> int:
    """A whole number, also written 1e8 or 20_000."""
    text = text.replace("_", "")
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(value) or value != int(value):
        raise ValueError(f"{text!r} is not a whole number")
    return int(value)


def to_count(name: str, value: Any) -> int:
    """The same for a value given from Python."""
    try:
        return parse_count(str(value))
    except ValueError as error:
        raise ShoalError(f"{name} must be a whole number: {error}.") from None


Count = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="COUNT",
        instance_from_str=lambda args: parse_count(args[0]),
        is_instance=lambda instance: isinstance(instance, int),
        str_from_instance=lambda instance: [str(instance)],
    ),
]


AUTO = -(2**62)
"""Value of `--num-envs auto` until it is resolved."""

EnvCount = Annotated[
    int,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="COUNT|auto",
        instance_from_str=lambda args: parse_envs(args[0]),
        is_instance=lambda instance: isinstance(instance, int),
        str_from_instance=lambda instance: ["auto" if instance == AUTO else str(instance)],
    ),
    Bounds(ge=1, le=2**31 - 1, also=(AUTO,)),
]


def parse_envs(text: str) -> int:
    """A number of envs, or "auto"."""
    return AUTO if text == "auto" else parse_count(text)
