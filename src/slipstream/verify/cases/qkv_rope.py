"""q, k and v out of one projection."""

import torch

from slipstream.ops import qkv_rope
from slipstream.verify.budget import Results
from slipstream.verify.case import Case, Scale, Suite
from slipstream.verify.cases.qk_norm_rope import EPS, draw_norm_rope, eager_qk_norm_rope
from slipstream.verify.cases.rope import eager_rope


def _case(
    batch: int,
    length: int,
    width: int,
    rotated: int,
    *,
    heads: tuple[int, int] = (3, 1),
    norm: bool = True,
    pool: int = 1,
) -> Case:
    query_heads, kv_heads = heads
    columns = query_heads + 2 * kv_heads

    def draw(generator: torch.Generator) -> Results:
        qkv = torch.randn(batch, length, columns * width, generator=generator)
        rest = draw_norm_rope(length, width, rotated, generator)
        kept = rest if norm else {name: rest[name] for name in ("cos", "sin")}
        return {"qkv": qkv, **kept}

    def eager(qkv: torch.Tensor, **rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = qkv.unflatten(-1, (columns, width)).split([query_heads, kv_heads, kv_heads], 2)
        return *(eager_qk_norm_rope if norm else eager_rope)(q, k, **rest), v

    return Case(
        name=f"B{batch}-L{length}-H{heads[0]}-G{heads[1]}-C{width}-rotated{rotated}"
        f"{'-norm' if norm else ''}",
        inputs=draw,
        call=lambda qkv, cos, sin, **weights: qkv_rope(
            qkv, cos, sin, **weights, heads=query_heads, kv_heads=kv_heads, eps=EPS, cast="fp32"
        ),
        eager=eager,
        fp32=frozenset({"cos", "sin"}),
        wanted=frozenset({"qkv"} | ({"q_weight_C", "k_weight_C"} if norm else set())),
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case(2, 63, 16, 16),
        _case(2, 63, 16, 16, norm=False),
        _case(1, 257, 24, 16, heads=(2, 2)),
        _case(2, 1, 63, 8, norm=False, pool=16),
        _case(1, 5, 66, 66),
        _case(2, 0, 16, 16),
    ]
    if scale == "large":
        found += [_case(2, 1025, 128, 128, heads=(16, 4), norm=norm) for norm in (True, False)]
    return found


SUITE = Suite(op="qkv_rope", cases=_cases)
