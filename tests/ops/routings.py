"""Routings with known shapes of load, and random inputs of experts for them."""

from dataclasses import dataclass

import torch

from slipstream.ops.activation import is_gated
from slipstream.ops.moe import Routing
from slipstream.verify import routings
from slipstream.verify.routings import Load, draw_experts
from tests.budget import Results

LOADS: list[Load] = ["random", "one-takes-all", "empty-experts", "absent"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a call of the experts."""

    T: int = 63
    D: int = 32
    F: int = 24
    E: int = 5
    K: int = 2

    def __str__(self) -> str:
        return f"T{self.T}-D{self.D}-F{self.F}-E{self.E}-K{self.K}"


SHAPES = [
    Shape(T=257, D=31, F=17, E=7),  # nothing a multiple of anything
    Shape(K=1),
    Shape(E=3, K=3),  # every token uses every expert
    Shape(E=1, K=1),
    Shape(T=5, E=24, K=4),  # more experts than rows
    Shape(T=150, D=200, F=136, E=2),  # more than one tile, and the last one not full
]


def routing_of(load: Load, tokens: int, num_experts: int, top_k: int) -> Routing:
    """Random weights and experts; see ``draw_experts`` for the loads."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    expert_TK = draw_experts(generator, tokens, num_experts, top_k, load)
    return routings.routing_of(expert_TK, num_experts, torch.rand(tokens, top_k))


def draw(shape: Shape, activation: str = "swiglu", *, bias: bool = False) -> Results:
    """``x``, weights and biases.

    The up projection's biases lie far outside a clamp or well within: what a value near its edge
    gets is decided by rounding, in any implementation.
    """
    rows = shape.F * (2 if is_gated(activation) else 1)
    inputs = {
        "x": torch.randn(shape.T, shape.D),
        "w13": torch.randn(shape.E, rows, shape.D) / shape.D**0.5,
        "w2": torch.randn(shape.E, shape.D, shape.F) / shape.F**0.5,
    }
    if bias:
        inputs["b13"] = 14.0 * torch.randint(-1, 2, (shape.E, rows)) + torch.rand(shape.E, rows)
        inputs["b2"] = torch.randn(shape.E, shape.D)
    return inputs


def small_integers(shape: Shape, *, bias: bool) -> Results:
    """Inputs of ungated experts for which every product and sum below 2^24 is exact in fp32."""
    sizes = {"x": (shape.T, shape.D), "w13": (shape.E, shape.F, shape.D)}
    sizes["w2"] = (shape.E, shape.D, shape.F)
    if bias:
        sizes |= {"b13": (shape.E, shape.F), "b2": (shape.E, shape.D)}
    return {name: torch.randint(-1, 2, size).float() for name, size in sizes.items()}
