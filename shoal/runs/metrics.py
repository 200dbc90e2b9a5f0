"""Metrics: one JSON line per log interval, and the same in TensorBoard, under Stable-Baselines3's names."""

import contextlib
import io
import json
import math
import os
import re
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import FileError
from shoal.runs import files

LOG_LIMIT = 2**30
"""Maximum bytes of a file of rows."""

LINE_LIMIT = 2**20
"""Maximum bytes of a row."""

MAX_VALUE = 1e100
"""Maximum absolute value of a number."""

Row = dict[str, Any]


class MetricsWriter:
    """Writes `metrics.jsonl` and `tb/`; a full disk loses a line, not the run."""

    def __init__(self, folder: Path, warn: Callable[[str], None], tensorboard: bool = True):
        self.path = folder / "metrics.jsonl"
        self.warn = warn
        self._board: EventFile | None = None
        self._failed = False
        if tensorboard:
            try:
                self._board = EventFile(folder / "tb")
            except (ImportError, FileError) as error:
                warn(f"No TensorBoard log: {error}")

    def write(self, steps: int, values: dict[str, float]) -> None:
        """Write a row to both; of consecutive failures only the first gives a warning."""
        try:
            append_row(self.path, {"steps": steps, **values})
            if self._board is not None:
                self._board.write(steps, values)
            self._failed = False
        except FileError as error:
            if not self._failed:
                self.warn(f"Metrics are lost: {error}")
            self._failed = True


class EventFile:
    """A TensorBoard event file of scalars. SummaryWriter would follow links and write from a thread."""

    def __init__(self, folder: Path):
        # The stubs lack protobuf's generated classes.
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._writer = Event, Summary, RecordWriter
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self.path = files.make_folder(folder) / name
        self._append(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def write(self, steps: int, values: Mapping[str, float]) -> None:
        scalars = [
            self._summary.Value(tag=re.sub(r"[^-/\w.]", "_", name), simple_value=value)
            for name, value in values.items()
        ]
        self._append(self._event(wall_time=time.time(), step=steps, summary=self._summary(value=scalars)))

    def _append(self, event: Any) -> None:
        record = io.BytesIO()
        self._writer(record).write(event.SerializeToString())
        files.append(self.path, record.getvalue())


# --- rows of metrics.jsonl and eval.jsonl -----------------------------------------------------------------------------


def is_metrics(row: Any) -> bool:
    """Whether a JSON value is a valid row of metrics: `steps` and numbers by name."""
    return _has_steps(row) and all(value is None or _is_number(value) for value in row.values())


def is_score(row: Any) -> bool:
    """Whether a JSON value is a valid row of an evaluation: `steps`, `mean`, and the mean of every group."""
    if not _has_steps(row) or not _is_number(row.get("mean")):
        return False
    groups = row.get("groups")
    if not isinstance(groups, dict) or not groups:
        return False
    return all(isinstance(score, dict) and _is_number(score.get("mean")) for score in groups.values())


def _has_steps(row: Any) -> bool:
    steps = row.get("steps") if isinstance(row, dict) else None
    return type(steps) is int and 0 <= steps < 2**63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= MAX_VALUE


def append_row(path: Path, row: Row) -> None:
    """Append a row to a file of JSON lines; non-finite numbers become null."""
    files.append(path, json.dumps(finite(row), allow_nan=False).encode() + b"\n")


def read_rows(path: Path, is_good: Callable[[Any], bool]) -> list[Row]:
    """The valid rows of a file of JSON lines; a warning counts the others."""
    rows = [row for _, row in _parse(_read(path), is_good)]
    if bad := rows.count(None):
        warnings.warn(f"{path}: {bad} of {len(rows)} lines are damaged and skipped.", stacklevel=1)
    return [row for row in rows if row is not None]


def trim_rows(path: Path, is_good: Callable[[Any], bool], steps: int) -> None:
    """Drop valid rows beyond `steps`. Damaged lines stay, and the last line gets its newline."""
    data = _read(path)
    kept = [line + b"\n" for line, row in _parse(data, is_good) if row is None or row["steps"] <= steps]
    if (text := b"".join(kept)) != data:
        with files.replacing(path) as temporary:
            temporary.write_bytes(text)


def _read(path: Path) -> bytes:
    return files.read_bytes(path, LOG_LIMIT) if os.path.lexists(path) else b""


def _parse(data: bytes, is_good: Callable[[Any], bool]) -> Iterator[tuple[bytes, Row | None]]:
    """Every non-empty line and its row; None for an invalid one."""
    for line in data.split(b"\n"):
        if line:
            row = None
            if len(line) <= LINE_LIMIT:
                with contextlib.suppress(ValueError, RecursionError):
                    row = json.loads(line.decode())
            yield line, row if is_good(row) else None


def finite(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, Mapping):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
