"""Buffers, grids and launches of the norm's kernels. Nothing here synchronises."""

import functools
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.ops.activation.launch import function_name
from slipstream.ops.norm import kernels, tuned, wide_kernels
from slipstream.ops.norm.options import NormOptions
from slipstream.ops.norm.tuned import Tile
from slipstream.ops.triton_support import cdiv


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What the forward keeps for the backward."""

    s: torch.Tensor | None
    """None where it is the activation of ``x``."""
    x: torch.Tensor | None
    """Before the activation; None without one."""
    stats: torch.Tensor
    weight_D: torch.Tensor
    bias_D: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the backward makes."""

    x: bool
    residual: bool
    """Its gradient where it is another than that of ``x``: after an activation."""
    weight: bool
    bias: bool
    y_dtype: torch.dtype | None
    """``y`` again in this dtype; None: not."""


def forward_launch(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    bias_D: torch.Tensor | None,
    residual: torch.Tensor | None,
    options: NormOptions,
    with_s: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``y``, ``s`` (empty unless ``with_s``) and, flat, 1 / sqrt(..) and mean of every row."""
    width, layer = x.shape[-1], options.kind == "layer"
    y, s = x.new_empty(x.shape), x.new_empty(x.shape if with_s else 0)
    num_rows = x.numel() // max(1, width)
    stats = x.new_empty(2 * num_rows if layer else num_rows, dtype=torch.float32)
    if not x.numel():
        return y, s, stats
    tile = _tile("forward", options.activation is not None and residual is None, x, residual)
    x, stride_x = _rows(x)
    extra, stride_extra = (None, None) if residual is None else _rows(residual)
    blocks = cdiv(num_rows, tile.block_t)
    kernel, grid = kernels.norm_fwd_kernel, _programs(tile, blocks, x.device)
    if tile.block_d < width:
        kernel, grid = wide_kernels.norm_wide_fwd_kernel, blocks
    kernel[(grid,)](
        x,
        extra,
        weight_D.contiguous(),
        None if bias_D is None else bias_D.contiguous(),
        y,
        s if with_s else None,
        stats,
        stride_x,
        stride_extra,
        num_rows,
        options.eps,
        options.offset or None,
        D=width,
        LAYER=layer,
        LLAMA=options.cast == "llama",
        ACTIVATION=options.activation and function_name(options.activation, x.dtype),
        BLOCK_T=tile.block_t,
        BLOCK_D=tile.block_d,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )
    return y, s, stats


def backward_launch(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    saved: Saved,
    options: NormOptions,
    wanted: Wanted,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x, residual, weight and bias, then ``y``: empty where not wanted."""
    like = saved.x if saved.s is None else saved.s
    assert like is not None
    width, weight_D, bias_D = like.shape[-1], saved.weight_D, saved.bias_D
    bias_dtype = weight_D.dtype if bias_D is None else bias_D.dtype
    dx = like.new_empty(like.shape if wanted.x else 0)
    dresidual = like.new_empty(like.shape if wanted.residual else 0)
    y = like.new_empty(like.shape if wanted.y_dtype else 0, dtype=wanted.y_dtype)
    dweight_D = weight_D.new_empty(width if wanted.weight else 0)
    dbias_D = weight_D.new_empty(width if wanted.bias else 0, dtype=bias_dtype)
    if not like.numel():
        return dx, dresidual, dweight_D.zero_(), dbias_D.zero_(), y
    tile = _tile("backward", saved.s is None, dy, ds, saved.s, saved.x)
    run = _wide_backward if tile.block_d < width else _backward
    outputs = [t if t.numel() else None for t in (dx, dresidual, y)]
    partial = run(dy, ds, saved, options, wanted, tile, outputs)
    if partial is not None:
        sum_parts(partial, dweight_D if wanted.weight else None, dbias_D if wanted.bias else None)
    return dx, dresidual, dweight_D, dbias_D, y


def _backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    saved: Saved,
    options: NormOptions,
    wanted: Wanted,
    tile: Tile,
    outputs: list[torch.Tensor | None],
) -> torch.Tensor | None:
    """One kernel; returns each program's sums for weight and bias."""
    tensors, numbers = _backward_arguments(dy, ds, saved, options)
    programs = _programs(tile, cdiv(numbers[-2], tile.block_t), dy.device)
    partial = _partial(saved, wanted, programs)
    kernels.norm_bwd_kernel[(programs,)](
        *tensors,
        *outputs,
        partial,
        *numbers,
        LLAMA=options.cast == "llama",
        **_constants(saved, options),
        DWEIGHT=wanted.weight,
        DBIAS=wanted.bias,
        BLOCK_T=tile.block_t,
        BLOCK_D=tile.block_d,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
        maxnreg=tile.max_registers,
    )
    return partial


def _wide_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    saved: Saved,
    options: NormOptions,
    wanted: Wanted,
    tile: Tile,
    outputs: list[torch.Tensor | None],
) -> torch.Tensor | None:
    """One kernel by rows and one by columns; returns the latter's sums."""
    tensors, numbers = _backward_arguments(dy, ds, saved, options)
    *strides, num_rows, _ = numbers
    constants = _constants(saved, options)
    if any(output is not None for output in outputs):
        wide_kernels.norm_wide_bwd_kernel[(cdiv(num_rows, tile.block_t),)](
            *tensors,
            *outputs,
            *numbers,
            LLAMA=options.cast == "llama",
            **constants,
            BLOCK_T=tile.block_t,
            BLOCK_D=tile.block_d,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
            maxnreg=tile.max_registers,
        )
    tile = tuned.lookup_columns("weight", _capability(dy.device))
    columns = cdiv(constants["D"], tile.block_d)
    programs = _programs(tile, columns * cdiv(num_rows, tile.block_t), dy.device)
    splits = max(1, programs // columns)
    partial = _partial(saved, wanted, splits)
    if partial is not None:
        dy, _, s, x, _, _, stats = tensors
        wide_kernels.norm_wide_bwd_weight_kernel[(columns, splits)](
            dy,
            s,
            x,
            stats,
            partial,
            strides[0],
            *strides[2:],
            num_rows,
            **constants,
            DWEIGHT=wanted.weight,
            DBIAS=wanted.bias,
            BLOCK_T=tile.block_t,
            BLOCK_D=tile.block_d,
            STAGES=tile.num_stages,
            num_warps=tile.num_warps,
        )
    return partial


def _backward_arguments(
    dy: torch.Tensor, ds: torch.Tensor | None, saved: Saved, options: NormOptions
) -> tuple[list[Any], list[Any]]:
    """The tensors that a backward kernel reads; strides of rows, number of rows and offset."""
    weight_D, bias_D = saved.weight_D, saved.bias_D
    laid_out = [(None, None) if t is None else _rows(t) for t in (dy, ds, saved.s, saved.x)]
    tensors = [
        *(tensor for tensor, _ in laid_out),
        weight_D.contiguous(),
        None if bias_D is None else bias_D.contiguous(),
        saved.stats,
    ]
    num_rows = dy.numel() // dy.shape[-1]
    return tensors, [*(stride for _, stride in laid_out), num_rows, options.offset or None]


def _constants(saved: Saved, options: NormOptions) -> dict[str, Any]:
    activation = options.activation
    if activation is not None:
        assert saved.x is not None
        activation = function_name(activation, saved.x.dtype)
    return {
        "D": saved.weight_D.shape[0],
        "LAYER": options.kind == "layer",
        "ACTIVATION": activation,
    }


def _partial(saved: Saved, wanted: Wanted, parts: int) -> torch.Tensor | None:
    sums, weight_D = wanted.weight + wanted.bias, saved.weight_D
    if not sums:
        return None
    return weight_D.new_empty((parts, sums, weight_D.shape[0]), dtype=torch.float32)


def sum_parts(
    partial: torch.Tensor, dweight_D: torch.Tensor | None, dbias_D: torch.Tensor | None
) -> None:
    """Sum ``partial (parts, sums, D)`` over its parts, in order, into one or two vectors."""
    parts, sums, width = partial.shape
    tile = tuned.lookup_columns("sum", _capability(partial.device))
    kernels.norm_sum_kernel[(cdiv(width, tile.block_d), sums)](
        partial,
        dweight_D,
        dbias_D,
        parts,
        D=width,
        BLOCK_P=tile.block_t,
        BLOCK_D=tile.block_d,
        STAGES=tile.num_stages,
        num_warps=tile.num_warps,
    )


def _rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
    """``tensor``, and the distance of its rows where that is not D.

    Copied where rows are not all at one distance.
    """
    if not tensor.is_contiguous():
        if tensor.dim() == 2 and tensor.stride(1) == 1:
            return tensor, tensor.stride(0)
        tensor = tensor.contiguous()
    return tensor, None


def _tile(direction: tuned.Direction, activated: bool, *loaded: torch.Tensor | None) -> Tile:
    """The tile for the tensors that are loaded; ``activated``: what is normalised is made here."""
    tensors = [tensor for tensor in loaded if tensor is not None]
    sizes = [tensor.element_size() for tensor in tensors]
    capability, width = _capability(tensors[0].device), tensors[0].shape[-1]
    activated = activated and max(sizes) == 2
    return tuned.lookup(direction, capability, width, sum(sizes), activated)


@functools.cache
def _capability(device: torch.device) -> int:
    return tuned.capability_of(device)


@functools.cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _programs(tile: Tile, blocks: int, device: torch.device) -> int:
    if not tile.programs_per_sm:
        return blocks
    return min(blocks, tile.programs_per_sm * _processors(device))
