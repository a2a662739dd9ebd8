"""AdamW: several steps in place, against torch.optim.AdamW."""

from dataclasses import replace
from typing import Any

import torch
from torch.optim.adamw import adamw as torch_adamw

from slipstream.ops import AdamWOptions, adamw
from slipstream.ops.scattered import Layout, Piece, Scattered
from slipstream.verify.budget import Results
from slipstream.verify.case import Case, Promise, Scale, Suite

STEPS = 10
STATE = frozenset({"master", "exp_avg", "exp_avg_sq", "divisor"})


def _draw(*shape: int) -> Any:
    def draw(generator: torch.Generator) -> Results:
        return {
            "master": torch.randn(shape, generator=generator),
            "grads": torch.randn(STEPS, *shape, generator=generator),
            "exp_avg": torch.zeros(shape),
            "exp_avg_sq": torch.zeros(shape),
            "divisor": 0.5 + torch.rand((), generator=generator),
        }

    return draw


def _ours(options: AdamWOptions) -> Any:
    def run(**t: torch.Tensor) -> Results:
        master, exp_avg, exp_avg_sq = (t[n].clone() for n in ("master", "exp_avg", "exp_avg_sq"))
        low = t["grads"].dtype != master.dtype
        param = master.to(t["grads"].dtype) if low else master
        step = torch.zeros((), device=master.device)
        for grad in t["grads"].unbind():
            adamw(
                [param],
                [grad.clone()],
                [exp_avg],
                [exp_avg_sq],
                [step],
                masters=[master] if low else None,
                options=options,
                grad_divisor=t["divisor"],
            )
        moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": step}
        return {"param": param, "master": master, **moments}

    return run


def _eager(options: AdamWOptions) -> Any:
    def run(**t: torch.Tensor) -> Results:
        master, exp_avg, exp_avg_sq = (t[n].clone() for n in ("master", "exp_avg", "exp_avg_sq"))
        step = torch.zeros((), device=master.device)
        for grad in t["grads"].unbind():
            torch_adamw(
                [master],
                [grad.to(master.dtype) / t["divisor"]],
                [exp_avg],
                [exp_avg_sq],
                [],
                [step],
                foreach=False,
                amsgrad=False,
                beta1=options.beta1,
                beta2=options.beta2,
                lr=options.lr,
                weight_decay=options.weight_decay,
                eps=options.eps,
                maximize=False,
            )
        moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "step": step}
        return {"param": master.to(t["grads"].dtype), "master": master, **moments}

    return run


def _case(name: str, *shape: int, pool: int = 1, **changed: Any) -> Case:
    options = replace(AdamWOptions(lr=1e-2, weight_decay=0.1), **changed)
    return Case(
        name="-".join([name, "x".join(map(str, shape))]),
        inputs=_draw(*shape),
        call=_ours(options),
        eager=_eager(options),
        fp32=STATE,
        wanted=frozenset(),
        pool=pool,
        own_units=True,
    )


def _cases(scale: Scale) -> list[Case]:
    found = [
        _case("plain", 257, 63),
        _case("beta1-0", 63, 5, beta1=0.0),
        _case("beta2-0.999", 63, 64, beta2=0.999, lr=1e-3),
        _case("one", 1, pool=64),
        _case("empty", 0, 8),
    ]
    if scale == "large":
        found.append(_case("plain", 2048, 1025))
    return found


def _skipped_step_changes_nothing(device: torch.device, dtype: torch.dtype) -> str | None:
    generator = torch.Generator("cpu").manual_seed(0)
    master = torch.randn(63, 5, generator=generator).to(device)
    low = dtype != torch.float32
    tensors = {
        "param": master.to(dtype) if low else master,
        "master": master,
        "exp_avg": torch.zeros_like(master),
        "exp_avg_sq": torch.zeros_like(master),
        "step": torch.zeros((), device=device),
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    adamw(
        [tensors["param"]],
        [torch.full_like(tensors["param"], float("nan"))],
        [tensors["exp_avg"]],
        [tensors["exp_avg_sq"]],
        [tensors["step"]],
        masters=[master] if low else None,
        options=AdamWOptions(lr=1e-2),
        grad_divisor=torch.tensor(float("nan"), device=device),
        skip=torch.tensor(True, device=device),
    )
    changed = [name for name in before if not torch.equal(before[name], tensors[name])]
    return f"changed {', '.join(changed)}" if changed else None


def _gradients_elsewhere_change_nothing(device: torch.device, dtype: torch.dtype) -> str | None:
    sizes, starts = (257, 63, 1), (0, 320, 384)
    pieces = [
        Piece(start=start, tensor=i, inner=0, size=size)
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True))
    ]
    generator = torch.Generator("cpu").manual_seed(0)
    grads = [torch.randn(size, generator=generator).to(device, dtype) for size in sizes]
    scattered = Scattered(Layout(pieces, 448), grads)
    found = []
    for grad in (scattered, scattered.flat()):
        master = torch.ones(448, device=device)
        low = dtype != torch.float32
        adamw(
            [master.to(dtype) if low else master],
            [grad],
            [torch.zeros_like(master)],
            [torch.zeros_like(master)],
            [torch.zeros((), device=device)],
            masters=[master] if low else None,
            options=AdamWOptions(lr=1e-2),
        )
        found.append(torch.cat([master[at : at + n] for at, n in zip(starts, sizes, strict=True)]))
    same = torch.equal(*found)
    return None if same else "the weights differ from those of flat gradients"


SUITE = Suite(
    op="adamw",
    cases=_cases,
    promises=(
        Promise(name="a skipped step changes nothing", holds=_skipped_step_changes_nothing),
        Promise(
            name="gradients elsewhere are those of the bucket",
            holds=_gradients_elsewhere_change_nothing,
        ),
    ),
    exempt={
        ("fused", "compile"): "PyTorch's fused AdamW cannot be traced",
        ("triton", "compile"): "it changes tensors in place, where the compiler fuses as well",
    },
)
