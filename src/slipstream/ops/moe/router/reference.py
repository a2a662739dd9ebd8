"""Router logits in plain PyTorch."""

import torch
import torch.nn.functional as F

from slipstream.ops.check import compute_dtype


def router_reference(
    x_TD: torch.Tensor, router_ED: torch.Tensor, _with_x: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x @ router^T`` in fp32 (fp64 for fp64 tokens), and ``x``."""
    wide = compute_dtype(x_TD)
    return F.linear(x_TD.to(wide), router_ED.to(wide)), x_TD
