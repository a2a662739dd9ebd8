"""Recording work as a CUDA graph so that a recording that fails leaves nothing behind.

Work that cannot be recorded, a wait for the device most of all, invalidates the capture. PyTorch
2.11 then raises out of ending it before it has put anything back: the current stream stays that of
the capture, the allocators go on as if one were under way, and the generator of random numbers
refuses every later call of the process. Newer versions put a part of that back themselves.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

Returned = TypeVar("Returned")

_ABANDONED: list[torch.cuda.CUDAGraph] = []
# The allocator of pinned memory asks a failed graph for its capture whenever another one is made,
# and cannot be told to stop: such a graph must never be destroyed.


def captured(
    function: Callable[[], Returned],
    stream: torch.cuda.Stream,
    *,
    pool: Any = None,
    error_mode: str = "global",
) -> tuple[torch.cuda.CUDAGraph, Returned]:
    """Record ``function`` on ``stream`` without running it; the graph, and what it returned.

    ``pool``: a ``torch.cuda.graph_pool_handle`` shared with other graphs (None: its own), not to
    be used again where this fails. ``error_mode``: what may disturb the capture, as in
    ``torch.cuda.graph``. Raises what ``function`` or ending the capture raises.
    """
    pool = pool or torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    try:
        # The outer block is the one that puts the current stream back, whatever happens.
        with (
            torch.cuda.stream(stream),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=error_mode),
        ):
            returned = function()
    except BaseException:
        # Where the device itself is lost this raises, too, and the first error says more.
        with suppress(RuntimeError):
            _recover(graph, stream, pool)
        raise
    return graph, returned


def _recover(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any) -> None:
    """Have the allocator and the generator end the capture that ``graph`` has failed at."""
    # Raises where PyTorch has ended it: then the memory is its own affair as well.
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(stream.device_index, pool)
        _ABANDONED.append(graph)
        torch._C._cuda_releasePool(stream.device_index, pool)
    # The next capture that succeeds is what resets the generator. Of something: an empty one warns.
    number = torch.zeros(1, device=stream.device)
    trivial = torch.cuda.CUDAGraph()
    with (
        torch.cuda.stream(stream),
        torch.cuda.graph(trivial, stream=stream, capture_error_mode="thread_local"),
    ):
        number.zero_()
