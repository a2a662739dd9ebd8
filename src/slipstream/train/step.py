"""One optimizer step: micro-batches weighed by tokens, exact clipping, non-finite guard.

The gradient is that of the mean over all tokens of the step, however they are split over
micro-batches and ranks. Ranks agree in two small sums, of the tokens that count and of the step's
results and votes; the host reads numbers from the device at the end only.
"""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from slipstream.data import Batch
from slipstream.errors import ConfigError
from slipstream.models import Transformer
from slipstream.parallel import Ranks, accumulate
from slipstream.train.config import TrainConfig
from slipstream.train.graph import GraphedPasses, Recorder
from slipstream.train.load import MoELoad, close_step
from slipstream.train.optimizer import AdamW
from slipstream.train.phases import PhaseTimer


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Numbers of a step, equal on every rank."""

    loss: float
    """Mean cross entropy in nats per token, without z and router losses."""
    z_loss: float
    """Mean squared logsumexp of the logits."""
    router_loss: float
    """Weighted losses of the MoE routers."""
    grad_norm: float
    """Norm of the gradient before clipping."""
    tokens: int
    """Tokens whose prediction counted."""
    skipped: bool
    """The loss or gradient was not finite and nothing was updated."""
    stop: bool
    """Some rank was asked to stop."""
    written: bool
    """Every rank has finished writing its checkpoint, if there is one under way."""
    load: MoELoad | None
    """Expert load, for a model with experts."""


class TrainStep:
    """Runs optimizer steps of one model on this rank.

    ``recorder``: record forward and backward and replay them; every batch has one shape then.
    """

    def __init__(
        self,
        model: Transformer,
        module: nn.Module,
        optimizer: AdamW,
        config: TrainConfig,
        ranks: Ranks,
        timer: PhaseTimer,
        recorder: Recorder | None = None,
    ) -> None:
        self.model, self.module, self.optimizer = model, module, optimizer
        self.config, self.ranks, self.timer = config, ranks, timer
        self.recorder = recorder
        self._graphed: GraphedPasses | None = None

    def run(
        self, batch: Batch, lr: float, *, stop: bool = False, written: bool = False
    ) -> StepResult:
        """Train on this rank's share of a step.

        One rank's ``stop`` stops them all; ``written`` holds if it does on all.
        """
        begin, device = time.perf_counter(), self.ranks.device
        self.model.train()
        sums = torch.zeros(6, dtype=torch.float64, device=device)
        with self.timer("data"):
            tokens = (batch.targets_BL >= 0).sum().to(device, torch.float64)
            tokens = self.ranks.sum(tokens)
        share = self.ranks.world / tokens.clamp(min=1)
        micro_batches = split(batch, self.config.micro_batch)
        part = 1 / len(micro_batches)
        for index, micro in enumerate(micro_batches):
            with accumulate(self.module, last=index == len(micro_batches) - 1):
                if self.recorder is None:
                    sums[:4] += self._micro_step(micro, share, part)
                else:
                    sums[:4] += self._graph_step(micro, share, part, first=index == 0)
        sums[4:] = torch.tensor([float(stop), float(written)])
        self.ranks.sum(sums)
        with self.timer("optimizer"):
            update = self.optimizer.step(lr, torch.isfinite(sums[:4]).all())
        numbers = torch.cat((sums, torch.stack((update.grad_norm, update.skipped)).double()))
        self.timer.enqueued(begin)
        nll, z, router, count, stopping, finished, norm, skipped = numbers.tolist()
        load = close_step(self.model, self.ranks, skipped=bool(skipped))
        return StepResult(
            loss=nll / max(1.0, count),
            z_loss=z / max(1.0, count),
            router_loss=router / self.ranks.world,
            grad_norm=norm,
            tokens=int(count),
            skipped=bool(skipped),
            stop=bool(stopping),
            written=finished == self.ranks.world,
            load=load,
        )

    def _micro_step(self, micro: Batch, share: torch.Tensor, part: float) -> torch.Tensor:
        with self.timer("data"):
            tokens, targets, document = to_device(micro, self.ranks.device)
        with self.timer("forward"):
            objective, sums = self._forward(tokens, targets, document, share, part=part)
        with self.timer("backward"):
            objective.backward()
        return sums

    def _graph_step(
        self, micro: Batch, share: torch.Tensor, part: float, *, first: bool
    ) -> torch.Tensor:
        if self._graphed is None:
            assert self.recorder is not None
            passes = partial(self._passes, part=part)
            self._graphed = GraphedPasses(self.model, passes, self.recorder, accumulate=part < 1)
        with self.timer("data"):
            self._graphed.load((micro.tokens_BL, micro.targets_BL, micro.document_BL, share))
        with self.timer("graph"):
            return self._graphed.run(first=first)

    def _passes(self, *inputs: Any, part: float) -> torch.Tensor:
        objective, sums = self._forward(*inputs, part=part)
        objective.backward()
        return sums

    def _forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor,
        document: torch.Tensor | None,
        share: torch.Tensor,
        *,
        part: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What to differentiate, and fp64 (4,): sums of nll and z, router losses, tokens."""
        output = self.module(tokens, targets, document)
        loss = output.loss
        objective = loss.objective * share.to(loss.objective.dtype) + output.router_loss * part
        router = output.router_loss.detach() * part
        sums = torch.stack([value.double() for value in (loss.nll, loss.z, router, loss.tokens)])
        return objective, sums


def split(batch: Batch, size: int) -> list[Batch]:
    """Micro-batches of ``size`` sequences (0: one), contiguous slices of ``batch``."""
    sequences = len(batch.tokens_BL)
    size = split_size(sequences, size)
    pieces = []
    for start in range(0, sequences, size):
        rows = slice(start, start + size)
        document = None if batch.document_BL is None else batch.document_BL[rows]
        pieces.append(
            Batch(
                tokens_BL=batch.tokens_BL[rows],
                targets_BL=batch.targets_BL[rows],
                document_BL=document,
            )
        )
    return pieces


def split_size(sequences: int, size: int) -> int:
    """Sequences of a micro-batch; ConfigError unless they divide a rank's share of a step."""
    size = size or sequences
    if sequences % size:
        raise ConfigError(
            f"train.micro_batch = {size} does not divide the {sequences} sequences of a rank's "
            "step; change it or train.tokens_per_step"
        )
    return size


def to_device(
    batch: Batch, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The tensors of a batch on ``device``; from pinned memory without waiting."""
    document = batch.document_BL
    return (
        batch.tokens_BL.to(device, non_blocking=True),
        batch.targets_BL.to(device, non_blocking=True),
        None if document is None else document.to(device, non_blocking=True),
    )
