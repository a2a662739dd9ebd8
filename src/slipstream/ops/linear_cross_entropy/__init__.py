"""The language-model head and its loss in one op: the logits of all tokens never exist at once."""

from typing import Any

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch
from slipstream.ops.dispatch import Refusal
from slipstream.ops.linear_cross_entropy.autograd import token_losses_chunked
from slipstream.ops.linear_cross_entropy.reference import token_losses_reference

IGNORE_INDEX = -100


def linear_cross_entropy(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int = IGNORE_INDEX,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Cross entropy of ``x @ w^T`` against ``targets``, in nats, fp32.

    ``x_TD (T, D)``, ``w_VD (V, D)``, ``targets_T (T,)`` int64 in [0, V) or ``ignore_index``.
    ``reduction``: ``none`` gives ``(T,)`` with zeros where ignored, ``sum``, or ``mean`` over the
    tokens not ignored. ``z_loss`` adds ``z_loss * logsumexp^2`` per token (arXiv 2204.02311),
    ``softcap`` replaces logits by ``softcap * tanh(logits / softcap)``. Raises ShapeError.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ShapeError(
            f"linear_cross_entropy: reduction = {reduction!r}, expected none, sum, mean"
        )
    loss_T, lse_T = token_losses(
        x_TD,
        w_VD,
        targets_T,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        softcap=softcap,
    )
    kept_T = targets_T != ignore_index
    if z_loss:
        loss_T = loss_T + z_loss * lse_T.square().where(kept_T, 0.0)
    if reduction == "none":
        return loss_T
    return loss_T.sum() if reduction == "sum" else loss_T.sum() / kept_T.sum().clamp(min=1)


def token_losses(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token cross entropy (0 where ignored) and logsumexp, both ``(T,)`` and differentiable."""
    name = "linear_cross_entropy"
    check.shape(name, "x", x_TD, None, None)
    check.shape(name, "w", w_VD, None, x_TD.shape[1])
    check.shape(name, "targets", targets_T, x_TD.shape[0])
    if targets_T.dtype != torch.int64:
        raise ShapeError(f"{name}: targets are {targets_T.dtype}, expected int64")
    if softcap is not None and softcap <= 0:
        raise ShapeError(f"{name}: softcap = {softcap}, expected a positive number or None")
    if not 0 <= label_smoothing < 1:
        raise ShapeError(f"{name}: label_smoothing = {label_smoothing}, expected in [0, 1)")
    check.same_device(name, x=x_TD, w=w_VD, targets=targets_T)
    return dispatch.call(name, x_TD, w_VD, targets_T, ignore_index, label_smoothing, softcap)


def _refuse_fp64(x_TD: torch.Tensor, *_: Any) -> Refusal | None:
    if x_TD.dtype == torch.float64:
        return Refusal(reason="it accumulates in fp32, and x is fp64")
    return None


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    x_TD = torch.randn(16, 32, device=device, dtype=dtype)
    w_VD = torch.randn(64, 32, device=device, dtype=dtype)
    targets_T = torch.arange(16, device=device)
    return (x_TD, w_VD, targets_T, IGNORE_INDEX, 0.0, None), {}


dispatch.register(
    "linear_cross_entropy",
    ("chunked", token_losses_chunked, _refuse_fp64),
    ("reference", token_losses_reference, None),
    example=_example,
)

__all__ = ["IGNORE_INDEX", "linear_cross_entropy", "token_losses"]
