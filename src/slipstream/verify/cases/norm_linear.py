"""A norm and the linear layer behind it, with and without activation and residual."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from slipstream.ops import norm_linear
from slipstream.verify.budget import Results
from slipstream.verify.case import Case, Scale, Suite
from slipstream.verify.cases.norm import EPS, norm_eager, norm_inputs


def _inputs(*shape: int, out: int, layer: bool, residual: bool) -> Callable[..., Results]:
    draw_norm = norm_inputs(*shape, bias=layer, residual=residual)

    def draw(generator: torch.Generator) -> Results:
        drawn, width = draw_norm(generator), shape[-1]
        drawn["w_OD"] = torch.randn(out, width, generator=generator) / width**0.5
        if layer:
            drawn["bias_O"] = torch.randn(out, generator=generator)
        return drawn

    return draw


def _eager(kind: str, activation: str | None) -> Callable[..., Any]:
    of_norm = norm_eager(kind, activation)

    def run(
        w_OD: torch.Tensor, bias_O: torch.Tensor | None = None, **tensors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, s = of_norm(**tensors)
        return F.linear(y, w_OD, bias_O), s

    return run


def _case(kind: str, *shape: int, out: int, more: str = "", pool: int = 1) -> Case:
    activation = "gelu" if "gelu" in more else None
    name = [kind, "x".join(map(str, shape)), f"O{out}", *([more] if more else [])]
    return Case(
        name="-".join(name),
        inputs=_inputs(*shape, out=out, layer=kind == "layer", residual="residual" in more),
        call=lambda **t: norm_linear(**t, kind=kind, eps=EPS, cast="fp32", activation=activation),
        eager=_eager(kind, activation),
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case("rms", 63, 257, out=96, more="residual"),
        _case("layer", 63, 64, out=33, more="gelu-residual"),
        _case("rms", 1, 63, out=8, pool=16),
        _case("layer", 2, 5, 64, out=65, more="gelu"),
        _case("rms", 0, 64, out=16, more="residual"),
    ]
    if scale == "large":
        found.append(_case("rms", 1031, 2048, out=1024, more="residual"))
    return found


SUITE = Suite(op="norm_linear", cases=_cases)
