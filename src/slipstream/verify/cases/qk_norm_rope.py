"""Norm of the heads of queries and keys, then the rotation."""

import torch
import torch.nn.functional as F

from slipstream.ops import RopeSpec, qk_norm_rope, rope_tables
from slipstream.verify.budget import Results
from slipstream.verify.case import Case, Scale, Suite
from slipstream.verify.cases.rope import eager_rope

EPS = 1e-6


def eager_qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    q_weight_C: torch.Tensor,
    k_weight_C: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As model code has it."""
    q = F.rms_norm(q, q.shape[-1:], q_weight_C, EPS)
    k = F.rms_norm(k, k.shape[-1:], k_weight_C, EPS)
    return eager_rope(q, k, cos, sin)


def draw_norm_rope(
    length: int, width: int, rotated: int, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Tables and weights."""
    cos, sin = rope_tables(RopeSpec(head_dim=rotated), length, torch.device("cpu"))
    weights = {
        name: 1 + 0.3 * torch.randn(width, generator=generator)
        for name in ("q_weight_C", "k_weight_C")
    }
    return {"cos": cos, "sin": sin, **weights}


def _case(
    batch: int,
    length: int,
    width: int,
    rotated: int,
    heads: tuple[int, int] = (3, 1),
    pool: int = 1,
) -> Case:
    def draw(generator: torch.Generator) -> Results:
        q, k = (torch.randn(batch, length, n, width, generator=generator) for n in heads)
        return {"q": q, "k": k, **draw_norm_rope(length, width, rotated, generator)}

    return Case(
        name=f"B{batch}-L{length}-H{heads[0]}-G{heads[1]}-C{width}-rotated{rotated}",
        inputs=draw,
        call=lambda q, k, cos, sin, **weights: qk_norm_rope(
            q, k, cos, sin, **weights, eps=EPS, cast="fp32"
        ),
        eager=eager_qk_norm_rope,
        fp32=frozenset({"cos", "sin"}),
        wanted=frozenset({"q", "k", "q_weight_C", "k_weight_C"}),
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case(2, 63, 16, 16),
        _case(1, 257, 24, 16),
        _case(2, 1, 16, 16, pool=16),
        _case(1, 5, 66, 66, heads=(4, 4)),
        _case(2, 0, 16, 16),
    ]
    if scale == "large":
        found.append(_case(2, 1025, 128, 128, heads=(16, 4)))
    return found


SUITE = Suite(op="qk_norm_rope", cases=_cases)
