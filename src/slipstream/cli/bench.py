"""``slipstream bench``: measure an op beside its peers, and tables of what was measured."""

from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.bench_names import MOE_PEERS, MOE_SHAPES
from slipstream.cli.bench_ops import ops
from slipstream.cli.bench_options import (
    check_named,
    device_of,
    dtype_of,
    keep_and_show,
    print_tables,
    say,
)
from slipstream.cli.bench_step import step
from slipstream.errors import ConfigError

app = typer.Typer(
    add_completion=False,
    help="Measure ops, the MoE layer and whole steps beside their peers.",
)
app.command()(ops)
app.command()(step)


@app.command()
def moe(
    shape: Annotated[
        list[str] | None,
        typer.Option(help=f"T,D,F,E,K or {', '.join(MOE_SHAPES)}, or NAME-short; may be repeated."),
    ] = None,
    peers: Annotated[
        str, typer.Option(help=f"all, or a list of {', '.join(MOE_PEERS)}; -NAME takes one away.")
    ] = "all",
    skew: Annotated[
        list[float] | None,
        typer.Option(help="Zipf exponent of expert popularity, 0 is none; may be repeated."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    out: Annotated[Path | None, typer.Option(help="Append raw rows to this .jsonl file.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda if there.")] = "auto",
    warmup: Annotated[int, typer.Option(min=1, help="Untimed turns of all.")] = 5,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed turns of all.")] = 30,
    cold: Annotated[
        bool, typer.Option("--cold", help="Also the first call, in a new process, no caches.")
    ] = False,
    cold_limit: Annotated[float, typer.Option(help="Seconds to wait for a first call.")] = 300.0,
    graph: Annotated[bool, typer.Option("--graph", help="Also as a CUDA graph.")] = False,
    balance: Annotated[
        bool,
        typer.Option(
            "--balance", help="Instead of peers: load balancing off and on (default skew 1.2)."
        ),
    ] = False,
) -> None:
    """Router, routing, experts and combine, forward and backward, of every peer in turns."""
    skews = skew or [1.2 if balance else 0.0]
    if min(skews) < 0:
        raise ConfigError(f"--skew {min(skews):g}: expected 0 or more")
    check_named(dtype, device)
    from slipstream.bench.moe import MoeRequest, bench_moe  # noqa: PLC0415
    from slipstream.bench.moe_balance import BalanceRequest, bench_balance  # noqa: PLC0415
    from slipstream.bench.moe_peers import select  # noqa: PLC0415
    from slipstream.bench.moe_problem import parse_shape  # noqa: PLC0415

    common: dict[str, Any] = {
        "shapes": [parse_shape(text) for text in shape or MOE_SHAPES],
        "skews": skews,
        "dtype": dtype_of(dtype),
        "device": device_of(device),
        "warmup": warmup,
        "repetitions": repetitions,
    }
    if balance:
        measured = bench_balance(BalanceRequest(**common), say)
    else:
        request = MoeRequest(
            **common, peers=select(peers), cold=cold, cold_limit_s=cold_limit, graph=graph
        )
        measured = bench_moe(request, say)
    keep_and_show(measured, out)


@app.command()
def table(
    files: Annotated[list[Path], typer.Argument(help="Files of raw rows (.jsonl).")],
) -> None:
    """Rebuild the tables from raw rows."""
    from slipstream.bench.results import read_rows  # noqa: PLC0415

    print_tables([row for file in files for row in read_rows(file)])
