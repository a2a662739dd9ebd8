"""Measures what a layer keeps, needs and takes, one layer at a time and on this device.

On a GPU memory is what PyTorch's allocator counts. On a CPU, where nothing counts it, the tensors
that autograd saves stand in, so working memory is not in the figures.
"""

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slipstream.nn.offload import moves
from slipstream.nn.saved import Scope, storage_of
from slipstream.recompute.cost import Cost


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

    def memory(self, module: nn.Module, args: tuple, kwargs: dict) -> Cost:
        """Memory of one pass of ``module``, its time left at 0."""
        weights = trained(module)
        kept, movable, forward, backward, grads = self._memory(module, weights, args, kwargs)
        return Cost(
            kept_bytes=kept,
            ms=0.0,
            forward_ms=0.0,
            forward_bytes=max(forward, kept),
            backward_bytes=max(backward, kept + sum(grads)),
            grad_bytes=sum(grads),
            largest_grad_bytes=max(grads, default=0),
            movable=tuple(sorted(movable)),
        )

    def _memory(
        self, module: nn.Module, weights: list[torch.Tensor], args: tuple, kwargs: dict
    ) -> tuple[int, list[int], int, int, list[int]]:
        # Twice: the first time handles and workspaces are made that stay.
        for _ in range(2):
            start = self.allocated()
            with self.peak() as forward, Scope() as scope:
                output = module(*args, **kwargs)
            others = [*module.parameters(), *module.buffers(), *_constants((args, kwargs))]
            kept = kept_bytes(scope, others)
            movable = [t.untyped_storage().nbytes() for t in _kept(scope, others) if moves(t)]
            scope.boxes.clear()
            outputs = differentiable(output)
            between = self.allocated() - start
            given = differentiable((args, kwargs))
            with self.peak() as backward:
                grads = _gradients(outputs, [*given, *weights])
            sizes = [size_of(grad) for grad in grads[len(given) :] if grad is not None]
            del output, outputs, grads
        return kept, movable, forward[0], between + backward[0], sizes

    def passes(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[float, float]:
        """Milliseconds of forward and backward of ``module``."""
        wanted = [*differentiable((args, kwargs)), *trained(module)]
        marks = [self.mark(wait=True)]
        outputs = differentiable(module(*args, **kwargs))
        marks.append(self.mark())
        _gradients(outputs, wanted)
        marks.append(self.mark())
        return self.between(*marks[:2]), self.between(*marks[1:])

    def run(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward and backward of ``module``, waiting for nothing."""
        wanted = [*differentiable((args, kwargs)), *trained(module)]
        _gradients(differentiable(module(*args, **kwargs)), wanted)

    def time(self, run: Callable[[], object]) -> float:
        """Milliseconds of ``run()`` on the device."""
        start = self.mark(wait=True)
        run()
        return self.between(start, self.mark())

    def mark(self, *, wait: bool = False) -> Any:
        """A point in time of the device's; ``wait``: once all before it is done."""
        if not self.on_gpu:
            return time.perf_counter()
        if wait:
            torch.cuda.synchronize(self.device)
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Milliseconds between two marks."""
        if not self.on_gpu:
            return 1e3 * (stop - start)
        stop.synchronize()
        return start.elapsed_time(stop)


def _gradients(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor]
) -> Sequence[torch.Tensor | None]:
    if not outputs:  # a frozen layer behind frozen ones has no backward pass
        return ()
    ones = [torch.ones_like(t) for t in outputs]
    return torch.autograd.grad(outputs, inputs, ones, allow_unused=True)


def kept_bytes(scope: Scope, given: Iterable[torch.Tensor]) -> int:
    """Memory of the tensors saved within a scope, each once, without what lies in ``given``."""
    return sum(tensor.untyped_storage().nbytes() for tensor in _kept(scope, given))


def _kept(scope: Scope, given: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Of the tensors saved within a scope one for each memory, but for that of ``given``."""
    seen = {storage_of(t) for t in given}
    found = []
    for box in scope.boxes:
        if box.tensor is not None and storage_of(box.tensor) not in seen:
            seen.add(storage_of(box.tensor))
            found.append(box.tensor)
    return found


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
