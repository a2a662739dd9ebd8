"""Activations of an MLP: gated (SwiGLU, clamped SwiGLU, GeGLU) and plain (GELU, ReLU^2, SiLU)."""

import math
from typing import Any, Literal

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch
from slipstream.ops.activation.reference import ALPHA, LIMIT, activation_reference

Activation = Literal[
    "swiglu", "swiglu_clamped", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu2", "silu"
]  # fmt: skip
GATED: dict[str, str] = {
    "swiglu": "silu",
    "swiglu_clamped": "clamped",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
}


def activation(
    x: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    kind: str,
    alpha: float = ALPHA,
    limit: float = LIMIT,
) -> torch.Tensor:
    """Apply an MLP activation.

    Gated kinds return ``f(gate) * up``: give ``gate (..., F)`` and ``up (..., F)``, or one fused
    ``x (..., 2F)`` whose first half is the gate. Plain kinds take ``x (..., F)`` alone.
    ``swiglu_clamped`` is ``g * sigmoid(alpha * g) * (u + 1)`` with the gate clamped to at most
    ``limit`` and up to within it; the others ignore ``alpha`` and ``limit``.
    Computed in fp32, returned in the dtype of ``x``. SwiGLU and GeGLU: Shazeer, arXiv 2002.05202;
    the clamped variant: gpt-oss, arXiv 2508.10925; ReLU^2: arXiv 2109.08668. Raises ShapeError.
    """
    check.choice("activation", "kind", kind, Activation)
    check_clamp("activation", alpha, limit)
    if kind not in GATED:
        if up is not None:
            raise ShapeError(f"activation: {kind} is not gated; leave out up")
        return dispatch.call("activation", x, None, kind, alpha, limit)
    gate, up = _split(x) if up is None else (x, up)
    if gate.shape != up.shape:
        raise ShapeError(f"activation: gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
    return dispatch.call("activation", gate, up, GATED[kind], alpha, limit)


def is_gated(kind: str) -> bool:
    """Whether ``kind`` multiplies by a second projection, so that ``w13`` has 2F rows."""
    return kind in GATED


def check_clamp(op: str, alpha: float, limit: float) -> None:
    """Raise unless ``alpha`` and ``limit`` can be those of a clamped activation."""
    # Compared, not asked: the compiler traces no isfinite of a number that may change.
    if not -math.inf < alpha < math.inf:
        raise ShapeError(f"{op}: alpha = {alpha}, expected a finite number")
    if not limit > 0:
        raise ShapeError(f"{op}: limit = {limit}, expected a number above 0 (inf: no clamp)")


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.shape[-1] % 2:
        raise ShapeError(f"activation: fused x needs an even last dimension, got {x.shape[-1]}")
    gate, up = x.chunk(2, dim=-1)
    return gate, up


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    gate, up = torch.randn(2, 16, 64, device=device, dtype=dtype)
    return (gate, up, "silu", ALPHA, LIMIT), {}


dispatch.register("activation", ("reference", activation_reference, None), example=_example)

__all__ = ["ALPHA", "GATED", "LIMIT", "Activation", "activation", "check_clamp", "is_gated"]
