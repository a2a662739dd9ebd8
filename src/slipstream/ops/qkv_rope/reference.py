"""q, k and v out of one projection, q and k normalised and turned, in plain PyTorch."""

import torch

from slipstream.ops.qk_norm_rope.reference import qk_norm_rope_reference
from slipstream.ops.qkv_rope.options import QKVOptions
from slipstream.ops.rope.reference import rope_reference


def qkv_rope_reference(
    qkv_BLP: torch.Tensor,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    q_weight_C: torch.Tensor | None,
    k_weight_C: torch.Tensor | None,
    options: QKVOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``rope(norm(q), norm(k))`` and v."""
    q, k, v = options.split(qkv_BLP)
    if options.norm is None or q_weight_C is None or k_weight_C is None:
        return *rope_reference(q, k, cos_LC, sin_LC), v
    normed = qk_norm_rope_reference(q, k, cos_LC, sin_LC, q_weight_C, k_weight_C, options.norm)
    return *normed, v
