"""The report as one page that needs nothing else: no network, no fonts, no libraries.

Everything from a trace is escaped by the template engine, and the page's own policy lets no script
run but ours.
"""

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from slipstream import __version__
from slipstream.diagnose import Account, Kind, Trace
from slipstream.diagnose.compare import Comparison
from slipstream.diagnose.findings import Finding
from slipstream.diagnose.hints import HINTS
from slipstream.report.diagnosis import words
from slipstream.report.diagnosis.change import COLUMNS, cells, grouped, headline
from slipstream.report.diagnosis.timeline import COLOURS, Window, origins, picture
from slipstream.report.diagnosis.view import Step, View, colour_of, worst_step

MAX_STEPS = 120
MAX_BARS = 16
FEW_STEPS = 12
MAX_RANKS = 8
_STEP_WIDTH = 10
_PARTS = (
    ("compute", "compute", "compute"),
    ("exposed_communication", "exposed communication", "communication"),
    ("exposed_copies", "exposed copies", "copy"),
    ("idle", "idle", "idle"),
)
_COLUMNS = (
    ("span", "span_with_copies_ms"),
    ("compute", "compute_ms"),
    ("exposed communication", "exposed_communication_ms"),
    ("waiting", "waiting_ms"),
    ("exposed copies", "exposed_copies_ms"),
    ("idle", "idle_ms"),
    ("GPU busy", "busy_pct"),
    ("communication", "communication_ms"),
    ("overlap", "overlap_pct"),
)
_TILES = (
    ("GPU busy", "busy_pct", "compute"),
    ("exposed communication", "exposed_communication_pct", "communication"),
    ("exposed copies", "exposed_copies_pct", "copy"),
    ("idle", "idle_pct", "idle"),
    ("communication hidden", "overlap_pct", "communication"),
)
_KEY = (
    ("gemm", "matrix products"),
    ("attention", "attention"),
    ("compute", "other compute"),
    ("optimizer", "optimizer"),
    ("communication", "communication"),
    ("copy", "copies"),
    ("idle", "idle"),
    ("host", "host"),
    ("sync", "host waits for the GPU"),
)


def page(view: View, change: Comparison | None = None) -> str:
    """The whole page as HTML, ``change`` at its top. The same view gives the same bytes."""
    script = _packaged("timeline.js")
    digest = hashlib.sha256(script.encode()).digest()
    windows = _windows(view)
    return (
        _templates()
        .get_template("page.html.j2")
        .render(
            view=view,
            hints=HINTS,
            split_parts=_PARTS,
            comparison=_comparison(change),
            tiles=_tiles(view),
            columns=[name for name, _ in _columns(view)],
            rows=_rows(view),
            collectives=_collectives(view.account.ranks),
            chart=_chart(view.steps),
            bar_ranks=view.notable(MAX_BARS),
            timeline=_timeline(view, windows),
            finding_windows=[_place(one, windows) for one in view.findings.findings],
            colours=_KEY,
            script=Markup(script),
            script_hash=base64.b64encode(digest).decode(),
            style=Markup(_packaged("style.css")),
            version=__version__,
        )
    )


@cache
def _templates() -> Environment:
    engine = Environment(
        loader=PackageLoader("slipstream.report.diagnosis"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: words.printable(value) if type(value) is str else value,
    )
    engine.filters |= {
        "ms": words.milliseconds,
        "us": words.microseconds,
        "pct": words.percent,
        "count": words.count,
        "short": words.short_name,
        "cost": words.cost,
        "evidence": words.evidence,
        "ranks": words.rank_list,
        "sentence": words.sentence,
    }
    return engine


@cache
def _packaged(name: str) -> str:
    return files("slipstream.report.diagnosis").joinpath("templates", name).read_text("utf-8")


def _cell(key: str, value: float | None) -> str:
    return words.percent(value) if key.endswith("_pct") else words.milliseconds(value)


def _comparison(change: Comparison | None) -> dict[str, Any] | None:
    if change is None:
        return None
    return {
        "title": headline(change),
        "reasons": change.reasons,
        "columns": COLUMNS,
        "groups": [
            (heading, [(row.name.replace("_", " "), cells(row)) for row in rows])
            for heading, rows in grouped(change)
        ],
    }


def _columns(view: View) -> list[tuple[str, str]]:
    return [
        column
        for column in _COLUMNS
        if column[1] != "waiting_ms" or view.worst[column[1]] is not None
    ]


def _tiles(view: View) -> list[dict[str, str | None]]:
    return [
        {
            "label": label,
            "colour": colour,
            "value": words.percent(view.worst[key]),
            "mean": words.percent(view.mean[key]) if view.several else None,
        }
        for label, key, colour in _TILES
        if view.worst[key] is not None
    ]


def _rows(view: View) -> list[tuple[str, list[str]]]:
    rows = [(rank.label, rank.numbers) for rank in view.ranks]
    if view.several:
        rows += [("worst", view.worst), ("mean", view.mean)]
    return [
        (label, [_cell(key, numbers[key]) for _, key in _columns(view)]) for label, numbers in rows
    ]


def _collectives(ranks: Sequence[Account]) -> list[tuple[str, list[str]]]:
    return [
        (
            f"{one.kind}, {one.dtype}, {one.group_size} ranks"
            + (f", {label}" if (label := _rank_label(rank.trace, len(ranks))) else ""),
            [
                words.count(one.num),
                words.data_size(one.total_bytes),
                words.milliseconds(one.total_ns / 1e6),
                words.data_rate(one.bus_bytes_per_s),
                words.data_rate(one.slowest_bytes_per_s),
                words.data_rate(one.fastest_bytes_per_s),
            ],
        )
        for rank in ranks
        for one in rank.collectives
    ]


def _rank_label(trace: Trace, ranks: int) -> str:
    return f"rank {trace.rank}" if trace.rank is not None and ranks > 1 else ""


def _chart(steps: Sequence[Step]) -> dict[str, Any] | None:
    """Columns of the four parts, one per step."""
    if not steps:
        return None
    shown = steps[:MAX_STEPS]
    longest = max(step.numbers["span_with_copies_ms"] or 0.0 for step in shown) or 1.0
    boxes = []
    for position, step in enumerate(shown):
        top = 100.0
        for part, label, colour in _PARTS:
            value = step.numbers[f"{part}_ms"] or 0.0
            high = 100 * value / longest
            top -= high
            boxes.append(
                {
                    "colour": colour,
                    "x": position * _STEP_WIDTH + 1,
                    "y": f"{max(top, 0):.3f}",
                    "width": _STEP_WIDTH - 2,
                    "height": f"{high:.3f}",
                    "title": f"step {step.number}, {step.label}: {label} "
                    f"{words.milliseconds(value)}",
                }
            )
    times = words.step_times([step.host_ms for step in steps])
    caption = f"{times}. Device time of each, the highest column is {words.milliseconds(longest)}"
    if len(steps) > len(shown):
        caption += f"; the first {len(shown)} of {len(steps)}"
    return {
        "caption": caption,
        "width": max(len(shown), FEW_STEPS) * _STEP_WIDTH,
        "boxes": boxes,
        "first": _named(shown),
        "last": f"step {shown[-1].number}" if len(shown) >= FEW_STEPS else "",
    }


def _timeline(view: View, windows: Sequence[Window]) -> dict[str, Any] | None:
    if not windows:
        return None
    infos = {id(rank.trace): rank.infos for rank in view.account.ranks}

    def tints(trace: Trace) -> np.ndarray:
        codes = [COLOURS.index(colour_of(info.klass)) for info in infos[id(trace)]]
        return np.array(codes, dtype=np.int64)

    number = worst_step(view.account)
    caption = "whole file" if number is None else f"step {number}"
    if number is not None and len(view.steps) > 1:
        caption += ", the longest"
    notes = ["Drag to move; Ctrl and the wheel, two fingers, or + and - zoom."]
    if len(windows) < len(view.ranks):
        notes.append(f"{len(windows)} of {len(view.ranks)} ranks are shown.")
    if len(set(origins(windows))) > 1:
        notes.append("The ranks have no common clock: each starts at 0.")
    return {"data": picture(windows, tints), "caption": caption, "note": " ".join(notes)}


def _named(steps: Sequence[Step]) -> str:
    first, last = steps[0].number, steps[-1].number
    if len(steps) == 1 or len(steps) >= FEW_STEPS:
        return f"step {first}"
    return f"steps {first} to {last}"


def _windows(view: View) -> list[Window]:
    """What to show of each rank: its part of the longest step, or the whole file."""
    number = worst_step(view.account)
    windows = []
    notable = view.notable(MAX_RANKS)
    for rank, counted in zip(view.ranks, view.account.ranks, strict=True):
        if rank not in notable:
            continue
        bounds = _bounds(counted, number)
        if bounds is not None:
            label = rank.label if view.several else ""
            windows.append(
                Window(trace=counted.trace, label=label, start_ns=bounds[0], end_ns=bounds[1])
            )
    return windows


def _bounds(counted: Account, number: int | None) -> tuple[int, int] | None:
    for step in counted.steps:
        if step.number == number:
            # A host that runs far ahead began the step while the device did the ones before.
            earliest = step.start_ns - (step.end_ns - step.start_ns) // 4
            return min(step.start_ns, max(step.host_start_ns, earliest)), step.end_ns
    trace = counted.trace
    device = trace.of_kind(Kind.KERNEL, Kind.COPY)
    if number is not None or not len(device):
        return None
    return int(trace.start_ns[device].min()), int(trace.end_ns[device].max())


def _place(finding: Finding, windows: Sequence[Window]) -> list[int] | None:
    """Where in the timeline a finding's time range lies, if it is shown there."""
    if finding.start_ms is None or finding.end_ms is None or not windows:
        return None
    rank = finding.evidence.get("shown_rank", finding.ranks[0] if finding.ranks else None)
    zeros = dict(zip((w.trace.rank for w in windows), origins(windows), strict=False))
    window = next((w for w in windows if w.trace.rank == rank), windows[0])
    device = window.trace.of_kind(Kind.KERNEL, Kind.COPY)
    if window.trace.rank not in zeros or not len(device):
        return None
    begin = int(window.trace.start_ns[device[0]]) - zeros[window.trace.rank]
    place = [begin + round(ms * 1e6) for ms in (finding.start_ms, finding.end_ms)]
    shown = window.start_ns - zeros[window.trace.rank], window.end_ns - zeros[window.trace.rank]
    return place if place[1] > shown[0] and place[0] < shown[1] else None
