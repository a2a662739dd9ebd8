"""The language-model head and its loss in one op: the logits of all tokens never exist at once."""

import math
from typing import Any

import torch

from slipstream.errors import ConfigError, ShapeError
from slipstream.ops import check, dispatch, triton_support
from slipstream.ops.dispatch import Refusal
from slipstream.ops.linear_cross_entropy.autograd import loss_triton
from slipstream.ops.linear_cross_entropy.chunked import loss_chunked
from slipstream.ops.linear_cross_entropy.options import LossOptions
from slipstream.ops.linear_cross_entropy.reference import loss_reference
from slipstream.ops.moe.checks import follow_autocast

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
    accumulate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy of ``x @ w^T`` against ``targets``, in nats, fp32.

    ``x_TD (T, D)``, ``w_VD (V, D)``, ``targets_T (T,)`` int64 in [0, V) or ``ignore_index``.
    ``reduction``: ``none`` gives ``(T,)`` with zeros where ignored, ``sum``, or ``mean`` over the
    tokens not ignored. ``z_loss`` adds ``z_loss * logsumexp^2`` per token (arXiv 2204.02311),
    ``softcap`` replaces logits by ``softcap * tanh(logits / softcap)``. ``accumulate (V, D)``: an
    fp32 buffer to which backward adds the gradient of ``w``, instead of returning it; not under
    ``torch.compile``. The gradient of ``w`` is summed in fp32. A target outside its range: a NaN
    loss or an error, by implementation. Raises ShapeError.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ShapeError(
            f"linear_cross_entropy: reduction = {reduction!r}, expected none, sum, mean"
        )
    options = LossOptions(
        ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss
    )
    if reduction == "none":
        loss_T, lse_T = _call(x_TD, w_VD, targets_T, options, False, accumulate)
        kept_T = targets_T != ignore_index
        return loss_T + z_loss * lse_T.square().where(kept_T, 0.0) if z_loss else loss_T
    objective, _, _, tokens = _call(x_TD, w_VD, targets_T, options, True, accumulate)
    return objective if reduction == "sum" else objective / tokens.clamp(min=1)


def linear_cross_entropy_sums(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    ignore_index: int = IGNORE_INDEX,
    accumulate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(objective, nll, z, tokens)``, sums over the tokens not ignored; see linear_cross_entropy.

    ``objective = nll + z_loss * z`` (fp32) is differentiable. ``nll``, the cross entropy with label
    smoothing, and ``z``, the squared logsumexp, are not; ``tokens`` is an int64 count. All stay on
    the device. Raises ShapeError.
    """
    options = LossOptions(
        ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss
    )
    return _call(x_TD, w_VD, targets_T, options, True, accumulate)


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
    options = LossOptions(
        ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap
    )
    return _call(x_TD, w_VD, targets_T, options, False, None)


def _call(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    options: LossOptions,
    sums: bool,
    accumulate: torch.Tensor | None,
) -> Any:
    name = "linear_cross_entropy"
    check.shape(name, "x", x_TD, None, None)
    check.shape(name, "w", w_VD, None, x_TD.shape[1])
    check.shape(name, "targets", targets_T, x_TD.shape[0])
    if targets_T.dtype != torch.int64:
        raise ShapeError(f"{name}: targets are {targets_T.dtype}, expected int64")
    check.floating(name, x=x_TD, w=w_VD)
    if not w_VD.shape[0]:
        raise ShapeError(f"{name}: w has shape {tuple(w_VD.shape)}, expected one row or more")
    if options.softcap is not None and not 0 < options.softcap < math.inf:
        raise ShapeError(f"{name}: softcap = {options.softcap}, expected a positive number or None")
    if not 0 <= options.z_loss < math.inf:
        raise ShapeError(f"{name}: z_loss = {options.z_loss}, expected a number of at least 0")
    if not 0 <= options.label_smoothing < 1:
        smoothing = options.label_smoothing
        raise ShapeError(f"{name}: label_smoothing = {smoothing}, expected in [0, 1)")
    check.same_device(name, x=x_TD, w=w_VD, targets=targets_T, accumulate=accumulate)
    _check_accumulate(name, w_VD, accumulate)
    x_TD, precision = follow_autocast(x_TD)
    with precision:
        return dispatch.call(name, x_TD, w_VD, targets_T, options, sums, accumulate)


def _check_accumulate(name: str, w_VD: torch.Tensor, accumulate: torch.Tensor | None) -> None:
    if accumulate is None:
        return
    if torch.compiler.is_compiling():
        # A graph would not see the buffer change.
        raise ConfigError(
            f"{name}: accumulate works in eager code only; leave it out of torch.compile"
        )
    check.shape(name, "accumulate", accumulate, *w_VD.shape)
    if accumulate.dtype != torch.float32 or accumulate.requires_grad:
        raise ShapeError(
            f"{name}: accumulate is {accumulate.dtype}, requires_grad = "
            f"{accumulate.requires_grad}; expected a plain torch.float32 buffer"
        )
    if not accumulate.is_contiguous():
        raise ShapeError(
            f"{name}: accumulate has strides {accumulate.stride()}, expected it to be contiguous"
        )


def _refuse_triton(x_TD: torch.Tensor, w_VD: torch.Tensor, *_: Any) -> Refusal | None:
    return triton_support.refusal(x_TD) or triton_support.refusal(w_VD, products=False)


def _refuse_fp64(x_TD: torch.Tensor, *_: Any) -> Refusal | None:
    if x_TD.dtype == torch.float64:
        return Refusal(reason="it accumulates in fp32, and x is fp64")
    return None


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    x_TD = torch.randn(16, 32, device=device, dtype=dtype)
    w_VD = torch.randn(64, 32, device=device, dtype=dtype)
    targets_T = torch.arange(16, device=device)
    return (x_TD, w_VD, targets_T, LossOptions(ignore_index=IGNORE_INDEX), True, None), {}


dispatch.register(
    "linear_cross_entropy",
    ("triton", loss_triton, _refuse_triton),
    ("chunked", loss_chunked, _refuse_fp64),
    ("reference", loss_reference, None),
    example=_example,
)

__all__ = ["IGNORE_INDEX", "linear_cross_entropy", "linear_cross_entropy_sums", "token_losses"]
