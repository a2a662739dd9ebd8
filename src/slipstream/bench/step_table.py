"""Tables of measured training steps and of loss curves."""

from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from slipstream.bench.results import Row

_COLUMNS = (
    "arm",
    "step ms",
    "p10-p90",
    "/ first",
    "fwd ms",
    "bwd ms",
    "optim ms",
    "host ms",
    "tok/s",
    "MFU",
    "of spec",
    "peak GiB",
    "predicted",
    "max loss diff",
)


def step_tables(rows: list[Row]) -> list[RenderableType]:
    """A table per model, batch and device: steps first, then loss curves."""
    tables: list[RenderableType] = []
    for case, make in (("step", _steps), ("step-curve", _curves)):
        found = [row for row in rows if row.get("case") == case]
        keys = list(dict.fromkeys(_key(row) for row in found))
        found.sort(key=lambda row: keys.index(_key(row)))
        tables += [make(list(group)) for _, group in groupby(found, key=_key)]
    return tables


def _key(row: Row) -> tuple[Any, ...]:
    names = ("device", "model", "layers", "batch", "seq_len", "steps", "commit", "date")
    return tuple(row[name] for name in names)


def _title(row: Row) -> str:
    return (
        f"{row['model']}, {row['layers']} layers, {row['params']:.3g} parameters, "
        f"{row['batch']} x {row['seq_len']} tokens, {row['dtype']}, {row['device']}"
    )


def _steps(rows: list[Row]) -> RenderableType:
    table = Table(title=_title(rows[0]), title_justify="left")
    for index, name in enumerate(_COLUMNS):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
    measured = [row for row in rows if row["status"] == "ok"]
    for row in sorted(measured, key=lambda row: row["step_ms"]["median"]):
        table.add_row(*_cells(row))
    return Group(table, *(Text(line) for line in _reasons(rows)), Text(""))


def _cells(row: Row) -> list[str]:
    step, ratio, predicted = (
        row["step_ms"],
        row.get("time_over_first"),
        row.get("predicted_peak_gib"),
    )
    nominal = row.get("mfu_of_nominal")
    return [
        row["arm"],
        f"{step['median']:.1f}",
        f"{step['p10']:.1f}-{step['p90']:.1f}",
        "" if ratio is None else f"{ratio['median']:.3f}",
        *(f"{row[f'{p}_ms']['median']:.1f}" for p in ("forward", "backward", "optimizer", "host")),
        f"{row['tok_per_s']:.0f}",
        f"{100 * row['mfu_of_measured']:.1f}%",
        "" if nominal is None else f"{100 * nominal:.1f}%",
        f"{row['peak_gib']:.1f}",
        "" if predicted is None else f"{predicted:.1f}",
        f"{row['max_loss_difference']:.1e}",
    ]


def _curves(rows: list[Row]) -> RenderableType:
    first = rows[0]
    title = f"loss curves, {first['steps']} steps, {first['seeds']} seeds: {_title(first)}"
    table = Table(title=title, title_justify="left")
    for name in ("arm", "last loss", "difference*", "of seeds*", "within"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for row in rows:
        if row["status"] != "ok":
            continue
        cells = [row["arm"], " ".join(f"{loss:.4f}" for loss in row["last_loss"]), "", "", ""]
        if "within" in row:
            pairs = list(zip(row["difference"], row["spread"], strict=True))
            difference, spread = max(pairs, key=lambda pair: pair[0] - pair[1])
            cells[2:] = [f"{difference:.2e}", f"{spread:.2e}", "yes" if row["within"] else "NO"]
        table.add_row(*cells)
    lines = [*_reasons(rows), "* in the window of steps where the arm comes closest to its bound"]
    return Group(table, *(Text(line) for line in lines), Text(""))


def _reasons(rows: list[Row]) -> list[str]:
    return [
        f"{row['arm']} {'absent' if row['status'] == 'absent' else 'FAILED'}: {row['reason']}"
        for row in rows
        if row["status"] != "ok"
    ]
