"""PyTorch's grouped product under autograd, for any width and layout."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from slipstream.ops.moe.experts.grouped import ALIGN_BYTES, grouped_outer, grouped_rows


def gemm_grouped(x_ND: torch.Tensor, w_EPD: torch.Tensor, offsets_E1: torch.Tensor) -> torch.Tensor:
    """Same rows as the reference; widths that are not aligned are padded with zeros."""
    rows = w_EPD.shape[1]
    step = ALIGN_BYTES // x_ND.element_size()
    pad_d, pad_p = -x_ND.shape[1] % step, -rows % step
    w_EPD = w_EPD.to(x_ND.dtype)
    if pad_d or pad_p:
        x_ND = F.pad(x_ND, (0, pad_d))
        w_EPD = F.pad(w_EPD, (0, pad_d, 0, pad_p))
    y_NP = _Gemm.apply(x_ND, w_EPD, offsets_E1[1:].to(torch.int32))
    return y_NP[:, :rows] if pad_p else y_NP


class _Gemm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: torch.Tensor, w_EPD: torch.Tensor, ends_E: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x_ND, w_EPD, ends_E)
        return grouped_rows(x_ND, w_EPD.mT, ends_E)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dy_NP,) = grads
        x_ND, w_EPD, ends_E = ctx.saved_tensors
        dx_ND = dw_EPD = None
        if ctx.needs_input_grad[0]:
            past_N = torch.arange(len(x_ND), device=x_ND.device) >= ends_E[-1]
            dx_ND = grouped_rows(dy_NP, w_EPD, ends_E).masked_fill(past_N[:, None], 0)
        if ctx.needs_input_grad[1]:
            dw_EPD = grouped_outer(dy_NP, x_ND, ends_E)
        return dx_ND, dw_EPD, None
