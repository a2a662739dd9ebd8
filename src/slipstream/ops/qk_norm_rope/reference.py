"""RMS norm of every head of q and k, then the rotation, in plain PyTorch."""

import torch

from slipstream.ops.norm.reference import norm_reference
from slipstream.ops.rope.options import QKNormOptions
from slipstream.ops.rope.reference import rope_reference


def qk_norm_rope_reference(
    q_BLHC: torch.Tensor,
    k_BLGC: torch.Tensor,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    q_weight_C: torch.Tensor,
    k_weight_C: torch.Tensor,
    options: QKNormOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``rope(norm(q), norm(k))``; the norms round as ``ops.norm`` does."""
    q, k = (
        norm_reference(
            x, weight, None, None, "rms", options.eps, options.cast, options.offset, None
        )[0]
        for x, weight in ((q_BLHC, q_weight_C), (k_BLGC, k_weight_C))
    )
    return rope_reference(q, k, cos_LC, sin_LC)
