"""RMSNorm and LayerNorm, with and without activation and residual."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from slipstream.ops import norm
from slipstream.verify.budget import Results
from slipstream.verify.case import Case, Scale, Suite

EPS = 1e-6


def norm_inputs(*shape: int, bias: bool, residual: bool) -> Callable[[torch.Generator], Results]:
    """Draws the tensors of a norm."""

    def draw(generator: torch.Generator) -> Results:
        drawn = {
            "x": torch.randn(shape, generator=generator) + 0.3,
            "weight_D": torch.randn(shape[-1], generator=generator),
        }
        if bias:
            drawn["bias_D"] = torch.randn(shape[-1], generator=generator)
        if residual:
            drawn["residual"] = torch.randn(shape, generator=generator)
        return drawn

    return draw


def norm_eager(kind: str, activation: str | None) -> Callable[..., Any]:
    """PyTorch's own norm, after an activation and a sum."""

    def run(
        x: torch.Tensor,
        weight_D: torch.Tensor,
        bias_D: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        s = x if activation is None else F.gelu(x)
        s = s if residual is None else s + residual
        if kind == "layer":
            return F.layer_norm(s, s.shape[-1:], weight_D, bias_D, EPS), s
        y = F.rms_norm(s, s.shape[-1:], weight_D, EPS)
        return (y if bias_D is None else y + bias_D), s

    return run


def _case(kind: str, *shape: int, more: str = "", pool: int = 1) -> Case:
    activation = "gelu" if "gelu" in more else None
    layer = kind == "layer"
    return Case(
        name="-".join([kind, "x".join(map(str, shape)), *([more] if more else [])]),
        inputs=norm_inputs(*shape, bias=layer, residual="residual" in more),
        call=lambda **t: norm(**t, kind=kind, eps=EPS, cast="fp32", activation=activation),
        eager=norm_eager(kind, activation),
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case("rms", 63, 257, more="residual"),
        _case("layer", 63, 64, more="gelu-residual"),
        _case("rms", 1, 63, pool=16),
        _case("layer", 257, 63),
        _case("rms", 2, 5, 64, more="gelu"),
        _case("rms", 0, 64, more="residual"),
    ]
    if scale != "small":
        # Wider than the kernels hold in registers.
        found.append(_case("layer", 5, 16411, more="residual"))
    if scale == "large":
        # More rows than there are programs, at the widths that have tiles of their own.
        found += [
            _case("layer", 1031, 2048, more="residual"),
            *(_case("rms", 1031, width, more="residual") for width in (4096, 8192, 16384)),
            _case("layer", 1031, 4096, more="gelu"),
            _case("rms", 4099, 128),
        ]
    return found


SUITE = Suite(op="norm", cases=_cases)
