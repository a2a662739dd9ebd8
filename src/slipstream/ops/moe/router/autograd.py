"""The router's products as custom ops, and their autograd function. Saved: both inputs."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.ahead import expecting
from slipstream.ops.custom import custom_op


def router_triton(
    x_TD: torch.Tensor, router_ED: torch.Tensor, with_x: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits, and the ``x`` to use elsewhere: see ``router_logits_and_x`` for ``with_x``."""
    x_TD, router_ED = x_TD.contiguous(), router_ED.contiguous()
    # The compiler loses the gradient of an output that is an input; without a gradient of x there
    # is nothing to add to.
    if with_x and x_TD.requires_grad and not torch.compiler.is_compiling():
        return _RouterWithX.apply(x_TD, router_ED)
    return _Router.apply(x_TD, router_ED), x_TD


class _Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_TD, router_ED)
        with expecting(_all_launches, x_TD, router_ED, None, ctx.needs_input_grad):
            return moe_router(x_TD, router_ED)

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return _backward(grads[0], ctx.saved_tensors, None, ctx.needs_input_grad)


class _RouterWithX(torch.autograd.Function):
    """Also returns x: the gradient that comes back for it is added in the kernel that makes dx."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, router_ED: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x_TD, router_ED)
        ctx.set_materialize_grads(False)
        with expecting(_all_launches, x_TD, router_ED, x_TD, ctx.needs_input_grad):
            return moe_router(x_TD, router_ED), x_TD

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        dlogits_TE, passed_TD = grads
        if dlogits_TE is None:
            return passed_TD, None
        return _backward(dlogits_TE, ctx.saved_tensors, passed_TD, ctx.needs_input_grad)


def _backward(
    dlogits_TE: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    passed_TD: torch.Tensor | None,
    needed: tuple[bool, ...],
) -> tuple[Any, ...]:
    x_TD, router_ED = saved
    if passed_TD is not None:
        passed_TD = passed_TD.contiguous()
    found = moe_router_backward(dlogits_TE.contiguous(), x_TD, router_ED, passed_TD, *needed)
    return tuple(grad if need else None for grad, need in zip(found, needed, strict=True))


def _all_launches(
    x_TD: torch.Tensor,
    router_ED: torch.Tensor,
    passed_TD: torch.Tensor | None,
    needed: tuple[bool, ...],
) -> None:
    """What forward and backward launch."""
    logits_TE = moe_router.function(x_TD, router_ED)
    if any(needed):
        moe_router_backward.function(logits_TE, x_TD, router_ED, passed_TD, *needed)


@custom_op("moe_router")
def moe_router(x_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    """fp32 logits ``(T, E)``."""
    from slipstream.ops.moe.router.launch import logits_launch  # noqa: PLC0415

    with torch.cuda.device_of(x_TD):
        return logits_launch(x_TD, router_ED)


@moe_router.register_fake
def _(x_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    return x_TD.new_empty((x_TD.shape[0], router_ED.shape[0]), dtype=torch.float32)


@custom_op("moe_router_backward")
def moe_router_backward(
    dlogits_TE: torch.Tensor,
    x_TD: torch.Tensor,
    router_ED: torch.Tensor,
    passed_TD: torch.Tensor | None,
    need_x: bool,
    need_router: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the tokens, ``passed_TD`` added, and of the router; empty if not needed."""
    from slipstream.ops.moe.router.launch import backward_launch  # noqa: PLC0415

    with torch.cuda.device_of(x_TD):
        return backward_launch(dlogits_TE, x_TD, router_ED, passed_TD, need_x, need_router)


@moe_router_backward.register_fake
def _(
    dlogits_TE: torch.Tensor,
    x_TD: torch.Tensor,
    router_ED: torch.Tensor,
    passed_TD: torch.Tensor | None,
    need_x: bool,
    need_router: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    dx_TD = torch.empty_like(x_TD) if need_x else x_TD.new_empty(0)
    return dx_TD, torch.empty_like(router_ED) if need_router else x_TD.new_empty(0)
