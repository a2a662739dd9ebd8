"""The correctness gate: no figures for a layer that is further from the truth than the budget.

The truth is the plain layer in fp64 on the inputs that are timed; the budget is that of
``slipstream verify``: 1.5 times the error of the plain layer in the same dtype plus one rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from slipstream.verify.budget import Results, bitwise_equal, compare


@dataclass(frozen=True, slots=True, kw_only=True)
class Standard:
    """What layers of one problem are held to."""

    truth: Results
    """fp64."""
    eager: Results
    """The same code in the dtype that is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a layer did."""

    problems: list[str]
    """One line per tensor outside its budget; empty: passed."""
    errors: dict[str, float]
    """Root mean square of the error over that of the truth, per tensor."""
    bitwise: bool
    """Two runs gave the same bits."""


def standard(plain: Callable[[torch.dtype], Results], dtype: torch.dtype) -> Standard:
    """Run the plain code in fp64 and in ``dtype``."""
    return Standard(truth=plain(torch.float64), eager=plain(dtype))


def judge(run: Callable[[], Results], against: Standard, dtype: torch.dtype | None) -> Verdict:
    """Run twice and hold the first run to the budget; ``dtype`` None: each tensor's own unit."""
    first, second = run(), run()
    bitwise = all(bitwise_equal(first[name], second[name]) for name in first)
    del second
    found = compare(first, against.eager, against.truth, dtype)
    errors = {
        figure.tensor: _relative(figure.error, _rms(against.truth[figure.tensor]))
        for figure in found.figures
        if figure.kind == "rms"
    }
    return Verdict(problems=found.problems, errors=errors, bitwise=bitwise)


def _relative(error: float, size: float) -> float:
    # A router of one expert has no gradient.
    if size:
        return error / size
    return math.inf if error else 0.0


def _rms(tensor: torch.Tensor) -> float:
    return tensor.square().mean().sqrt().item()
