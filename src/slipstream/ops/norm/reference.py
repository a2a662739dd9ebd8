"""RMSNorm and LayerNorm in plain PyTorch, statistics in fp32."""

import torch

from slipstream.ops.activation.reference import apply
from slipstream.ops.check import compute_dtype


def norm_reference(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    eps: float,
    cast: str,
    offset: float,
    activation: str | None,
    _with_s: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm(s)`` and ``s``, where ``s = f(x) + residual`` is rounded to the dtype of ``x``."""
    wide = compute_dtype(x)
    s = x
    if activation is not None:
        s = apply(s.to(wide), activation).to(x.dtype)
    if residual is not None:
        s = (s.to(wide) + residual.to(wide)).to(x.dtype)
    value = s.to(wide)
    if kind == "layer":
        value = value - value.mean(-1, keepdim=True)
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    weight = weight_D.to(wide) + offset
    if cast == "llama":
        value, weight = value.to(x.dtype), weight.to(x.dtype)
    value = value * weight
    if bias_D is not None:
        value = value + bias_D.to(value.dtype)
    return value.to(x.dtype), s
