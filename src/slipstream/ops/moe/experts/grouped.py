"""PyTorch's grouped matrix products as two custom ops.

Registered with ``torch.library`` because the shape function PyTorch has for its own op accepts
bf16 only, which would keep the fp32 path out of ``torch.compile``.
"""

import torch
import torch.nn.functional as F


@torch.library.custom_op("slipstream::grouped_rows", mutates_args=())
def grouped_rows(
    rows_NA: torch.Tensor, weight_EAB: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """``out[n] = rows[n] @ weight[e]`` for the expert e whose rows end at ``ends[e]``; (N, B)."""
    return F.grouped_mm(rows_NA, weight_EAB, offs=ends_E)


@grouped_rows.register_fake
def _(rows_NA: torch.Tensor, weight_EAB: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return rows_NA.new_empty(rows_NA.shape[0], weight_EAB.shape[2])


@torch.library.custom_op("slipstream::grouped_outer", mutates_args=())
def grouped_outer(
    left_NA: torch.Tensor, right_NB: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """``out[e] = left[rows of e]^T @ right[rows of e]``, zeros for an expert without rows."""
    return F.grouped_mm(left_NA.mT, right_NB, offs=ends_E)


@grouped_outer.register_fake
def _(left_NA: torch.Tensor, right_NB: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return left_NA.new_empty(ends_E.shape[0], left_NA.shape[1], right_NB.shape[1])
