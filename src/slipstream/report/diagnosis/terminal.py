"""The report as a person reads it in a terminal, or as plain lines in a file or pipe."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.console import Console
from rich.table import Table
from rich.text import Text

from slipstream.diagnose.findings import Finding
from slipstream.report.diagnosis.view import COLUMNS, PARTS, Numbers, Rank, View
from slipstream.report.diagnosis.words import (
    cost,
    evidence,
    milliseconds,
    percent,
    printable,
    rank_list,
    sentence,
    short_name,
    step_times,
)

MAX_RANKS = 8
BAR_WIDTH = 48
LABEL_WIDTH = 12
MAX_EVIDENCE = 6
MAX_KINDS = 5
IN_FULL = 3
"""Findings shown in full; of the others the title."""
_STYLE = {
    "compute": "blue",
    "exposed_communication": "yellow",
    "exposed_copies": "magenta",
    "idle": "bright_black",
}
_LETTER = {"compute": "#", "exposed_communication": "=", "exposed_copies": "+", "idle": "."}


def show(view: View, console: Console) -> None:
    """Print the whole report."""
    lines(Text(printable(view.title), style="bold"), 0, console)
    lines(Text(printable(view.describe())), 0, console)
    for problem in view.problems:
        lines(Text(f"note: {printable(problem)}", style="yellow"), 0, console)
    console.print()
    if view.has_device_work:
        shown = view.notable(MAX_RANKS)
        bars([(rank.label, rank.numbers) for rank in shown], console)
        console.print()
        _table(view, shown, console)
        console.print()
        _makeup(view, console)
    _findings(view, console)


def bars(rows: Sequence[tuple[str, Numbers]], console: Console) -> None:
    """The split of each row as a bar as long as its span."""
    blocks = console.is_terminal and not console.legacy_windows and console.encoding == "utf-8"
    label_width = min(LABEL_WIDTH, max(len(label) for label, _ in rows))
    width = max(10, min(BAR_WIDTH, console.width - label_width - 14))
    longest = max(numbers["span_with_copies_ms"] or 0.0 for _, numbers in rows)
    for label, numbers in rows:
        span = numbers["span_with_copies_ms"] or 0.0
        cells = round(width * span / longest) if longest else 0
        line = Text(printable(label)[:label_width].ljust(label_width) + "  ")
        for part, length in zip(PARTS, _lengths(numbers, cells), strict=True):
            line.append(("\u2588" if blocks else _LETTER[part]) * length, style=_STYLE[part])
        line.append(" " * (width - cells) + milliseconds(span).rjust(11))
        console.print(line, no_wrap=True)
    key = Text()
    for part in PARTS:
        key.append("\u2588 " if blocks else f"{_LETTER[part]} ", style=_STYLE[part])
        key.append(part.replace("_", " ") + ("  " if part != PARTS[-1] else ""))
    lines(key, label_width + 2, console)


def _lengths(numbers: Numbers, cells: int) -> list[int]:
    """Cells per part, rounded so that they add up to ``cells``."""
    ends, so_far = [0], 0.0
    for part in PARTS:
        so_far += numbers[f"{part}_pct"] or 0.0
        ends.append(round(cells * so_far / 100))
    return [end - start for start, end in pairwise(ends)]


def _table(view: View, ranks: Sequence[Rank], console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("ms", no_wrap=True)
    columns = [
        column
        for column in COLUMNS
        if column[1] != "waiting_ms" or view.worst[column[1]] is not None
    ]
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for label, numbers in _rows(view, ranks):
        table.add_row(Text(label), *(_cell(key, numbers[key]) for _, key in columns))
    console.print(table)
    left_out = len(view.ranks) - len(ranks)
    if left_out:
        console.print(Text(f"({left_out} more ranks in --json and -o)", style="dim"))


def _rows(view: View, ranks: Sequence[Rank]) -> Iterator[tuple[str, Numbers]]:
    for rank in ranks:
        yield printable(rank.label)[:LABEL_WIDTH], rank.numbers
    if view.several:
        yield "worst", view.worst
        yield "mean", view.mean


def _cell(key: str, value: float | None) -> str:
    if value is None or key.endswith("_pct"):
        return percent(value)
    return f"{value:,.2f}" if value < 10_000 else f"{value:,.0f}"


def _makeup(view: View, console: Console) -> None:
    """Steps, phases and kinds of kernels, a line or two each."""
    facts = {
        "steps": [step_times([step.host_ms for step in view.steps])] if view.steps else [],
        "phases": [f"{share.name} {percent(share.share_pct)}" for share in view.phases],
        "kernels": [f"{one.name} {percent(one.share_pct)}" for one in view.classes[:MAX_KINDS]],
    }
    for name, parts in facts.items():
        if not parts:
            continue
        for number, line in enumerate(_packed(parts, console.width - 10, ", ")):
            lines(Text(("" if number else name).ljust(9) + printable(line)), 0, console)
    console.print()


def _findings(view: View, console: Console) -> None:
    found = view.findings.findings
    for number, finding in enumerate(found[:IN_FULL], start=1):
        _finding(number, finding, view, console)
    for number, finding in enumerate(found[IN_FULL:], start=IN_FULL + 1):
        facts = "; ".join(fact for fact in (cost(finding), finding.id) if fact)
        lines(Text(f"{number}. {sentence(finding.title)}: {facts}"), 0, console)
    if len(found) > IN_FULL:
        console.print(Text("   (in full in --json and -o)\n", style="dim"))
    for withdrawn in view.findings.resolved:
        lines(Text(printable(withdrawn), style="dim"), 0, console)
    for names, reason in view.not_judged():
        lines(Text(f"not judged: {names}: {printable(reason)}", style="dim"), 0, console)


def _finding(number: int, finding: Finding, view: View, console: Console) -> None:
    lines(Text(f"{number}. {sentence(finding.title)}", style="bold"), 0, console)
    facts = [cost(finding), f"{finding.confidence} confidence", finding.id]
    if view.several:
        facts.insert(2, rank_list(finding.ranks, len(view.ranks)))
    known = [fact for fact in facts if fact]
    body = [Text(line, style="cyan") for line in _packed(known, console.width - 3)]
    if finding.detail:
        body.append(Text(printable(finding.detail)))
    shown = [item for item in finding.evidence.items() if item[0] != "ranks"][:MAX_EVIDENCE]
    numbers = [printable(evidence(name, value)) for name, value in shown]
    body += [Text(line, style="dim") for line in _packed(numbers, console.width - 3)]
    room = console.width - 5
    body += [Text(f"- {short_name(name, room)}", style="dim") for name in finding.kernels[:2]]
    actions = (("PyTorch", finding.action_pytorch), ("Slipstream", finding.action_slipstream))
    body += [Text.assemble((f"{name}: ", "green"), text) for name, text in actions if text]
    for line in body:
        lines(line, 3, console)
    console.print()


def _packed(items: Sequence[str], width: int, joint: str = "; ") -> list[str]:
    """Items on as few lines as keep each whole; one that is longer has its own line."""
    packed: list[str] = []
    for item in items:
        if packed and len(packed[-1]) + len(joint) + len(item) <= width:
            packed[-1] += joint + item
        else:
            packed.append(item)
    return packed


def lines(text: Text, indent: int, console: Console) -> None:
    """Wrap to the console's width without the spaces rich fills lines with."""
    for line in text.wrap(console, console.width - indent):
        line.rstrip()
        console.print(Text(" " * indent) + line, no_wrap=True)
