"""What of a call is not a tensor, and sums over tokens in plain PyTorch."""

from dataclasses import dataclass

import torch

Sums = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""objective, nll, z (fp32, or fp64 for fp64 input) and tokens (int64): scalars."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """What is not a tensor."""

    ignore_index: int
    """Target of a token that does not count."""
    label_smoothing: float = 0.0
    """Share of the target that is spread over the vocabulary."""
    softcap: float | None = None
    """Bound of the logits; None: no bound."""
    z_loss: float = 0.0
    """Weight of the squared logsumexp in the objective; no part of per-token losses."""


def sums_of(
    loss_T: torch.Tensor, lse_T: torch.Tensor, targets_T: torch.Tensor, options: LossOptions
) -> Sums:
    """The sums of per-token losses; only the objective is differentiable."""
    kept_T = targets_T != options.ignore_index
    nll, z = loss_T.sum(), lse_T.square().where(kept_T, 0.0).sum()
    objective = nll + options.z_loss * z if options.z_loss else nll
    # An output of its own even where it equals nll.
    return objective, nll.detach().clone(), z.detach(), kept_T.sum()
