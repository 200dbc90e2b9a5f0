"""Settings are dataclasses whose fields say in their types what they may hold.

`Annotated[float, Bounds(gt=0)]` is a number above 0. One function checks every dataclass of settings: types, bounds,
choices and finite numbers. Another one reads a value from text.
"""

import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

from shoal.core.errors import ShoalError, excerpt, unknown

T = TypeVar("T")

MAX_THREADS = 2**12
"""Maximum number of threads or processes in a setting."""

MAX_FLOAT = 1e30
"""Maximum absolute value of a float setting; float32 holds it and its multiples."""

MAX_INT = 2**62
"""Maximum absolute value of an int setting, within int64."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of a number, as part of a setting's type. Names are those of Python's operators (ge: >=)."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    also: tuple[float, ...] = ()
    """Values outside of the bounds that are allowed too."""

    def admit(self, value: float) -> bool:
        """Whether a value lies within the bounds."""
        return value in self.also or not (
            (self.ge is not None and value < self.ge)
            or (self.gt is not None and value <= self.gt)
            or (self.le is not None and value > self.le)
            or (self.lt is not None and value >= self.lt)
        )

    def __str__(self) -> str:
        if self.ge is not None and self.le is not None:
            return f"between {self.ge:.10g} and {self.le:.10g}"
        rules = {"at least": self.ge, "above": self.gt, "at most": self.le, "below": self.lt}
        return " and ".join(f"{rule} {bound:.10g}" for rule, bound in rules.items() if bound is not None)


Positive = Annotated[int, Bounds(ge=1)]
NonNegative = Annotated[int, Bounds(ge=0)]
PositiveFloat = Annotated[float, Bounds(gt=0)]
NonNegativeFloat = Annotated[float, Bounds(ge=0)]
UnitInterval = Annotated[float, Bounds(ge=0, le=1)]

INT32 = 2**31 - 1
"""Maximum of an int32."""


def check_settings(config: Any, prefix: str = "") -> None:
    """Refuse a field whose value does not fit its declared type, by the name of its flag.

    Where a number with a point is declared, a whole number becomes one.
    """
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    for name, value in _typed(type(config), values, prefix).items():
        object.__setattr__(config, name, value)


def make_settings(kind: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """An instance of a dataclass of settings, checked; where its own rules fail on a value's type, that is said."""
    try:
        made = kind(**values)
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        _typed(kind, values, prefix)
        raise
    check_settings(made, prefix)
    return made


def bounds_of(kind: Any) -> dict[str, Bounds]:
    """The bounds of a dataclass of settings, by field; fields without bounds are left out."""
    hints = typing.get_type_hints(kind, include_extras=True)
    notes = {name: getattr(hint, "__metadata__", ()) for name, hint in hints.items()}
    return {name: note for name, found in notes.items() for note in found if isinstance(note, Bounds)}


def _typed(kind: Any, values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: _check(prefix + name.replace("_", "-"), value, hints[name]) for name, value in values.items()}


def _check(name: str, value: Any, kind: Any) -> Any:
    """The value, of its declared type, or a refusal."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        value = _check(name, value, arguments[0])
        for bounds in arguments[1:]:
            if isinstance(bounds, Bounds) and value is not None and not bounds.admit(value):
                raise ShoalError(f"--{name} must be {bounds}, got {value}.")
    elif origin is typing.Literal:
        if value not in arguments:
            raise unknown(f"choice for --{name}:", str(value), [str(a) for a in arguments])
    elif origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _check(name, value, next(a for a in arguments if a is not type(None)))
    elif origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        if not isinstance(value, (tuple, list)):
            raise ShoalError(f"--{name} must be a list of values, got {_shown(value)}.")
        return tuple(_check(name, part, arguments[0]) for part in value)
    elif kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise ShoalError(f"--{name} must be a finite number, got {_shown(value)}.")
        if abs(value) > MAX_FLOAT:
            raise ShoalError(f"--{name} must be within {MAX_FLOAT:g}, got {_shown(value)}.")
        return float(value)
    elif kind is int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ShoalError(f"--{name} must be a whole number, got {_shown(value)}.")
        if abs(value) > MAX_INT:
            raise ShoalError(f"--{name} must be within 2**62, got {_shown(value)}.")
    elif kind is Path:
        if not isinstance(value, (str, Path)):
            raise ShoalError(f"--{name} must be a path, got {_shown(value)}.")
        return Path(value)
    elif kind in (bool, str) and not isinstance(value, kind):
        raise ShoalError(f"--{name} must be a {kind.__name__}, got {_shown(value)}.")
    return value


def _shown(value: Any) -> str:
    """A value for an error message, cut where it is long."""
    if isinstance(value, int) and abs(value) > MAX_INT:
        return f"a number of {value.bit_length()} bits"
    return excerpt(repr(value))


def read_setting(what: str, text: str, kind: Any) -> Any:
    """Text as a value of a setting's type; `what` was typed, for the error."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    try:
        if origin in (typing.Union, types.UnionType):
            if text.lower() == "none":
                return None
            return read_setting(what, text, next(a for a in arguments if a is not type(None)))
        if origin is tuple:
            return tuple(read_setting(what, part, arguments[0]) for part in text.split(",") if part)
        if kind is bool:
            return {"true": True, "false": False}[text.lower()]
        return text if origin is typing.Literal or kind is str else kind(text)
    except (ValueError, KeyError):
        wanted = getattr(kind, "__name__", str(kind))
        raise ShoalError(f"{what}: {text!r} is no {wanted}.") from None
