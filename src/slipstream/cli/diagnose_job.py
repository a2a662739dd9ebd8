"""The work of ``slipstream diagnose``: profiles read, accounted for, judged and put into words."""

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from slipstream import diagnose
from slipstream.diagnose.compare import Comparison, Verdict
from slipstream.diagnose.gate import gate
from slipstream.report.diagnosis import NUMBERS, View, gather, page, show, show_change, to_json

STEP_CHANGE = "step_change_pct"
BAR_FROM_BYTES = 20 * 2**20
MIN_WIDTH, MAX_WIDTH = 40, 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A job, and with ``--compare`` the one before it, in the forms that are printed."""

    view: View
    before: View | None
    change: Comparison | None

    def failures(self, rules: Sequence[str]) -> list[str]:
        """A line for each of the ``rules`` (``name=limit``) that is broken."""
        numbers = dict(self.view.worst)
        if self.change is not None:
            # By how much the later step is slower, where that is beyond doubt.
            worse = self.change.verdict is Verdict.WORSE
            numbers[STEP_CHANGE] = self.change.step.pct if worse else None
        return [str(failure) for failure in gate(numbers, rules)]

    def page(self) -> str:
        """One self-contained HTML page."""
        return page(self.view, self.change)

    def json(self, failures: Sequence[str]) -> str:
        """One JSON object."""
        return to_json(self.view, self.change, failures)

    def text(self) -> str:
        """The report as lines for a terminal of the present width."""
        console = Console()
        console.width = max(MIN_WIDTH, min(console.width, MAX_WIDTH))
        # Printed by the caller: rich ends the process with 1 where the reader of a pipe has gone.
        with console.capture() as text:
            if self.before is not None and self.change is not None:
                show_change(self.change, self.before, self.view, console)
            else:
                show(self.view, console)
        return text.get()


def check_rules(rules: Sequence[str], *, comparing: bool) -> None:
    """ConfigError for a limit on a number that will not be there, before the work is done."""
    gate(dict.fromkeys([*NUMBERS, STEP_CHANGE] if comparing else NUMBERS), rules)


def diagnosed(paths: Sequence[Path], before: Sequence[Path] | None) -> Diagnosis:
    """Read the job of ``paths``, and the one it is compared with if there is one."""
    earlier = _view(before) if before else None
    view = _view(paths)
    change = diagnose.compare(earlier.account, view.account) if earlier else None
    return Diagnosis(view=view, before=earlier, change=change)


def _view(paths: Sequence[Path]) -> View:
    with _progress() as progress:
        job = diagnose.read(paths, progress=progress)
    counted = diagnose.account(job)
    return gather(counted, diagnose.findings(counted))


@contextmanager
def _progress() -> Generator[Callable[[int, int], None] | None]:
    """A bar on a terminal while files of some size are read, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("reading"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", total=None, visible=False)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=total >= BAR_FROM_BYTES)

        yield advance
