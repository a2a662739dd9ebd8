"""One qkv projection into q, k and v: heads of q and k normalised and turned on the way."""

from typing import Any

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch
from slipstream.ops.dispatch import Refusal
from slipstream.ops.qk_norm_rope import checked_norm, refuse_weights
from slipstream.ops.qkv_rope.fused import qkv_rope_triton
from slipstream.ops.qkv_rope.options import QKVOptions
from slipstream.ops.qkv_rope.reference import qkv_rope_reference
from slipstream.ops.rope import RopeSpec, check_tables, refuse_triton, rope_tables


def qkv_rope(
    qkv_BLP: torch.Tensor,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    *,
    heads: int,
    kv_heads: int,
    q_weight_C: torch.Tensor | None = None,
    k_weight_C: torch.Tensor | None = None,
    eps: float = 1e-6,
    cast: str = "llama",
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``q (B, L, H, C)``, ``k (B, L, G, C)``, ``v (B, L, G, C)`` of ``qkv (B, L, (H + 2G) * C)``.

    The features of a token are those of its H = ``heads`` queries, its G = ``kv_heads`` keys, its
    G values. q and k are turned by the tables ``(L, R)`` of ``rope_tables``, after an RMS norm of
    every head where both weights ``(C,)`` are given (``eps``, ``cast``, ``offset`` as in
    ``ops.norm``). v is a view of ``qkv``. Computed in fp32, rounded where the separate ops round.
    Backward writes one gradient of ``qkv``. Raises ShapeError.
    """
    op = "qkv_rope"
    check.shape(op, "qkv", qkv_BLP, None, None, None)
    check.floating(op, qkv=qkv_BLP)
    if not (heads > 0 and kv_heads > 0):
        raise ShapeError(f"{op}: heads = {heads}, kv_heads = {kv_heads}, expected 1 or more")
    columns = heads + 2 * kv_heads
    if qkv_BLP.shape[2] % columns:
        raise ShapeError(
            f"{op}: qkv has {qkv_BLP.shape[2]} features, expected a multiple of heads + 2 * "
            f"kv_heads = {columns}"
        )
    check_tables(op, cos_LC, sin_LC, qkv_BLP.shape[1], qkv_BLP.shape[2] // columns)
    check.same_device(op, qkv=qkv_BLP, cos=cos_LC, sin=sin_LC)
    norm = None
    if q_weight_C is not None and k_weight_C is not None:
        head = qkv_BLP[:, :, : qkv_BLP.shape[2] // columns]
        norm = checked_norm(op, head, q_weight_C, k_weight_C, eps, cast, offset)
    elif q_weight_C is not k_weight_C:
        raise ShapeError(f"{op}: one of q_weight and k_weight is None; give both or neither")
    options = QKVOptions(heads=heads, kv_heads=kv_heads, norm=norm)
    return dispatch.call(op, qkv_BLP, cos_LC, sin_LC, q_weight_C, k_weight_C, options)


def _refuse(
    qkv_BLP: torch.Tensor,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    q_weight_C: torch.Tensor | None,
    k_weight_C: torch.Tensor | None,
    *_: Any,
) -> Refusal | None:
    refusal = refuse_triton((qkv_BLP,), cos_LC, sin_LC)
    weights = [weight for weight in (q_weight_C, k_weight_C) if weight is not None]
    return refusal or refuse_weights(*weights)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    qkv_BLP = torch.randn(2, 8, 8 * 16, device=device, dtype=dtype)
    tables = rope_tables(RopeSpec(head_dim=16), 8, device)
    return (qkv_BLP, *tables, None, None, QKVOptions(heads=4, kv_heads=2, norm=None)), {}


dispatch.register(
    "qkv_rope",
    ("triton", qkv_rope_triton, _refuse),
    ("reference", qkv_rope_reference, None),
    example=_example,
)

__all__ = ["qkv_rope"]
