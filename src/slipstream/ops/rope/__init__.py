"""Rotary position embedding of queries and keys together, with the scaling variants in use."""

from typing import Any

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch, triton_support
from slipstream.ops.dispatch import Refusal
from slipstream.ops.rope.fused import rope_triton
from slipstream.ops.rope.reference import rope_reference
from slipstream.ops.rope.tables import RopeScaling, RopeSpec, rope_tables


def rope(
    q_BLHC: torch.Tensor, k_BLGC: torch.Tensor, cos_LC: torch.Tensor, sin_LC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate ``q (B, L, H, C)`` and ``k (B, L, G, C)`` by the tables ``(L, R)`` of ``rope_tables``.

    Feature i turns with feature i + R (the half-split layout of Llama); features past 2R pass
    unchanged. Computed in fp32, returned in the dtypes given. Source: arXiv 2104.09864.
    Raises ShapeError.
    """
    check_heads("rope", q_BLHC, k_BLGC, cos_LC, sin_LC)
    return dispatch.call("rope", q_BLHC, k_BLGC, cos_LC, sin_LC)


def check_heads(
    op: str,
    q_BLHC: torch.Tensor,
    k_BLGC: torch.Tensor,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
) -> None:
    """Raise unless queries, keys and tables fit each other."""
    check.shape(op, "q", q_BLHC, None, None, None, None)
    batch, length, _, width = q_BLHC.shape
    check.shape(op, "k", k_BLGC, batch, length, None, width)
    check_tables(op, cos_LC, sin_LC, length, width)
    check.floating(op, q=q_BLHC, k=k_BLGC)
    check.same_device(op, q=q_BLHC, k=k_BLGC, cos=cos_LC, sin=sin_LC)


def check_tables(
    op: str, cos_LC: torch.Tensor, sin_LC: torch.Tensor, length: int, width: int
) -> None:
    """Raise unless the tables are for ``length`` positions and heads of ``width`` features."""
    check.shape(op, "cos", cos_LC, None, None)
    pairs = cos_LC.shape[1]
    check.shape(op, "cos", cos_LC, length, pairs)
    check.shape(op, "sin", sin_LC, length, pairs)
    check.floating(op, cos=cos_LC, sin=sin_LC)
    if 2 * pairs > width:
        raise ShapeError(f"{op}: tables turn {2 * pairs} features, heads have {width}")


def refuse_triton(
    tensors: tuple[torch.Tensor, ...], cos_LC: torch.Tensor, sin_LC: torch.Tensor
) -> Refusal | None:
    """Why the kernels cannot serve a call on ``tensors`` with these tables."""
    for tensor in tensors:
        refusal = triton_support.refusal(tensor)
        if refusal is not None:
            return refusal
    if cos_LC.requires_grad or sin_LC.requires_grad:
        return Refusal(reason="the kernels have no gradient of the tables")
    if not cos_LC.shape[1] or cos_LC.dtype == torch.float64:
        return Refusal(reason="the kernels do not take fp64 or empty tables")
    return None


def _refuse(
    q_BLHC: torch.Tensor, k_BLGC: torch.Tensor, cos_LC: torch.Tensor, sin_LC: torch.Tensor
) -> Refusal | None:
    return refuse_triton((q_BLHC, k_BLGC), cos_LC, sin_LC)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    q_BLHC = torch.randn(2, 8, 4, 16, device=device, dtype=dtype)
    k_BLGC = torch.randn(2, 8, 2, 16, device=device, dtype=dtype)
    return (q_BLHC, k_BLGC, *rope_tables(RopeSpec(head_dim=16), 8, device)), {}


dispatch.register(
    "rope", ("triton", rope_triton, _refuse), ("reference", rope_reference, None), example=_example
)

__all__ = [
    "RopeScaling",
    "RopeSpec",
    "check_heads",
    "check_tables",
    "refuse_triton",
    "rope",
    "rope_tables",
]
