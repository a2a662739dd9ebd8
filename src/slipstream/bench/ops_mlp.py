"""Activations of an MLP, gated and plain, and SwiGLU inside the linear layer behind it."""

import torch
import torch.nn.functional as F

from slipstream import ops
from slipstream.bench.ops_case import Draw, Floor, Function, OpCase, OpShape, Reemission
from slipstream.bench.ops_peers import liger, usual
from slipstream.verify.budget import Results

WIDTHS = {5632: 2048, 14336: 4096}
"""Model widths that go with hidden ones; any other takes the multiple of 8 at a third of F."""


def swiglu_case(shape: OpShape, size: int) -> OpCase:
    """silu(gate) * up from two tensors: 3 of (T, F) in the forward, 5 in the backward."""
    return _gated(
        shape, size, "swiglu", "swiglu", lambda gate, up: F.silu(gate) * up, "liger_swiglu"
    )


def geglu_case(shape: OpShape, size: int) -> OpCase:
    """gelu(gate) * up with the tanh form of GELU, which is the one Liger has."""

    def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return F.gelu(gate, approximate="tanh") * up

    return _gated(shape, size, "geglu", "geglu_tanh", plain, "liger_geglu")


def swiglu_fused_case(shape: OpShape, size: int) -> OpCase:
    """SwiGLU of one (T, 2F) tensor, as one fused projection leaves it."""

    def make_liger() -> Function:
        function = liger("liger_swiglu")
        return lambda x: function(*x.chunk(2, dim=-1))

    return OpCase(
        op="swiglu-fused",
        sizes={"T": shape.tokens, "F": shape.width},
        inputs=lambda draw: {"x": draw.normal(shape.tokens, 2 * shape.width)},
        plain=_swiglu_of_halves,
        peers=usual(
            lambda x: ops.activation(x, kind="swiglu"), _swiglu_of_halves, liger=make_liger
        ),
        floor=_floor(shape, size, forward=3, backward=5),
        wanted=frozenset({"x"}),
    )


def gelu_case(shape: OpShape, size: int) -> OpCase:
    """GELU: 2 tensors in the forward, 3 in the backward."""
    return OpCase(
        op="gelu",
        sizes={"T": shape.tokens, "F": shape.width},
        inputs=lambda draw: {"x": draw.normal(shape.tokens, shape.width)},
        plain=lambda x: F.gelu(x),
        peers=usual(lambda x: ops.activation(x, kind="gelu"), lambda x: F.gelu(x)),
        floor=_floor(shape, size, forward=2, backward=3),
        wanted=frozenset({"x"}),
    )


def activation_linear_case(shape: OpShape, size: int) -> OpCase:
    """The down projection of SwiGLU(x), which re-emits the product in its backward."""
    width = WIDTHS.get(shape.width, max(8, shape.width // 3 // 8 * 8))

    def plain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(_swiglu_of_halves(x), w)

    def keep(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(ops.activation(x, kind="swiglu"), w)

    def inputs(draw: Draw) -> Results:
        return {
            "x": draw.normal(shape.tokens, 2 * shape.width),
            "w": draw.normal(width, shape.width, std=shape.width**-0.5),
        }

    product = 2.0 * shape.tokens * shape.width * width
    return OpCase(
        op="activation-linear",
        sizes={"T": shape.tokens, "F": shape.width, "D": width},
        inputs=inputs,
        plain=plain,
        peers=usual(
            lambda x, w: ops.activation_linear(x, w, kind="swiglu"),
            plain,
            slipstream_keep=lambda: keep,
        ),
        floor=Floor(forward_flops=product, backward_flops=2 * product),
        wanted=frozenset({"x", "w"}),
        reemission=Reemission(
            peer="slipstream",
            keeps="slipstream-keep",
            written_bytes=shape.tokens * shape.width * size,
        ),
    )


def _gated(shape: OpShape, size: int, op: str, kind: str, plain: Function, of_liger: str) -> OpCase:
    def make_liger() -> Function:
        function = liger(of_liger)
        return lambda gate, up: function(gate, up)

    def inputs(draw: Draw) -> Results:
        return {name: draw.normal(shape.tokens, shape.width) for name in ("gate", "up")}

    return OpCase(
        op=op,
        sizes={"T": shape.tokens, "F": shape.width},
        inputs=inputs,
        plain=plain,
        peers=usual(lambda gate, up: ops.activation(gate, up, kind=kind), plain, liger=make_liger),
        floor=_floor(shape, size, forward=3, backward=5),
        wanted=frozenset({"gate", "up"}),
    )


def _swiglu_of_halves(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _floor(shape: OpShape, size: int, *, forward: int, backward: int) -> Floor:
    tensor = shape.tokens * shape.width * size
    return Floor(forward_bytes=forward * tensor, backward_bytes=backward * tensor)
