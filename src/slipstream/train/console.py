"""What a person sees while training: a progress bar on a terminal, plain lines elsewhere."""

import os
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Record = dict[str, Any]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the view; rich would end the process."""
        raise BrokenPipeError


class ProgressView:
    """Rank 0's view of a run: a live bar if stdout is a terminal, one line per interval if not."""

    def __init__(self, steps: int, start: int, log_every: int, *, enabled: bool) -> None:
        self.steps, self.start, self.log_every, self.enabled = steps, start, log_every, enabled
        self._begin = time.perf_counter()
        self._console = _Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._bar: Progress | None = None
        if enabled and self._console.is_terminal:
            self._bar = Progress(
                TextColumn("[progress.description]{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("training", total=steps, completed=start)
            self._bar.start()

    def say(self, text: str) -> None:
        """A line above the bar, or just a line."""
        if not self.enabled:
            return
        try:
            self._console.print(text, markup=False)
        except BrokenPipeError:
            # Whoever read along has gone; that is no reason to stop training.
            self.enabled = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def step(self, record: Record) -> None:
        """Show a finished step."""
        done = record["step"]
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=_short(record))
        if done % self.log_every == 0 or done == self.steps or done == self.start + 1:
            self.say(_line(record, self.steps, self._eta(done)))

    def close(self) -> None:
        """Take the bar down."""
        if self._bar is not None:
            self._bar.stop()

    def _eta(self, done: int) -> str:
        per_step = (time.perf_counter() - self._begin) / max(1, done - self.start)
        left = int(per_step * (self.steps - done))
        return f"{left // 3600}:{left % 3600 // 60:02d}:{left % 60:02d}"


def _short(record: Record) -> str:
    return f"loss {_number(record['loss'], 3)}  {record['time']['tok_per_s']:,.0f} tok/s"


def _number(value: float | None, digits: int) -> str:
    # A value that was not finite is null in the record.
    return "nan" if value is None else f"{value:.{digits}f}"


def _line(record: Record, steps: int, eta: str) -> str:
    clock = record["time"]
    parts = [
        f"step {record['step']}/{steps}",
        f"loss {_number(record['loss'], 4)}",
        f"grad {_number(record['grad_norm'], 2)}",
        f"lr {record['lr']:.2e}",
        f"{clock['tok_per_s']:,.0f} tok/s",
        f"{clock['step_ms']:.0f} ms",
    ]
    if clock.get("mfu") is not None:
        parts.append(f"mfu {100 * clock['mfu']:.1f}%")
    if "moe" in record:
        parts.append(f"load {record['moe']['max_over_mean']:.2f}x")
        if record["moe"]["unused"]:
            parts.append(f"{record['moe']['unused']} experts unused")
    parts += [f"mem {clock['peak_gib']:.2f} GiB", f"eta {eta}"]
    if record["skipped"]:
        parts.append("SKIPPED: not finite")
    return "  ".join(parts)
