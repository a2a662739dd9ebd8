"""The language-model loss as sums, so that micro-batches and ranks can be weighed by tokens."""

from typing import NamedTuple

import torch

from slipstream import ops


class LossSums(NamedTuple):
    """Sums over the tokens of a batch that count."""

    objective: torch.Tensor
    """fp32 scalar, the only one that is differentiable: ``nll + z_loss * z``."""
    nll: torch.Tensor
    """fp32 scalar: cross entropy in nats, summed."""
    z: torch.Tensor
    """fp32 scalar: squared logsumexp of the logits, summed."""
    tokens: torch.Tensor
    """int64 scalar: tokens that count."""


class TokenLoss(torch.nn.Module):
    """Cross entropy of hidden states against next tokens through the output embedding.

    Label smoothing is for training only: an evaluation reports the plain cross entropy. ``z_loss``
    weighs the squared logsumexp in the objective and is no part of ``nll``.
    """

    def __init__(
        self, *, label_smoothing: float = 0.0, softcap: float | None = None, z_loss: float = 0.0
    ) -> None:
        super().__init__()
        self.label_smoothing, self.softcap, self.z_loss = label_smoothing, softcap, z_loss

    def forward(
        self, hidden_BLD: torch.Tensor, w_VD: torch.Tensor, targets_BL: torch.Tensor
    ) -> LossSums:
        """Sums over the tokens whose target is not ``IGNORE_INDEX``."""
        sums = ops.linear_cross_entropy_sums(
            hidden_BLD.flatten(0, 1),
            w_VD,
            targets_BL.flatten(),
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing if self.training else 0.0,
            softcap=self.softcap,
        )
        return LossSums(*sums)
