"""Norms: RMSNorm, with a residual added before it, GELU before LayerNorm, LayerNorm, and
RMSNorm inside the linear layer behind it."""

import torch
import torch.nn.functional as F

from slipstream import ops
from slipstream.bench.ops_case import Draw, Floor, Function, OpCase, OpShape, Reemission
from slipstream.bench.ops_peers import liger, usual
from slipstream.verify.budget import Results

EPS = 1e-6
STATISTIC = 4
"""Bytes of one fp32 number per row: rstd, or the mean."""


def rms_norm_plainly(x: torch.Tensor, weight_D: torch.Tensor) -> torch.Tensor:
    """RMSNorm as model code has it: statistics in fp32, rounded before the weight."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight_D * wide.to(x.dtype)


def norm_case(shape: OpShape, size: int) -> OpCase:
    """RMSNorm: reads x and writes y; backward reads dy and x and writes dx."""

    def make_liger() -> Function:
        function = liger("liger_rms_norm")
        return lambda x, weight: function(x, weight, EPS)

    return _case(
        shape,
        "norm",
        Floor(
            forward_bytes=_bytes(shape, size, tensors=2, statistics=1),
            backward_bytes=_bytes(shape, size, tensors=3, statistics=1),
        ),
        usual(
            lambda x, weight: ops.norm(x, weight, eps=EPS)[0],
            lambda x, weight: rms_norm_plainly(x, weight),
            torch=lambda: lambda x, weight: F.rms_norm(x, x.shape[-1:], weight, EPS),
            liger=make_liger,
        ),
    )


def add_norm_case(shape: OpShape, size: int) -> OpCase:
    """s = x + residual and its RMSNorm, both returned: 4 tensors each way."""

    def plain(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> tuple:
        s = x + residual
        return rms_norm_plainly(s, weight), s

    def native(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> tuple:
        s = x + residual
        return F.rms_norm(s, s.shape[-1:], weight, EPS), s

    def make_liger() -> Function:
        function = liger("liger_fused_add_rms_norm")
        return lambda x, weight, residual: function(x, residual, weight, EPS)

    return _case(
        shape,
        "add-norm",
        Floor(
            forward_bytes=_bytes(shape, size, tensors=4, statistics=1),
            backward_bytes=_bytes(shape, size, tensors=4, statistics=1),
        ),
        usual(
            lambda x, weight, residual: ops.norm(x, weight, residual=residual, eps=EPS),
            plain,
            torch=lambda: native,
            liger=make_liger,
        ),
        residual=True,
    )


def gelu_norm_case(shape: OpShape, size: int) -> OpCase:
    """LayerNorm of GELU(x): forward x to y, backward dy and x to dx."""
    return _case(
        shape,
        "gelu-norm",
        Floor(
            forward_bytes=_bytes(shape, size, tensors=2, statistics=2),
            backward_bytes=_bytes(shape, size, tensors=3, statistics=2),
        ),
        usual(
            lambda x, weight, bias: ops.activation_norm(
                x, weight, bias, kind="layer", eps=EPS, cast="fp32", activation="gelu"
            ),
            lambda x, weight, bias: F.layer_norm(F.gelu(x), x.shape[-1:], weight, bias, EPS),
        ),
        bias=True,
    )


def layernorm_case(shape: OpShape, size: int) -> OpCase:
    """LayerNorm: as RMSNorm, with a mean per row too."""

    def make_liger() -> Function:
        function = liger("liger_layer_norm")
        return lambda x, weight, bias: function(x, weight, bias, EPS)

    return _case(
        shape,
        "layernorm",
        Floor(
            forward_bytes=_bytes(shape, size, tensors=2, statistics=2),
            backward_bytes=_bytes(shape, size, tensors=3, statistics=2),
        ),
        usual(
            lambda x, weight, bias: ops.norm(x, weight, bias, kind="layer", eps=EPS, cast="fp32")[
                0
            ],
            lambda x, weight, bias: F.layer_norm(x, x.shape[-1:], weight, bias, EPS),
            liger=make_liger,
        ),
        bias=True,
    )


def norm_linear_case(shape: OpShape, size: int) -> OpCase:
    """A square linear layer of RMSNorm(x), which re-emits the norm's output in its backward."""

    def plain(x: torch.Tensor, weight: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(rms_norm_plainly(x, weight), w)

    def keep(x: torch.Tensor, weight: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(ops.norm(x, weight, eps=EPS)[0], w)

    def ours(x: torch.Tensor, weight: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ops.norm_linear(x, weight, w, kind="rms", eps=EPS, cast="llama", offset=0.0)[0]

    def inputs(draw: Draw) -> Results:
        drawn = _inputs(shape, draw, residual=False, bias=False)
        return drawn | {"w": draw.normal(shape.width, shape.width, std=shape.width**-0.5)}

    product = 2.0 * shape.tokens * shape.width**2
    return OpCase(
        op="norm-linear",
        sizes={"T": shape.tokens, "D": shape.width, "O": shape.width},
        inputs=inputs,
        plain=plain,
        peers=usual(ours, plain, slipstream_keep=lambda: keep),
        floor=Floor(forward_flops=product, backward_flops=2 * product),
        wanted=frozenset({"x", "weight", "w"}),
        reemission=Reemission(
            peer="slipstream",
            keeps="slipstream-keep",
            written_bytes=shape.tokens * shape.width * size,
        ),
    )


def _case(
    shape: OpShape,
    op: str,
    floor: Floor,
    peers: dict,
    *,
    residual: bool = False,
    bias: bool = False,
) -> OpCase:
    names = ["x", "weight", *(["bias"] if bias else []), *(["residual"] if residual else [])]
    return OpCase(
        op=op,
        sizes={"T": shape.tokens, "D": shape.width},
        inputs=lambda draw: _inputs(shape, draw, residual=residual, bias=bias),
        plain=peers["eager"](),
        peers=peers,
        floor=floor,
        wanted=frozenset(names),
    )


def _inputs(shape: OpShape, draw: Draw, *, residual: bool, bias: bool) -> Results:
    drawn = {
        "x": draw.normal(shape.tokens, shape.width),
        "weight": draw.normal(shape.width, std=0.1).add_(1),
    }
    if bias:
        drawn["bias"] = draw.normal(shape.width, std=0.1)
    if residual:
        drawn["residual"] = draw.normal(shape.tokens, shape.width)
    return drawn


def _bytes(shape: OpShape, size: int, *, tensors: int, statistics: int) -> int:
    return shape.tokens * (tensors * shape.width * size + statistics * STATISTIC)
