"""Rotary position embedding."""

import torch

from slipstream.ops import RopeSpec, rope, rope_tables
from slipstream.verify.budget import Results
from slipstream.verify.case import Case, Scale, Suite


def eager_rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables in the dtype of the model and a rotated copy, as model code usually has it."""
    pairs = cos.shape[1]
    cos, sin = (torch.cat((t, t), dim=-1)[:, None].to(q.dtype) for t in (cos, sin))

    def turn(x: torch.Tensor) -> torch.Tensor:
        head, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        first, second = head.chunk(2, dim=-1)
        rotated = head * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((rotated, rest), dim=-1)

    return turn(q), turn(k)


def _case(batch: int, length: int, width: int, rotated: int, pool: int = 1) -> Case:
    def draw(generator: torch.Generator) -> Results:
        cos, sin = rope_tables(RopeSpec(head_dim=rotated), length, torch.device("cpu"))
        return {
            "q": torch.randn(batch, length, 3, width, generator=generator),
            "k": torch.randn(batch, length, 1, width, generator=generator),
            "cos": cos,
            "sin": sin,
        }

    return Case(
        name=f"B{batch}-L{length}-C{width}-rotated{rotated}",
        inputs=draw,
        call=lambda q, k, cos, sin: rope(q, k, cos, sin),
        eager=eager_rope,
        fp32=frozenset({"cos", "sin"}),
        wanted=frozenset({"q", "k"}),
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case(2, 63, 16, 16),
        _case(1, 257, 24, 16),
        _case(2, 1, 16, 16, pool=16),
        _case(1, 5, 66, 66),
        _case(2, 0, 16, 16),
    ]
    if scale == "large":
        found.append(_case(2, 1025, 128, 128))
    return found


SUITE = Suite(op="rope", cases=_cases)
