"""Metrics: one JSON line per log interval, and the same in TensorBoard under the names people know."""

import json
from pathlib import Path
from typing import Any


class MetricsWriter:
    """Writes `metrics.jsonl` and `tb/`; a full disk loses a line, not the run."""

    def __init__(self, folder: Path, warn, tensorboard: bool = True):
        self.path = folder / "metrics.jsonl"
        self.warn = warn
        self._board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard.writer import SummaryWriter

                self._board = SummaryWriter(str(folder / "tb"))
            except (ImportError, OSError) as error:
                warn(f"No TensorBoard log: {error}.")

    def write(self, steps: int, values: dict[str, float]) -> None:
        try:
            with self.path.open("a") as file:
                file.write(json.dumps({"steps": steps, **values}) + "\n")
            if self._board is not None:
                for name, value in values.items():
                    self._board.add_scalar(name, value, steps)
        except OSError as error:
            self.warn(f"A line of metrics could not be written: {error}.")

    def close(self) -> None:
        if self._board is not None:
            try:
                self._board.close()
            except OSError as error:
                self.warn(f"The TensorBoard log could not be finished: {error}.")
