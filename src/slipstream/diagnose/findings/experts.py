"""Uneven expert load, as far as kernels and collectives show it."""

import re

import numpy as np

from slipstream.diagnose.classify import KernelClass
from slipstream.diagnose.findings.context import Found, View, ms
from slipstream.diagnose.findings.model import Confidence
from slipstream.diagnose.trace import Kind

_UNEVEN = 1.1
"""Largest over mean; durations of equal work on equal devices differ by less."""


def imbalance(views: list[View]) -> Found:
    """Grouped matrix products that take longer on one rank than on the mean of all."""
    if len(views) < 2:
        yield from _splits(views[0])
        return
    spent = np.array([_expert_ns(view) for view in views], dtype=np.float64)
    if not (spent > 0).all() or spent.max() < _UNEVEN * spent.mean():
        return
    worst = int(np.argmax(spent))
    view = views[worst]
    yield from view.finding(
        "expert-imbalance",
        spent.max() - spent.mean(),
        f"experts of one rank work {spent.max() / spent.mean():.2f} times the mean",
        confidence=Confidence.MEDIUM,
        evidence={
            "largest_ms": ms(spent.max()),
            "mean_ms": ms(spent.mean()),
            "smallest_ms": ms(spent.min()),
        },
        kernels=view.top_names(_experts(view), view.trace.dur_ns[_experts(view)]),
    )


def _experts(view: View) -> np.ndarray:
    grouped = np.array(
        [info.klass is KernelClass.GROUPED_GEMM for info in view.account.infos], dtype=bool
    )
    return view.kernels[grouped[view.trace.name[view.kernels]]]


def _expert_ns(view: View) -> int:
    return int(view.trace.dur_ns[_experts(view)].sum())


def _splits(view: View) -> Found:
    """Of one rank: how unevenly its all-to-alls are split."""
    if not len(_experts(view)):
        return
    split = [_numbers(one.get("In split size")) for one in view.trace.details]
    used = view.trace.detail[view.trace.of_kind(Kind.CPU_OP, Kind.KERNEL)]
    sizes = [split[row] for row in used[used >= 0].tolist() if len(split[row]) > 1]
    ratios = [float(np.max(s) / np.mean(s)) for s in sizes if np.mean(s) > 0]
    if not ratios or np.median(ratios) < _UNEVEN:
        return
    yield from view.finding(
        "expert-imbalance",
        0,
        f"tokens leave unevenly: the largest share is {np.median(ratios):.2f} times the mean",
        confidence=Confidence.LOW,
        evidence={"all_to_alls": len(ratios), "largest_over_mean": round(max(ratios), 3)},
        always=True,
    )


def _numbers(text: object) -> list[int]:
    """``"[3, 5]"`` or a list of integers."""
    if isinstance(text, list | tuple):
        return [n for n in text if isinstance(n, int)]
    return [int(n) for n in re.findall(r"\d+", text)] if isinstance(text, str) else []
