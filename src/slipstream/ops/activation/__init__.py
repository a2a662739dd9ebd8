"""Activations of an MLP: gated (SwiGLU, GeGLU) and plain (GELU, ReLU^2, SiLU)."""

from typing import Any, Literal

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch
from slipstream.ops.activation.reference import activation_reference

Activation = Literal[
    "swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu2", "silu"
]  # fmt: skip
GATED: dict[str, str] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


def activation(x: torch.Tensor, up: torch.Tensor | None = None, *, kind: str) -> torch.Tensor:
    """Apply an MLP activation.

    Gated kinds return ``f(gate) * up``: give ``gate (..., F)`` and ``up (..., F)``, or one fused
    ``x (..., 2F)`` whose first half is the gate. Plain kinds take ``x (..., F)`` alone.
    Computed in fp32, returned in the dtype of ``x``. SwiGLU and GeGLU: Shazeer, arXiv 2002.05202;
    ReLU^2: arXiv 2109.08668. Raises ShapeError.
    """
    check.choice("activation", "kind", kind, Activation)
    if kind not in GATED:
        if up is not None:
            raise ShapeError(f"activation: {kind} is not gated; leave out up")
        return dispatch.call("activation", x, None, kind)
    gate, up = _split(x) if up is None else (x, up)
    if gate.shape != up.shape:
        raise ShapeError(f"activation: gate {tuple(gate.shape)} and up {tuple(up.shape)} differ")
    return dispatch.call("activation", gate, up, GATED[kind])


def is_gated(kind: str) -> bool:
    """Whether ``kind`` multiplies by a second projection, so that ``w13`` has 2F rows."""
    return kind in GATED


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.shape[-1] % 2:
        raise ShapeError(f"activation: fused x needs an even last dimension, got {x.shape[-1]}")
    gate, up = x.chunk(2, dim=-1)
    return gate, up


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    gate, up = torch.randn(2, 16, 64, device=device, dtype=dtype)
    return (gate, up, "silu"), {}


dispatch.register("activation", ("reference", activation_reference, None), example=_example)

__all__ = ["GATED", "Activation", "activation", "is_gated"]
