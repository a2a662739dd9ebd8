"""Grids, buffers and the order of the routing kernels: three launches, four with load balancing."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from slipstream.ops.launching import launch
from slipstream.ops.moe.route import kernels, sort_kernels
from slipstream.ops.moe.route.balance_launch import rebalance_in_place, state_size
from slipstream.ops.moe.route.options import RouteOptions
from slipstream.ops.triton_support import cdiv, next_power_of_2

TILE_SLOTS = 256
"""Slots of a tile, about; each tile costs E counters."""
TILE_TOKENS = 64
TILE_ELEMENTS = 2048
"""Scores, or counters, a program holds at a time."""
TILE_ROWS = 128
"""Rows of a tile of ``Routing.schedule``."""
MIN_BLOCK = 16
PREFIX_CHUNK = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """How tokens fall into tiles; a tile lies within one sequence."""

    tokens: int
    """T."""
    sequences: int
    """Runs of equal length that tiles do not cross."""
    tile_tokens: int
    """Tokens of a tile; the last of a sequence may have fewer."""
    length: int
    """Tokens of a sequence."""
    per_sequence: int
    """Tiles of a sequence."""
    count: int
    """Tiles of all sequences."""


class Maps(NamedTuple):
    """What sorting the slots gives; fields as in ``Routing``."""

    offsets_E1: torch.Tensor
    order_N: torch.Tensor
    position_N: torch.Tensor
    demand_E: torch.Tensor
    rerouted: torch.Tensor
    aux_loss: torch.Tensor
    z_loss: torch.Tensor
    schedule: torch.Tensor


class Choice(NamedTuple):
    """What the first pass gives, before the slots are sorted."""

    weight_TK: torch.Tensor
    stats_2T: torch.Tensor
    count_EJ: torch.Tensor
    state: torch.Tensor | None
    prob_EJ: torch.Tensor | None
    square_J: torch.Tensor


def tiling(tokens: int, top_k: int, sequences: int = 1) -> Tiling:
    """Tiles of about TILE_SLOTS slots."""
    tile = max(1, min(TILE_TOKENS, TILE_SLOTS // next_power_of_2(top_k)))
    length = tokens // sequences
    per_sequence = cdiv(length, tile)
    return Tiling(
        tokens=tokens,
        sequences=sequences,
        tile_tokens=tile,
        length=length,
        per_sequence=per_sequence,
        count=per_sequence * sequences,
    )


def schedule_room(rows: int, num_experts: int) -> int:
    """M of ``Routing.schedule``: the most tiles there can be."""
    return rows // TILE_ROWS + min(num_experts, rows)


def route_launch(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    share_E: torch.Tensor | None,
    load_E: torch.Tensor | None,
    threshold: torch.Tensor | None,
    options: RouteOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Maps]:
    """weight_TK, expert_TK, stats_2T and share_SE for backward, and the maps."""
    tokens, experts = logits_TE.shape
    sequences = options.num_sequences if options.aux == "sequence" else 1
    tiles = tiling(tokens, options.top_k, sequences)
    balances = load_E is not None and threshold is not None and tokens > 0
    expert_TK = logits_TE.new_empty((tokens, options.top_k), dtype=torch.int64)
    load = (load_E, threshold) if balances else None
    choice = _choose(logits_TE, bias_E, expert_TK, load, options, tiles)
    plain_EJ, state = None, choice.state
    if load_E is not None and threshold is not None and state is not None:
        plain_EJ = torch.empty_like(choice.count_EJ)
        rebalance_in_place(
            logits_TE,
            choice.stats_2T,
            bias_E,
            expert_TK,
            choice.weight_TK,
            choice.count_EJ,
            plain_EJ,
            load_E,
            threshold,
            options,
            state,
            tile_tokens=tiles.tile_tokens,
            length=tiles.length,
        )
    share_SE = share_E
    if share_SE is None:
        share_SE = logits_TE.new_empty((sequences, experts), dtype=torch.float32)
    maps = _sort(
        expert_TK,
        choice.count_EJ,
        tiles,
        experts,
        plain_EJ=plain_EJ,
        state=state,
        prob_EJ=choice.prob_EJ,
        square_J=choice.square_J,
        share_SE=share_SE,
        shared=share_E is not None,
    )
    return choice.weight_TK, expert_TK, choice.stats_2T, share_SE, maps


def sort_launch(expert_TK: torch.Tensor, num_experts: int) -> Maps:
    """Maps of given experts; ids that are no expert sort after all others."""
    tokens, top_k = expert_TK.shape
    tiles = tiling(tokens, top_k)
    count_BJ = expert_TK.new_empty((num_experts + 1, tiles.count), dtype=torch.int32)
    tile_slots = tiles.tile_tokens * top_k
    if tiles.count:
        launch(
            sort_kernels.moe_count_kernel,
            (tiles.count,),
            expert_TK,
            count_BJ,
            tokens * top_k,
            tiles.count,
            E=num_experts,
            TILE_N=tile_slots,
            BLOCK_N=max(MIN_BLOCK, next_power_of_2(tile_slots)),
            BLOCK_E=_block(num_experts + 1),
        )
    maps = _sort(expert_TK, count_BJ, tiles, num_experts)
    return maps._replace(demand_E=maps.demand_E[:num_experts])


def route_backward_launch(
    logits_TE: torch.Tensor,
    stats_2T: torch.Tensor,
    expert_TK: torch.Tensor,
    share_SE: torch.Tensor,
    dweight_TK: torch.Tensor | None,
    daux: torch.Tensor | None,
    dz: torch.Tensor | None,
    options: RouteOptions,
) -> torch.Tensor:
    """Gradient of the logits, in their dtype."""
    dlogits_TE = torch.empty_like(logits_TE)
    tokens, experts = logits_TE.shape
    if not tokens:
        return dlogits_TE
    block_e = _block(experts)
    block_t = max(1, TILE_ELEMENTS // block_e)
    launch(
        kernels.moe_route_bwd_kernel,
        (cdiv(tokens, block_t),),
        logits_TE,
        stats_2T,
        expert_TK,
        share_SE,
        dweight_TK,
        daux if options.aux != "none" else None,
        dz,
        dlogits_TE,
        tokens,
        tokens // share_SE.shape[0] if options.aux == "sequence" else tokens,
        options.scale,
        E=experts,
        TOP_K=options.top_k,
        SCORE=options.score,
        NORMALIZE=options.normalize,
        BY_SEQUENCE=options.aux == "sequence",
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        BLOCK_K=next_power_of_2(options.top_k),
    )
    return dlogits_TE


def _block(size: int) -> int:
    return max(MIN_BLOCK, next_power_of_2(size))


def _choose(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    expert_TK: torch.Tensor,
    load: tuple[torch.Tensor | None, ...] | None,
    options: RouteOptions,
    tiles: Tiling,
) -> Choice:
    """``load``: load_E and threshold where load is balanced."""
    tokens, experts = logits_TE.shape
    floats = {"dtype": torch.float32}
    wants_prob = options.aux != "none"
    size = state_size(options.depth)
    choice = Choice(
        weight_TK=logits_TE.new_empty(expert_TK.shape, **floats),
        stats_2T=logits_TE.new_empty((2, tokens), **floats),
        count_EJ=logits_TE.new_empty((experts, tiles.count), dtype=torch.int32),
        state=logits_TE.new_empty(size, dtype=torch.int64) if load else None,
        prob_EJ=logits_TE.new_empty((experts, tiles.count), **floats) if wants_prob else None,
        square_J=logits_TE.new_empty(tiles.count, **floats),
    )
    if not tiles.count:
        return choice
    block_e = _block(experts)
    launch(
        kernels.moe_choose_kernel,
        (tiles.count + (load is not None),),
        logits_TE,
        bias_E,
        *(load or (None, None)),
        choice.weight_TK,
        expert_TK,
        choice.state,
        choice.stats_2T,
        choice.count_EJ,
        choice.prob_EJ,
        choice.square_J,
        tokens,
        tiles.length,
        tiles.per_sequence,
        tiles.count,
        size,
        options.scale,
        E=experts,
        TOP_K=options.top_k,
        GROUPS=options.num_groups,
        TOP_GROUPS=options.top_groups,
        GROUP_TOP=min(options.group_top, experts // options.num_groups),
        SCORE=options.score,
        NORMALIZE=options.normalize,
        TILE_T=tiles.tile_tokens,
        BLOCK_T=max(1, min(tiles.tile_tokens, TILE_ELEMENTS // block_e)),
        BLOCK_E=block_e,
        BLOCK_K=next_power_of_2(options.top_k),
        BLOCK_G=next_power_of_2(options.num_groups),
    )
    return choice


def _sort(
    expert_TK: torch.Tensor,
    count_BJ: torch.Tensor,
    tiles: Tiling,
    num_experts: int,
    *,
    plain_EJ: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    prob_EJ: torch.Tensor | None = None,
    square_J: torch.Tensor | None = None,
    share_SE: torch.Tensor | None = None,
    shared: bool = False,
) -> Maps:
    """Prefix over tiles, then maps; ``shared``: ``share_SE`` was given, else it is written."""
    bins, top_k = count_BJ.shape[0], expert_TK.shape[1]
    base_JB = count_BJ.new_empty((tiles.count, bins))
    total_B = count_BJ.new_empty(bins)
    part_SE = None
    if prob_EJ is not None:
        part_SE = prob_EJ.new_empty((tiles.sequences, bins), dtype=torch.float64)
    maps = _empty_maps(expert_TK, count_BJ, num_experts)
    launch(
        sort_kernels.moe_prefix_kernel,
        ((bins + 1) * tiles.sequences,),
        count_BJ,
        plain_EJ,
        prob_EJ,
        share_SE if shared else None,
        square_J,
        state,
        base_JB,
        total_B,
        maps.demand_E,
        None if shared else share_SE,
        part_SE,
        maps.z_loss,
        maps.rerouted,
        tiles.tokens,
        tiles.length,
        tiles.per_sequence,
        tiles.count,
        BINS=bins,
        TOP_K=top_k,
        CHUNK=PREFIX_CHUNK,
    )
    _write_maps(maps, expert_TK, base_JB, total_B, part_SE, tiles)
    return maps


def _empty_maps(expert_TK: torch.Tensor, count_BJ: torch.Tensor, num_experts: int) -> Maps:
    rows = expert_TK.numel()
    scalars = count_BJ.new_empty((), dtype=torch.float32)
    return Maps(
        offsets_E1=count_BJ.new_empty(num_experts + 1),
        order_N=expert_TK.new_empty(rows, dtype=torch.int64),
        position_N=expert_TK.new_empty(rows, dtype=torch.int64),
        demand_E=expert_TK.new_empty(count_BJ.shape[0], dtype=torch.int64),
        rerouted=expert_TK.new_empty((), dtype=torch.int64),
        aux_loss=torch.empty_like(scalars),
        z_loss=scalars,
        schedule=count_BJ.new_empty((1 + schedule_room(rows, num_experts) + num_experts, 2)),
    )


def _write_maps(
    maps: Maps,
    expert_TK: torch.Tensor,
    base_JB: torch.Tensor,
    total_B: torch.Tensor,
    part_SE: torch.Tensor | None,
    tiles: Tiling,
) -> None:
    rows, top_k = expert_TK.numel(), expert_TK.shape[1]
    bins, num_experts = total_B.shape[0], maps.offsets_E1.shape[0] - 1
    block_b = _block(bins)
    room_t = TILE_ELEMENTS // block_b
    launch(
        sort_kernels.moe_maps_kernel,
        (num_experts + tiles.count,),
        expert_TK,
        base_JB,
        total_B,
        part_SE,
        maps.order_N,
        maps.position_N,
        maps.offsets_E1,
        maps.schedule,
        maps.aux_loss,
        tiles.length,
        tiles.per_sequence,
        tiles.count,
        schedule_room(rows, num_experts),
        tiles.sequences,
        E=num_experts,
        BINS=bins,
        TOP_K=top_k,
        TILE_T=tiles.tile_tokens,
        # A loop over blocks takes registers of its own.
        BLOCK_T=tiles.tile_tokens if tiles.tile_tokens <= room_t else max(1, room_t // 2),
        BLOCK_B=block_b,
        BLOCK_K=next_power_of_2(top_k),
    )
