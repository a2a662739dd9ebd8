"""Validation loss over the same fixed windows, however many ranks share them."""

from dataclasses import dataclass

import torch

from slipstream.data import ShardSet, sequential_batches
from slipstream.models import Transformer
from slipstream.parallel import Ranks
from slipstream.train.config import RunConfig
from slipstream.train.setup import check_vocabulary
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
    model: Transformer, shards: ShardSet, ranks: Ranks, config: RunConfig, stopping: list[str]
) -> Evaluation | None:
    """Mean loss over the first ``eval.tokens`` validation tokens, one sequence at least.

    A process that is alone gives up and returns None once ``stopping`` is not empty.
    """
    was_training = model.training
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    share = config.sequences_per_step // ranks.world
    batches = sequential_batches(
        shards,
        seq_len=config.data.seq_len,
        batch_size=config.train.micro_batch or share,
        max_samples=max(1, config.eval.tokens // config.data.seq_len),
        rank=ranks.rank,
        world=ranks.world,
        mask_documents=config.data.mask_documents,
    )
    for batch in batches:
        if stopping and ranks.world == 1:
            model.train(was_training)
            return None
        check_vocabulary(config, shards, batch)
        loss = model(*to_device(batch, ranks.device)).loss
        sums += torch.stack((loss.nll.double(), loss.tokens.double()))
    nll, tokens = ranks.sum(sums).tolist()
    model.train(was_training)
    mean = nll / max(1.0, tokens)
    per_byte = None if shards.bytes_per_token is None else mean / shards.bytes_per_token
    return Evaluation(loss=mean, nats_per_byte=per_byte, tokens=int(tokens))
