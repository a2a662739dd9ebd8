"""The language-model head with its loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from slipstream.ops import linear_cross_entropy_sums, token_losses
from slipstream.ops.linear_cross_entropy import IGNORE_INDEX
from slipstream.verify.budget import Results
from slipstream.verify.case import TOKENS, Case, Promise, Scale, Suite

Z_LOSS = 0.01


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


def _eager_sums(label_smoothing: float, softcap: float | None) -> Callable[..., Any]:
    def run(x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> Any:
        loss_T, lse_T = _eager(label_smoothing, softcap)(x, w, targets)
        kept_T = targets != IGNORE_INDEX
        z = lse_T.square().where(kept_T, 0.0).sum()
        return {"objective": loss_T.sum() + Z_LOSS * z, "tokens": kept_T.sum()}

    return run


def _case(
    tokens: int,
    width: int,
    vocab: int,
    more: str = "",
    *,
    sums: bool = False,
    ignored: float = 0.3,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    pool: int = 4,
) -> Case:
    options = {"label_smoothing": label_smoothing, "softcap": softcap}

    def call_sums(x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> Results:
        found = linear_cross_entropy_sums(x, w, targets, z_loss=Z_LOSS, **options)
        return {"objective": found[0], "tokens": found[3]}

    parts = [f"T{tokens}-D{width}-V{vocab}", "sums" if sums else "", more]
    return Case(
        name="-".join(part for part in parts if part),
        inputs=_inputs(tokens, width, vocab, ignored),
        call=call_sums if sums else lambda x, w, targets: token_losses(x, w, targets, **options),
        eager=(_eager_sums if sums else _eager)(label_smoothing, softcap),
        # The error of a few numbers is luck.
        pool=2 * pool if sums else pool,
    )


def _cases(scale: Scale) -> list[Case]:
    tokens = TOKENS[scale]
    options = {"label_smoothing": 0.2, "softcap": 3.0, "pool": 2}
    found = [
        _case(tokens, 32, 101, sums=True),
        _case(4 * tokens + 5, 31, 63, "smoothing-softcap", sums=True, **options),
        _case(tokens, 32, 101, "all-ignored", sums=True, ignored=1.1),
        _case(0, 32, 101, sums=True),
        _case(tokens, 32, 101),
        _case(4 * tokens + 5, 31, 63, "smoothing-softcap", **options),
        _case(1, 32, 101, ignored=0.0, pool=32),
        _case(tokens, 32, 101, "all-ignored", ignored=1.1),
        _case(0, 32, 101),
    ]
    if scale == "large":
        # Rows of many blocks, the last ragged; more logits (fp32 ones at least) than a chunk holds.
        found.append(_case(640, 64, 131072, "chunks", pool=1))
        found.append(_case(1100, 64, 262139, "chunks", sums=True, pool=1))
    return found


def _without_z_loss_the_objective_is_nll(device: torch.device, dtype: torch.dtype) -> str | None:
    x, w, targets_T = _drawn(device, dtype)
    objective, nll, _, tokens = linear_cross_entropy_sums(x, w, targets_T)
    if not torch.equal(objective.detach(), nll):
        return f"objective {objective.item()!r}, nll {nll.item()!r}"
    kept = int((targets_T != IGNORE_INDEX).sum())
    return None if tokens.item() == kept else f"{tokens.item()} tokens, expected {kept}"


def _ignored_tokens_get_zero_gradients(device: torch.device, dtype: torch.dtype) -> str | None:
    x, w, targets_T = _drawn(device, dtype)
    linear_cross_entropy_sums(x, w, targets_T, z_loss=Z_LOSS, label_smoothing=0.1)[0].backward()
    assert x.grad is not None
    ignored_T = targets_T == IGNORE_INDEX
    found = x.grad[ignored_T].abs().max().item()
    if found:
        return f"the gradient of an ignored token reaches {found}"
    lost = int((x.grad[~ignored_T].abs().amax(1) == 0).sum())
    return f"{lost} tokens that count got no gradient" if lost else None


def _drawn(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    drawn = _inputs(9, 32, 101, 0.3)(torch.Generator().manual_seed(0))
    drawn["targets"][:2] = torch.tensor([IGNORE_INDEX, 100])
    x, w = (drawn[name].to(device, dtype).requires_grad_() for name in ("x", "w"))
    return x, w, drawn["targets"].to(device)


SUITE = Suite(
    op="linear_cross_entropy",
    cases=_cases,
    promises=(
        Promise(
            name="without z_loss the objective is nll", holds=_without_z_loss_the_objective_is_nll
        ),
        Promise(name="ignored tokens get zero gradients", holds=_ignored_tokens_get_zero_gradients),
    ),
)
