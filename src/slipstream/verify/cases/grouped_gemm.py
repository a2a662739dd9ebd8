"""One matrix product per group of rows."""

from itertools import pairwise

import torch

from slipstream.ops import moe
from slipstream.verify.budget import Results, bitwise_equal
from slipstream.verify.case import Case, Promise, Scale, Suite
from slipstream.verify.cases.moe_experts import HOST, leaf, untouched
from slipstream.verify.checks import poisoned


def _eager(x: torch.Tensor, w: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    parts = enumerate(pairwise(offsets.tolist()))
    return torch.cat([x[start:stop] @ w[e].T for e, (start, stop) in parts])


def _case(rows: int, width: int, out: int, groups: int, load: str = "", pool: int = 1) -> Case:
    def draw(generator: torch.Generator) -> Results:
        group_N = torch.randint(0, groups, (rows,), generator=generator)
        if load == "empty-groups":
            group_N = group_N // 2 * 2
        if load == "one-takes-all":
            group_N = torch.full_like(group_N, groups - 1)
        ends = torch.bincount(group_N, minlength=groups).cumsum(0)
        return {
            "x": torch.randn(rows, width, generator=generator),
            "w": torch.randn(groups, out, width, generator=generator) / width**0.5,
            "offsets": torch.cat((ends.new_zeros(1), ends)).int(),
        }

    return Case(
        name=f"N{rows}-D{width}-P{out}-E{groups}" + (f"-{load}" if load else ""),
        inputs=draw,
        call=lambda x, w, offsets: moe.grouped_gemm(x, w, offsets),
        eager=_eager,
        pool=pool,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case(126, 64, 48, 5),
        _case(63, 31, 17, 6, "empty-groups"),
        _case(63, 64, 48, 5, "one-takes-all"),
        _case(63, 63, 65, 1),
        _case(1, 64, 48, 3, pool=4 if scale == "small" else 16),
        _case(0, 64, 48, 5),
    ]
    if scale != "small":
        found.append(_case(257, 63, 65, 7))
    if scale == "large":
        found.append(_case(4099, 256, 320, 24))
    return found


def _rows_past_the_end_are_left_alone(device: torch.device, dtype: torch.dtype) -> str | None:
    generator = torch.Generator("cpu").manual_seed(0)
    x_ND, grad_NP = torch.randn(2, 63, 64, generator=generator).to(device, dtype)
    w_EPD = torch.randn(3, 64, 64, generator=generator).to(device, dtype)
    offsets_E1 = torch.tensor([0, 10, 10, 40], dtype=torch.int32, device=device)
    found = []
    for poison in (0.0, float("nan")):
        x_ND[40:], grad_NP[40:] = poison, poison
        x, w = leaf(x_ND), leaf(w_EPD)
        with poisoned():
            y_NP = moe.grouped_gemm(x, w, offsets_E1)
            dx_ND, dw_EPD = torch.autograd.grad(y_NP, (x, w), grad_NP)
        found.append([y_NP.detach()[:40], dx_ND, dw_EPD])
    if dx_ND[40:].count_nonzero():
        return "rows past the last offset have a gradient"
    if not all(bitwise_equal(a, b) for a, b in zip(*found, strict=True)):
        return "rows past the last offset change the result"
    return untouched(y_NP.detach(), 40)


SUITE = Suite(
    op="grouped_gemm",
    groups=("moe",),
    cases=_cases,
    promises=(
        Promise(
            name="rows past the last offset are left alone", holds=_rows_past_the_end_are_left_alone
        ),
    ),
    exempt={("reference", check): HOST for check in ("compile", "sync", "graph")},
    products=("triton",),
)
