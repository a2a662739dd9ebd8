"""The language-model head with its loss: bound by its three products, 6TDV FLOPs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from slipstream import ops
from slipstream.bench.ops_case import Draw, Floor, Function, Missing, OpCase, OpShape
from slipstream.bench.ops_peers import liger, usual
from slipstream.verify.budget import Results

CHUNK = 2048
"""Tokens whose logits the truth holds in fp64 at once."""


def linear_cross_entropy_case(shape: OpShape, size: int) -> OpCase:
    """Mean cross entropy of ``x @ w^T``, gradients of x and w."""

    def inputs(draw: Draw) -> Results:
        return {
            "x": draw.normal(shape.tokens, shape.width),
            "w": draw.normal(shape.vocabulary, shape.width, std=shape.width**-0.5),
            "targets": draw.integers(shape.vocabulary, shape.tokens),
        }

    product = 2.0 * shape.tokens * shape.width * shape.vocabulary
    return OpCase(
        op="linear-cross-entropy",
        sizes={"T": shape.tokens, "D": shape.width, "V": shape.vocabulary},
        inputs=inputs,
        plain=lambda x, w, targets: _sum_of_losses(x, w, targets) / len(targets),
        truth=_in_chunks,
        peers=usual(
            lambda x, w, targets: ops.linear_cross_entropy(x, w, targets),
            lambda x, w, targets: _sum_of_losses(x, w, targets) / len(targets),
            torch=_make_native,
            liger=lambda: _make_liger(),
            liger_fp32=lambda: _make_liger(accum_dtype=torch.float32),
        ),
        floor=Floor(forward_flops=product, backward_flops=2 * product, parted=False),
        wanted=frozenset({"x", "w"}),
        scalar=True,
    )


def _sum_of_losses(x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logits = F.linear(x, w)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets, reduction="sum")


def _in_chunks(x: torch.Tensor, w: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    sums = [
        checkpoint(_sum_of_losses, rows, w, wanted, use_reentrant=False, preserve_rng_state=False)
        for rows, wanted in zip(x.split(CHUNK), targets.split(CHUNK), strict=True)
    ]
    return torch.stack(sums).sum() / len(targets)


def _make_native() -> Function:
    function = getattr(F, "linear_cross_entropy", None)
    if function is None:
        raise Missing(f"torch {torch.__version__} has no linear_cross_entropy; 2.13 has")
    chunked = torch.nn.LinearCrossEntropyOptions()
    # It returns the loss in the dtype of x.
    return lambda x, w, targets: function(x, w, targets, options=chunked).float()


def _make_liger(**options: Any) -> Function:
    function = liger("liger_fused_linear_cross_entropy")
    return lambda x, w, targets: function(x, w, targets, **options)
