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


def draw_pre_activation(kind: str, *shape: int, fused: bool, generator: torch.Generator) -> Results:
    """``x``, and ``up`` unless ``kind`` has none or both are one tensor."""
    if kind not in GATED:
        return {"x": torch.randn(shape, generator=generator)}
    if fused:
        return {"x": torch.randn(*shape[:-1], 2 * shape[-1], generator=generator)}
    return {name: torch.randn(shape, generator=generator) for name in ("x", "up")}


def eager_activation(kind: str, x: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
    """Any activation as model code has it."""
    if kind not in GATED:
        return EAGER[kind](x)
    gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
    return eager_gated(kind, gate, up, ALPHA, LIMIT)


def _case(kind: str, *shape: int, fused: bool = False, pool: int = 1) -> Case:
    return Case(
        name=f"{kind}-{'x'.join(map(str, shape))}{'-fused' if fused else ''}",
        inputs=lambda generator: draw_pre_activation(
            kind, *shape, fused=fused, generator=generator
        ),
        call=lambda **t: activation(**t, kind=kind, alpha=ALPHA, limit=LIMIT),
        eager=lambda **t: eager_activation(kind, **t),
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case("swiglu", 63, 257),
        *(_case(kind, 63, 65) for kind in (*EAGER, "swiglu_clamped") if kind != "swiglu"),
        _case("swiglu", 2, 31, 64, fused=True),
        _case("swiglu_clamped", 9, 257, fused=True),
        _case("swiglu", 1, 63, pool=16),
        _case("gelu", 2, 3, 64),
        _case("swiglu", 0, 64),
    ]
    if scale == "large":
        found += [_case("swiglu", 4099, 1024), _case("geglu", 4099, 1408, fused=True)]
    return found


SUITE = Suite(op="activation", cases=_cases)
