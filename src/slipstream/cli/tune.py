"""``slipstream tune``: measure kernel configurations on this device and keep the fastest."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from slipstream.cli.bench_names import MOE_SHAPES, TUNED_VARIABLE
from slipstream.cli.bench_options import device_of, dtype_of

if TYPE_CHECKING:
    from slipstream.bench.moe_tune import Tuned

app = typer.Typer(
    add_completion=False, help="Measure kernel configurations on this device and keep the fastest."
)


@app.callback()
def tune() -> None:
    """Measure kernel configurations on this device and keep the fastest."""


@app.command()
def moe(
    shape: Annotated[
        list[str] | None,
        typer.Option(help=f"T,D,F,E,K or {', '.join(MOE_SHAPES)}, or NAME-short; may be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    out: Annotated[
        Path | None,
        typer.Option(help=f"File to write; default: where {TUNED_VARIABLE} points, or ~/.config."),
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed turns of all candidates.")] = 15,
) -> None:
    """Tune the expert kernels for the shapes that will be trained."""
    chosen, device = dtype_of(dtype), device_of("auto")
    from slipstream.bench.moe_problem import parse_shape  # noqa: PLC0415
    from slipstream.bench.moe_tune import (  # noqa: PLC0415
        TuneRequest,
        require_device,
        rules,
        tune_moe,
    )
    from slipstream.ops.moe.experts import tuned  # noqa: PLC0415

    request = TuneRequest(
        shapes=[parse_shape(text) for text in shape or MOE_SHAPES],
        dtype=chosen,
        device=device,
        repetitions=repetitions,
    )
    require_device(request)
    path = out or tuned.overrides_path()
    if tuned.ENVIRONMENT in os.environ and not tuned.overrides_path().exists():
        # The library refuses to run with a variable that points to nothing.
        tuned.write(tuned.overrides_path(), [])
    found = list(tune_moe(request, lambda text: print(text, file=sys.stderr, flush=True)))
    new = rules(found, request.dtype, device)
    kept = tuned.overrides() if path == tuned.overrides_path() else ()
    replaced = {(r.product, r.capability, r.dtype, r.width, r.hidden) for r in new}
    old = [r for r in kept if (r.product, r.capability, r.dtype, r.width, r.hidden) not in replaced]
    tuned.write(path, [*new, *old])
    _print_table(found)
    print(f"{path}: {len(new)} rules measured, {len(old)} kept")
    if path != tuned.overrides_path():
        print(f"to use it: export {tuned.ENVIRONMENT}={path}")


def _print_table(found: list[Tuned]) -> None:
    table = Table(title="fastest tiles", title_justify="left")
    for name in ("shape", "product", "before ms", "ms", "TFLOP/s", "tried", "tile"):
        table.add_column(name, justify="left" if name in ("shape", "product") else "right")
    for one in found:
        tile = one.tile
        words = f"{tile.block_m}x{tile.block_n}x{tile.block_k}, {tile.num_warps} warps, "
        words += f"{tile.num_stages} stages"
        words += ", flattened" if tile.flatten else ""
        words += f", {tile.programs_per_sm} per SM" if tile.programs_per_sm > 1 else ""
        words += ", gathered before" if tile.gather_before else ""
        words += ", activation fused" if tile.fuse else ""
        times = (f"{one.before_ms:.3f}", f"{one.ms:.3f}", f"{one.tflop_per_s:.0f}")
        table.add_row(one.shape.name, one.product, *times, str(one.tried), words)
    console = Console(width=130)
    with console.capture() as text:
        console.print(table)
    print(text.get(), end="", flush=True)
