"""Hugging Face transformers: Slipstream's experts in the MoE models of transformers 5.

Importing this module registers the experts implementation ``slipstream``; it is used where asked
for: ``model.set_experts_implementation("slipstream")`` or ``from_pretrained(...,
experts_implementation="slipstream")``. Routers, shared experts and weights stay those of the model.
"""

import warnings
from typing import Any

import torch

from slipstream.errors import DependencyError, ShapeError
from slipstream.integrations.hf_experts import read_gate
from slipstream.ops import moe
from slipstream.ops.activation import ALPHA, LIMIT
from slipstream.ops.moe import Routing

try:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise DependencyError(
        "slipstream.integrations.hf needs transformers 5; pip install 'slipstream-train[hf]'"
    ) from error

NAME = "slipstream"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def experts_forward(
    module: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The forward of an experts module of transformers, ``(T, D)`` in and out.

    ``hidden_states (T, D)``, ``top_k_index (T, K)``, ``top_k_weights (T, K)``; expert ids from
    ``module.num_experts`` on (those of other ranks) add nothing. Gates of ``moe_mlp``, plain or
    clamped SwiGLU and GeGLU, concatenated or interleaved, and plain activations run as one op; any
    other gate, and a norm after the experts, run between two grouped products. Sums over the
    experts of a token are fp32. Raises ShapeError.
    """
    up_name = "gate_up_proj" if module.has_gate else "up_proj"
    w13, w2 = _weight(module, up_name), _weight(module, "down_proj")
    b13 = getattr(module, f"{up_name}_bias") if module.has_bias else None
    b2 = module.down_proj_bias if module.has_bias else None
    routing = moe.routing_from(top_k_index, top_k_weights, module.num_experts)
    gate = None if _has_norm(module) else read_gate(module)
    if gate is None:
        _warn_stepwise(type(module))
        out = _stepwise(module, hidden_states, w13, w2, b13, b2, routing)
    else:
        out = moe.moe_mlp(
            hidden_states,
            w13,
            w2,
            routing,
            activation=gate.activation,
            b13_EP=b13,
            b2_ED=b2,
            interleaved=gate.interleaved,
            alpha=ALPHA if gate.alpha is None else float(getattr(module, gate.alpha)),
            limit=LIMIT if gate.limit is None else float(getattr(module, gate.limit)),
        )
    return out.to(hidden_states.dtype)


def _weight(module: Any, name: str) -> torch.Tensor:
    """The weight ``(E, out, in)``, a view where the module stores it the other way round."""
    weight = getattr(module, name)
    if weight.dtype not in DTYPES:
        raise ShapeError(
            f"{type(module).__name__}.{name} has dtype {weight.dtype}, the experts implementation "
            f'"{NAME}" takes float64, float32, bfloat16, float16; load the model unquantised'
        )
    return weight.mT if module.is_transposed else weight


def _has_norm(module: Any) -> bool:
    return getattr(module, "has_post_expert_norm", False)


def _stepwise(
    module: Any,
    x_TD: torch.Tensor,
    w13_EPD: torch.Tensor,
    w2_EDF: torch.Tensor,
    b13_EP: torch.Tensor | None,
    b2_ED: torch.Tensor | None,
    routing: Routing,
) -> torch.Tensor:
    """The module's own gate, and norm, between two grouped products."""
    edges = routing.offsets_E1
    # Past the last edge a product leaves memory as it is; zeros keep it out of gradients.
    present_N1 = (torch.arange(len(routing.order_N), device=x_TD.device) < edges[-1])[:, None]

    def project(
        rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        product = moe.grouped_gemm(rows, weight, edges)
        if bias is not None:
            ones = product.new_ones(len(product), 1)
            product = product + moe.grouped_gemm(ones, bias[:, :, None], edges)
        return torch.where(present_N1, product, 0)

    h_NP = project(x_TD[routing.order_N // routing.top_k], w13_EPD, b13_EP)
    a_NF = module._apply_gate(h_NP) if module.has_gate else module.act_fn(h_NP)
    y_ND = project(a_NF, w2_EDF, b2_ED)
    return moe.combine(module.post_expert_norm(y_ND) if _has_norm(module) else y_ND, routing)


_STEPWISE: set[type] = set()


def _warn_stepwise(experts: type) -> None:
    if experts in _STEPWISE:
        return
    _STEPWISE.add(experts)
    warnings.warn(
        f'{experts.__name__}: the experts implementation "{NAME}" runs the activation of this '
        "family as two grouped products and PyTorch between them, which is slower than one op; "
        "wrap the model in torch.compile",
        RuntimeWarning,
        stacklevel=3,
    )


# What torch.compiler.assume_constant_result sets, without importing the compiler.
_warn_stepwise._dynamo_marked_constant = True  # type: ignore[attr-defined]

ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
