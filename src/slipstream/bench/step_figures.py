"""Figures of an arm: time of a step and its phases, tokens, MFU, and the ratio to the first arm."""

from statistics import median

import torch

from slipstream.bench.results import Row
from slipstream.bench.step_clock import PHASES, StepTimes
from slipstream.bench.step_model import StepModel
from slipstream.bench.timing import Quantiles
from slipstream.hw import describe


def figures(
    model: StepModel,
    blocks: list[list[StepTimes]],
    host_ms: list[float],
    reference: list[list[StepTimes]] | None,
    *,
    product_flops_per_s: float,
    device: torch.device,
) -> Row:
    """Over all timed steps of all blocks; ``reference``: the blocks of the arm compared with."""
    steps = [step for block in blocks for step in block]
    step_ms = Quantiles.of([step.step_ms for step in steps])
    per_s = 1e3 / step_ms.median
    row: Row = {
        "n": step_ms.n,
        "step_ms": step_ms.row(),
        **{f"{p}_ms": Quantiles.of([getattr(s, f"{p}_ms") for s in steps]).row() for p in PHASES},
        "host_ms": Quantiles.of(host_ms).row(),
        "tok_per_s": round(model.tokens * per_s, 1),
        "product_tflop_per_s": float(f"{product_flops_per_s / 1e12:.4g}"),
        "mfu_of_measured": round(model.flops * per_s / product_flops_per_s, 4),
        "block_ms": [round(_median(block), 3) for block in blocks],
    }
    spec = describe(device).spec
    if spec is not None:
        row["mfu_of_nominal"] = round(model.flops * per_s / spec.bf16_flops, 4)
    if reference is not None:
        pairs = zip(blocks, reference, strict=True)
        ratios = [_median(own) / _median(theirs) for own, theirs in pairs]
        row["time_over_first"] = {
            "median": round(median(ratios), 4),
            "min": round(min(ratios), 4),
            "max": round(max(ratios), 4),
        }
    return row


def _median(block: list[StepTimes]) -> float:
    return median(step.step_ms for step in block)
