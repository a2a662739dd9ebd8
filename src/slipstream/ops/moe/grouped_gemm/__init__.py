"""One matrix per group of rows, for rows that are already grouped."""

from typing import Any

import torch

from slipstream.ops import check, dispatch, triton_support
from slipstream.ops.dispatch import Refusal
from slipstream.ops.moe import checks
from slipstream.ops.moe.experts.grouped import refuse_grouped
from slipstream.ops.moe.grouped_gemm.autograd import gemm_grouped
from slipstream.ops.moe.grouped_gemm.fused import gemm_triton
from slipstream.ops.moe.grouped_gemm.reference import grouped_gemm_reference
from slipstream.ops.moe.route import values


def grouped_gemm(x_ND: torch.Tensor, w_EPD: torch.Tensor, offsets_E1: torch.Tensor) -> torch.Tensor:
    """``x[n] @ w[e]^T`` for every row n of group e; ``(N, P)`` in the dtype of ``x``.

    ``x_ND (N, D)``: rows of group e are ``offsets_E1[e] : offsets_E1[e + 1]``; ``w_EPD (E, P, D)``,
    also as a transposed view, cast to the dtype of ``x``; ``offsets_E1 (E + 1,)`` integers,
    ascending from 0 to at most N. Rows past the last offset are neither read nor written: their
    output is undefined and their gradient zero. Groups may be empty. Accumulates in fp32, follows
    autocast, no host synchronisation. Other offsets: ConfigError on a CPU, on a GPU only with
    SLIPSTREAM_CHECK_VALUES=1, as an assertion on the device. Raises ShapeError for all else.
    """
    check.shape("grouped_gemm", "w", w_EPD, None, None, None)
    checks.not_empty("grouped_gemm", "w", w_EPD)
    check.shape("grouped_gemm", "x", x_ND, None, w_EPD.shape[2])
    check.shape("grouped_gemm", "offsets", offsets_E1, w_EPD.shape[0] + 1)
    checks.floating("grouped_gemm", x=x_ND, w=w_EPD)
    checks.integer("grouped_gemm", "offsets", offsets_E1)
    check.same_device("grouped_gemm", x=x_ND, w=w_EPD, offsets=offsets_E1)
    values.edges("grouped_gemm", "offsets", offsets_E1, x_ND.shape[0])
    x_ND, precision = checks.follow_autocast(x_ND)
    with precision:
        return dispatch.call("grouped_gemm", x_ND, w_EPD, offsets_E1)


def _refuse_triton(x_ND: torch.Tensor, *_: Any) -> Refusal | None:
    return triton_support.refusal(x_ND)


def _refuse_grouped(x_ND: torch.Tensor, *_: Any) -> Refusal | None:
    return refuse_grouped(x_ND)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    x_ND = torch.randn(32, 16, device=device, dtype=dtype)
    w_EPD = torch.randn(4, 24, 16, device=device, dtype=dtype)
    offsets_E1 = torch.tensor([0, 9, 9, 20, 32], device=device, dtype=torch.int32)
    return (x_ND, w_EPD, offsets_E1), {}


dispatch.register(
    "grouped_gemm",
    ("triton", gemm_triton, _refuse_triton),
    ("grouped_mm", gemm_grouped, _refuse_grouped),
    ("reference", grouped_gemm_reference, None),
    example=_example,
)

__all__ = ["grouped_gemm"]
