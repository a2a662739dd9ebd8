"""The weighted sum of expert rows."""

import torch

from slipstream.ops import moe
from slipstream.verify.budget import Results, bitwise_equal
from slipstream.verify.case import TOKENS, Case, Promise, Scale, Suite
from slipstream.verify.cases.moe_experts import leaf
from slipstream.verify.checks import poisoned
from slipstream.verify.routings import Load, draw_experts, eager_combine, routing_of

EXPERTS = 5


def _case(
    tokens: int,
    width: int,
    top_k: int = 2,
    load: Load = "random",
    *,
    extras: tuple[str, ...] = ("residual", "shared"),
    experts: int = EXPERTS,
    pool: int = 1,
) -> Case:
    def draw(generator: torch.Generator) -> Results:
        return {
            "y": torch.randn(tokens * top_k, width, generator=generator),
            "weight": torch.rand(tokens, top_k, generator=generator),
            "expert": draw_experts(generator, tokens, experts, top_k, load),
        } | {name: torch.randn(tokens, width, generator=generator) for name in extras}

    def call(
        y: torch.Tensor,
        weight: torch.Tensor,
        expert: torch.Tensor,
        residual: torch.Tensor | None = None,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        routing = routing_of(expert, experts, weight)
        return moe.combine(y, routing, residual_TD=residual, shared_TD=shared)

    name = f"T{tokens}-D{width}-E{experts}-K{top_k}"
    marks = [load] * (load != "random") + ["bare"] * (not extras)
    return Case(
        name="-".join([name, *marks]),
        inputs=draw,
        call=call,
        eager=lambda **t: eager_combine(**t, num_experts=experts),
        fp32=frozenset({"weight"}),
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    tokens = TOKENS[scale]
    found = [
        _case(tokens, 65),
        _case(tokens, 64, load="absent"),
        _case(tokens, 63, load="empty-experts", extras=()),
        _case(tokens, 64, 1, "one-takes-all", extras=("residual",)),
        _case(tokens, 33, 5, extras=("shared",)),
        _case(1, 65, pool=4 if scale == "small" else 16),
        _case(0, 64),
    ]
    if scale != "small":
        found += [_case(257, 31), _case(63, 32, 16, experts=16, extras=())]
    if scale == "large":
        found.append(_case(1031, 2048, 8, experts=64))
    return found


def _absent_rows_are_left_alone(device: torch.device, dtype: torch.dtype) -> str | None:
    generator = torch.Generator("cpu").manual_seed(0)
    expert_TK = draw_experts(generator, 63, EXPERTS, 2, "absent").to(device)
    weight_TK = torch.rand(63, 2, generator=generator).to(device)
    y_ND = torch.randn(126, 64, generator=generator).to(device, dtype)
    dout_TD = torch.randn(63, 64, generator=generator).to(device, dtype)
    found = []
    for poison in (0.0, float("nan")):
        weight, y = leaf(weight_TK), y_ND.clone()
        routing = routing_of(expert_TK, EXPERTS, weight)
        rows = int(routing.offsets_E1[-1])
        y[rows:] = poison
        y = leaf(y)
        with poisoned():
            out_TD = moe.combine(y, routing)
            dy_ND, dweight_TK = torch.autograd.grad(out_TD, (y, weight), dout_TD)
        found.append([out_TD.detach(), dy_ND[:rows], dweight_TK])
    if dweight_TK[expert_TK >= EXPERTS].count_nonzero():
        return "the weight of an absent slot has a gradient"
    same = all(bitwise_equal(a, b) for a, b in zip(*found, strict=True))
    return None if same else "the row of an absent slot changes the result"


SUITE = Suite(
    op="moe_combine",
    groups=("moe",),
    cases=_cases,
    promises=(
        Promise(name="rows of absent slots are left alone", holds=_absent_rows_are_left_alone),
    ),
)
