"""Routings with known shapes of load, and stock experts to be measured against."""

import torch
import torch.nn.functional as F

from slipstream.ops.moe import Routing, route

ACTIVATIONS = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}
GATED = ["swiglu", "geglu", "geglu_tanh"]

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


def stock_experts(routing: Routing, activation: str = "swiglu"):
    """A loop over experts in the dtype of the inputs, as stock code has it."""

    def run(x, w13, w2):
        rows = x[routing.order_N // routing.top_k]
        outputs = []
        for e, part in enumerate(rows.split(routing.counts_E.tolist())):
            h = part @ w13[e].T
            gate, up = h.chunk(2, dim=-1) if activation in GATED else (h, 1)
            outputs.append((ACTIVATIONS[activation](gate) * up) @ w2[e].T)
        return torch.cat(outputs)

    return run
