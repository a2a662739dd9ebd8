"""The Triton path of ``grouped_gemm``, as custom ops that ``torch.compile`` treats as one step.

Triton is imported when an op first runs, so that importing Slipstream does not need it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from slipstream.ops.custom import custom_op
from slipstream.ops.moe.experts.grouped import ALIGN_BYTES


def gemm_triton(x_ND: torch.Tensor, w_EPD: torch.Tensor, offsets_E1: torch.Tensor) -> torch.Tensor:
    """Same rows as the reference; widths that are not aligned are padded with zeros."""
    rows = w_EPD.shape[1]
    step = ALIGN_BYTES // x_ND.element_size()
    pad_d, pad_p = -x_ND.shape[1] % step, -rows % step
    if pad_d or pad_p:
        x_ND, w_EPD = F.pad(x_ND, (0, pad_d)), F.pad(w_EPD, (0, pad_d, 0, pad_p))
    y_NP = _Gemm.apply(x_ND, w_EPD, offsets_E1)
    return y_NP[:, :rows] if pad_p else y_NP


@custom_op("moe_gemm")
def moe_gemm(
    x_ND: torch.Tensor, w_EPD: torch.Tensor, offsets_E1: torch.Tensor, product: str
) -> torch.Tensor:
    """Rows times their group's weights, tiled as ``product``; zeros past the end for ``dx``."""
    from slipstream.ops.moe.experts import launch, tuned  # noqa: PLC0415

    layout = launch.Layout.of_rows(offsets_E1, x_ND.shape[0])
    weight = launch.aligned_weight(w_EPD)
    tile = tuned.lookup(product, x_ND.device, x_ND.dtype, layout.num_rows, weight)
    return launch.rows(launch.aligned(x_ND), weight, None, layout, tile, zero=product == "dx")


@moe_gemm.register_fake
def _(
    x_ND: torch.Tensor, w_EPD: torch.Tensor, offsets_E1: torch.Tensor, product: str
) -> torch.Tensor:
    return x_ND.new_empty(x_ND.shape[0], w_EPD.shape[1])


@custom_op("moe_gemm_outer")
def moe_gemm_outer(
    dy_NP: torch.Tensor,
    x_ND: torch.Tensor,
    offsets_E1: torch.Tensor,
    dtype: torch.dtype,
    transposed: bool,
) -> torch.Tensor:
    """Gradient of the weights (E, P, D) in ``dtype``, laid out (E, D, P) where ``transposed``."""
    from slipstream.ops.moe.experts import launch, tuned  # noqa: PLC0415

    layout = launch.Layout.of_rows(offsets_E1, x_ND.shape[0])
    like = _gradient(dy_NP, x_ND, offsets_E1, dtype, transposed, "meta")
    tile = tuned.lookup("dw2", x_ND.device, x_ND.dtype, layout.num_rows, like)
    return launch.outer(
        launch.aligned(dy_NP), launch.aligned(x_ND), layout, tile, like=like, into=None
    )


@moe_gemm_outer.register_fake
def _(
    dy_NP: torch.Tensor,
    x_ND: torch.Tensor,
    offsets_E1: torch.Tensor,
    dtype: torch.dtype,
    transposed: bool,
) -> torch.Tensor:
    return _gradient(dy_NP, x_ND, offsets_E1, dtype, transposed, x_ND.device)


def _gradient(
    dy_NP: torch.Tensor,
    x_ND: torch.Tensor,
    offsets_E1: torch.Tensor,
    dtype: torch.dtype,
    transposed: bool,
    device: torch.device | str,
) -> torch.Tensor:
    groups, rows, width = offsets_E1.shape[0] - 1, dy_NP.shape[1], x_ND.shape[1]
    if transposed:
        return torch.empty(groups, width, rows, dtype=dtype, device=device).mT
    return torch.empty(groups, rows, width, dtype=dtype, device=device)


class _Gemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, w_EPD: torch.Tensor, offsets_E1: torch.Tensor
    ) -> torch.Tensor:
        ctx.dtype = w_EPD.dtype
        ctx.transposed = w_EPD.stride(2) != 1 and w_EPD.stride(1) == 1
        w_EPD = w_EPD.to(x_ND.dtype)
        ctx.save_for_backward(x_ND, w_EPD, offsets_E1)
        return moe_gemm(x_ND, w_EPD, offsets_E1, "down")

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dy_NP,) = grads
        x_ND, w_EPD, offsets_E1 = ctx.saved_tensors
        dx_ND = dw_EPD = None
        if ctx.needs_input_grad[0]:
            dx_ND = moe_gemm(dy_NP, w_EPD.mT, offsets_E1, "dx")
        if ctx.needs_input_grad[1]:
            dw_EPD = moe_gemm_outer(dy_NP, x_ND, offsets_E1, ctx.dtype, ctx.transposed)
        return dx_ND, dw_EPD, None
