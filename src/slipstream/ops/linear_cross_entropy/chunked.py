"""The op in plain PyTorch, chunk by chunk: what runs where Triton's kernels do not.

Backward computes a chunk's logits and their softmax again, so any gradient of the per-token losses
is served. The weight gradient is accumulated in fp32 over chunks. Derivation in README.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.linear_cross_entropy.options import LossOptions, sums_of

CHUNK_LOGITS = 1 << 26
"""Logits of one chunk: 256 MiB in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunked:
    """What is not a tensor."""

    loss: LossOptions
    tokens: int
    """Tokens of a chunk."""


def loss_chunked(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    options: LossOptions,
    sums: bool,
    accumulate: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """Same results as the reference without ever holding the whole logits."""
    chunked = Chunked(loss=options, tokens=max(1, CHUNK_LOGITS // max(1, w_VD.shape[0])))
    loss_T, lse_T = _TokenLosses.apply(x_TD, w_VD, targets_T, chunked, accumulate)
    return sums_of(loss_T, lse_T, targets_T, options) if sums else (loss_T, lse_T)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        options: Chunked,
        accumulate: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        w = w_VD.to(x_TD.dtype)
        losses, lses = [], []
        for x, targets in _chunks(options.tokens, x_TD, targets_T):
            loss, lse = _forward_chunk(x, w, targets, options.loss)
            losses.append(loss)
            lses.append(lse)
        empty = x_TD.new_zeros(0, dtype=torch.float32)
        loss_T = torch.cat(losses) if losses else empty
        lse_T = torch.cat(lses) if lses else empty.clone()
        ctx.save_for_backward(x_TD, w_VD, targets_T)
        ctx.options, ctx.accumulate = options, accumulate
        return loss_T, lse_T

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        dloss_T, dlse_T = grads
        x_TD, w_VD, targets_T = ctx.saved_tensors
        w, options = w_VD.to(x_TD.dtype), ctx.options
        dxs, dw_VD = [], ctx.accumulate
        if dw_VD is None:
            dw_VD = torch.zeros_like(w_VD, dtype=torch.float32)
        for x, targets, dloss, dlse in _chunks(options.tokens, x_TD, targets_T, dloss_T, dlse_T):
            dlogits = _dlogits_chunk(x, w, targets, dloss, dlse, options.loss).to(x.dtype)
            dxs.append(dlogits @ w)
            dw_VD += dlogits.T @ x
        dx_TD = torch.cat(dxs) if dxs else torch.zeros_like(x_TD)
        dw = dw_VD.to(w_VD.dtype) if ctx.accumulate is None else None
        return dx_TD, dw, None, None, None


def _chunks(size: int, *tensors: torch.Tensor) -> Any:
    return zip(*(t.split(size) for t in tensors if t.shape[0]), strict=True)


def _logits(
    x: torch.Tensor, w: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits in fp32, and the tanh they are made of where they are capped."""
    logits = (x @ w.T).float()
    if softcap is None:
        return logits, None
    tanh = torch.tanh(logits / softcap)
    return softcap * tanh, tanh


def _forward_chunk(
    x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor, options: LossOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    logits, _ = _logits(x, w, options.softcap)
    highest = logits.amax(-1, keepdim=True)
    less = logits - highest
    kept = targets != options.ignore_index
    picked = less.gather(1, targets.where(kept, 0)[:, None])[:, 0]
    smooth = options.label_smoothing
    wanted = (1 - smooth) * picked
    if smooth:
        wanted = wanted + smooth * less.mean(-1)
    log_total = less.exp_().sum(-1).log()
    # lse - logits would have the rounding of lse, which may be far larger than the loss.
    return (log_total - wanted).where(kept, 0.0), highest[:, 0] + log_total


def _dlogits_chunk(
    x: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    dloss: torch.Tensor,
    dlse: torch.Tensor,
    options: LossOptions,
) -> torch.Tensor:
    logits, tanh = _logits(x, w, options.softcap)
    kept = targets != options.ignore_index
    dloss, smooth = dloss.where(kept, 0.0), options.label_smoothing
    # exp(logits - lse) would have the rounding of lse, relative to a probability of nearly 1.
    dlogits = logits.softmax(-1).mul_((dloss + dlse)[:, None])
    if smooth:
        dlogits -= (smooth / w.shape[0] * dloss)[:, None]
    index = targets.where(kept, 0)[:, None]
    dlogits.scatter_add_(1, index, -(1 - smooth) * dloss[:, None])
    if tanh is not None:
        dlogits *= 1 - tanh.square()
    return dlogits
