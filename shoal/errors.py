"""The one error that is meant for the person at the keyboard."""

import difflib
from collections.abc import Iterable


class ShoalError(Exception):
    """Bad input: one sentence that names the thing, the value and the remedy. The command line exits with 2."""

    exit_code = 2


def unknown(kind: str, name: str, known: Iterable[str]) -> ShoalError:
    """An error for a name that does not exist, with the nearest one that does."""
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    remedy = f"did you mean {near[0]!r}?" if near else f"choose one of: {', '.join(names)}."
    return ShoalError(f"There is no {kind} {name!r}; {remedy}")
