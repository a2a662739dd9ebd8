"""``slipstream report``: the numbers of a run and its loss curve."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(help="Summarise a run and draw its loss curve.")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    figure: Annotated[
        Path | None, typer.Option(help="Where to draw; default loss.svg in the run folder.")
    ] = None,
) -> None:
    """Summarise a run and draw its loss curve."""
    from slipstream.report import loss_curve, summarise  # noqa: PLC0415

    summary = summarise(run)
    table = Table(show_header=False, box=None, title=f"run {run}", title_justify="left")
    for name, text in summary.lines():
        table.add_row(name, text)
    console = Console(soft_wrap=True)
    # Printed by us: rich ends the process with 1 where the reader of a pipe has gone.
    with console.capture() as text:
        console.print(table)
    print(text.get(), end="", flush=True)
    print(f"loss curve: {loss_curve(run, figure or run / 'loss.svg')}")
