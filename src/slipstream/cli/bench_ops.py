"""``slipstream bench ops``: every memory-bound op and the fused linears beside their peers."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.bench_names import OPS, OPS_PEERS
from slipstream.cli.bench_options import check_named, device_of, dtype_of, keep_and_show, say


def ops(
    op: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(OPS)}, or adamw for all of its; may be repeated."),
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="T,D (F in place of D inside an MLP) or T,D,V; may be repeated."),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(help=f"all, or a list of {', '.join(OPS_PEERS)}; -NAME takes one away."),
    ] = "all",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    out: Annotated[Path | None, typer.Option(help="Append raw rows to this .jsonl file.")] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda if there.")] = "auto",
    warmup: Annotated[int, typer.Option(min=1, help="Untimed turns of all.")] = 5,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed turns of all.")] = 30,
    quick: Annotated[bool, typer.Option("--quick", help="One shape of each op.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="Also as a CUDA graph.")] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Also the device time by kernel in the rows.")
    ] = False,
) -> None:
    """Norms, activations, rotary embedding, AdamW and the loss, beside their peers in turns."""
    check_named(dtype, device)
    from slipstream.bench import ops_list, ops_peers  # noqa: PLC0415
    from slipstream.bench.ops import OpsRequest, bench_ops  # noqa: PLC0415
    from slipstream.bench.ops_case import parse_shape  # noqa: PLC0415

    request = OpsRequest(
        ops=ops_list.select(op or []),
        shapes=[parse_shape(text) for text in shape or []],
        peers=ops_peers.select(peers),
        dtype=dtype_of(dtype),
        device=device_of(device),
        quick=quick,
        warmup=warmup,
        repetitions=repetitions,
        graph=graph,
        kernels=kernels,
    )
    keep_and_show(bench_ops(request, say), out)
