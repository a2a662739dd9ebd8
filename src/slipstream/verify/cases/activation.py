"""The activations, gated and plain."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from slipstream.ops import activation
from slipstream.verify.budget import Results
from slipstream.verify.case import Case, Scale, Suite

EAGER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}
GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_clamped")
ALPHA, LIMIT = 1.702, 1.0


def eager_gated(
    kind: str, gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float
) -> torch.Tensor:
    """A gated activation as model code has it."""
    if kind != "swiglu_clamped":
        return EAGER[kind](gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def _case(kind: str, *shape: int, pool: int = 1) -> Case:
    gated = kind in GATED

    def draw(generator: torch.Generator) -> Results:
        drawn = {"x": torch.randn(shape, generator=generator)}
        return drawn | ({"up": torch.randn(shape, generator=generator)} if gated else {})

    def eager(x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        return EAGER[kind](x) if up is None else eager_gated(kind, x, up, ALPHA, LIMIT)

    return Case(
        name=f"{kind}-{'x'.join(map(str, shape))}",
        inputs=draw,
        call=lambda **t: activation(**t, kind=kind, alpha=ALPHA, limit=LIMIT),
        eager=eager,
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case("swiglu", 63, 257),
        *(_case(kind, 63, 65) for kind in (*EAGER, "swiglu_clamped") if kind != "swiglu"),
        _case("swiglu", 1, 63, pool=16),
        _case("gelu", 2, 3, 64),
        _case("swiglu", 0, 64),
    ]
    if scale == "large":
        found.append(_case("swiglu", 4099, 1024))
    return found


SUITE = Suite(op="activation", cases=_cases)
