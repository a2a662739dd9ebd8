"""Router logits: tokens times the router's weight, in fp32 whatever the model computes in."""

from typing import Any

import torch

from slipstream.ops import check, dispatch
from slipstream.ops.dispatch import Refusal
from slipstream.ops.moe import checks
from slipstream.ops.moe.router.autograd import router_triton
from slipstream.ops.moe.router.reference import router_reference
from slipstream.ops.triton_support import refusal


def router_logits(x_TD: torch.Tensor, router_ED: torch.Tensor) -> torch.Tensor:
    """``x @ router^T``, fp32 ``(T, E)`` (fp64 for fp64 tokens), from tokens of any float dtype.

    ``x_TD (T, D)``, ``router_ED (E, D)``: near ties between experts are common, so products are
    exact in fp32 and summed in fp32, without a copy of ``x`` in fp32 where ``x`` is bf16. Autocast
    does not apply. Gradients: ``dx`` in the dtype of ``x``, the router's summed in fp32, in a fixed
    order. Raises ShapeError.
    """
    _check("router_logits", x_TD, router_ED)
    with checks.without_autocast(x_TD):
        return dispatch.call("moe_router", x_TD, router_ED)[0]


def router_logits_and_x(
    x_TD: torch.Tensor, router_ED: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``router_logits`` and ``x`` itself, for whatever else uses ``x`` to take it from here.

    The gradient that comes back for the second output is then added where the router's part of
    ``dx`` is made, in fp32 and rounded once: a pass over ``x`` less than if autograd adds the two.
    """
    _check("router_logits_and_x", x_TD, router_ED)
    with checks.without_autocast(x_TD):
        return dispatch.call("moe_router", x_TD, router_ED, True)


def _check(op: str, x_TD: torch.Tensor, router_ED: torch.Tensor) -> None:
    check.shape(op, "x", x_TD, None, None)
    check.shape(op, "router", router_ED, None, x_TD.shape[1])
    checks.floating(op, x=x_TD, router=router_ED)
    check.same_device(op, x=x_TD, router=router_ED)


def _refuse(x_TD: torch.Tensor, router_ED: torch.Tensor, _with_x: bool = False) -> Refusal | None:
    if x_TD.dtype != torch.bfloat16:
        return Refusal(reason=f"the kernels take bf16 tokens, not {x_TD.dtype}")
    # Interpreted, they multiply in fp32.
    return refusal(x_TD, products=False) or refusal(router_ED, products=False)


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    x_TD = torch.randn(16, 32, device=device, dtype=dtype)
    return (x_TD, torch.randn(8, 32, device=device, dtype=torch.float32)), {}


dispatch.register(
    "moe_router",
    ("triton", router_triton, _refuse),
    ("reference", router_reference, None),
    example=_example,
)

__all__ = ["router_logits", "router_logits_and_x"]
