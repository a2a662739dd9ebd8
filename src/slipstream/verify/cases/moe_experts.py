"""The MLPs of the experts."""

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.ops import moe
from slipstream.verify.budget import Results, bitwise_equal, results
from slipstream.verify.case import TOKENS, Case, Promise, Scale, Suite
from slipstream.verify.cases.activation import GATED
from slipstream.verify.checks import poisoned
from slipstream.verify.routings import Load, draw_experts, eager_experts, routing_of

WEIGHTS = frozenset({"w13", "w2"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a call, and which of its experts get the tokens."""

    tokens: int = 63
    width: int = 64
    hidden: int = 48
    experts: int = 5
    top_k: int = 2
    load: Load = "random"

    def __str__(self) -> str:
        sizes = f"T{self.tokens}-D{self.width}-F{self.hidden}-E{self.experts}-K{self.top_k}"
        return sizes if self.load == "random" else f"{sizes}-{self.load}"


def draw(
    generator: torch.Generator, shape: Shape, *, gated: bool = True, bias: bool = False
) -> Results:
    """``x``, weights, biases and the experts of each token.

    Half of the biases of the up projection lie far outside a clamp and the others within: what a
    value near its edge gets is decided by rounding, in the eager code too.
    """
    rows = 2 * shape.hidden if gated else shape.hidden
    width, hidden, experts = shape.width, shape.hidden, shape.experts
    drawn = {
        "x": torch.randn(shape.tokens, width, generator=generator),
        "w13": torch.randn(experts, rows, width, generator=generator) / width**0.5,
        "w2": torch.randn(experts, width, hidden, generator=generator) / hidden**0.5,
        "expert": draw_experts(generator, shape.tokens, experts, shape.top_k, shape.load),
    }
    if bias:
        sides = torch.randint(-1, 2, (experts, rows), generator=generator)
        drawn["b13"] = 14.0 * sides + torch.randn(experts, rows, generator=generator) / 10
        drawn["b2"] = torch.randn(experts, width, generator=generator)
    return drawn


def _call(num_experts: int, **options: Any) -> Any:
    def run(
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        expert: torch.Tensor,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
    ) -> torch.Tensor:
        routing = routing_of(expert, num_experts)
        return moe.experts(x, w13, w2, routing, b13_EP=b13, b2_ED=b2, **options)

    return run


def _case(
    shape: Shape, more: str = "", *, bias: bool = False, pool: int = 1, **options: Any
) -> Case:
    gated = options.get("activation", "swiglu") in GATED
    eager = {name: value for name, value in options.items() if name != "save"}
    return Case(
        name=f"{shape}-{more}" if more else str(shape),
        inputs=lambda generator: draw(generator, shape, gated=gated, bias=bias),
        call=_call(shape.experts, **options),
        eager=lambda **t: eager_experts(**t, **eager),
        fp32=WEIGHTS if more == "fp32-weights" else frozenset(),
        pool=pool,
    )


def shapes(scale: Scale) -> list[Shape]:
    """Odd sizes and loads; the first is the plain one."""
    tokens = TOKENS[scale]
    found = [
        Shape(tokens=tokens),
        Shape(tokens=tokens, width=31, hidden=17, load="empty-experts"),
        Shape(tokens=tokens, load="one-takes-all", top_k=1),
        Shape(tokens=tokens, experts=3, top_k=3),
        Shape(tokens=tokens, experts=1, top_k=1),
        Shape(tokens=0),
    ]
    if scale != "small":
        found.append(Shape(tokens=257, width=63, hidden=65, experts=7))
    if scale == "large":
        found.append(Shape(tokens=1031, width=256, hidden=320, experts=24, top_k=4))
    return found


def _cases(scale: Scale) -> list[Case]:
    clamped: dict[str, Any] = {"activation": "swiglu_clamped", "interleaved": True, "bias": True}
    plain, *others = shapes(scale)
    return [
        *(_case(shape) for shape in (plain, *others)),
        _case(Shape(tokens=1), pool=4 if scale == "small" else 16),
        _case(plain, "fp32-weights"),
        _case(plain, "save-x", save="x"),
        _case(plain, "clamped-interleaved-bias", **clamped),
        *(_case(plain, kind, activation=kind) for kind in ("geglu", "gelu_tanh", "relu2")),
    ]


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that asks for a gradient."""
    return tensor.detach().clone().requires_grad_()


def prepared(device: torch.device, dtype: torch.dtype, load: Load) -> Results:
    """Inputs of the plain shape under ``load``."""
    drawn = draw(torch.Generator("cpu").manual_seed(0), Shape(load=load))
    return {
        name: t.to(device, dtype if t.is_floating_point() else None) for name, t in drawn.items()
    }


def _empty_experts_get_zeros(device: torch.device, dtype: torch.dtype) -> str | None:
    inputs = prepared(device, dtype, "empty-experts")
    with poisoned():
        found = results(_call(Shape().experts), inputs, dtype)
    wrong = [name for name in WEIGHTS if found[f"gradient of {name}"][1::2].count_nonzero()]
    return f"the gradient of {', '.join(sorted(wrong))} is not zero" if wrong else None


def _absent_rows_are_left_alone(device: torch.device, dtype: torch.dtype) -> str | None:
    inputs = prepared(device, dtype, "absent")
    routing = routing_of(inputs["expert"], Shape().experts)
    rows = int(routing.offsets_E1[-1])
    generator = torch.Generator("cpu").manual_seed(1)
    grad_ND = torch.randn(routing.order_N.numel(), Shape().width, generator=generator)
    found = []
    for poison in (0.0, float("nan")):
        grad = grad_ND.to(device, dtype)
        grad[rows:] = poison
        x = inputs["x"].clone()
        # The first token has no expert here.
        x[:1] = poison
        x, w13, w2 = leaf(x), leaf(inputs["w13"]), leaf(inputs["w2"])
        with poisoned():
            y_ND = moe.experts(x, w13, w2, routing)
            found.append([y_ND.detach(), *torch.autograd.grad(y_ND, (x, w13, w2), grad)])
    return untouched(found[0][0], rows) or _same_bits(found, rows)


def untouched(y_ND: torch.Tensor, rows: int) -> str | None:
    """Rows past ``rows`` hold what their memory held (NaN, poisoned) or zeros."""
    past = y_ND[rows:]
    written = ~(past.isnan() | (past == 0)).all()
    return "rows past the last offset were computed" if written else None


def _same_bits(found: list[list[torch.Tensor]], rows: int) -> str | None:
    (y, *grads), (y_nan, *grads_nan) = found
    if not bitwise_equal(y[:rows], y_nan[:rows]):
        return "the input of an absent slot changes other rows"
    names = ("x", "w13", "w2")
    pairs = zip(names, grads, grads_nan, strict=True)
    wrong = [name for name, a, b in pairs if not bitwise_equal(a, b) or not b.isfinite().all()]
    return f"absent slots reach the gradient of {', '.join(wrong)}" if wrong else None


HOST = "the reference reads the offsets on the host"
SUITE = Suite(
    op="moe_experts",
    groups=("moe",),
    cases=_cases,
    promises=(
        Promise(name="experts without tokens get zero gradients", holds=_empty_experts_get_zeros),
        Promise(name="rows of absent slots are left alone", holds=_absent_rows_are_left_alone),
    ),
    exempt={("reference", check): HOST for check in ("compile", "sync", "graph")},
    products=("triton",),
)
