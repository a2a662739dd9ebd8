"""Validation loss over a fixed set of windows, the same for any number of ranks."""

from dataclasses import dataclass

import torch

from slipstream.data import ShardSet, sequential_batches
from slipstream.models import Transformer
from slipstream.parallel import Ranks
from slipstream.train.step import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of one evaluation."""

    loss: float
    """Mean cross entropy in nats per token."""
    nats_per_byte: float | None
    """Nats per byte of text: comparable between tokenizers; None where bytes are unknown."""
    tokens: int
    """Tokens predicted."""


@torch.no_grad()
def evaluate(
    model: Transformer,
    shards: ShardSet,
    ranks: Ranks,
    *,
    seq_len: int,
    batch_size: int,
    max_tokens: int,
    mask_documents: bool,
) -> Evaluation:
    """Mean loss over the first ``max_tokens`` validation tokens."""
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    batches = sequential_batches(
        shards,
        seq_len=seq_len,
        batch_size=batch_size,
        max_samples=max(1, max_tokens // seq_len),
        rank=ranks.rank,
        world=ranks.world,
        mask_documents=mask_documents,
    )
    for batch in batches:
        loss = model(*to_device(batch, ranks.device)).loss
        sums += torch.stack((loss.nll.double(), loss.tokens.double()))
    nll, tokens = ranks.sum(sums).tolist()
    model.train(was_training)
    mean = nll / max(1.0, tokens)
    per_byte = None if shards.bytes_per_token is None else mean / shards.bytes_per_token
    return Evaluation(loss=mean, nats_per_byte=per_byte, tokens=int(tokens))
