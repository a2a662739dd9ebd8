"""Checks the MoE ops share, and how they follow autocast."""

from contextlib import AbstractContextManager, nullcontext

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check
from slipstream.ops.check import FLOATS, floating
from slipstream.ops.moe.routing import Routing

INTEGERS = (torch.int32, torch.int64)


def integer(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise unless ``tensor`` holds int32 or int64."""
    if tensor.dtype not in INTEGERS:
        raise ShapeError(f"{op}: {name} has dtype {tensor.dtype}, expected int32 or int64; cast it")


def not_empty(op: str, name: str, tensor: torch.Tensor) -> None:
    """Raise if a size of ``tensor`` is 0."""
    if 0 in tensor.shape:
        raise ShapeError(f"{op}: {name} has shape {tuple(tensor.shape)}, expected sizes above 0")


def routing_maps(op: str, routing: Routing, num_experts: int | None = None) -> None:
    """Raise unless the maps of ``routing`` fit together (and ``num_experts`` experts)."""
    if not isinstance(routing, Routing):
        raise ShapeError(
            f"{op}: routing is {check.described(routing)}, expected a Routing, from route or "
            f"routing_from"
        )
    check.shape(op, "routing.expert", routing.expert_TK, None, None)
    tokens, top_k = routing.expert_TK.shape
    if top_k < 1:
        raise ShapeError(f"{op}: routing has 0 slots per token, expected 1 or more")
    check.shape(op, "routing.weight", routing.weight_TK, tokens, top_k)
    floating(op, **{"routing.weight": routing.weight_TK})
    edges = None if num_experts is None else num_experts + 1
    check.shape(op, "routing.offsets", routing.offsets_E1, edges)
    maps = {"order": routing.order_N, "position": routing.position_N}
    for name, tensor in maps.items():
        check.shape(op, f"routing.{name}", tensor, tokens * top_k)
    for name, tensor in {"offsets": routing.offsets_E1, **maps}.items():
        integer(op, f"routing.{name}", tensor)
    if routing.schedule is not None:
        check.shape(op, "routing.schedule", routing.schedule, None, 2)
        integer(op, "routing.schedule", routing.schedule)


def follow_autocast(
    rows: torch.Tensor,
) -> tuple[torch.Tensor, AbstractContextManager[object, bool | None]]:
    """``rows`` as autocast wants them, and a context with autocast off to run the op in.

    The op casts its weights to the dtype of its rows. As everywhere in PyTorch, fp64 is kept.
    """
    if not _under_autocast(rows):
        return rows, nullcontext()
    device = rows.device.type
    if rows.dtype != torch.float64:
        rows = rows.to(torch.get_autocast_dtype(device))
    return rows, torch.autocast(device, enabled=False)


def without_autocast(rows: torch.Tensor) -> AbstractContextManager[object, bool | None]:
    """A context with autocast off; entering autocast costs the host microseconds."""
    if not _under_autocast(rows):
        return nullcontext()
    return torch.autocast(rows.device.type, enabled=False)


def _under_autocast(rows: torch.Tensor) -> bool:
    device = rows.device.type
    # torch 2.11's compiler cannot trace the question whether a device has autocast.
    return device != "meta" and torch.is_autocast_enabled(device)


__all__ = [
    "FLOATS",
    "INTEGERS",
    "floating",
    "follow_autocast",
    "integer",
    "not_empty",
    "routing_maps",
    "without_autocast",
]
