"""Chunked linear cross entropy: at most one chunk of logits exists at any time.

Forward keeps the logsumexp of each token; backward recomputes a chunk's logits from it, so any
gradient of the per-token losses is served. The weight gradient is accumulated in fp32 over chunks.
Derivation in README.md.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

CHUNK_LOGITS = 1 << 26
"""Logits of one chunk: 256 MiB in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """What is not a tensor."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    chunk_tokens: int


def token_losses_chunked(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same results as the reference without ever holding the whole logits."""
    device = x_TD.device.type
    if torch.is_autocast_enabled(device):
        # Backward runs outside the autocast block and must recompute the same logits.
        x_TD = x_TD.to(torch.get_autocast_dtype(device))
        with torch.autocast(device, enabled=False):
            return token_losses_chunked(
                x_TD, w_VD, targets_T, ignore_index, label_smoothing, softcap
            )
    options = LossOptions(
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
        chunk_tokens=max(1, CHUNK_LOGITS // max(1, w_VD.shape[0])),
    )
    return _TokenLosses.apply(x_TD, w_VD, targets_T, options)


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        options: LossOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        w = w_VD.to(x_TD.dtype)
        losses, lses = [], []
        for x, targets in _chunks(options.chunk_tokens, x_TD, targets_T):
            loss, lse = _forward_chunk(x, w, targets, options)
            losses.append(loss)
            lses.append(lse)
        empty = x_TD.new_zeros(0, dtype=torch.float32)
        loss_T = torch.cat(losses) if losses else empty
        lse_T = torch.cat(lses) if lses else empty.clone()
        ctx.save_for_backward(x_TD, w_VD, targets_T, lse_T)
        ctx.options = options
        return loss_T, lse_T

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        dloss_T, dlse_T = grads
        x_TD, w_VD, targets_T, lse_T = ctx.saved_tensors
        w, options = w_VD.to(x_TD.dtype), ctx.options
        dxs, dw_VD = [], torch.zeros_like(w_VD, dtype=torch.float32)
        rows = _chunks(options.chunk_tokens, x_TD, targets_T, lse_T, dloss_T, dlse_T)
        for x, targets, lse, dloss, dlse in rows:
            dlogits = _dlogits_chunk(x, w, targets, lse, dloss, dlse, options).to(x.dtype)
            dxs.append(dlogits @ w)
            dw_VD += dlogits.T @ x
        dx_TD = torch.cat(dxs) if dxs else torch.zeros_like(x_TD)
        return dx_TD, dw_VD.to(w_VD.dtype), None, None


def _chunks(size: int, *tensors: torch.Tensor) -> Any:
    return zip(*(t.split(size) for t in tensors if t.shape[0]), strict=True)


def _logits(x: torch.Tensor, w: torch.Tensor, softcap: float | None) -> torch.Tensor:
    logits = (x @ w.T).float()
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _forward_chunk(
    x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor, options: LossOptions
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = _logits(x, w, options.softcap)
    lse = torch.logsumexp(logits, dim=-1)
    kept = targets != options.ignore_index
    picked = logits.gather(1, targets.where(kept, 0)[:, None])[:, 0]
    smooth = options.label_smoothing
    loss = lse - (1 - smooth) * picked
    if smooth:
        loss = loss - smooth * logits.mean(-1)
    return loss.where(kept, 0.0), lse


def _dlogits_chunk(
    x: torch.Tensor,
    w: torch.Tensor,
    targets: torch.Tensor,
    lse: torch.Tensor,
    dloss: torch.Tensor,
    dlse: torch.Tensor,
    options: LossOptions,
) -> torch.Tensor:
    logits = _logits(x, w, options.softcap)
    kept = targets != options.ignore_index
    dloss, smooth = dloss.where(kept, 0.0), options.label_smoothing
    dlogits = torch.exp(logits - lse[:, None]) * (dloss + dlse)[:, None]
    if smooth:
        dlogits -= (smooth / w.shape[0] * dloss)[:, None]
    index = targets.where(kept, 0)[:, None]
    dlogits.scatter_add_(1, index, -(1 - smooth) * dloss[:, None])
    if options.softcap is not None:
        dlogits *= 1 - (logits / options.softcap).square()
    return dlogits
