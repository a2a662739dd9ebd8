"""The router's product: fp32 logits, whatever the tokens are in."""

import torch
import torch.nn.functional as F

from slipstream.ops import moe
from slipstream.verify.budget import Results
from slipstream.verify.case import Case, Scale, Suite


def _eager(x: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    return F.linear(x.to(torch.promote_types(x.dtype, torch.float32)), router)


def _case(tokens: int, width: int, num_experts: int, pool: int = 1) -> Case:
    def draw(generator: torch.Generator) -> Results:
        return {
            "x": torch.randn(tokens, width, generator=generator),
            "router": torch.randn(num_experts, width, generator=generator) / width**0.5,
        }

    return Case(
        name=f"T{tokens}-D{width}-E{num_experts}",
        inputs=draw,
        call=lambda x, router: moe.router_logits(x, router),
        eager=_eager,
        fp32=frozenset({"router"}),
        pool=pool,
        own_units=True,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case(63, 64, 8),
        _case(257, 63, 5),
        _case(1, 64, 8, pool=16),
        _case(63, 31, 1),
        _case(0, 64, 8),
    ]
    if scale == "large":
        found.append(_case(4099, 2048, 128))
    return found


SUITE = Suite(op="moe_router", groups=("moe",), cases=_cases, products=("triton",))
