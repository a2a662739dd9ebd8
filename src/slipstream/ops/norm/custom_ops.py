"""The norm's kernels as custom ops, one step each for ``torch.compile``.

Triton is imported when an op first runs, so that importing Slipstream does not need it.
"""

from typing import Any

import torch

from slipstream.ops.custom import custom_op
from slipstream.ops.norm.options import NormOptions


@custom_op("norm")
def norm_forward(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    eps: float,
    cast: str,
    offset: float,
    activation: str | None,
    with_s: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y``, ``s`` (empty unless ``with_s``) and the statistics of the rows."""
    from slipstream.ops.norm.launch import forward_launch  # noqa: PLC0415

    options = NormOptions(kind=kind, eps=eps, cast=cast, offset=offset, activation=activation)
    with torch.cuda.device_of(x):
        return forward_launch(x, weight_D, bias_D, residual, options, with_s)


@norm_forward.register_fake
def _(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    residual: torch.Tensor | None,
    kind: str,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with_s = rest[-1]
    num_rows = x.shape[:-1].numel()
    stats = x.new_empty(2 * num_rows if kind == "layer" else num_rows, dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape if with_s else 0), stats


@custom_op("norm_backward")
def norm_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor | None,
    x: torch.Tensor | None,
    stats: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    kind: str,
    eps: float,
    cast: str,
    offset: float,
    activation: str | None,
    want_x: bool,
    want_residual: bool,
    want_weight: bool,
    want_bias: bool,
    y_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, residual, weight and bias, then ``y`` again; empty where not wanted.

    ``x``: before the activation, None without one; ``s``: None where it is the activation of ``x``.
    """
    from slipstream.ops.norm.launch import Saved, Wanted, backward_launch  # noqa: PLC0415

    options = NormOptions(kind=kind, eps=eps, cast=cast, offset=offset, activation=activation)
    saved = Saved(s=s, x=x, stats=stats, weight_D=weight_D, bias_D=bias_D)
    wanted = Wanted(
        x=want_x, residual=want_residual, weight=want_weight, bias=want_bias, y_dtype=y_dtype
    )
    with torch.cuda.device_of(dy):
        return backward_launch(dy, ds, saved, options, wanted)


@norm_backward.register_fake
def _(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    s: torch.Tensor | None,
    x: torch.Tensor | None,
    stats: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    *rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    want_x, want_residual, want_weight, want_bias, y_dtype = rest[-5:]
    like = x if s is None else s
    assert like is not None
    width, bias_dtype = like.shape[-1], (weight_D if bias_D is None else bias_D).dtype
    return (
        like.new_empty(like.shape if want_x else 0),
        like.new_empty(like.shape if want_residual else 0),
        weight_D.new_empty(width if want_weight else 0),
        weight_D.new_empty(width if want_bias else 0, dtype=bias_dtype),
        like.new_empty(like.shape if y_dtype else 0, dtype=y_dtype),
    )
