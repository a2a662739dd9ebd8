"""Launches of the activation kernels: rows, strides, grids, allocation."""

import math

import torch

from slipstream.ops.activation.kernels import activation_bwd_kernel, activation_fwd_kernel
from slipstream.ops.activation.options import ActivationOptions
from slipstream.ops.activation.tuned import Blocks, lookup
from slipstream.ops.triton_support import cdiv

MAX_VECTOR = 16
"""Elements that one thread loads at most side by side."""


def forward(
    x: torch.Tensor,
    up: torch.Tensor | None,
    options: ActivationOptions,
    blocks: Blocks | None = None,
) -> torch.Tensor:
    """``f(x)`` or ``f(gate) * up``, contiguous ``(..., F)`` in the dtype of ``x``."""
    width = options.width(x, up)
    out = x.new_empty(*x.shape[:-1], width)
    if not out.numel():
        return out
    fused = options.gated and up is None
    x_TF, up_TF = as_rows(x), None if up is None else as_rows(up)
    blocks = blocks or lookup("forward", x)
    strides = x_TF.stride(0), 0 if up_TF is None else up_TF.stride(0)
    activation_fwd_kernel[(cdiv(out.numel(), blocks.block),)](
        x_TF,
        up_TF,
        out,
        len(x_TF),
        *strides,
        float(options.alpha),
        float(options.limit),
        F=width,
        ACTIVATION=function_name(options.gating, x.dtype),
        GATED=options.gated,
        FUSED=fused,
        FLAT=not fused and _flat(width, x_TF, up_TF),
        ALIGNED=math.gcd(MAX_VECTOR, width, *strides),
        BLOCK=blocks.block,
        num_warps=blocks.num_warps,
    )
    return out


def backward(
    dout: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor | None,
    options: ActivationOptions,
    *,
    want_output: bool = False,
    blocks: Blocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of ``x`` and ``up``, contiguous, and the output where ``want_output``."""
    width = options.width(x, up)
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    dup = None if up is None else torch.empty_like(up, memory_format=torch.contiguous_format)
    out = x.new_empty(*x.shape[:-1], width) if want_output else None
    if not dout.numel():
        return dx, dup, out
    fused = options.gated and up is None
    dout_TF, x_TF, up_TF = as_rows(dout), as_rows(x), None if up is None else as_rows(up)
    blocks = blocks or lookup("backward", x)
    strides = dout_TF.stride(0), x_TF.stride(0), 0 if up_TF is None else up_TF.stride(0)
    activation_bwd_kernel[(cdiv(dout.numel(), blocks.block),)](
        dout_TF,
        x_TF,
        up_TF,
        dx,
        dup,
        out,
        len(x_TF),
        *strides,
        float(options.alpha),
        float(options.limit),
        F=width,
        ACTIVATION=function_name(options.gating, x.dtype),
        GATED=options.gated,
        FUSED=fused,
        FLAT=not fused and _flat(width, dout_TF, x_TF, up_TF),
        ALIGNED=math.gcd(MAX_VECTOR, width, *strides),
        BLOCK=blocks.block,
        num_warps=blocks.num_warps,
    )
    return dx, dup, out


def function_name(gating: str, dtype: torch.dtype) -> str:
    """What the kernels call the function of tensors of ``dtype``."""
    if dtype == torch.float32 or gating == "relu2":
        return gating
    return f"{gating}_16_bit"


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` as a matrix with features side by side: a view unless its layout has no such view."""
    x_TF = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return x_TF if x_TF.stride(1) == 1 or x_TF.shape[1] == 1 else x_TF.contiguous()


def _flat(width: int, *tensors_TF: torch.Tensor | None) -> bool:
    return all(t is None or t.stride(0) == width or len(t) == 1 for t in tensors_TF)
