"""Figures of a row from times: shares of the copy and product rates, and whether they add up."""

from dataclasses import dataclass
from typing import Any

import torch

from slipstream.bench.ops_case import OpCase, Reemission
from slipstream.bench.results import Row
from slipstream.bench.timing import Timing

PARTS = ("forward", "backward", "total")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What this device did in the same turns."""

    bytes_per_s: float
    """A large copy within the device, bytes read and written."""
    flops_per_s: float
    """A large square matrix product."""


def figures(case: OpCase, timings: dict[str, Timing], rates: Rates, device: torch.device) -> Row:
    """Times, floors, and shares of the rates; ``sums`` says whether the total is its parts'."""
    floor = case.floor
    bytes_of = {"forward": floor.forward_bytes, "backward": floor.backward_bytes}
    flops_of = {"forward": floor.forward_flops, "backward": floor.backward_flops}
    row: Row = {
        "n": timings["total"].device_ms.n,
        "copy_gb_per_s": _short(rates.bytes_per_s / 1e9),
        "product_tflop_per_s": _short(rates.flops_per_s / 1e12),
    }
    for part, timing in timings.items():
        row[f"{part}_ms"] = timing.device_ms.row()
        row[f"{part}_host_ms"] = timing.host_ms.row()
        moved = bytes_of.get(part, sum(bytes_of.values()))
        flops = flops_of.get(part, sum(flops_of.values()))
        seconds = timing.device_ms.median / 1e3
        if moved:
            row[f"{part}_bytes"] = moved
            row[f"{part}_copy_share"] = _short(moved / seconds / rates.bytes_per_s)
        if flops and (floor.parted or part not in flops_of):
            row[f"{part}_flops"] = flops
            row[f"{part}_product_share"] = _short(flops / seconds / rates.flops_per_s)
    if "forward" in timings:
        row |= _adds_up(timings, rates, device)
    return row


def _adds_up(timings: dict[str, Timing], rates: Rates, device: torch.device) -> Row:
    """Whether the total is forward plus backward, within noise and what a cache may hand on.

    The backward of the total may find in the L2 cache what its forward left there, and need not
    wait for what the forward has yet to write back.
    """
    total, forward, backward = (timings[n].device_ms for n in ("total", "forward", "backward"))
    gap = total.median - forward.median - backward.median
    noise = sum(q.p90 - q.p10 for q in (total, forward, backward))
    cache = 0
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
    allowed = noise + 2e3 * cache / rates.bytes_per_s
    return {
        "sum_gap_ms": round(gap, 4),
        "sum_gap_allowed_ms": round(allowed, 4),
        "sums": abs(gap) <= allowed,
    }


def reemission_row(what: Reemission, reemits: Row, keeps: Row, rates: Rates) -> Row:
    """What writing a tensor again costs, beside the one write it takes, and what it saves."""
    parts = {part: _difference(reemits[f"{part}_ms"], keeps[f"{part}_ms"]) for part in PARTS}
    row: dict[str, Any] = {
        "written_bytes": what.written_bytes,
        "write_ms": round(1e3 * what.written_bytes / rates.bytes_per_s, 4),
        **{f"extra_{part}_ms": ms for part, ms in parts.items()},
    }
    if "saved_mib" in reemits and "saved_mib" in keeps:
        row["freed_mib"] = round(keeps["saved_mib"] - reemits["saved_mib"], 2)
    return {"reemission": row}


def _difference(ours: dict[str, float], theirs: dict[str, float]) -> float:
    return round(ours["median"] - theirs["median"], 4)


def _short(value: float) -> float:
    return float(f"{value:.4g}")
