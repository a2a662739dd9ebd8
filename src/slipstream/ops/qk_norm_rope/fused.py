"""The Triton path of ``qk_norm_rope``, as custom ops that ``torch.compile`` treats as steps.

Triton is imported when an op first runs, so that importing Slipstream does not need it.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.custom import custom_op
from slipstream.ops.rope.options import QKNormOptions


def qk_norm_rope_triton(
    q_BLHC: torch.Tensor,
    k_BLGC: torch.Tensor,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    q_weight_C: torch.Tensor,
    k_weight_C: torch.Tensor,
    options: QKNormOptions,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same values as the reference; saves q, k and the tables."""
    # The compiler cannot pass one tensor twice to an autograd function.
    if k_BLGC is q_BLHC:
        k_BLGC = k_BLGC.view_as(k_BLGC)
    if k_weight_C is q_weight_C:
        k_weight_C = k_weight_C.view_as(k_weight_C)
    return _QKNormRope.apply(q_BLHC, k_BLGC, q_weight_C, k_weight_C, cos_LC, sin_LC, options)


@custom_op("qk_norm_rope")
def qk_norm_rope_forward(
    q_BLHC: torch.Tensor,
    k_BLGC: torch.Tensor,
    q_weight_C: torch.Tensor,
    k_weight_C: torch.Tensor,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    eps: float,
    cast: str,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both normalised and turned, contiguous."""
    from slipstream.ops.rope import launch  # noqa: PLC0415

    outputs = _like(q_BLHC), _like(k_BLGC)
    options = QKNormOptions(eps=eps, cast=cast, offset=offset)
    launch.turn(
        (q_BLHC, k_BLGC, None),
        (*outputs, None),
        (cos_LC, sin_LC),
        launch.Sizes.of(q_BLHC, k_BLGC),
        norm=launch.QKNorm(q_weight_C=q_weight_C, k_weight_C=k_weight_C, options=options),
    )
    return outputs


@qk_norm_rope_forward.register_fake
def _(
    q_BLHC: torch.Tensor,
    k_BLGC: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _like(q_BLHC), _like(k_BLGC)


@custom_op("qk_norm_rope_backward")
def qk_norm_rope_backward(
    dq_BLHC: torch.Tensor | None,
    dk_BLGC: torch.Tensor | None,
    q_BLHC: torch.Tensor,
    k_BLGC: torch.Tensor,
    q_weight_C: torch.Tensor,
    k_weight_C: torch.Tensor,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    eps: float,
    cast: str,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q and k, contiguous, and of both weights."""
    from slipstream.ops.rope import launch  # noqa: PLC0415

    dq, dk = _like(q_BLHC), _like(k_BLGC)
    options = QKNormOptions(eps=eps, cast=cast, offset=offset)
    dweights = launch.norm_backward(
        (dq_BLHC, dk_BLGC, None),
        (q_BLHC, k_BLGC),
        (dq, dk, None),
        (cos_LC, sin_LC),
        launch.Sizes.of(q_BLHC, k_BLGC),
        launch.QKNorm(q_weight_C=q_weight_C, k_weight_C=k_weight_C, options=options),
    )
    return dq, dk, *dweights


@qk_norm_rope_backward.register_fake
def _(
    dq_BLHC: torch.Tensor | None,
    dk_BLGC: torch.Tensor | None,
    q_BLHC: torch.Tensor,
    k_BLGC: torch.Tensor,
    q_weight_C: torch.Tensor,
    k_weight_C: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dweights = q_weight_C.new_empty(q_weight_C.shape), k_weight_C.new_empty(k_weight_C.shape)
    return _like(q_BLHC), _like(k_BLGC), *dweights


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BLHC: torch.Tensor,
        k_BLGC: torch.Tensor,
        q_weight_C: torch.Tensor,
        k_weight_C: torch.Tensor,
        cos_LC: torch.Tensor,
        sin_LC: torch.Tensor,
        options: QKNormOptions,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = q_BLHC, k_BLGC, q_weight_C, k_weight_C, cos_LC, sin_LC
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        ctx.options = options
        return qk_norm_rope_forward(*tensors, options.eps, options.cast, options.offset)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        if all(grad is None for grad in grads):
            return (None,) * 7
        saved, o = ctx.saved_tensors, ctx.options
        gradients = qk_norm_rope_backward(*grads, *saved, o.eps, o.cast, o.offset)
        return *gradients, None, None, None
