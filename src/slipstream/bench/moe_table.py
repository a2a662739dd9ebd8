"""Tables of measured rows."""

from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.bench.results import Row

_COLUMNS = (
    "peer",
    "fwd ms",
    "bwd ms",
    "total ms",
    "TFLOP/s",
    "/ ours",
    "host ms",
    "not GEMM",
    "saved MiB",
    "peak MiB",
    "cold s",
    "worst error",
    "bitwise",
)


def moe_tables(rows: list[Row]) -> list[RenderableType]:
    """One table per shape, skew, dtype and device, fastest first, then who has no figures.

    Rows of load balancing come last, in a table of their own.
    """
    layers = [row for row in rows if row.get("case") == "moe"]
    balance = [row for row in rows if row.get("case") == "moe-balance"]
    keys = list(dict.fromkeys(_key(row) for row in layers))
    layers.sort(key=lambda row: keys.index(_key(row)))
    tables = [_table(list(group)) for _, group in groupby(layers, key=_key)]
    return [*tables, _balance_table(balance)] if balance else tables


def _key(row: Row) -> tuple[Any, ...]:
    names = ("device", "dtype", "shape", "tokens", "width", "hidden", "experts", "top_k", "skew")
    return tuple(row[name] for name in names)


def _table(rows: list[Row]) -> RenderableType:
    first = rows[0]
    sizes = ", ".join(str(first[n]) for n in ("tokens", "width", "hidden", "experts", "top_k"))
    title = (
        f"{first['shape']} (T, D, F, E, K = {sizes}), skew {first['skew']:g}, max/mean load "
        f"{first['max_over_mean_load']:.2f}, {first['dtype']}, {first['device']}"
    )
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    measured = [row for row in rows if row["status"] == "ok"]
    times = {row["peer"]: row["total_ms"]["median"] for row in measured}
    for row in sorted(measured, key=lambda row: times[row["peer"]]):
        table.add_row(*_cells(row, times.get("slipstream")))
    without = [row for row in rows if row["status"] != "ok"]
    words = {row["peer"]: "absent" if row["status"] == "absent" else "FAILED" for row in without}
    lines = [f"{row['peer']} {words[row['peer']]}: {row['reason']}" for row in without]
    return Group(table, *(Text(line) for line in lines), Text(""))


def _cells(row: Row, ours_ms: float | None) -> list[str]:
    share, total_ms = row.get("share_not_gemm"), row["total_ms"]["median"]
    return [
        row["peer"],
        *(f"{row[name]['median']:.3f}" for name in ("forward_ms", "backward_ms", "total_ms")),
        f"{row['total_tflop_per_s']:.4g}",
        "" if ours_ms is None else f"{total_ms / ours_ms:.3f}",
        f"{row['total_host_ms']['median']:.2f}",
        "" if share is None else f"{100 * share:.1f}%",
        _number(row.get("saved_mib")),
        _number(row.get("peak_mib")),
        str(row.get("cold_s", row.get("cold_failed", ""))),
        f"{max(row['error'].values()):.1e}",
        "yes" if row["bitwise"] else "no",
    ]


def _balance_table(rows: list[Row]) -> RenderableType:
    table = Table(title="load balancing inside routing", title_justify="left")
    numbers = ("skew", "threshold", "max/mean load", "moved", "fwd ms", "fwd+bwd ms")
    for name in ("shape", "measured", "balance", *numbers):
        table.add_column(name, justify="right" if name in numbers else "left", no_wrap=True)
    for row in rows:
        words = (row["shape"], row["measured"], row["balance"])
        if row["status"] != "ok":
            table.add_row(*words, f"FAILED: {row['reason']}")
            continue
        table.add_row(
            *words,
            f"{row['skew']:g}",
            f"{row['threshold']:g}",
            f"{row['max_over_mean_load']:.2f}",
            f"{100 * row['rerouted_share']:.1f}%",
            f"{row['forward_ms']['median']:.3f}",
            f"{row['total_ms']['median']:.3f}",
        )
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
