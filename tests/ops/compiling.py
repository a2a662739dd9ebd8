"""A compiled op must stay within the error budget of the same op run eagerly."""

from collections.abc import Callable
from typing import Any

import torch

from tests.budget import Results, assert_budget


def assert_compiles(
    function: Callable[..., Any],
    inputs: Results,
    backend: str = "aot_eager",
    truth: Callable[..., Any] | None = None,
) -> None:
    """Compile ``function`` without a graph break; compare outputs and gradients, in fp32.

    ``truth``: for a ``function`` that does not take fp64.
    """
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    assert_budget(compiled, function, inputs, torch.float32, truth)
