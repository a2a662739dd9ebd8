"""Experts and combine as one op."""

from dataclasses import replace
from typing import Any

import torch

from slipstream.ops import moe
from slipstream.verify.budget import Results, bitwise_equal
from slipstream.verify.case import Case, Promise, Scale, Suite
from slipstream.verify.cases.moe_experts import HOST, Shape, draw, leaf, prepared, shapes
from slipstream.verify.checks import poisoned
from slipstream.verify.routings import eager_combine, eager_experts, routing_of


def _inputs(generator: torch.Generator, shape: Shape, *, bias: bool, extras: bool) -> Results:
    drawn = draw(generator, shape, bias=bias)
    drawn["weight"] = torch.rand(shape.tokens, shape.top_k, generator=generator)
    if extras:
        for name in ("residual", "shared"):
            drawn[name] = torch.randn(shape.tokens, shape.width, generator=generator)
    return drawn


def _call(num_experts: int, **options: Any) -> Any:
    def run(
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        expert: torch.Tensor,
        weight: torch.Tensor,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return moe.moe_mlp(
            x,
            w13,
            w2,
            routing_of(expert, num_experts, weight),
            b13_EP=b13,
            b2_ED=b2,
            residual_TD=residual,
            shared_TD=shared,
            **options,
        )

    return run


def _eager(num_experts: int, **options: Any) -> Any:
    def run(
        x: torch.Tensor,
        w13: torch.Tensor,
        w2: torch.Tensor,
        expert: torch.Tensor,
        weight: torch.Tensor,
        b13: torch.Tensor | None = None,
        b2: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        y_ND = eager_experts(x, w13, w2, expert, b13, b2, **options)
        return eager_combine(y_ND, weight, expert, num_experts, residual, shared)

    return run


def _case(
    shape: Shape,
    more: str = "",
    *,
    bias: bool = False,
    extras: bool = True,
    pool: int = 1,
    save: str = "h",
    **options: Any,
) -> Case:
    return Case(
        name=f"{shape}-{more}" if more else str(shape),
        inputs=lambda generator: _inputs(generator, shape, bias=bias, extras=extras),
        call=_call(shape.experts, save=save, **options),
        eager=_eager(shape.experts, **options),
        fp32=frozenset({"weight"}),
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    clamped: dict[str, Any] = {"activation": "swiglu_clamped", "interleaved": True, "bias": True}
    plain, *others = shapes(scale)
    return [
        *(_case(shape) for shape in (plain, *others)),
        _case(replace(plain, load="absent")),
        _case(Shape(tokens=1), pool=4 if scale == "small" else 16),
        _case(plain, "bare-save-x", extras=False, save="x"),
        _case(plain, "clamped-interleaved-bias", **clamped),
    ]


def _absent_slots_are_skipped(device: torch.device, dtype: torch.dtype) -> str | None:
    inputs = prepared(device, dtype, "absent")
    weight_TK = torch.rand(63, 2, generator=torch.Generator("cpu").manual_seed(1)).to(device)
    routing = routing_of(inputs["expert"], Shape().experts, leaf(weight_TK))
    found = []
    for poison in (0.0, float("nan")):
        x = inputs["x"].clone()
        # The first token has no expert here.
        x[:1] = poison
        leaves = x, w13, w2 = leaf(x), leaf(inputs["w13"]), leaf(inputs["w2"])
        residual = torch.ones_like(x)
        with poisoned():
            out_TD = moe.moe_mlp(x, w13, w2, routing, residual_TD=residual)
            grads = torch.autograd.grad(
                out_TD, (*leaves, routing.weight_TK), torch.ones_like(out_TD)
            )
        found.append([out_TD.detach(), *grads])
    if not torch.equal(out_TD[:1], residual[:1]):
        return "a token without experts does not keep its residual"
    if found[1][-1][inputs["expert"] >= Shape().experts].count_nonzero():
        return "the weight of an absent slot has a gradient"
    same = all(bitwise_equal(a, b) for a, b in zip(*found, strict=True))
    return None if same else "a token without experts changes the result"


SUITE = Suite(
    op="moe_mlp",
    groups=("moe",),
    cases=_cases,
    promises=(Promise(name="absent slots are skipped", holds=_absent_slots_are_skipped),),
    exempt={("reference", check): HOST for check in ("compile", "sync", "graph")},
    products=("triton", "composed"),
)
