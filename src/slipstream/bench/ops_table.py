"""Tables of measured ops: one per op, shape, dtype and device, fastest first."""

from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.bench.results import Row

_COLUMNS = (
    "peer",
    "fwd us",
    "of copy",
    "bwd us",
    "of copy",
    "total us",
    "of copy",
    "/ ours",
    "fwd host",
    "bwd host",
    "saved MiB",
    "peak MiB",
    "worst error",
    "bitwise",
    "adds up",
)


def ops_tables(rows: list[Row]) -> list[RenderableType]:
    """A table per op and shape; what re-emission costs stands below its op."""
    found = [row for row in rows if row.get("case") == "ops"]
    keys = list(dict.fromkeys(_key(row) for row in found))
    found.sort(key=lambda row: keys.index(_key(row)))
    return [_table(list(group)) for _, group in groupby(found, key=_key)]


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("device", "dtype", "op", "shape"))


def _table(rows: list[Row]) -> RenderableType:
    first = rows[0]
    measured = [row for row in rows if row["status"] == "ok"]
    title = f"{first['op']} {first['shape']}, {first['dtype']}, {first['device']}"
    products = any("total_product_share" in row for row in measured)
    if measured:
        rate = measured[0]
        title += f", copy {rate['copy_gb_per_s']:.0f} GB/s"
        if products:
            title += f", gemm {rate['product_tflop_per_s']:.0f} TFLOP/s"
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(_COLUMNS):
        name = "of gemm" if products and name == "of copy" else name
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    ours = next((r["total_ms"]["median"] for r in measured if r["peer"] == "slipstream"), None)
    for row in sorted(measured, key=lambda row: row["total_ms"]["median"]):
        table.add_row(*_cells(row, ours))
    return Group(table, *(Text(line) for line in _notes(rows)), Text(""))


def _cells(row: Row, ours_ms: float | None) -> list[str]:
    times = []
    for part in ("forward", "backward", "total"):
        share = row.get(f"{part}_copy_share", row.get(f"{part}_product_share"))
        times += [_micro(row, f"{part}_ms"), "" if share is None else f"{100 * share:.1f}%"]
    error = row["error"]
    return [
        row["peer"],
        *times,
        "" if ours_ms is None else f"{row['total_ms']['median'] / ours_ms:.3f}",
        *(_micro(row, f"{part}_host_ms") for part in ("forward", "backward")),
        *("" if row.get(n) is None else f"{row[n]:.1f}" for n in ("saved_mib", "peak_mib")),
        f"{max(error.values()):.1e}" if error else "",
        "yes" if row["bitwise"] else "no",
        {True: "yes", False: "NO"}[row["sums"]] if "sums" in row else "",
    ]


def _micro(row: Row, name: str) -> str:
    return f"{1e3 * row[name]['median']:.1f}" if name in row else ""


def _notes(rows: list[Row]) -> list[str]:
    words = {"absent": "absent", "wrong": "FAILED", "failed": "FAILED"}
    notes = [
        f"{row['peer']} {words[row['status']]}: {row['reason']}"
        for row in rows
        if row["status"] != "ok"
    ]
    for row in rows:
        if "reemission" in row:
            notes.append(_reemission(row["peer"], row["reemission"]))
    return notes


def _reemission(peer: str, found: dict[str, float]) -> str:
    extra, write = found["extra_total_ms"], found["write_ms"]
    line = (
        f"{peer} re-emits {found['written_bytes'] / 2**20:.0f} MiB: {1e3 * extra:+.1f} us in all, "
        f"{1e3 * found['extra_backward_ms']:+.1f} us in the backward; one write takes "
        f"{1e3 * write:.1f} us"
    )
    freed = found.get("freed_mib")
    return line if freed is None else f"{line}; frees {freed:.0f} MiB"
