"""Linear layer and cross entropy in plain PyTorch, whole logits in fp32: the truth to test against.

It serves fp64 calls and is never chosen for training: see ``autograd.py`` for the chunked one.
"""

import torch
import torch.nn.functional as F

from slipstream.ops.check import compute_dtype


def token_losses_reference(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token cross entropy (0 where ignored) and logsumexp of the logits, both ``(T,)``."""
    wide = compute_dtype(x_TD)
    logits_TV = x_TD.to(wide) @ w_VD.to(wide).T
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    loss_T = F.cross_entropy(
        logits_TV,
        targets_T,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    return loss_T, torch.logsumexp(logits_TV, dim=-1)
