"""Progress output: a live line on a terminal, plain lines in a log, nothing with `quiet`."""

import sys
import time
from typing import IO, Any, cast

from shoal.core.streams import Output, print_error

PLAIN_INTERVAL = 10.0
"""Seconds between lines when the output is not a terminal."""


class Progress:
    """Prints steps, speed, reward and time left of a run."""

    def __init__(self, total: int, start: int = 0, quiet: bool = False):
        self.total, self.quiet = total, quiet
        self._bar: Any = None
        self._task: Any = None
        self._last = 0.0
        if quiet:
            return
        if sys.stderr is not None and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.percentage:3.0f}%"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[note]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(file=cast(IO[str], Output(sys.stderr))),
            )
            self._task = self._bar.add_task("", total=total, completed=start, note="starting")
            self._bar.start()

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            print_error(text)

    def warn(self, text: str) -> None:
        """Print a warning, also with `quiet`."""
        if self._bar is not None:
            self._bar.console.print(f"warning: {text}", style="yellow", highlight=False, markup=False)
        else:
            print_error(f"warning: {text}")

    def update(self, steps: int, values: dict[str, float]) -> None:
        """Show the newest metrics."""
        if self.quiet:
            return
        note = f"{si(steps)} steps  {si(values['time/fps'])} env steps/s  {si(values['time/agent_fps'])} agent steps/s"
        returns = [(k, v) for k, v in values.items() if k.endswith("ep_rew_mean")]
        for key, value in returns:
            group = "" if len(returns) == 1 else f" {key.split('/')[1]}"
            note += f"  reward{group} {value:.1f}"
        if "rollout/ep_len_mean" in values:
            note += f"  length {values['rollout/ep_len_mean']:.0f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=min(steps, self.total), note=note)
        elif time.monotonic() - self._last >= PLAIN_INTERVAL or steps >= self.total:
            self._last = time.monotonic()
            left = values["time/left"]
            print_error(f"{min(100.0, 100 * steps / self.total):3.0f}%  {note}  left {left:.0f} s")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def si(value: float) -> str:
    """A number with a unit prefix: 1.2 M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"
