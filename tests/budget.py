"""The error budgets of ``slipstream.verify`` as assertions of tests."""

from collections.abc import Callable
from typing import Any

import torch

from slipstream.verify.budget import Comparison, Results, cast, compare, decide, results


class Draws(list[Results]):
    """Random inputs to be judged as one; more of them where nothing but a maximum is over."""

    def __init__(self, draw: Callable[[], Results], count: int) -> None:
        super().__init__(draw() for _ in range(count))
        self._draw = draw

    def at(self, index: int) -> Results:
        """The inputs of that number, kept once they are drawn."""
        while len(self) <= index:
            self.append(self._draw())
        return self[index]


def assert_budget(
    function: Callable[..., Any],
    eager: Callable[..., Any],
    inputs: Results | Draws,
    dtype: torch.dtype,
    truth: Callable[..., Any] | None = None,
) -> None:
    """Hold ``function`` to the budget of ``eager`` in ``dtype``; ``truth`` (or eager) gives fp64.

    All take the tensors of ``inputs`` by name and return one tensor or several. Several draws of
    inputs, each with other upstream gradients, are judged as one, as ``slipstream verify`` does.
    """
    draws = Draws(lambda: inputs, 1) if isinstance(inputs, dict) else inputs

    def run(draw: int) -> tuple[Results, Results, Results]:
        drawn = {name: cast(t, dtype) for name, t in draws.at(draw).items()}
        actual, expected = (results(f, drawn, dtype, draw=draw) for f in (function, eager))
        return actual, expected, results(truth or eager, drawn, dtype, torch.float64, draw=draw)

    _assert_passed(decide(run, len(draws), dtype)[0])


def assert_within(actual: Results, eager: Results, truth: Results, dtype: torch.dtype) -> None:
    """Hold every tensor of ``actual`` to the budget that ``eager`` sets against ``truth``."""
    _assert_passed(compare(actual, eager, truth, dtype))


def _assert_passed(found: Comparison) -> None:
    wrong = {figure.tensor for figure in found.figures if not figure.passed}
    shares = [f"{f.tensor}: {f.kind} {f.ratio:.2f}" for f in found.figures if f.tensor in wrong]
    assert not found.problems, "\n".join([*found.problems, "of what is allowed:", *shares])


__all__ = ["Draws", "Results", "assert_budget", "assert_within", "results"]
