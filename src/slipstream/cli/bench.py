"""``slipstream bench``: measure an op beside its peers, and tables of what was measured."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from slipstream.bench.moe import MoeRequest, bench_moe
from slipstream.bench.moe_balance import BalanceRequest, bench_balance
from slipstream.bench.moe_peers import PEERS, select
from slipstream.bench.moe_problem import SHAPES, parse_shape
from slipstream.bench.moe_table import moe_tables
from slipstream.bench.results import Row, append_row, read_rows
from slipstream.errors import ConfigError

app = typer.Typer(
    add_completion=False, help="Measure the MoE layer beside its peers, with a correctness gate."
)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_SHAPES = [name for name in SHAPES if not name.endswith("-short")]
WIDTH = 170


@app.command()
def moe(
    shape: Annotated[
        list[str] | None,
        typer.Option(help=f"T,D,F,E,K or one of {', '.join(SHAPES)}; may be repeated."),
    ] = None,
    peers: Annotated[
        str, typer.Option(help=f"all, or a list of {', '.join(PEERS)}; -NAME takes one away.")
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
    common: dict[str, Any] = {
        "shapes": [parse_shape(text) for text in shape or DEFAULT_SHAPES],
        "skews": skews,
        "dtype": _dtype(dtype),
        "device": _device(device),
        "warmup": warmup,
        "repetitions": repetitions,
    }
    if balance:
        measured = bench_balance(BalanceRequest(**common), _say)
    else:
        request = MoeRequest(
            **common, peers=select(peers), cold=cold, cold_limit_s=cold_limit, graph=graph
        )
        measured = bench_moe(request, _say)
    rows = []
    for row in measured:
        rows.append(row)
        if out is not None:
            append_row(out, row)
    _print_tables(rows)


@app.command()
def table(
    files: Annotated[list[Path], typer.Argument(help="Files of raw rows (.jsonl).")],
) -> None:
    """Rebuild the tables from raw rows."""
    _print_tables([row for file in files for row in read_rows(file)])


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print_tables(rows: list[Row]) -> None:
    console = Console(width=WIDTH)
    # Printed by us: rich ends the process with 1 where the reader of a pipe has gone.
    with console.capture() as text:
        for found in moe_tables(rows):
            console.print(found)
    print(text.get(), end="", flush=True)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: expected {', '.join(DTYPES)}")
    return DTYPES[name]


def _device(name: str) -> torch.device:
    if name not in ("auto", "cuda", "cpu"):
        raise ConfigError(f"--device {name}: expected auto, cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device; use cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")
