"""The Triton path of ``qkv_rope``, as custom ops that ``torch.compile`` treats as steps.

v is a view in forward; backward writes the gradient of the whole projection in one kernel, which
reads those of q, k and v where they lie. Triton is imported when an op first runs.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.custom import custom_op
from slipstream.ops.qkv_rope.options import QKVOptions
from slipstream.ops.rope.options import QKNormOptions


def qkv_rope_triton(
    qkv_BLP: torch.Tensor,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    q_weight_C: torch.Tensor | None,
    k_weight_C: torch.Tensor | None,
    options: QKVOptions,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Same values as the reference; saves qkv where there is a norm, else the tables alone."""
    if k_weight_C is not None and k_weight_C is q_weight_C:
        k_weight_C = k_weight_C.view_as(k_weight_C)  # the compiler cannot pass one tensor twice
    return _QKVRope.apply(qkv_BLP, q_weight_C, k_weight_C, cos_LC, sin_LC, options)


@custom_op("qkv_rope")
def qkv_rope_forward(
    qkv_BLP: torch.Tensor,
    q_weight_C: torch.Tensor | None,
    k_weight_C: torch.Tensor | None,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    cast: str,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, contiguous."""
    from slipstream.ops.rope import launch  # noqa: PLC0415

    q, k, _ = _options(heads, kv_heads).split(qkv_BLP)
    outputs = q.new_empty(q.shape), k.new_empty(k.shape)
    launch.turn(
        (q, k, None),
        (*outputs, None),
        (cos_LC, sin_LC),
        launch.Sizes.of(q, k),
        norm=launch.QKNorm.of(q_weight_C, k_weight_C, eps, cast, offset),
    )
    return outputs


@qkv_rope_forward.register_fake
def _(
    qkv_BLP: torch.Tensor,
    q_weight_C: torch.Tensor | None,
    k_weight_C: torch.Tensor | None,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    cast: str,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, _ = _options(heads, kv_heads).split(qkv_BLP)
    return q.new_empty(q.shape), k.new_empty(k.shape)


@custom_op("qkv_rope_backward")
def qkv_rope_backward(
    dq_BLHC: torch.Tensor | None,
    dk_BLGC: torch.Tensor | None,
    dv_BLGC: torch.Tensor | None,
    qkv_BLP: torch.Tensor | None,
    q_weight_C: torch.Tensor | None,
    k_weight_C: torch.Tensor | None,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    cast: str,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of qkv and of both weights, the latter empty without a norm.

    ``qkv`` is None without a norm. Of the gradients of the outputs at least one is there.
    """
    from slipstream.ops.rope import launch  # noqa: PLC0415

    grads, options = (dq_BLHC, dk_BLGC, dv_BLGC), _options(heads, kv_heads)
    dqkv_BLP = _dqkv(grads, options)
    dq, dk, dv = options.split(dqkv_BLP)
    tables, sizes = (cos_LC, sin_LC), launch.Sizes.of(dq, dk)
    norm = launch.QKNorm.of(q_weight_C, k_weight_C, eps, cast, offset)
    if norm is None or qkv_BLP is None:
        launch.turn(grads, (dq, dk, dv), tables, sizes, inverse=True)
        return dqkv_BLP, dqkv_BLP.new_empty(0), dqkv_BLP.new_empty(0)
    inputs = options.split(qkv_BLP)[:2]
    dweights = launch.norm_backward(grads, inputs, (dq, dk, dv), tables, sizes, norm)
    return dqkv_BLP, *dweights


@qkv_rope_backward.register_fake
def _(
    dq_BLHC: torch.Tensor | None,
    dk_BLGC: torch.Tensor | None,
    dv_BLGC: torch.Tensor | None,
    qkv_BLP: torch.Tensor | None,
    q_weight_C: torch.Tensor | None,
    k_weight_C: torch.Tensor | None,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    cast: str,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dqkv_BLP = _dqkv((dq_BLHC, dk_BLGC, dv_BLGC), _options(heads, kv_heads))
    if q_weight_C is None or k_weight_C is None:
        return dqkv_BLP, dqkv_BLP.new_empty(0), dqkv_BLP.new_empty(0)
    return dqkv_BLP, q_weight_C.new_empty(q_weight_C.shape), k_weight_C.new_empty(k_weight_C.shape)


def _options(heads: int, kv_heads: int) -> QKVOptions:
    return QKVOptions(heads=heads, kv_heads=kv_heads, norm=None)


def _dqkv(grads: tuple[torch.Tensor | None, ...], options: QKVOptions) -> torch.Tensor:
    like = next(grad for grad in grads if grad is not None)
    batch, length, _, width = like.shape
    return like.new_empty(batch, length, (options.heads + 2 * options.kv_heads) * width)


class _QKVRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv_BLP: torch.Tensor,
        q_weight_C: torch.Tensor | None,
        k_weight_C: torch.Tensor | None,
        cos_LC: torch.Tensor,
        sin_LC: torch.Tensor,
        options: QKVOptions,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        saved = None if options.norm is None else qkv_BLP
        ctx.save_for_backward(saved, q_weight_C, k_weight_C, cos_LC, sin_LC)
        ctx.options = options
        numbers = _numbers(options)
        q, k = qkv_rope_forward(qkv_BLP, q_weight_C, k_weight_C, cos_LC, sin_LC, *numbers)
        return q, k, options.split(qkv_BLP)[2]

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return (None,) * 6
        saved, numbers = ctx.saved_tensors, _numbers(ctx.options)
        dqkv_BLP, *dweights = qkv_rope_backward(*grads, *saved, *numbers)
        if ctx.options.norm is None:
            return dqkv_BLP, None, None, None, None, None
        return dqkv_BLP, *dweights, None, None, None


def _numbers(options: QKVOptions) -> tuple[int, int, float, str, float]:
    norm = options.norm or QKNormOptions(eps=0.0, cast="llama", offset=0.0)
    return options.heads, options.kv_heads, norm.eps, norm.cast, norm.offset
