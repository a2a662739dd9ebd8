"""The ops that are measured, and the shapes each is measured at unless others are given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from slipstream.bench import ops_adamw, ops_loss, ops_mlp, ops_norms, ops_rope
from slipstream.bench.ops_case import OpCase, OpShape
from slipstream.errors import ConfigError

Grid = Literal["width", "hidden", "weights", "loss"]
TOKENS = (8192, 16384)
WIDTHS = {"width": (2048, 4096, 8192, 5120, 3000), "hidden": (5632, 14336, 11000)}
"""Widths that models have, and awkward ones: no power of two, no multiple of 128."""
FEW: dict[Grid, list[OpShape]] = {
    "weights": [OpShape(tokens=8192, width=4096), OpShape(tokens=8192, width=3000)],
    "loss": [
        OpShape(tokens=16384, width=4096),
        OpShape(tokens=16384, width=2048, vocabulary=50304),
    ],
}
QUICK: dict[Grid, OpShape] = {
    "width": OpShape(tokens=8192, width=4096),
    "hidden": OpShape(tokens=8192, width=14336),
    "weights": OpShape(tokens=4096, width=4096),
    "loss": OpShape(tokens=8192, width=2048, vocabulary=50304),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """An op and how to make a case of it."""

    make: Callable[[OpShape, int], OpCase]
    """Takes the shape and the bytes per element."""
    grid: Grid
    """Which shapes are its own."""


OPS = {
    "norm": Listed(make=ops_norms.norm_case, grid="width"),
    "add-norm": Listed(make=ops_norms.add_norm_case, grid="width"),
    "gelu-norm": Listed(make=ops_norms.gelu_norm_case, grid="width"),
    "layernorm": Listed(make=ops_norms.layernorm_case, grid="width"),
    "swiglu": Listed(make=ops_mlp.swiglu_case, grid="hidden"),
    "swiglu-fused": Listed(make=ops_mlp.swiglu_fused_case, grid="hidden"),
    "geglu": Listed(make=ops_mlp.geglu_case, grid="hidden"),
    "gelu": Listed(make=ops_mlp.gelu_case, grid="hidden"),
    "rope": Listed(make=ops_rope.rope_case, grid="width"),
    "rope-qk-norm": Listed(make=ops_rope.rope_qk_norm_case, grid="width"),
    "adamw-master": Listed(make=ops_adamw.master_case, grid="weights"),
    "adamw-fp32": Listed(make=ops_adamw.fp32_case, grid="weights"),
    "adamw-bf16": Listed(make=ops_adamw.bf16_case, grid="weights"),
    "linear-cross-entropy": Listed(make=ops_loss.linear_cross_entropy_case, grid="loss"),
    "norm-linear": Listed(make=ops_norms.norm_linear_case, grid="width"),
    "activation-linear": Listed(make=ops_mlp.activation_linear_case, grid="hidden"),
}


def select(names: list[str]) -> list[str]:
    """The ops of these names, or of a family such as ``adamw``; all for none. ConfigError."""
    wanted = [name.replace("_", "-") for name in names]
    for name, given in zip(wanted, names, strict=True):
        if not any(_named(op, name) for op in OPS):
            raise ConfigError(f"--op {given}: there are {', '.join(OPS)}")
    return [op for op in OPS if not wanted or any(_named(op, name) for name in wanted)]


def shapes_of(op: str, given: list[OpShape], *, quick: bool) -> list[OpShape]:
    """What to measure ``op`` at: the shapes given, one for a quick look, or its grid."""
    grid = OPS[op].grid
    if given:
        return given
    if quick:
        return [QUICK[grid]]
    if grid in FEW:
        return FEW[grid]
    return [OpShape(tokens=t, width=width) for t in TOKENS for width in WIDTHS[grid]]


def _named(op: str, name: str) -> bool:
    return op == name or (name not in OPS and op.startswith(f"{name}-"))
