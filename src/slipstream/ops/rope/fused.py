"""The Triton path of ``rope``, as a custom op that ``torch.compile`` treats as one step.

Triton is imported when the op first runs, so that importing Slipstream does not need it.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.custom import custom_op, or_empty


def rope_triton(
    q_BLHC: torch.Tensor, k_BLGC: torch.Tensor, cos_LC: torch.Tensor, sin_LC: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same values as the reference; saves the tables alone."""
    if k_BLGC is q_BLHC:
        k_BLGC = k_BLGC.view_as(k_BLGC)  # the compiler cannot pass one tensor twice
    return _Rope.apply(q_BLHC, k_BLGC, cos_LC, sin_LC)


@custom_op("rope")
def rope_turn(
    q_BLHC: torch.Tensor | None,
    k_BLGC: torch.Tensor | None,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both turned, or turned back; contiguous, empty for None."""
    from slipstream.ops.rope import launch  # noqa: PLC0415

    like = k_BLGC if q_BLHC is None else q_BLHC
    assert like is not None
    sizes = launch.Sizes(
        batch=like.shape[0],
        length=like.shape[1],
        heads=1 if q_BLHC is None else q_BLHC.shape[2],
        kv_heads=1 if k_BLGC is None else k_BLGC.shape[2],
        width=like.shape[3],
    )
    outputs = _like(q_BLHC), _like(k_BLGC)
    launch.turn((q_BLHC, k_BLGC, None), (*outputs, None), (cos_LC, sin_LC), sizes, inverse=inverse)
    return or_empty(outputs[0], cos_LC), or_empty(outputs[1], cos_LC)


@rope_turn.register_fake
def _(
    q_BLHC: torch.Tensor | None,
    k_BLGC: torch.Tensor | None,
    cos_LC: torch.Tensor,
    sin_LC: torch.Tensor,
    inverse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return or_empty(_like(q_BLHC), cos_LC), or_empty(_like(k_BLGC), cos_LC)


def _like(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BLHC: torch.Tensor,
        k_BLGC: torch.Tensor,
        cos_LC: torch.Tensor,
        sin_LC: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos_LC, sin_LC)
        return rope_turn(q_BLHC, k_BLGC, cos_LC, sin_LC, False)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        dq_out, dk_out = grads
        cos_LC, sin_LC = ctx.saved_tensors
        if dq_out is None and dk_out is None:
            return None, None, None, None
        dq, dk = rope_turn(dq_out, dk_out, cos_LC, sin_LC, True)
        return None if dq_out is None else dq, None if dk_out is None else dk, None, None
