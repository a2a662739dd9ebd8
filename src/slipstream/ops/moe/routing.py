"""What one routing pass hands to the experts, the combine and the losses."""

from typing import NamedTuple

import torch


class Routing(NamedTuple):
    """Decisions and bookkeeping of one MoE layer for T tokens, K slots each, N = T*K rows.

    A flat slot is ``t*K + k``. Rows are the slots sorted by expert, stable, so that the rows of
    expert e are ``offsets_E1[e] : offsets_E1[e + 1]``.
    """

    weight_TK: torch.Tensor
    """fp32, differentiable: the weight of each slot in the combine."""
    expert_TK: torch.Tensor
    """int64: the expert of each slot, after load balancing."""
    offsets_E1: torch.Tensor
    """int32 (E + 1,): first row of each expert; the last entry is N."""
    order_N: torch.Tensor
    """int64: row to flat slot."""
    position_N: torch.Tensor
    """int64: flat slot to row."""
    demand_E: torch.Tensor
    """int64: slots per expert before load balancing (plain top-k)."""
    rerouted: torch.Tensor
    """int64 scalar: slots that load balancing moved."""
    aux_loss: torch.Tensor
    """fp32 scalar, differentiable: 1.0 for a perfectly balanced router; 0 if not asked for."""
    z_loss: torch.Tensor
    """fp32 scalar, differentiable: mean squared logsumexp of the logits."""
    schedule: torch.Tensor | None = None
    """int32 (1 + M + E, 2), M = N // 128 + min(E, N). First (number of tiles, 0); then (expert,
    first row) of every 128-row tile, tiles of an expert adjacent and ascending, experts with most
    rows first (ties: the lower index), undefined past the count; the last E entries are (expert,
    rows) of all experts in that order, empty ones included. None: the experts compute it."""

    @property
    def counts_E(self) -> torch.Tensor:
        """int32 (E,): rows per expert."""
        return self.offsets_E1.diff()

    @property
    def top_k(self) -> int:
        """Slots per token."""
        return self.expert_TK.shape[1]
