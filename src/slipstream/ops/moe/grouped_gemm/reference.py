"""One matrix product per group in a plain loop: the truth to test against, any dtype."""

from itertools import pairwise

import torch

from slipstream.ops.check import compute_dtype


def grouped_gemm_reference(
    x_ND: torch.Tensor, w_EPD: torch.Tensor, offsets_E1: torch.Tensor
) -> torch.Tensor:
    """See ``grouped_gemm``; zeros past the last offset; reads the offsets on the host."""
    wide = compute_dtype(x_ND)
    edges = offsets_E1.tolist()
    outputs = [
        x_ND[start:stop].to(wide) @ w_EPD[group].to(wide).T
        for group, (start, stop) in enumerate(pairwise(edges))
    ]
    outputs.append(x_ND.new_zeros(len(x_ND) - edges[-1], w_EPD.shape[1], dtype=wide))
    return torch.cat(outputs).to(x_ND.dtype)
