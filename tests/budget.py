"""The error budgets of ``slipstream.verify`` as assertions of tests."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slipstream.verify.budget import Comparison, Results, cast, compare, compare_draws, results


def assert_budget(
    function: Callable[..., Any],
    eager: Callable[..., Any],
    inputs: Results | Sequence[Results],
    dtype: torch.dtype,
    truth: Callable[..., Any] | None = None,
) -> None:
    """Hold ``function`` to the budget of ``eager`` in ``dtype``; ``truth`` (or eager) gives fp64.

    All take the tensors of ``inputs`` by name and return one tensor or several. Several draws of
    inputs, each with other upstream gradients, are judged as one.
    """
    draws = [inputs] if isinstance(inputs, dict) else inputs
    draws = [{name: cast(t, dtype) for name, t in drawn.items()} for drawn in draws]

    def run(what: Callable[..., Any], run_in: torch.dtype | None = None) -> list[Results]:
        return [results(what, t, dtype, run_in, draw=draw) for draw, t in enumerate(draws)]

    exact = run(truth or eager, torch.float64)
    _assert_passed(compare_draws(run(function), run(eager), exact, dtype))


def assert_within(actual: Results, eager: Results, truth: Results, dtype: torch.dtype) -> None:
    """Hold every tensor of ``actual`` to the budget that ``eager`` sets against ``truth``."""
    _assert_passed(compare(actual, eager, truth, dtype))


def _assert_passed(found: Comparison) -> None:
    wrong = {figure.tensor for figure in found.figures if not figure.passed}
    shares = [f"{f.tensor}: {f.kind} {f.ratio:.2f}" for f in found.figures if f.tensor in wrong]
    assert not found.problems, "\n".join([*found.problems, "of what is allowed:", *shares])


__all__ = ["Results", "assert_budget", "assert_within", "results"]
