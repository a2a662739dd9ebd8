"""PyTorch's grouped matrix products as two custom ops.

Registered with ``torch.library`` because the shape function PyTorch has for its own op accepts
bf16 only, which would keep the fp32 path out of ``torch.compile``.
"""

import torch
import torch.nn.functional as F

from slipstream.ops.dispatch import Refusal

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGN_BYTES = 16
"""PyTorch's grouped product and tensor descriptors want addresses and strides in multiples."""


def refuse_grouped(rows: torch.Tensor) -> Refusal | None:
    """Why PyTorch's grouped product cannot serve these rows; None where it can."""
    if rows.dtype not in DTYPES:
        return Refusal(reason=f"PyTorch's grouped product does not take {rows.dtype}")
    if rows.is_cuda and rows.dtype != torch.bfloat16:
        # A loop over the groups that copies their offsets to the host.
        return Refusal(reason=f"PyTorch's grouped product waits for the host in {rows.dtype}")
    if rows.is_cuda and torch.cuda.get_device_capability(rows.device) < (8, 0):
        return Refusal(reason="PyTorch's grouped product needs compute capability 8.0")
    if rows.device.type not in ("cpu", "cuda", "meta"):
        return Refusal(reason=f"PyTorch has no grouped product for {rows.device.type}")
    return None


@torch.library.custom_op("slipstream::grouped_rows", mutates_args=())
def grouped_rows(
    rows_NA: torch.Tensor, weight_EAB: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """``out[n] = rows[n] @ weight[e]`` for the expert e whose rows end at ``ends[e]``; (N, B).

    Rows past the last end belong to nobody; theirs are undefined.
    """
    if not rows_NA.numel():  # the product refuses the strides of an empty tensor
        return rows_NA.new_zeros(rows_NA.shape[0], weight_EAB.shape[2])
    return F.grouped_mm(_laid_out(rows_NA), _laid_out(weight_EAB), offs=ends_E)


@grouped_rows.register_fake
def _(rows_NA: torch.Tensor, weight_EAB: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return rows_NA.new_empty(rows_NA.shape[0], weight_EAB.shape[2])


@torch.library.custom_op("slipstream::grouped_outer", mutates_args=())
def grouped_outer(
    left_NA: torch.Tensor, right_NB: torch.Tensor, ends_E: torch.Tensor
) -> torch.Tensor:
    """``out[e] = left[rows of e]^T @ right[rows of e]``, zeros for an expert without rows."""
    if not left_NA.shape[0]:
        return left_NA.new_zeros(ends_E.shape[0], left_NA.shape[1], right_NB.shape[1])
    return F.grouped_mm(_laid_out(left_NA).mT, _laid_out(right_NB), offs=ends_E)


@grouped_outer.register_fake
def _(left_NA: torch.Tensor, right_NB: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return left_NA.new_empty(ends_E.shape[0], left_NA.shape[1], right_NB.shape[1])


def grouped_sum(rows_NA: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """``out[e] = rows of e``, summed: ``(E, A)``, zeros for an expert without rows."""
    # As a product with ones: a sum by index is either not deterministic or waits for the host.
    step = ALIGN_BYTES // rows_NA.element_size()
    return grouped_outer(rows_NA, rows_NA.new_ones(rows_NA.shape[0], step), ends_E)[:, :, 0]


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, copied where the grouped product would refuse its address or strides."""
    step = ALIGN_BYTES // tensor.element_size()
    *batch, row, column = tensor.stride()
    rows, columns = tensor.shape[-2:]
    by_row = column == 1 and row >= columns and row % step == 0
    by_column = row == 1 and column >= rows and column % step == 0
    aligned = tensor.data_ptr() % ALIGN_BYTES == 0 and all(s % step == 0 for s in batch)
    fits = aligned and (by_row or by_column)
    return tensor if fits else tensor.clone(memory_format=torch.contiguous_format)
