"""Mixture of Experts: ``route``, ``experts``, ``combine``; ``moe_mlp`` is the last two in one."""

from slipstream.ops.moe.combine import combine
from slipstream.ops.moe.experts import ExpertsOptions, experts
from slipstream.ops.moe.grouped_gemm import grouped_gemm
from slipstream.ops.moe.mlp import moe_mlp
from slipstream.ops.moe.route import route, routing_from
from slipstream.ops.moe.router import router_logits, router_logits_and_x
from slipstream.ops.moe.routing import Routing

__all__ = [
    "ExpertsOptions",
    "Routing",
    "combine",
    "experts",
    "grouped_gemm",
    "moe_mlp",
    "route",
    "router_logits",
    "router_logits_and_x",
    "routing_from",
]
