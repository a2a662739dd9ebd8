"""The Triton path as custom ops, and its autograd functions.

Sums: gradients are made with the loss, while a chunk's logits exist, and backward multiplies them
by one number. They are handed out once; a second backward computes them again from the saved
inputs. Per-token losses: any gradient may come, so backward computes the logits again.
"""

from typing import Any

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd.function import once_differentiable

from slipstream.ops.custom import custom_op
from slipstream.ops.linear_cross_entropy.options import LossOptions, Sums, sums_of

_T = torch.Tensor
Tokens = tuple[_T, _T]
Made = tuple[_T, _T, _T, _T, _T, _T]
"""objective, nll, z, tokens, and the gradients of x and w."""


def loss_triton(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    options: LossOptions,
    sums: bool,
    accumulate: torch.Tensor | None,
) -> Tokens | Sums:
    """Loss and logsumexp of every token, or the sums."""
    targets_T = targets_T.contiguous()
    if sums and _makes_gradients(x_TD, w_VD):
        if torch.compiler.is_compiling():
            return _CompiledSums.apply(x_TD, w_VD, targets_T, options)
        return _Sums.apply(x_TD, w_VD, targets_T, options, accumulate)
    loss_T, lse_T = _Tokens.apply(x_TD, w_VD, targets_T, options, accumulate)
    return sums_of(loss_T, lse_T, targets_T, options) if sums else (loss_T, lse_T)


def _makes_gradients(x_TD: torch.Tensor, w_VD: torch.Tensor) -> bool:
    """Whether forward should make them: not where it will be run again before backward."""
    wanted = torch.is_grad_enabled() and (x_TD.requires_grad or w_VD.requires_grad)
    return wanted and (torch.compiler.is_compiling() or not _checkpointed())


def _checkpointed() -> bool:
    # A non-reentrant checkpoint runs both times with gradients enabled.
    hooks = _top_saved_tensors_default_hooks(False)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"


class _Sums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        options: LossOptions,
        accumulate: torch.Tensor | None,
    ) -> Sums:
        objective, nll, z, tokens, *made = linear_cross_entropy_gradients(
            x_TD, w_VD, targets_T, *_plain(options), options.z_loss, *ctx.needs_input_grad[:2]
        )
        ctx.save_for_backward(x_TD, w_VD, targets_T)
        # No saved tensors: handed out and changed in place, which these must not be.
        ctx.made = made
        ctx.options, ctx.accumulate, ctx.dtype = options, accumulate, w_VD.dtype
        ctx.mark_non_differentiable(nll, z, tokens)
        return objective, nll, z, tokens

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        from slipstream.ops.linear_cross_entropy.launch import scale_launch  # noqa: PLC0415

        made, ctx.made = ctx.made, None
        (dx_TD, dw_VD), (need_x, need_w) = made or _again(ctx), ctx.needs_input_grad[:2]
        factor = grads[0].contiguous()
        with torch.cuda.device_of(dx_TD):
            dx_TD = scale_launch(dx_TD, dx_TD, factor) if need_x else None
            if not need_w:
                return dx_TD, None, None, None, None
            if ctx.accumulate is not None:
                scale_launch(dw_VD, ctx.accumulate, factor, add=True)
                return dx_TD, None, None, None, None
            same = ctx.dtype == dw_VD.dtype
            out_VD = dw_VD if same else torch.empty_like(dw_VD, dtype=ctx.dtype)
            return dx_TD, scale_launch(dw_VD, out_VD, factor), None, None, None


def _again(ctx: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients that forward made, from the saved inputs."""
    tensors, options = ctx.saved_tensors, ctx.options
    with _no_autocast(tensors[0]):
        *_, dx_TD, dw_VD = linear_cross_entropy_gradients(
            *tensors, *_plain(options), options.z_loss, *ctx.needs_input_grad[:2]
        )
    return dx_TD, dw_VD


class _CompiledSums(torch.autograd.Function):
    """For the compiler: what was made is saved, and backward scales copies of it."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        options: LossOptions,
    ) -> Sums:
        objective, nll, z, tokens, dx_TD, dw_VD = linear_cross_entropy_gradients(
            x_TD, w_VD, targets_T, *_plain(options), options.z_loss, *ctx.needs_input_grad[:2]
        )
        ctx.save_for_backward(dx_TD, dw_VD)
        ctx.dtypes = x_TD.dtype, w_VD.dtype
        ctx.mark_non_differentiable(nll, z, tokens)
        return objective, nll, z, tokens

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        scaled = [
            (made.float() * grads[0]).to(dtype) if needed else None
            for made, dtype, needed in zip(
                ctx.saved_tensors, ctx.dtypes, ctx.needs_input_grad[:2], strict=True
            )
        ]
        return (*scaled, None, None)


class _Tokens(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        w_VD: torch.Tensor,
        targets_T: torch.Tensor,
        options: LossOptions,
        accumulate: torch.Tensor | None,
    ) -> Tokens:
        loss_T, lse_T, softmax_2T = linear_cross_entropy_tokens(
            x_TD, w_VD, targets_T, *_plain(options)
        )
        ctx.save_for_backward(x_TD, w_VD, targets_T, softmax_2T)
        ctx.options, ctx.accumulate = options, accumulate
        return loss_T, lse_T

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        dloss_T, dlse_T = (grad.contiguous() for grad in grads)
        found = _backward(
            ctx.saved_tensors, dloss_T, dlse_T, ctx.options, ctx.needs_input_grad, ctx.accumulate
        )
        return (*found, None, None, None)


def _backward(
    saved: tuple[torch.Tensor, ...],
    dloss_T: torch.Tensor,
    dlse_T: torch.Tensor,
    options: LossOptions,
    needed: tuple[bool, ...],
    accumulate: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    need_x, need_w = needed[:2]
    x_TD, w_VD, targets_T, softmax_2T = saved
    arguments = x_TD, w_VD, targets_T, softmax_2T, dloss_T, dlse_T
    if accumulate is not None:
        from slipstream.ops.linear_cross_entropy.launch import backward_launch  # noqa: PLC0415

        with torch.cuda.device_of(dloss_T), _no_autocast(dloss_T):
            dx_TD, _ = backward_launch(*arguments, options, need_x, need_w, accumulate)
        return (dx_TD if need_x else None), None
    dx_TD, dw_VD = linear_cross_entropy_backward(*arguments, *_plain(options), need_x, need_w)
    return (dx_TD if need_x else None), (dw_VD if need_w else None)


def _plain(options: LossOptions) -> tuple[int, float, float | None]:
    return options.ignore_index, options.label_smoothing, options.softcap


def _options(
    ignore_index: int, label_smoothing: float, softcap: float | None, z_loss: float = 0.0
) -> LossOptions:
    return LossOptions(
        ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss
    )


def _no_autocast(tensor: torch.Tensor) -> torch.autocast:
    # Backward may be called under it; the products are in the dtype forward chose.
    return torch.autocast(tensor.device.type, enabled=False)


@custom_op("linear_cross_entropy_tokens")
def linear_cross_entropy_tokens(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss (0 where ignored) and logsumexp of every token, fp32, and what backward reads."""
    from slipstream.ops.linear_cross_entropy.launch import forward_launch  # noqa: PLC0415

    options = _options(ignore_index, label_smoothing, softcap)
    with torch.cuda.device_of(x_TD):
        return forward_launch(x_TD, w_VD, targets_T, options)


@linear_cross_entropy_tokens.register_fake
def _(x_TD: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    loss_T = x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)
    return loss_T, torch.empty_like(loss_T), loss_T.new_empty(2, x_TD.shape[0])


@custom_op("linear_cross_entropy_gradients")
def linear_cross_entropy_gradients(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    need_x: bool,
    need_w: bool,
) -> Made:
    """The four sums and the gradients of the objective, that of w in fp32."""
    from slipstream.ops.linear_cross_entropy.launch import gradients_launch  # noqa: PLC0415

    options = _options(ignore_index, label_smoothing, softcap, z_loss)
    with torch.cuda.device_of(x_TD):
        sums, dx_TD, dw_VD = gradients_launch(x_TD, w_VD, targets_T, options, need_x, need_w)
    return (*sums, dx_TD, dw_VD)


@linear_cross_entropy_gradients.register_fake
def _(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    need_x: bool,
    need_w: bool,
) -> Made:
    objective, nll, z = (x_TD.new_empty((), dtype=torch.float32) for _ in range(3))
    dx_TD = x_TD.new_empty(x_TD.shape if need_x else (0,))
    dw_VD = w_VD.new_empty(w_VD.shape if need_w else (0,), dtype=torch.float32)
    return objective, nll, z, targets_T.new_empty(()), dx_TD, dw_VD


@custom_op("linear_cross_entropy_backward")
def linear_cross_entropy_backward(
    x_TD: torch.Tensor,
    w_VD: torch.Tensor,
    targets_T: torch.Tensor,
    softmax_2T: torch.Tensor,
    dloss_T: torch.Tensor,
    dlse_T: torch.Tensor,
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    need_x: bool,
    need_w: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and w in their dtypes; empty if not needed."""
    from slipstream.ops.linear_cross_entropy.launch import backward_launch  # noqa: PLC0415

    options = _options(ignore_index, label_smoothing, softcap)
    with torch.cuda.device_of(x_TD), _no_autocast(x_TD):
        dx_TD, dw_VD = backward_launch(
            x_TD, w_VD, targets_T, softmax_2T, dloss_T, dlse_T, options, need_x, need_w
        )
    return dx_TD, dw_VD.to(w_VD.dtype)


@linear_cross_entropy_backward.register_fake
def _(x_TD: torch.Tensor, w_VD: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    need_x, need_w = rest[-2:]
    dx_TD = x_TD.new_empty(x_TD.shape if need_x else (0,))
    return dx_TD, w_VD.new_empty(w_VD.shape if need_w else (0,))
