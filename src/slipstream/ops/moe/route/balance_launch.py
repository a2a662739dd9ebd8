"""Buffers and grid of the balance kernels: one launch, which leaves at once if nothing is hot."""

from typing import Any, NamedTuple

import torch

from slipstream.ops.launching import launch
from slipstream.ops.moe.route import balance_kernels
from slipstream.ops.moe.route.balance_select import BINS, WORD
from slipstream.ops.moe.route.options import BalanceMode, RouteOptions
from slipstream.ops.triton_support import cdiv, interpreting, multiprocessors, next_power_of_2

NUM_WARPS = 16
TILE_ELEMENTS = 2048
"""Scores a program holds at a time."""
MAX_BLOCK_T = 32
TILE_SLOTS = 2048
"""Slots of plain top-k a program holds at a time."""
MIN_BLOCK_E = 16
KERNELS: dict[str, Any] = {
    "weight": balance_kernels.balance_weight_kernel,
    "causal": balance_kernels.balance_causal_kernel,
}


class Spec(NamedTuple):
    """What the kernels are compiled for; never a number of tokens."""

    E: int
    TOP_K: int
    GROUPS: int
    TOP_GROUPS: int
    GROUP_TOP: int
    SCORE: str
    NORMALIZE: bool
    TILE_T: int
    BLOCK_T: int
    BLOCK_S: int
    BLOCK_E: int
    BLOCK_K: int
    BLOCK_G: int


def spec(num_experts: int, tile_tokens: int, options: RouteOptions) -> Spec:
    """``tile_tokens``: tokens of a tile of the counts."""
    block_e = max(MIN_BLOCK_E, next_power_of_2(num_experts))
    return Spec(
        E=num_experts,
        TOP_K=options.top_k,
        GROUPS=options.num_groups,
        TOP_GROUPS=options.top_groups,
        GROUP_TOP=min(options.group_top, num_experts // options.num_groups),
        SCORE=options.score,
        NORMALIZE=options.normalize,
        TILE_T=tile_tokens,
        BLOCK_T=max(1, min(MAX_BLOCK_T, TILE_ELEMENTS // block_e)),
        BLOCK_S=max(1, TILE_SLOTS // next_power_of_2(options.top_k)),
        BLOCK_E=block_e,
        BLOCK_K=next_power_of_2(options.top_k),
        BLOCK_G=next_power_of_2(options.num_groups),
    )


def state_size(depth: int) -> int:
    """int64 numbers of ``state``: rerouted slots, whether an expert is hot, a ticket counter,
    proposals of each round."""
    return 4 + depth


def rebalance_in_place(
    logits_TE: torch.Tensor,
    stats_2T: torch.Tensor,
    bias_E: torch.Tensor | None,
    expert_TK: torch.Tensor,
    weight_TK: torch.Tensor,
    count_EJ: torch.Tensor,
    plain_EJ: torch.Tensor,
    load_E: torch.Tensor,
    threshold: torch.Tensor,
    options: RouteOptions,
    state: torch.Tensor,
    *,
    tile_tokens: int,
    length: int,
) -> None:
    """Move shed slots of plain top-k, in place: ``expert_TK``, ``weight_TK`` and ``count_EJ``.

    ``logits_TE`` contiguous, ``stats_2T`` its row maxima and sums. ``count_EJ`` int32: slots per
    expert and tile, where tiles of ``tile_tokens`` tokens do not cross runs of ``length`` tokens.
    ``state``: ``state_size`` zeros, but ``state[1]`` is 1 if any expert is hot; afterwards
    ``state[0]`` is the number of rerouted slots. If it is 0 nothing changed, else ``plain_EJ``
    holds the counts of plain top-k.
    """
    tokens, experts = logits_TE.shape
    shape = spec(experts, tile_tokens, options)
    if not tokens:
        return
    words = cdiv(tokens, WORD.value)
    chunk = cdiv(words, min(_most_programs(logits_TE.device), words)) * WORD.value
    launch(
        KERNELS[options.mode],
        (cdiv(tokens, chunk),),
        logits_TE,
        stats_2T,
        bias_E,
        expert_TK,
        weight_TK,
        count_EJ,
        plain_EJ,
        load_E,
        threshold,
        *_scratch(logits_TE, expert_TK.numel(), options.mode),
        state,
        tokens,
        chunk,
        length,
        -(-length // tile_tokens),
        count_EJ.shape[1],
        options.depth,
        options.scale,
        S=shape,
        num_warps=NUM_WARPS,
        num_stages=1,
        # All programs at once or none: they wait for each other.
        launch_cooperative_grid=True,
    )


def _scratch(logits_TE: torch.Tensor, slots: int, mode: BalanceMode) -> tuple[torch.Tensor, ...]:
    tokens, experts = logits_TE.shape
    ints, empty = torch.int32, logits_TE.new_empty
    moving = empty(2 * (slots + tokens), dtype=ints)
    if mode == "causal":
        bits = empty((experts, cdiv(tokens, WORD.value)), dtype=ints)
        return moving, bits, empty(experts, dtype=ints)
    return (
        moving,
        empty((4, experts), dtype=ints),
        empty(experts, dtype=torch.int64),
        empty((experts, BINS.value), dtype=ints),
        empty((2, experts, tokens), dtype=ints),
    )


def _most_programs(device: torch.device) -> int:
    # The interpreter runs one program after another: they could not wait for each other.
    return 1 if interpreting() else multiprocessors(device)
