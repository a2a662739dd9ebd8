"""The language-model head with its loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from slipstream.ops import token_losses
from slipstream.ops.linear_cross_entropy import IGNORE_INDEX
from slipstream.verify.budget import Results
from slipstream.verify.case import Case, Scale, Suite


def _inputs(
    tokens: int, width: int, vocab: int, ignored: float
) -> Callable[[torch.Generator], Results]:
    def draw(generator: torch.Generator) -> Results:
        targets_T = torch.randint(0, vocab, (tokens,), generator=generator)
        skipped_T = torch.rand(tokens, generator=generator) < ignored
        return {
            "x": torch.randn(tokens, width, generator=generator),
            "w": torch.randn(vocab, width, generator=generator) / width**0.5,
            "targets": targets_T.masked_fill(skipped_T, IGNORE_INDEX),
        }

    return draw


def _eager(label_smoothing: float, softcap: float | None) -> Callable[..., Any]:
    def run(x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> Any:
        # Logits in the dtype of the model, the loss in fp32 (fp64 for the truth).
        logits = F.linear(x, w)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        loss_T = F.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
        return loss_T, logits.logsumexp(-1)

    return run


def _case(
    tokens: int,
    width: int,
    vocab: int,
    more: str = "",
    *,
    ignored: float = 0.3,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    pool: int = 1,
) -> Case:
    options = {"label_smoothing": label_smoothing, "softcap": softcap}
    return Case(
        name=f"T{tokens}-D{width}-V{vocab}" + (f"-{more}" if more else ""),
        inputs=_inputs(tokens, width, vocab, ignored),
        call=lambda x, w, targets: token_losses(x, w, targets, **options),
        eager=_eager(label_smoothing, softcap),
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case(63, 32, 101),
        _case(257, 31, 63, "smoothing-softcap", label_smoothing=0.2, softcap=3.0),
        _case(1, 32, 101, ignored=0.0, pool=32),
        _case(63, 32, 101, "all-ignored", ignored=1.1),
        _case(0, 32, 101),
    ]
    if scale == "large":
        # More logits than one chunk holds, and a ragged last one.
        found.append(_case(640, 64, 131072, "chunks"))
    return found


SUITE = Suite(op="linear_cross_entropy", cases=_cases)
