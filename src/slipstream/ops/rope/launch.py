"""Launches of the rope kernels: layouts, grids, allocation. Tensors are ``(B, L, heads, C)``."""

from dataclasses import dataclass

import torch

from slipstream.ops.norm.launch import sum_parts
from slipstream.ops.rope.kernels import qk_norm_rope_bwd_kernel, rope_kernel
from slipstream.ops.rope.options import QKNormOptions
from slipstream.ops.rope.tuned import Tile, lookup, programs
from slipstream.ops.triton_support import cdiv, next_power_of_2

MAX_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNorm:
    """Weights of the norms before the rotation, and their options."""

    q_weight_C: torch.Tensor
    k_weight_C: torch.Tensor
    options: QKNormOptions

    @classmethod
    def of(
        cls,
        q_weight_C: torch.Tensor | None,
        k_weight_C: torch.Tensor | None,
        eps: float,
        cast: str,
        offset: float,
    ) -> "QKNorm | None":
        """That of weights which may both be None: then None."""
        if q_weight_C is None or k_weight_C is None:
            return None
        options = QKNormOptions(eps=eps, cast=cast, offset=offset)
        return cls(q_weight_C=q_weight_C, k_weight_C=k_weight_C, options=options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What all tensors of a call share."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    width: int
    """C."""

    @classmethod
    def of(cls, q: torch.Tensor, k: torch.Tensor) -> "Sizes":
        """Those of q and k."""
        batch, length, heads, width = q.shape
        return cls(batch=batch, length=length, heads=heads, kv_heads=k.shape[2], width=width)

    @property
    def tokens(self) -> int:
        """B * L."""
        return self.batch * self.length


def turn(
    inputs: tuple[torch.Tensor | None, ...],
    outputs: tuple[torch.Tensor | None, ...],
    tables: tuple[torch.Tensor, torch.Tensor],
    sizes: Sizes,
    *,
    inverse: bool = False,
    norm: QKNorm | None = None,
    tile: Tile | None = None,
) -> None:
    """Write q and k turned (after ``norm``; back where ``inverse``), and v as it is.

    ``inputs`` and ``outputs`` are (q, k, v). An input None is zeros, an output None not wanted;
    the tokens of an output are equally far apart and their heads side by side.
    """
    like = next(t for t in outputs if t is not None)
    if not sizes.tokens:
        return
    q, k, v = (_side_by_side(t) for t in inputs)
    q_out, k_out, v_out = outputs
    cos, sin = (table.contiguous() for table in tables)
    tile = tile or lookup("turn", like)
    meta = _blocks(sizes.width, cos.shape[1], tile)
    q_blocks, k_blocks, v_blocks = (
        0 if out is None else cdiv(sizes.tokens * heads, meta["ROWS"])
        for out, heads in zip(outputs, (sizes.heads, sizes.kv_heads, sizes.kv_heads), strict=True)
    )
    options = norm.options if norm else None
    rope_kernel[(q_blocks + k_blocks + v_blocks,)](
        q, k, v, q_out, k_out, v_out, cos, sin,
        None if norm is None else norm.q_weight_C.contiguous(),
        None if norm is None else norm.k_weight_C.contiguous(),
        sizes.tokens, sizes.length, q_blocks, k_blocks, *_strides(q), *_strides(k), *_strides(v),
        float(options.eps) if options else 0.0, float(options.offset) if options else 0.0,
        H=sizes.heads, G=sizes.kv_heads, C=sizes.width, R=cos.shape[1],
        STRIDE_Q=_token_stride(q_out), STRIDE_K=_token_stride(v_out if k_out is None else k_out),
        INVERSE=inverse, LLAMA=bool(options and options.cast == "llama"),
        num_warps=tile.num_warps, **meta,
    )  # fmt: skip


def norm_backward(
    grads: tuple[torch.Tensor | None, ...],
    inputs: tuple[torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    tables: tuple[torch.Tensor, torch.Tensor],
    sizes: Sizes,
    norm: QKNorm,
    tile: Tile | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the gradients of (q, k, v) before norm and rotation; return those of both weights.

    The latter are summed over programs in fp32, in a fixed order, and rounded once.
    ``grads`` and ``outputs`` are (q, k, v), ``inputs`` (q, k); a gradient None is zeros.
    """
    dq, dk, _ = outputs
    weights = norm.q_weight_C.contiguous(), norm.k_weight_C.contiguous()
    dweights = weights[0].new_empty(sizes.width), weights[1].new_empty(sizes.width)
    if not sizes.tokens:
        return dweights[0].zero_(), dweights[1].zero_()
    dq_out, dk_out, dv_out = (_side_by_side(t) for t in grads)
    q, k = (_side_by_side(t) for t in inputs)
    cos, sin = (table.contiguous() for table in tables)
    tile = tile or lookup("norm_backward", dq)
    meta = _blocks(sizes.width, cos.shape[1], tile)
    q_blocks = cdiv(sizes.tokens * sizes.heads, meta["ROWS"])
    k_blocks = cdiv(sizes.tokens * sizes.kv_heads, meta["ROWS"])
    v_blocks = 0 if outputs[2] is None else k_blocks
    grid = min(programs(tile, dq), q_blocks + k_blocks + v_blocks)
    partial_P2C = dq.new_empty((grid, 2, sizes.width), dtype=torch.float32)
    qk_norm_rope_bwd_kernel[(grid,)](
        dq_out, dk_out, dv_out, q, k, *outputs, cos, sin, *weights, partial_P2C,
        sizes.tokens, sizes.length, q_blocks, k_blocks, v_blocks,
        *_strides(dq_out), *_strides(dk_out), *_strides(dv_out), *_strides(q), *_strides(k),
        float(norm.options.eps), float(norm.options.offset),
        H=sizes.heads, G=sizes.kv_heads, C=sizes.width, R=cos.shape[1],
        STRIDE_Q=_token_stride(dq), STRIDE_K=_token_stride(dk),
        LLAMA=norm.options.cast == "llama", STAGES=tile.num_stages,
        num_warps=tile.num_warps, maxnreg=tile.max_registers, **meta,
    )  # fmt: skip
    sum_parts(partial_P2C, *dweights)
    return dweights


def _blocks(width: int, pairs: int, tile: Tile) -> dict[str, int]:
    block_c = next_power_of_2(width)
    return {
        "ROWS": min(MAX_ROWS, max(1, tile.features // block_c)),
        "BLOCK_R": next_power_of_2(pairs),
        "BLOCK_P": next_power_of_2(max(1, width - 2 * pairs)),
        "BLOCK_C": block_c,
    }


def _side_by_side(x: torch.Tensor | None) -> torch.Tensor | None:
    """``x`` with features side by side: itself unless its layout has them apart."""
    return x if x is None or x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous()


def _strides(x: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def _token_stride(out: torch.Tensor | None) -> int:
    return 0 if out is None else out.stride(1)
