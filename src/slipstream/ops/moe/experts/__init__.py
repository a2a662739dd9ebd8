"""The MLPs of all experts over tokens sorted by expert, for any token counts."""

from typing import Any

import torch

from slipstream.ops import check, dispatch
from slipstream.ops.activation import GATED, Activation
from slipstream.ops.dispatch import Refusal
from slipstream.ops.moe.experts.autograd import experts_grouped
from slipstream.ops.moe.experts.reference import experts_reference
from slipstream.ops.moe.route import route
from slipstream.ops.moe.routing import Routing

GROUPED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def experts(
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    routing: Routing,
    *,
    activation: str = "swiglu",
) -> torch.Tensor:
    """Run every token through its experts; returns rows sorted by expert, ``(N, D)``, N = T*K.

    ``x_TD (T, D)``; ``w13_EPD (E, P, D)`` with P = 2F, gate rows before up rows, for a gated
    activation and P = F otherwise; ``w2_EDF (E, D, F)``. Weights are cast to the dtype of ``x``.
    An expert without tokens gets zero gradients. Raises ShapeError.
    """
    check.choice("experts", "activation", activation, Activation)
    gated = activation in GATED
    check.shape("experts", "w2", w2_EDF, None, None, None)
    num_experts, width, hidden = w2_EDF.shape
    check.shape("experts", "x", x_TD, routing.expert_TK.shape[0], width)
    check.shape("experts", "w13", w13_EPD, num_experts, hidden * (2 if gated else 1), width)
    check.shape("experts", "routing.offsets", routing.offsets_E1, num_experts + 1)
    check.same_device("experts", x=x_TD, w13=w13_EPD, w2=w2_EDF, routing=routing.order_N)
    gating = GATED.get(activation, activation)
    return dispatch.call("moe_experts", x_TD, w13_EPD, w2_EDF, routing, gating, gated)


def _refuse_grouped(x_TD: torch.Tensor, *_: Any) -> Refusal | None:
    if x_TD.dtype not in GROUPED_DTYPES:
        return Refusal(reason=f"PyTorch's grouped product does not take {x_TD.dtype}")
    if x_TD.is_cuda and torch.cuda.get_device_capability(x_TD.device) < (8, 0):
        return Refusal(reason="PyTorch's grouped product needs compute capability 8.0")
    return None


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    x_TD = torch.randn(16, 32, device=device, dtype=dtype)
    w13_EPD = torch.randn(4, 128, 32, device=device, dtype=dtype)
    w2_EDF = torch.randn(4, 32, 64, device=device, dtype=dtype)
    routing = route(torch.randn(16, 4, device=device), top_k=2)
    return (x_TD, w13_EPD, w2_EDF, routing, "silu", True), {}


dispatch.register(
    "moe_experts",
    ("grouped_mm", experts_grouped, _refuse_grouped),
    ("reference", experts_reference, None),
    example=_example,
)

__all__ = ["experts"]
