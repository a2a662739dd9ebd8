"""What the commands of ``slipstream bench`` share: options, progress, rows on disk, tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.bench_names import DEVICES, DTYPES
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from slipstream.bench.results import Row

WIDTH = 170


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)


def keep_and_show(measured: Iterable[Row], out: Path | None) -> None:
    """Append every row to ``out`` as it comes, then print the tables of all."""
    from slipstream.bench.results import append_row  # noqa: PLC0415

    rows = []
    for row in measured:
        rows.append(row)
        if out is not None:
            append_row(out, row)
    print_tables(rows)


def print_tables(rows: list[Row]) -> None:
    """Every table that ``rows`` make, on stdout."""
    from rich.console import Console  # noqa: PLC0415

    from slipstream.bench.moe_table import moe_tables  # noqa: PLC0415
    from slipstream.bench.ops_table import ops_tables  # noqa: PLC0415
    from slipstream.bench.step_table import step_tables  # noqa: PLC0415

    console = Console(width=WIDTH)
    # Printed by us: rich ends the process with 1 where the reader of a pipe has gone.
    with console.capture() as text:
        for tables in (moe_tables, ops_tables, step_tables):
            for found in tables(rows):
                console.print(found)
    print(text.get(), end="", flush=True)


def check_named(dtype: str | None, device: str | None = None) -> None:
    """ConfigError for a ``--dtype`` or ``--device`` there is none of, before torch is loaded."""
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: expected {', '.join(DTYPES)}")
    if device is not None and device not in DEVICES:
        raise ConfigError(f"--device {device}: expected auto, cuda or cpu")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of ``--dtype``. Raises ConfigError."""
    check_named(name)
    import torch  # noqa: PLC0415

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def device_of(name: str) -> torch.device:
    """The device of ``--device``. Raises ConfigError."""
    check_named(None, name)
    import torch  # noqa: PLC0415

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device; use cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
