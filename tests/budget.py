"""The error budgets of ``slipstream.verify`` as assertions of tests."""

from collections.abc import Callable
from typing import Any

import torch

from slipstream.verify.budget import Results, cast, compare, results


def assert_budget(
    function: Callable[..., Any],
    eager: Callable[..., Any],
    inputs: Results,
    dtype: torch.dtype,
    truth: Callable[..., Any] | None = None,
) -> None:
    """Hold ``function`` to the budget of ``eager`` in ``dtype``; ``truth`` (or eager) gives fp64.

    All take the tensors of ``inputs`` by name and return one tensor or several.
    """
    inputs = {name: cast(tensor, dtype) for name, tensor in inputs.items()}
    assert_within(
        results(function, inputs, dtype),
        results(eager, inputs, dtype),
        results(truth or eager, inputs, dtype, run_in=torch.float64),
        dtype,
    )


def assert_within(actual: Results, eager: Results, truth: Results, dtype: torch.dtype) -> None:
    """Hold every tensor of ``actual`` to the budget that ``eager`` sets against ``truth``."""
    found = compare(actual, eager, truth, dtype)
    assert not found.problems, "\n".join(found.problems)


__all__ = ["Results", "assert_budget", "assert_within", "results"]
