"""An activation and the linear layer after it."""

import torch
import torch.nn.functional as F

from slipstream.ops import activation_linear
from slipstream.verify.budget import Results
from slipstream.verify.case import Case, Scale, Suite
from slipstream.verify.cases.activation import (
    ALPHA,
    LIMIT,
    draw_pre_activation,
    eager_activation,
)


def _case(
    kind: str, *shape: int, out: int, fused: bool = False, bias: bool = False, pool: int = 1
) -> Case:
    def draw(generator: torch.Generator) -> Results:
        drawn = draw_pre_activation(kind, *shape, fused=fused, generator=generator)
        drawn["w_DF"] = torch.randn(out, shape[-1], generator=generator) * shape[-1] ** -0.5
        if bias:
            drawn["bias_D"] = torch.randn(out, generator=generator)
        return drawn

    def eager(
        x: torch.Tensor,
        w_DF: torch.Tensor,
        up: torch.Tensor | None = None,
        bias_D: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return F.linear(eager_activation(kind, x, up), w_DF, bias_D)

    more = ("-fused" if fused else "") + ("-bias" if bias else "")
    return Case(
        name=f"{kind}-{'x'.join(map(str, shape))}-{out}{more}",
        inputs=draw,
        call=lambda **t: activation_linear(**t, kind=kind, alpha=ALPHA, limit=LIMIT),
        eager=eager,
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case("swiglu", 63, 257, out=65),
        _case("geglu_tanh", 3, 21, 64, out=63, fused=True),
        _case("swiglu_clamped", 63, 65, out=64, fused=True, bias=True),
        _case("gelu", 257, 63, out=8),
        _case("relu2", 1, 63, out=16, pool=16),
        _case("swiglu", 0, 64, out=16, bias=True),
    ]
    if scale == "large":
        found.append(_case("swiglu", 4099, 1024, out=512, fused=True))
    return found


SUITE = Suite(op="activation_linear", cases=_cases)
