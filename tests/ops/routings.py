"""Routings with known shapes of load, for the ops that come after routing."""

import torch

from slipstream.ops.moe import Routing, route

LOADS = ["random", "one-takes-all", "empty-experts"]


def routing_of(load: str, tokens: int, num_experts: int, top_k: int) -> Routing:
    """``one-takes-all``: the last expert gets every token; ``empty-experts``: odd ones get none."""
    logits_TE = torch.randn(tokens, num_experts)
    if load == "one-takes-all":
        logits_TE[:, -1] += 100
        top_k = 1
    if load == "empty-experts":
        logits_TE[:, 1::2] -= 100
    return route(logits_TE, top_k=top_k)
