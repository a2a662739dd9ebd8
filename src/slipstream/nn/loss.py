"""The language-model loss as sums, so that micro-batches and ranks can be weighed by tokens."""

from typing import NamedTuple

import torch

from slipstream import ops
from slipstream.ops.linear_cross_entropy import IGNORE_INDEX


class LossSums(NamedTuple):
    """Sums over the tokens of a batch that count."""

    nll: torch.Tensor
    """fp32 scalar, differentiable: cross entropy in nats, summed."""
    z: torch.Tensor
    """fp32 scalar, differentiable: squared logsumexp of the logits, summed."""
    tokens: torch.Tensor
    """int64 scalar: tokens that count."""


class TokenLoss(torch.nn.Module):
    """Cross entropy of hidden states against next tokens through the output embedding.

    Label smoothing is for training only: an evaluation reports the plain cross entropy.
    """

    def __init__(self, *, label_smoothing: float = 0.0, softcap: float | None = None) -> None:
        super().__init__()
        self.label_smoothing, self.softcap = label_smoothing, softcap

    def forward(
        self, hidden_BLD: torch.Tensor, w_VD: torch.Tensor, targets_BL: torch.Tensor
    ) -> LossSums:
        """Sums over the tokens whose target is not ``IGNORE_INDEX``."""
        targets_T = targets_BL.flatten()
        nll_T, lse_T = ops.token_losses(
            hidden_BLD.flatten(0, 1),
            w_VD,
            targets_T,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            softcap=self.softcap,
        )
        kept_T = targets_T != IGNORE_INDEX
        return LossSums(nll_T.sum(), lse_T.square().where(kept_T, 0.0).sum(), kept_T.sum())
