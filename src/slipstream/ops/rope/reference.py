"""Rotary position embedding in plain PyTorch, rotated in fp32."""

import torch

from slipstream.ops.check import compute_dtype


def rope_reference(
    q_BLHC: torch.Tensor, k_BLGC: torch.Tensor, cos_LC: torch.Tensor, sin_LC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate pairs (i, i + R) of the first 2R features of every head, R = ``cos.shape[-1]``."""
    return _rotate(q_BLHC, cos_LC, sin_LC), _rotate(k_BLGC, cos_LC, sin_LC)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    wide, pairs = compute_dtype(x), cos.shape[-1]
    cos, sin = cos.to(wide)[:, None], sin.to(wide)[:, None]
    first, second = x[..., :pairs].to(wide), x[..., pairs : 2 * pairs].to(wide)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((turned.to(x.dtype), x[..., 2 * pairs :]), dim=-1)
