"""Activations of an MLP: gated (SwiGLU, clamped SwiGLU, GeGLU) and plain (GELU, ReLU^2, SiLU)."""

import math
from typing import Any, Literal

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch, triton_support
from slipstream.ops.activation.fused import activation_triton
from slipstream.ops.activation.options import ActivationOptions
from slipstream.ops.activation.reference import ALPHA, LIMIT, activation_reference
from slipstream.ops.dispatch import Refusal

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
    options = checked_options("activation", x, up, kind, alpha, limit)
    return dispatch.call("activation", x, up, options)


def checked_options(
    op: str, x: torch.Tensor, up: torch.Tensor | None, kind: str, alpha: float, limit: float
) -> ActivationOptions:
    """What an activation of these arguments computes; raises unless they fit each other."""
    check.choice(op, "kind", kind, Activation)
    check_clamp(op, alpha, limit)
    check.rows(op, "x", x, "(..., F)")
    gated = kind in GATED
    if up is not None:
        if not gated:
            raise ShapeError(f"{op}: {kind} is not gated; leave out up")
        if x.shape != up.shape:
            raise ShapeError(f"{op}: gate {tuple(x.shape)} and up {tuple(up.shape)} differ")
        check.floating(op, up=up)
        check.same_device(op, x=x, up=up)
    elif gated and x.shape[-1] % 2:
        raise ShapeError(f"{op}: fused x needs an even last dimension, got {x.shape[-1]}")
    gating = GATED[kind] if gated else kind
    return ActivationOptions(gating=gating, gated=gated, alpha=alpha, limit=limit)


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


def _reference(
    x: torch.Tensor, up: torch.Tensor | None, options: ActivationOptions
) -> torch.Tensor:
    gate, up = options.halves(x, up)
    return activation_reference(gate, up, options.gating, options.alpha, options.limit)


def refuse_triton(x: torch.Tensor, up: torch.Tensor | None, *_: Any) -> Refusal | None:
    """Why the kernels cannot serve a call on ``x`` and ``up``."""
    return triton_support.refusal(x) or (None if up is None else triton_support.refusal(up))


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    gate, up = torch.randn(2, 16, 64, device=device, dtype=dtype)
    return (gate, up, ActivationOptions(gating="silu", gated=True, alpha=ALPHA, limit=LIMIT)), {}


dispatch.register(
    "activation",
    ("triton", activation_triton, refuse_triton),
    ("reference", _reference, None),
    example=_example,
)

__all__ = [
    "ALPHA",
    "GATED",
    "LIMIT",
    "Activation",
    "activation",
    "check_clamp",
    "checked_options",
    "is_gated",
    "refuse_triton",
]
