"""``slipstream verify``: prove on this machine that every op is as accurate as it claims."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from slipstream.cli.bench_names import DTYPES
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.verify import Row

app = typer.Typer(add_completion=False, help="Hold every op on this machine to its fp64 truth.")
EXIT_FAILED = 1
CERTIFICATE = "slipstream-verify.json"
WIDTH = 110


@app.command(name="verify")
def run(
    only: Annotated[
        list[str] | None,
        typer.Option(help="An op (norm) or a group of ops (moe); several: repeat, or commas."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: a GPU if there is one.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="bf16, fp16, fp32; default: all three.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Without the compiler: seconds, not minutes.")
    ] = False,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json", help=f"Write a certificate with every figure; in a folder: {CERTIFICATE}."
        ),
    ] = None,
) -> None:
    """Hold every op, in every implementation that runs here, to its fp64 truth.

    An error may be 1.5 times that of eager PyTorch in the same dtype plus one rounding unit, for
    outputs and gradients. Exit code 1 if anything fails.
    """
    target = None if json_path is None else _target(json_path)
    from slipstream.hw import describe  # noqa: PLC0415
    from slipstream.verify import (  # noqa: PLC0415
        Options,
        certificate,
        passed,
        pick_device,
        verify,
    )

    options = Options(
        only=_split(only),
        device=device,
        dtypes=_split(dtype) or tuple(DTYPES),
        quick=quick,
    )
    begin = time.perf_counter()
    with _progress() as progress:
        rows = verify(options, progress)
    seconds = time.perf_counter() - begin
    chosen = pick_device(device)
    print(table(rows, f"{describe(chosen).name} ({chosen.type})"), end="")
    print(verdict(rows, seconds), flush=True)
    if target is not None:
        document = certificate(rows, options, chosen)
        target.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n")
        print(f"certificate: {target}")
    if not passed(rows):
        raise typer.Exit(EXIT_FAILED)


def table(rows: list[Row], title: str) -> str:
    """A line for every op, implementation and dtype, then every failure on a line of its own."""
    grid = Table(box=None, title=title, title_justify="left", pad_edge=False)
    for name, justify in (
        ("op", "left"),
        ("implementation", "left"),
        ("dtype", "left"),
        ("cases", "right"),
        ("error/allowed", "right"),
        ("verdict", "left"),
    ):
        grid.add_column(name, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    grid.add_column("", overflow="fold")
    for row in rows:
        worst = "" if row.worst is None else f"{row.worst:.2f}"
        shown = row.verdict.upper() if row.verdict == "fail" else row.verdict
        cells = (row.op, row.implementation, row.dtype, str(row.cases or ""), worst, shown)
        grid.add_row(*map(escape, (*cells, row.reason)))
    console = Console(width=max(WIDTH, shutil.get_terminal_size().columns), highlight=False)
    # Printed by us: rich ends the process with 1 where the reader of a pipe has gone.
    with console.capture() as text:
        console.print(grid)
    failures = (
        f"FAIL {row.op} {row.implementation} {row.dtype}: {o.check} of {o.case}: {o.detail}\n"
        for row in rows
        for o in row.outcomes
        if o.verdict == "fail"
    )
    return text.get() + "".join(failures)


def verdict(rows: list[Row], seconds: float) -> str:
    """The closing line."""
    judged = [row for row in rows if row.verdict != "skipped"]
    failed = sum(row.verdict == "fail" for row in judged)
    checks = sum(len(row.outcomes) for row in judged)
    summary = f"{len(judged)} rows, {checks} checks, {len(rows) - len(judged)} rows skipped"
    if not judged:
        return f"verdict: nothing could be verified ({summary}, {seconds:.0f} s)"
    outcome = f"{failed} of {len(judged)} rows FAILED" if failed else "all pass"
    return f"verdict: {outcome} ({summary}, {seconds:.0f} s)"


def _split(given: list[str] | None) -> tuple[str, ...]:
    return tuple(part for text in given or () for part in text.split(",") if part)


def _target(path: Path) -> Path:
    """Where the certificate goes, checked before minutes are spent. Raises ConfigError."""
    target = path / CERTIFICATE if path.is_dir() else path
    if not target.parent.is_dir():
        raise ConfigError(f"--json {path}: there is no folder {target.parent}; make it first")
    if not os.access(target if target.exists() else target.parent, os.W_OK):
        raise ConfigError(f"--json {path}: may not be written; give another path")
    return target


@contextmanager
def _progress() -> Generator[Callable[[str], None] | None]:
    """What is being verified, on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verifying")
        yield lambda name: bar.update(task, description=f"verifying {name}")
