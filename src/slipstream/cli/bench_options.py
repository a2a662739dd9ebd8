"""What the commands of ``slipstream bench`` share: options, progress, rows on disk, tables."""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console

from slipstream.bench.moe_table import moe_tables
from slipstream.bench.ops_table import ops_tables
from slipstream.bench.results import Row, append_row
from slipstream.bench.step_table import step_tables
from slipstream.errors import ConfigError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WIDTH = 170


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def keep_and_show(measured: Iterable[Row], out: Path | None) -> None:
    """Append every row to ``out`` as it comes, then print the tables of all."""
    rows = []
    for row in measured:
        rows.append(row)
        if out is not None:
            append_row(out, row)
    print_tables(rows)


def print_tables(rows: list[Row]) -> None:
    """Every table that ``rows`` make, on stdout."""
    console = Console(width=WIDTH)
    # Printed by us: rich ends the process with 1 where the reader of a pipe has gone.
    with console.capture() as text:
        for tables in (moe_tables, ops_tables, step_tables):
            for found in tables(rows):
                console.print(found)
    print(text.get(), end="", flush=True)


def dtype_of(name: str) -> torch.dtype:
    """The dtype of ``--dtype``. Raises ConfigError."""
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: expected {', '.join(DTYPES)}")
    return DTYPES[name]


def device_of(name: str) -> torch.device:
    """The device of ``--device``. Raises ConfigError."""
    if name not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"--device {name}: expected auto, cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device; use cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
