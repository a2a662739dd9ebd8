"""The maps of given experts: a stable sort, with slots of no expert behind all others."""

import torch

from slipstream.ops import moe
from slipstream.verify.budget import Results
from slipstream.verify.case import TOKENS, Case, Promise, Scale, Suite
from slipstream.verify.cases.moe_route import schedule_problem
from slipstream.verify.checks import poisoned
from slipstream.verify.routings import Load, draw_experts, routing_of

UNCOMPARED = ("schedule", "aux_loss", "z_loss")
"""Undefined past its end; zeros that have no gradient."""


def _fields(routing: moe.Routing) -> Results:
    return {name: t for name, t in routing._asdict().items() if name not in UNCOMPARED}


def _case(
    tokens: int, num_experts: int, top_k: int, load: Load = "random", *, same: bool = False
) -> Case:
    def draw(generator: torch.Generator) -> Results:
        expert_TK = draw_experts(generator, tokens, num_experts, top_k, load)
        weight_TK = torch.rand(tokens, top_k, generator=generator)
        return {"expert": expert_TK // 2 if same else expert_TK, "weight": weight_TK}

    def eager(expert: torch.Tensor, weight: torch.Tensor) -> Results:
        wide = torch.promote_types(weight.dtype, torch.float32)
        return _fields(routing_of(expert, num_experts, weight.to(wide)))

    marks = [load] * (load != "random") + ["repeated"] * same
    return Case(
        name="-".join([f"T{tokens}-E{num_experts}-K{top_k}", *marks]),
        inputs=draw,
        call=lambda expert, weight: _fields(moe.routing_from(expert, weight, num_experts)),
        eager=eager,
        own_units=True,
    )


def _cases(scale: Scale) -> list[Case]:
    tokens = TOKENS[scale]
    found = [
        _case(tokens, 8, 2),
        _case(tokens, 5, 3, "absent"),
        _case(tokens, 5, 2, "empty-experts"),
        _case(tokens, 5, 1, "one-takes-all"),
        _case(tokens, 6, 4, same=True),
        _case(tokens, 4, 4),
        _case(tokens, 1, 1),
        _case(1, 8, 2),
        _case(0, 8, 2),
    ]
    if scale != "small":
        found.append(_case(257, 60, 6))
    if scale == "large":
        found.append(_case(4099, 128, 8))
    return found


def _schedule_covers_every_row_once(device: torch.device, dtype: torch.dtype) -> str | None:
    generator = torch.Generator("cpu").manual_seed(0)
    expert_TK = draw_experts(generator, 257, 5, 2, "absent").to(device)
    with poisoned():
        routing = moe.routing_from(expert_TK, torch.ones(257, 2, device=device, dtype=dtype), 5)
    return schedule_problem(routing)


SUITE = Suite(
    op="moe_sort",
    groups=("moe",),
    cases=_cases,
    promises=(Promise(name="tiles cover every row once", holds=_schedule_covers_every_row_once),),
)
