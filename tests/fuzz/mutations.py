"""Mutations of bytes, JSON values and safetensors files. All choices come from one `random.Random`."""

import copy
import json
import re
import struct
from collections.abc import Iterator
from random import Random
from typing import Any

DEEP = 2000
"""Levels of a value that is nested too deeply."""

EDGES: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    255,
    2**31,
    -(2**31),
    2**53,
    2**63,
    10**30,
    0.5,
    -0.5,
    1e-320,
    1e308,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "0",
    "nan",
    "../../x",
    "/etc/passwd",
    "a\0b",
    "\x1b[31mred\n\r",
    "\ud800",
    "é" * 3000,
    [],
    [[]],
    [0, 0, 0],
    {},
    {"": {"": None}},
]
"""JSON values at the edge of what a field may be."""

NUMBERS = [
    b"0",
    b"-1",
    b"1",
    b"3",
    b"255",
    b"65536",
    b"2147483648",
    b"1e308",
    b"1e400",
    b"nan",
    b"inf",
    b"-0",
    b"9" * 40,
]
"""Texts that take the place of a number in a text file."""


def edge(rng: Random) -> Any:
    """One of the edges, for whatever is done to it next."""
    return copy.deepcopy(rng.choice(EDGES))


def mutate_json(rng: Random, tree: Any, count: int | None = None) -> tuple[Any, str]:
    """A changed copy of a JSON value, and what was done."""
    tree = {"": copy.deepcopy(tree)}
    done = []
    for _ in range(count or rng.choice((1, 1, 1, 2, 4))):
        places = list(_places(tree))
        holder, key = rng.choice(places)
        action = rng.choice(("edge", "edge", "edge", "near", "swap", "delete", "repeat", "deep", "add"))
        value = holder[key]
        if action == "near" and isinstance(value, (int, float)) and not isinstance(value, bool):
            holder[key] = rng.choice((value + 1, value - 1, -value, value * 2, value * 1e6, value / 3))
        elif action == "swap":
            other, its = rng.choice(places)
            holder[key] = copy.deepcopy(other[its])
        elif action == "delete" and holder is not tree:
            del holder[key]
        elif action == "repeat" and isinstance(holder, list):
            holder[key:key] = [copy.deepcopy(value) for _ in range(rng.choice((1, 3, 50)))]
        elif action == "deep":
            deep: Any = value
            for _ in range(DEEP):
                deep = [deep] if rng.random() < 0.5 else {"a": deep}
            holder[key] = deep
            done.append(f"deep {str(key)[:40]!r}")
            break  # nothing can walk through it any more
        elif action == "add" and isinstance(value, dict):
            value[rng.choice(("unknown", "", "__class__", "seed"))] = edge(rng)
        else:
            holder[key] = edge(rng)
        done.append(f"{action} {str(key)[:40]!r}")
    return tree[""], ", ".join(done)


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below a value."""
    waiting = [tree]
    while waiting:
        holder = waiting.pop()
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            yield holder, key
            if isinstance(value, (dict, list)):
                waiting.append(value)


def to_json(tree: Any) -> bytes:
    """Text of a JSON value, however deep."""
    try:
        return json.dumps(tree).encode()
    except RecursionError:
        return _write_deep(tree).encode()


def _write_deep(tree: Any) -> str:
    """`json.dumps` without recursion."""
    parts: list[str] = []
    waiting: list[Any] = [("value", tree)]
    while waiting:
        kind, value = waiting.pop()
        if kind == "text":
            parts.append(value)
        elif isinstance(value, dict) and value:
            rows = [[("text", f"{json.dumps(str(key))}: "), ("value", part)] for key, part in value.items()]
            waiting += _wrapped("{", rows, "}")
        elif isinstance(value, list) and value:
            waiting += _wrapped("[", [[("value", part)] for part in value], "]")
        else:
            parts.append(json.dumps(value))
    return "".join(parts)


def _wrapped(start: str, rows: list[list[Any]], end: str) -> list[Any]:
    """The parts of a container, last first."""
    parts: list[Any] = [("text", start)]
    for number, row in enumerate(rows):
        parts += [("text", ", ")] * (number > 0) + row
    return [*parts, ("text", end)][::-1]


def mutate_bytes(rng: Random, data: bytes) -> tuple[bytes, str]:
    """Changed bytes, and what was done."""
    found = bytearray(data)
    done = []
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        action = rng.choice(("flip", "set", "insert", "delete", "copy", "cut", "zero", "number", "number"))
        size = len(found)
        at = rng.randrange(size + 1)
        length = min(rng.choice((1, 2, 4, 8, 64, 1000)), size - at)
        if action == "flip" and at < size:
            found[at] ^= 1 << rng.randrange(8)
        elif action == "set" and at < size:
            found[at] = rng.choice((0, 1, 127, 128, 255, 10, 32, 34, 45, 91, 123))
        elif action == "delete":
            del found[at : at + length]
        elif action == "copy":
            to = rng.randrange(size + 1)
            found[to:to] = found[at : at + length]
        elif action == "cut" and rng.random() < 0.3:
            del found[at:]
        elif action == "zero":
            found[at : at + length] = bytes(length)
        elif action == "number" and (numbers := list(re.finditer(rb"-?\d+(\.\d+)?", bytes(found[:100_000])))):
            number = rng.choice(numbers)
            found[number.start() : number.end()] = rng.choice(NUMBERS)
        else:
            found[at:at] = rng.randbytes(rng.choice((1, 4, 40)))
        done.append(f"{action} at {at}")
    return bytes(found), ", ".join(done)


def mutate_tensors(rng: Random, data: bytes) -> tuple[bytes, str]:
    """A safetensors file with another header, or other values; its length field is right."""
    (length,) = struct.unpack_from("<Q", data)
    header, values = json.loads(data[8 : 8 + length]), bytearray(data[8 + length :])
    if rng.random() < 0.5 and values:
        at = rng.randrange(len(values) // 4) * 4
        pattern = rng.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff", b"\xff" * 4, b"\x00" * 4, rng.randbytes(4)))
        count = rng.choice((1, 4, 1000))
        values[at : at + 4 * count] = (pattern * count)[: len(values) - at]
        done = f"values at {at}"
    else:
        header, done = mutate_json(rng, header)
    text = to_json(header)
    return struct.pack("<Q", len(text)) + text + bytes(values), done
