"""Maps for experts somebody else chose: another router, or another rank's."""

from typing import Any

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch
from slipstream.ops.dispatch import Refusal
from slipstream.ops.moe import checks
from slipstream.ops.moe.route import values
from slipstream.ops.moe.route.autograd import sort_triton
from slipstream.ops.moe.route.reference import sort_reference
from slipstream.ops.moe.routing import Routing
from slipstream.ops.triton_support import refusal


def routing_from(expert_TK: torch.Tensor, weight_TK: torch.Tensor, num_experts: int) -> Routing:
    """The routing of given experts ``expert_TK (T, K)`` and weights ``weight_TK (T, K)``.

    An id of ``num_experts`` or more is a slot of no expert: it sorts after all others, past
    ``offsets_E1[E]``, and the ops leave it out. A token may name an expert more than once. Weights
    are taken in fp32 and stay differentiable; losses are 0, demand counts the given slots.
    Negative ids: ConfigError, on a GPU as ``route`` does (else such a slot has no expert).
    No host synchronisation. Raises ShapeError.
    """
    check.shape("routing_from", "expert", expert_TK, None, None)
    checks.integer("routing_from", "expert", expert_TK)
    check.shape("routing_from", "weight", weight_TK, *expert_TK.shape)
    checks.floating("routing_from", weight=weight_TK)
    check.same_device("routing_from", expert=expert_TK, weight=weight_TK)
    if expert_TK.shape[1] < 1:
        raise ShapeError("routing_from: expert has 0 slots per token, expected 1 or more")
    if num_experts < 1:
        raise ShapeError(f"routing_from: num_experts = {num_experts}, expected 1 or more")
    values.not_negative("routing_from", "expert", expert_TK)
    weight_TK = weight_TK.to(check.compute_dtype(weight_TK))
    return dispatch.call("moe_sort", expert_TK.to(torch.int64), weight_TK, num_experts)


def _refuse(expert_TK: torch.Tensor, weight_TK: torch.Tensor, _: int) -> Refusal | None:
    # The kernels read the experts alone, so weights may be fp64.
    return refusal(weight_TK.float())


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    expert_TK = torch.randint(0, 4, (16, 2), device=device)
    return (expert_TK, torch.rand(16, 2, device=device, dtype=dtype), 4), {}


dispatch.register(
    "moe_sort",
    ("triton", sort_triton, _refuse),
    ("reference", sort_reference, None),
    example=_example,
)
