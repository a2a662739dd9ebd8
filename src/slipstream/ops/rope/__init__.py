"""Rotary position embedding of queries and keys together, with the scaling variants in use."""

from typing import Any

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch
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
    check.shape("rope", "q", q_BLHC, None, None, None, None)
    check.shape("rope", "cos", cos_LC, None, None)
    length, pairs = q_BLHC.shape[1], cos_LC.shape[1]
    check.shape("rope", "k", k_BLGC, q_BLHC.shape[0], length, None, q_BLHC.shape[3])
    check.shape("rope", "cos", cos_LC, length, pairs)
    check.shape("rope", "sin", sin_LC, length, pairs)
    if 2 * pairs > q_BLHC.shape[3]:
        raise ShapeError(f"rope: tables turn {2 * pairs} features, heads have {q_BLHC.shape[3]}")
    check.same_device("rope", q=q_BLHC, k=k_BLGC, cos=cos_LC, sin=sin_LC)
    return dispatch.call("rope", q_BLHC, k_BLGC, cos_LC, sin_LC)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    q_BLHC = torch.randn(2, 8, 4, 16, device=device, dtype=dtype)
    k_BLGC = torch.randn(2, 8, 2, 16, device=device, dtype=dtype)
    return (q_BLHC, k_BLGC, *rope_tables(RopeSpec(head_dim=16), 8, device)), {}


dispatch.register("rope", ("reference", rope_reference, None), example=_example)

__all__ = ["RopeScaling", "RopeSpec", "rope", "rope_tables"]
