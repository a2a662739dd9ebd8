"""A comparison of two jobs in words: rows for a table, a JSON object, and the terminal's report."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.diagnose.compare import Change, Comparison
from slipstream.report.diagnosis.terminal import bars, lines
from slipstream.report.diagnosis.view import View
from slipstream.report.diagnosis.words import printable

MAX_CLASSES = 12
COLUMNS = ("A", "B", "change", "in %", "90 % interval", "verdict")
KINDS = {
    "step": "Step",
    "split": "Parts of a step",
    "phase": "Phases",
    "class": "Kinds of kernels",
}
_STYLE = {"better": "green", "worse": "red", "inconclusive": "dim"}


def headline(change: Comparison) -> str:
    """The verdict in one line."""
    return f"{change.verdict}: B ({change.after}) against A ({change.before})"


def grouped(change: Comparison) -> list[tuple[str, list[Change]]]:
    """The changes under the heading of their kind, kinds without any left out."""
    groups = [(KINDS[kind], [c for c in change.changes if c.kind == kind]) for kind in KINDS]
    return [(heading, rows) for heading, rows in groups if rows]


def cells(row: Change) -> list[str]:
    """The texts of one row, in order of ``COLUMNS``."""
    interval = "-"
    if row.low_ms is not None and row.high_ms is not None:
        interval = f"{row.low_ms:+,.2f} to {row.high_ms:+,.2f}"
    return [
        f"{row.before_ms:,.2f}",
        f"{row.after_ms:,.2f}",
        f"{row.shift_ms:+,.2f}",
        "-" if row.pct is None else f"{row.pct:+,.1f}",
        interval,
        str(row.verdict),
    ]


def as_object(change: Comparison) -> dict[str, Any]:
    """The comparison for JSON."""
    return {
        "before": change.before,
        "after": change.after,
        "verdict": str(change.verdict),
        "reasons": list(change.reasons),
        "unlike": list(change.unlike),
        "changes": [
            {
                "kind": row.kind,
                "name": row.name,
                "before_ms": row.before_ms,
                "after_ms": row.after_ms,
                "shift_ms": row.shift_ms,
                "pct": row.pct,
                "low_ms": row.low_ms,
                "high_ms": row.high_ms,
                "verdict": str(row.verdict),
            }
            for row in change.changes
        ],
    }


def show_change(change: Comparison, before: View, after: View, console: Console) -> None:
    """Print what changed from one job to the other."""
    lines(Text(printable(headline(change)), style="bold"), 0, console)
    for reason in change.reasons:
        lines(Text("- " + printable(reason)), 0, console)
    for name, view in (("A", before), ("B", after)):
        lines(Text(f"{name}: {printable(view.title)}: {printable(view.describe())}"), 0, console)
    console.print()
    bars([("A", before.mean), ("B", after.mean)], console)
    console.print()
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("ms a step" if _by_step(before, after) else "ms", max_width=28)
    for name in (*COLUMNS[:4], COLUMNS[5]):
        table.add_column(name, justify="right", no_wrap=True)
    hidden = 0
    for _, rows in grouped(change):
        for row in rows[:MAX_CLASSES]:
            texts = cells(row)
            verdict = Text(texts[5], style=_STYLE[texts[5]])
            name = printable(row.name.replace("_", " "))
            table.add_row(Text(name), *texts[:4], verdict)
        hidden += len(rows[MAX_CLASSES:])
        table.add_section()
    console.print(table)
    if hidden:
        console.print(Text(f"({hidden} smaller changes in --json and -o)", style="dim"))


def _by_step(*views: View) -> bool:
    return all(rank.num_steps for view in views for rank in view.ranks)
