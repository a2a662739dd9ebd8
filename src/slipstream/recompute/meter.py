"""Measures what a layer keeps, needs and takes, one layer at a time and on this device.

On a GPU memory is what PyTorch's allocator counts. On a CPU, where nothing counts it, the tensors
that autograd saves stand in, so working memory is not in the figures.
"""

import statistics
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slipstream.nn.saved import Scope, storage_of
from slipstream.recompute.cost import Cost

WARMUP, REPEATS = 2, 5
STACKED = 3
"""Layers in a row when offload is timed: copies overlap the neighbours' work."""


class Meter:
    """Memory and time of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"

    def allocated(self) -> int:
        """Bytes in use on a GPU; 0 elsewhere."""
        return torch.cuda.memory_allocated(self.device) if self.on_gpu else 0

    @contextmanager
    def peak(self) -> Generator[list[int]]:
        """Appends the most bytes in use within the block, above those at its start."""
        found: list[int] = []
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
        before = self.allocated()
        yield found
        after = torch.cuda.max_memory_allocated(self.device) if self.on_gpu else 0
        found.append(after - before)

    def cost(self, module: nn.Module, args: tuple, kwargs: dict, *, stacked: bool = False) -> Cost:
        """One pass of ``module``; ``stacked``: the time is that of one of several in a row."""
        weights = trained(module)
        kept, forward, backward, grads = self._memory(module, weights, args, kwargs)
        depth = STACKED if stacked else 1
        times = [self._ms(module, weights, args, kwargs, depth) for _ in range(WARMUP + REPEATS)]
        return Cost(
            kept_bytes=kept,
            ms=statistics.median(times[WARMUP:]),
            forward_bytes=max(forward, kept),
            backward_bytes=max(backward, kept + sum(grads)),
            grad_bytes=sum(grads),
            largest_grad_bytes=max(grads, default=0),
        )

    def _memory(
        self, module: nn.Module, weights: list[torch.Tensor], args: tuple, kwargs: dict
    ) -> tuple[int, int, int, list[int]]:
        # Twice: the first time handles and workspaces are made that stay.
        for _ in range(2):
            start = self.allocated()
            with self.peak() as forward, Scope() as scope:
                output = module(*args, **kwargs)
            others = [*module.parameters(), *module.buffers(), *_constants((args, kwargs))]
            kept = kept_bytes(scope, others)
            scope.boxes.clear()
            outputs = differentiable(output)
            between = self.allocated() - start
            given = differentiable((args, kwargs))
            with self.peak() as backward:
                grads = _gradients(outputs, [*given, *weights])
            sizes = [size_of(grad) for grad in grads[len(given) :] if grad is not None]
            del output, outputs, grads
        return kept, forward[0], between + backward[0], sizes

    def _ms(
        self, module: nn.Module, weights: list[torch.Tensor], args: tuple, kwargs: dict, depth: int
    ) -> float:
        def run() -> None:
            outputs = [differentiable(module(*args, **kwargs)) for _ in range(depth)]
            wanted = [*differentiable((args, kwargs)), *weights]
            while outputs:
                _gradients(outputs.pop(), wanted)

        return self.time(run) / depth

    def time(self, run: Any) -> float:
        """Milliseconds of ``run()`` on the device."""
        if self.on_gpu:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize(self.device)
            start.record()
            run()
            stop.record()
            stop.synchronize()
            return start.elapsed_time(stop)
        begin = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - begin)


def _gradients(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    if not outputs:  # a frozen layer behind frozen ones has no backward pass
        return ()
    ones = [torch.ones_like(t) for t in outputs]
    return torch.autograd.grad(outputs, inputs, ones, allow_unused=True)


def kept_bytes(scope: Scope, given: Iterable[torch.Tensor]) -> int:
    """Memory of the tensors saved within a scope, each once, without what lies in ``given``."""
    seen = {storage_of(t) for t in given}
    total = 0
    for box in scope.boxes:
        if box.tensor is not None and storage_of(box.tensor) not in seen:
            seen.add(storage_of(box.tensor))
            total += box.tensor.untyped_storage().nbytes()
    return total


def differentiable(tree: Any) -> list[torch.Tensor]:
    """The tensors of ``tree`` that need a gradient."""
    return [t for t in _tensors(tree) if t.requires_grad]


def trained(module: nn.Module) -> list[torch.Tensor]:
    """Its weights that need a gradient."""
    return [p for p in module.parameters() if p.requires_grad]


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def _constants(tree: Any) -> list[torch.Tensor]:
    return [t for t in _tensors(tree) if not t.requires_grad]


def _tensors(tree: Any) -> list[torch.Tensor]:
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__"):
            values = [getattr(leaf, name) for name in leaf.__dataclass_fields__]
            found += [value for value in values if isinstance(value, torch.Tensor)]
    return found
