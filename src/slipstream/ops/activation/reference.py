"""Activations in plain PyTorch, computed in fp32."""

import torch
import torch.nn.functional as F

from slipstream.ops.check import compute_dtype

ALPHA, LIMIT = 1.702, 7.0
"""Steepness and clamp of gpt-oss's activation."""


def apply(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The ungated function ``kind`` of ``x`` in the dtype of ``x``."""
    if kind == "silu":
        return F.silu(x)
    if kind == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")


def activation_reference(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    gating: str,
    alpha: float = ALPHA,
    limit: float = LIMIT,
) -> torch.Tensor:
    """``f(gate)``, times ``up`` where given; the product is rounded once.

    ``gating`` is a function of ``apply`` or ``clamped``, which alone reads ``alpha`` and ``limit``.
    """
    wide = compute_dtype(gate)
    x = gate.to(wide)
    if up is None:
        return apply(x, gating).to(gate.dtype)
    factor = up.to(wide)
    if gating == "clamped":
        x, factor = x.clamp(max=limit), factor.clamp(-limit, limit) + 1
        value = x * torch.sigmoid(alpha * x)
    else:
        value = apply(x, gating)
    return (value * factor).to(gate.dtype)
