"""Which implementations of an op can be tested here, and in which dtypes."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from slipstream.errors import HardwareError
from slipstream.ops import dispatch
from slipstream.ops.triton_support import interpreting
from tests.budget import Draws, Results

EXAMPLES = 10 if interpreting() else 25
"""Of a hypothesis test; an interpreted kernel takes a second."""
DRAWS = 1 if interpreting() else 16
"""Of the inputs of a budget test; a GPU's libraries sum small products in parts, each its own way,
and with one draw the largest error of a few numbers in fp32 is luck."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def runnable(op: str) -> list[str]:
    """Names of the implementations of ``op``; Triton's where there is a GPU or its interpreter."""
    triton = interpreting() or torch.cuda.is_available()
    return [name for name in dispatch.implementations(op) if triton or name != "triton"]


def fast(op: str) -> list[str]:
    """Those that are held to the reference."""
    return [name for name in runnable(op) if name != "reference"]


def cases(
    op: str,
    dtypes: Sequence[torch.dtype] = DTYPES,
    # The interpreter's bf16 products are wrong.
    interpreted: Sequence[torch.dtype] = (torch.float32, torch.float16),
) -> list:
    """Parameters (implementation, dtype) of a test of everything ``fast``.

    ``interpreted``: dtypes to keep where kernels are interpreted, which takes a second per call.
    """
    return [
        pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
        for name in fast(op)
        for dtype in dtypes
        if not (name == "triton" and interpreting() and dtype not in interpreted)
    ]


def draws(draw: Callable[[], Results]) -> Draws:
    """``DRAWS`` random inputs, to be judged together."""
    return Draws(draw, DRAWS)


ONE = (torch.float16,)
"""``interpreted`` of a test with many other parameters: in fp16 the rounding of what is stored
dwarfs the luck of the sums, on which the largest fp32 error of a small tensor hangs."""


CPU_ONLY = {
    "grouped_mm": "PyTorch's grouped product waits for the host",
    "fused": "PyTorch's fused AdamW takes 1 - beta in fp32",
}
"""Implementations to the reason for which they refuse calls on a GPU that they serve on a CPU."""


@contextmanager
def forced(op: str, name: str) -> Iterator[None]:
    """``dispatch.force``, or a skip where the device that tests run on cannot run it."""
    on_cpu = torch.get_default_device().type == "cpu"
    if name == "triton" and on_cpu and not interpreting():
        pytest.skip("Triton runs on a CPU with TRITON_INTERPRET=1 only")
    try:
        with dispatch.force(**{op: name}):
            yield
    except HardwareError as error:
        if on_cpu or name not in CPU_ONLY or CPU_ONLY[name] not in str(error):
            raise
        pytest.skip(str(error))
