"""What autograd keeps between forward and backward, decided when a block of the forward is over.

Inside a ``Scope`` every tensor that an autograd node saves lies in a ``Box``. At its end a scope
empties some boxes, to be filled in backward, and hands the others to the scope around it, so scopes
nest. The graph is the same with and without one: gradients are equal bit for bit.
"""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import record_function
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

Values = tuple[torch.Tensor, ...]
Make = Callable[..., Values]

_active = threading.local()


class Box:
    """A saved tensor, or the way to get it back."""

    __slots__ = ("fetch", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.fetch: Callable[[], torch.Tensor] | None = None

    def open(self) -> torch.Tensor:
        """The tensor."""
        if self.tensor is not None:
            return self.tensor
        assert self.fetch is not None
        return self.fetch()

    def empty(self, fetch: Callable[[], torch.Tensor]) -> None:
        """Let go of the tensor; ``fetch`` brings it back."""
        self.tensor, self.fetch = None, fetch


class Scope:
    """Collects what autograd saves within the block; ``settle`` decides about it at the end."""

    def __init__(self) -> None:
        self.boxes: list[Box] = []

    def __enter__(self) -> Self:
        _stack().append(self)
        self._pack = _Pack(self.boxes)
        self._hooks = saved_tensors_hooks(self._pack, Box.open)
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> None:
        self._hooks.__exit__(kind, *rest)
        # Every node holds on to the hooks: led they to what is kept, all of it would be there until
        # the last node of the block is through backward; and no collector sees what nodes hold.
        self._pack.boxes = []
        del self._pack, self._hooks
        stack = _stack()
        stack.pop()
        if kind is None:
            self.settle()
            if stack:
                stack[-1].boxes.extend(self.boxes)

    def settle(self) -> None:
        """Empty boxes; those left in ``boxes`` go to the scope around this one."""


class _Pack:
    """The hook of a scope."""

    __slots__ = ("boxes",)

    def __init__(self, boxes: list[Box]) -> None:
        self.boxes = boxes

    def __call__(self, tensor: torch.Tensor) -> Box:
        # Detached: a node that saves what it returns would otherwise hold on to itself.
        box = Box(tensor.detach())
        self.boxes.append(box)
        return box


class Recompute(Scope):
    """A scope whose given values are not kept: backward makes them again, once for all readers."""

    def drop(self, values: Values, again: Make, inputs: Values) -> None:
        """``again(*inputs)`` returns ``values`` anew, bit for bit and laid out as they are now."""
        self._plan = (values, again, inputs)

    def settle(self) -> None:
        """Empty the boxes of the values."""
        values, again, inputs = self._plan
        del self._plan
        kept = {storage_of(t) for t in inputs}
        index: dict[int, int] = {}
        for i, value in enumerate(values):
            if value.numel() and storage_of(value) not in kept:
                index.setdefault(storage_of(value), i)
        source = _Again(again, [Box(t.detach()) for t in inputs])
        left = []
        for box in self.boxes:
            tensor = box.tensor
            i = None if tensor is None else index.get(storage_of(tensor))
            if tensor is None or i is None or tensor.dtype != values[i].dtype:
                left.append(box)
            else:
                source.serve(box, tensor, i, values[i])
        self.boxes = left if len(left) == len(self.boxes) else [*left, *source.inputs]


class _Again:
    """Runs a function once more, keeps each result until its last reader has it."""

    def __init__(self, again: Make, inputs: list[Box]) -> None:
        self.again, self.inputs = again, inputs
        self._autocast = _autocast_of(inputs)
        self._readers: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._values: dict[int, torch.Tensor] = {}

    def serve(self, box: Box, tensor: torch.Tensor, i: int, value: torch.Tensor) -> None:
        """Fill ``box``, which holds a view of value ``i``, from the next run."""
        self._readers[i] = self._readers.get(i, 0) + 1
        offset = int(tensor.storage_offset()) - int(value.storage_offset())
        box.empty(partial(self._view, i, tensor.size(), tensor.stride(), offset))

    def _view(self, i: int, size: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
        if i not in self._values:
            self._run()
        value = self._values[i]
        self._left[i] -= 1
        if not self._left[i]:
            del self._values[i]
        with torch.no_grad():
            return value.as_strided(size, stride, value.storage_offset() + offset)

    def _run(self) -> None:
        with record_function("## recompute ##"), torch.no_grad(), self._autocast():
            values = self.again(*(box.open() for box in self.inputs))
        self._values = {i: values[i] for i in self._readers}
        self._left = dict(self._readers)


def recomputed(make: Make, use: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """``use(*make(*inputs))``, keeping for backward none of the tensors that ``make`` returns.

    ``make`` returns all large tensors it makes, is deterministic, and changes nothing; it may read
    weights. Under ``torch.compile`` nothing made inside ``make`` is kept.
    """
    if torch.compiler.is_compiling():
        return use(*region(make, *inputs))
    if not torch.is_grad_enabled():
        return use(*make(*inputs))
    with Recompute() as scope:
        values = make(*inputs)
        result = use(*values)
        scope.drop(values, make, inputs)
    return result


def region(make: Make, *inputs: torch.Tensor) -> Values:
    """``make(*inputs)`` in a graph being compiled, whose backward has to compute it again."""
    if not torch.is_grad_enabled():
        return make(*inputs)
    # With a policy rather than without: torch 2.11 marks ops inside an autograd.Function only so.
    return checkpoint(make, *inputs, use_reentrant=False, context_fn=_REGION)


def storage_of(tensor: torch.Tensor) -> int:
    """Names the memory a tensor lies in, on any device."""
    return tensor.untyped_storage()._cdata


def _policy(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


_REGION = partial(create_selective_checkpoint_contexts, _policy)


def _autocast_of(inputs: Sequence[Box]) -> Callable[[], torch.autocast]:
    kind = inputs[0].open().device.type
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return partial(torch.autocast, kind, dtype=dtype, enabled=enabled)


def _stack() -> list[Scope]:
    if not hasattr(_active, "stack"):
        _active.stack = []
    return _active.stack
