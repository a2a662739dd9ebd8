"""Grids and buffers of the router kernels."""

import torch

from slipstream.ops.launching import launch
from slipstream.ops.moe.router import kernels
from slipstream.ops.triton_support import cdiv, interpreting, next_power_of_2

WEIGHT_PARTS = 3
"""bf16 parts of an fp32 router: all of its 24 bits."""
GRADIENT_PARTS = 2
"""bf16 parts of the gradient of the logits, and of the router in ``dx``."""
MIN_BLOCK = 16
BLOCK_T = 128
PROGRAMS = 264
"""Programs of a backward kernel, at most about; a constant: sums are the same on every GPU."""
SPLIT_BLOCK = 1024
SUM_BLOCK = 128
"""Elements a program sums, over SUM_SPLITS partial sums at a time."""
SUM_SPLITS = 32

# Blocks and stages below fill 96 KiB of shared memory: all that some GPUs have, and two programs
# for each multiprocessor of the others.


def logits_launch(x_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    """``x @ router^T`` in fp32."""
    (tokens, width), experts = x_TD.shape, router_ED.shape[0]
    logits_TE = x_TD.new_empty((tokens, experts), dtype=torch.float32)
    if not tokens:
        return logits_TE
    parts = (
        router_ED[None] if router_ED.dtype == torch.bfloat16 else _split(router_ED, WEIGHT_PARTS)
    )
    block_e = _block(experts, 128)
    launch(
        kernels.moe_router_fwd_kernel,
        (cdiv(tokens, BLOCK_T) * cdiv(experts, block_e),),
        x_TD,
        parts,
        logits_TE,
        tokens,
        E=experts,
        D=width,
        PARTS=parts.shape[0],
        WIDE=interpreting(),
        BLOCK_T=BLOCK_T,
        BLOCK_E=block_e,
        BLOCK_D=64 if parts.shape[0] == 1 else 32,
        num_warps=8,
        num_stages=4 if block_e <= 64 else 3,
    )
    return logits_TE


def backward_launch(
    dlogits_TE: torch.Tensor,
    x_TD: torch.Tensor,
    router_ED: torch.Tensor,
    passed_TD: torch.Tensor | None,
    need_x: bool,
    need_router: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``passed + dlogits @ router`` in bf16, ``dlogits^T @ x`` in the dtype of the router.

    What is not needed is empty.
    """
    dx_TD = torch.empty_like(x_TD) if need_x else x_TD.new_empty(0)
    drouter_ED = torch.empty_like(router_ED) if need_router else x_TD.new_empty(0)
    if not x_TD.shape[0]:
        return dx_TD, drouter_ED.zero_()
    parts_PTE = _split(dlogits_TE, GRADIENT_PARTS)
    if need_x:
        _dx_launch(parts_PTE, router_ED, passed_TD, dx_TD)
    if need_router:
        _dw_launch(parts_PTE, x_TD, drouter_ED)
    return dx_TD, drouter_ED


def _dx_launch(
    dlogits_PTE: torch.Tensor,
    router_ED: torch.Tensor,
    passed_TD: torch.Tensor | None,
    dx_TD: torch.Tensor,
) -> None:
    (_, tokens, experts), width = dlogits_PTE.shape, router_ED.shape[1]
    exact = router_ED.dtype == torch.bfloat16
    parts = router_ED[None] if exact else _split(router_ED, GRADIENT_PARTS)
    all_experts = _block(experts, 256)
    # Up to 128 experts, one block holds them all and stays while the columns go by.
    held = all_experts <= 128
    block_t = BLOCK_T if all_experts != 128 else BLOCK_T // 2
    block_d = _block(width, 128 if not held else 64 if block_t == BLOCK_T or exact else 32)
    blocks_t, blocks_d = cdiv(tokens, block_t), cdiv(width, block_d)
    span = cdiv(blocks_d, max(1, PROGRAMS // blocks_t)) if held else 1
    launch(
        kernels.moe_router_bwd_dx_kernel,
        (blocks_t, cdiv(blocks_d, span)),
        dlogits_PTE,
        parts,
        passed_TD,
        dx_TD,
        tokens,
        span,
        E=experts,
        D=width,
        PARTS=parts.shape[0],
        WIDE=interpreting(),
        BLOCK_T=block_t,
        BLOCK_E=all_experts if held else 32,
        BLOCK_D=block_d,
        STAGES=2,
        num_warps=block_t // 16,
    )


def _dw_launch(dlogits_PTE: torch.Tensor, x_TD: torch.Tensor, drouter_ED: torch.Tensor) -> None:
    """Partial sums over runs of tokens, then their sum, in order."""
    (_, tokens, experts), width = dlogits_PTE.shape, x_TD.shape[1]
    block_t, block_e, block_d = 32, _block(experts, 64), _block(width, 256)
    programs = cdiv(experts, block_e) * cdiv(width, block_d)
    steps = cdiv(tokens, block_t)
    span = block_t * cdiv(steps, max(1, PROGRAMS // programs))
    splits = cdiv(tokens, span)
    partial_SED = x_TD.new_empty((splits, experts, width), dtype=torch.float32)
    launch(
        kernels.moe_router_bwd_dw_kernel,
        (programs, splits),
        dlogits_PTE,
        x_TD,
        partial_SED,
        tokens,
        span,
        E=experts,
        D=width,
        PARTS=dlogits_PTE.shape[0],
        WIDE=interpreting(),
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_D=block_d,
        num_warps=4,
        num_stages=4,
    )
    size = experts * width
    launch(
        kernels.moe_router_sum_kernel,
        (cdiv(size, SUM_BLOCK),),
        partial_SED,
        drouter_ED,
        splits,
        SIZE=size,
        BLOCK_S=SUM_SPLITS,
        BLOCK=SUM_BLOCK,
    )


def _block(size: int, most: int) -> int:
    return min(most, max(MIN_BLOCK, next_power_of_2(size)))


def _split(wide: torch.Tensor, parts: int) -> torch.Tensor:
    """A matrix as ``(parts, *shape)`` in bf16."""
    split = wide.new_empty((parts, *wide.shape), dtype=torch.bfloat16)
    launch(
        kernels.moe_router_split_kernel,
        (cdiv(wide.numel(), SPLIT_BLOCK),),
        wide,
        split,
        wide.shape[0],
        WIDTH=wide.shape[1],
        PARTS=parts,
        BLOCK=SPLIT_BLOCK,
    )
    return split
