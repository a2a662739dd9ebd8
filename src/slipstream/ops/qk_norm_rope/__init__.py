"""Queries and keys normalised head by head and turned, in one pass."""

from typing import Any

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch, triton_support
from slipstream.ops.dispatch import Refusal
from slipstream.ops.norm import CastOrder
from slipstream.ops.qk_norm_rope.fused import qk_norm_rope_triton
from slipstream.ops.qk_norm_rope.reference import qk_norm_rope_reference
from slipstream.ops.rope import RopeSpec, check_heads, refuse_triton, rope_tables
from slipstream.ops.rope.options import QKNormOptions


def qk_norm_rope(
    q_BLHC: torch.Tensor,
    k_BLGC: torch.Tensor,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    *,
    q_weight_C: torch.Tensor,
    k_weight_C: torch.Tensor,
    eps: float = 1e-6,
    cast: str = "llama",
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rope(norm(q), norm(k))``: an RMS norm over the C features of every head, then the rotation.

    ``q (B, L, H, C)``, ``k (B, L, G, C)``, tables ``(L, R)`` as in ``ops.rope``; weights ``(C,)``,
    ``eps``, ``cast`` and ``offset`` as in ``ops.norm``. Computed in fp32, rounded where the two ops
    round; the weights' gradients are summed in fp32, in a fixed order. q and k may be slices of
    one qkv tensor. Qwen3, arXiv 2505.09388. Raises ShapeError.
    """
    op = "qk_norm_rope"
    check_heads(op, q_BLHC, k_BLGC, cos_LC, sin_LC)
    options = checked_norm(op, q_BLHC, q_weight_C, k_weight_C, eps, cast, offset)
    return dispatch.call(op, q_BLHC, k_BLGC, cos_LC, sin_LC, q_weight_C, k_weight_C, options)


def checked_norm(
    op: str,
    x: torch.Tensor,
    q_weight_C: torch.Tensor,
    k_weight_C: torch.Tensor,
    eps: float,
    cast: str,
    offset: float,
) -> QKNormOptions:
    """The norm of these arguments, for heads of the width of ``x``; raises unless they fit."""
    check.choice(op, "cast", cast, CastOrder)
    if not eps >= 0:
        raise ShapeError(f"{op}: eps = {eps}, expected a number of at least 0")
    check.shape(op, "q_weight", q_weight_C, x.shape[-1])
    check.shape(op, "k_weight", k_weight_C, x.shape[-1])
    check.floating(op, q_weight=q_weight_C, k_weight=k_weight_C)
    check.same_device(op, q=x, q_weight=q_weight_C, k_weight=k_weight_C)
    return QKNormOptions(eps=eps, cast=cast, offset=offset)


def _refuse(
    q_BLHC: torch.Tensor,
    k_BLGC: torch.Tensor,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    q_weight_C: torch.Tensor,
    k_weight_C: torch.Tensor,
    *_: Any,
) -> Refusal | None:
    refusal = refuse_triton((q_BLHC, k_BLGC), cos_LC, sin_LC)
    return refusal or refuse_weights(q_weight_C, k_weight_C)


def refuse_weights(*weights_C: torch.Tensor) -> Refusal | None:
    """Why the kernels cannot read these weights; they multiply in fp32."""
    refusals = (triton_support.refusal(weight, products=False) for weight in weights_C)
    return next((refusal for refusal in refusals if refusal is not None), None)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    q_BLHC = torch.randn(2, 8, 4, 16, device=device, dtype=dtype)
    k_BLGC = torch.randn(2, 8, 2, 16, device=device, dtype=dtype)
    weights = torch.ones(2, 16, device=device, dtype=dtype)
    tables = rope_tables(RopeSpec(head_dim=16), 8, device)
    return (
        q_BLHC,
        k_BLGC,
        *tables,
        *weights,
        QKNormOptions(eps=1e-6, cast="llama", offset=0.0),
    ), {}


dispatch.register(
    "qk_norm_rope",
    ("triton", qk_norm_rope_triton, _refuse),
    ("reference", qk_norm_rope_reference, None),
    example=_example,
)

__all__ = ["checked_norm", "qk_norm_rope", "refuse_weights"]
