"""The error budgets of ``slipstream.verify`` as assertions of tests."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slipstream.verify.budget import Results, cast, compare, pooled, results


def assert_budget(
    function: Callable[..., Any],
    eager: Callable[..., Any],
    inputs: Results | Sequence[Results],
    dtype: torch.dtype,
    truth: Callable[..., Any] | None = None,
) -> None:
    """Hold ``function`` to the budget of ``eager`` in ``dtype``; ``truth`` (or eager) gives fp64.

    All take the tensors of ``inputs`` by name and return one tensor or several. Several draws of
    inputs are judged together.
    """
    draws = [inputs] if isinstance(inputs, dict) else inputs
    draws = [{name: cast(t, dtype) for name, t in drawn.items()} for drawn in draws]
    assert_within(
        pooled([results(function, drawn, dtype) for drawn in draws]),
        pooled([results(eager, drawn, dtype) for drawn in draws]),
        pooled([results(truth or eager, drawn, dtype, run_in=torch.float64) for drawn in draws]),
        dtype,
    )


def assert_within(actual: Results, eager: Results, truth: Results, dtype: torch.dtype) -> None:
    """Hold every tensor of ``actual`` to the budget that ``eager`` sets against ``truth``."""
    found = compare(actual, eager, truth, dtype)
    wrong = {figure.tensor for figure in found.figures if not figure.passed}
    shares = [f"{f.tensor}: {f.kind} {f.ratio:.2f}" for f in found.figures if f.tensor in wrong]
    assert not found.problems, "\n".join([*found.problems, "of what is allowed:", *shares])


__all__ = ["Results", "assert_budget", "assert_within", "results"]
