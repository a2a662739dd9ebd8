"""Linear layer and cross entropy in plain PyTorch, whole logits in fp32: the truth to test against.

It serves fp64 calls and is never chosen for training: see ``launch.py`` for the fast one.
"""

import torch
import torch.nn.functional as F

from slipstream.ops.add_to import AddTo
from slipstream.ops.check import compute_dtype
from slipstream.ops.linear_cross_entropy.options import LossOptions, sums_of


def loss_reference(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    options: LossOptions,
    sums: bool,
    accumulate: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Per-token cross entropy (0 where ignored) and logsumexp of the logits, or their sums."""
    wide = compute_dtype(x_TD)
    w_VD = w_VD.to(wide) if accumulate is None else AddTo.apply(w_VD.to(wide), accumulate)
    logits_TV = x_TD.to(wide) @ w_VD.T
    if options.softcap is not None:
        logits_TV = options.softcap * torch.tanh(logits_TV / options.softcap)
    loss_T = F.cross_entropy(
        logits_TV,
        targets_T,
        ignore_index=options.ignore_index,
        label_smoothing=options.label_smoothing,
        reduction="none",
    )
    lse_T = torch.logsumexp(logits_TV, dim=-1)
    return sums_of(loss_T, lse_T, targets_T, options) if sums else (loss_T, lse_T)
