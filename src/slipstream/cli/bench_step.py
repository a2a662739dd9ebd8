"""``slipstream bench step``: whole training steps of one model in several stacks, in turns."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.bench_names import STEP_ARMS, STEP_SIZES
from slipstream.cli.bench_options import device_of, keep_and_show, say

DEFAULT_ARMS = "stock,stock-liger,slipstream-cache,slipstream"
CURVE_ARMS = "stock,slipstream-cache"


def step(
    recipe: Annotated[
        str | None,
        typer.Argument(
            help=f"Recipe (.toml) whose model section gives the shape, or {', '.join(STEP_SIZES)}; "
            "default: OLMoE with 8 layers (small with --curve)."
        ),
    ] = None,
    arms: Annotated[
        str | None,
        typer.Option(help=f"List of {', '.join(STEP_ARMS)}; default: {DEFAULT_ARMS}."),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences of a step; default: 4 (8 with --curve).")
    ] = None,
    seq: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a sequence; default: 4096 (512 with --curve)."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a block.")] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of every arm, in turns.")] = 3,
    curve: Annotated[
        int | None, typer.Option(help="Instead: compare loss curves over this many steps.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Initial weights per arm, with --curve.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Append raw rows to this .jsonl file.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda if there.")] = "auto",
) -> None:
    """Forward, backward and AdamW of a Hugging Face Qwen3-MoE in stacks that are compared."""
    where = device_of(device)
    from slipstream.bench.step import StepRequest, bench_step  # noqa: PLC0415
    from slipstream.bench.step_arms import select_arms  # noqa: PLC0415
    from slipstream.bench.step_curve import CurveRequest, bench_curve  # noqa: PLC0415
    from slipstream.bench.step_model import step_model  # noqa: PLC0415

    source = recipe or (None if curve is None else "small")
    sequences, length = (4, 4096) if curve is None else (8, 512)
    model = step_model(source, layers=layers, batch=batch or sequences, seq_len=seq or length)
    if curve is not None:
        names = select_arms(arms or CURVE_ARMS)
        request = CurveRequest(model=model, arms=names, device=where, steps=curve, seeds=seeds)
        keep_and_show(bench_curve(request, say), out)
        return
    keep_and_show(
        bench_step(
            StepRequest(
                model=model,
                arms=select_arms(arms or DEFAULT_ARMS),
                device=where,
                steps=steps,
                rounds=rounds,
            ),
            say,
        ),
        out,
    )
