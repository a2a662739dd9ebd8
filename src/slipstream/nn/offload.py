"""Saved tensors that wait for backward in the host's memory.

On a GPU copies run on a stream of their own, from and to pinned buffers that are used again. Which
layer a copy out is given until, and at which layer the copies back begin, is part of the action:
``offload:3:2`` has left when the third layer after it ends, and starts to come back when the second
one after it begins its backward; ``offload:1,3:2`` leaves in parts, small tensors first. Events
order everything; the host waits for nothing. On a CPU a copy stands in.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from slipstream.nn.saved import Box, Scope, storage_of
from slipstream.nn.site import offload_times

MIN_BYTES = 1 << 16
PIECE_BYTES = 1 << 28
"""Host buffers are of this size or smaller, so that tensors of any size share them."""


def concerns(action: str) -> bool:
    """Whether a layer with this action has to run inside ``around``."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return offload_times(action) is not None or any(lane.blocks for lane in _lanes.values())


def around(module: nn.Module, action: str, run: Callable[[], Any]) -> Any:
    """``run()``, the forward of a layer; what autograd saves in it goes where ``action`` says.

    Every layer of a model runs through here, so that copies under way know how far it has come.
    """
    times = offload_times(action)
    if times is None:
        output = run()
    else:
        with Offload(module, *times):
            output = run()
    tensor = next((t for t in tree_leaves(output) if _is_made(t)), None)
    if tensor is not None and (lane := _lanes.get(tensor.device)) is not None:
        lane.passed(tensor)
    return output


class Offload(Scope):
    """Moves saved tensors to the host when the block ends.

    ``leave``: layers after this one until their memory is free, the last number for the largest,
    the one before it for the next, the first for all others. ``back``: layers before this one, in
    backward, at which they start to come back; 0: when they are needed. Weights stay, and whatever
    lies in memory of ``MIN_BYTES`` or less.
    """

    def __init__(self, module: nn.Module, leave: Sequence[int] = (1,), back: int = 1) -> None:
        super().__init__()
        self.leave, self.back = tuple(leave), back
        self._stays = {storage_of(t) for t in (*module.parameters(), *module.buffers())}

    def settle(self) -> None:
        """Start the copies and empty the boxes."""
        moved: dict[int, int] = {}
        sources: list[torch.Tensor] = []
        chosen: list[tuple[Box, torch.Tensor]] = []
        left = []
        for box in self.boxes:
            tensor = box.tensor
            if tensor is None or not self._moves(tensor):
                left.append(box)
                continue
            if storage_of(tensor) not in moved:
                moved[storage_of(tensor)] = len(sources)
                sources.append(_bytes_of(tensor))
            chosen.append((box, tensor))
        if sources:
            readers = [0] * len(sources)
            for _, tensor in chosen:
                readers[moved[storage_of(tensor)]] += 1
            away = _Away(_lane(sources[0].device), sources, readers, self.leave, self.back)
            for box, tensor in chosen:
                i, like = moved[storage_of(tensor)], _Geometry(tensor)
                box.empty(partial(away.view, i, like))
        self.boxes = left

    def _moves(self, tensor: torch.Tensor) -> bool:
        return moves(tensor) and storage_of(tensor) not in self._stays


def moves(tensor: torch.Tensor) -> bool:
    """Whether the memory a tensor lies in is worth moving, and its bytes are all there is to it."""
    plain = not tensor.is_conj() and not tensor.is_neg()
    return plain and tensor.untyped_storage().nbytes() > MIN_BYTES


class _Geometry:
    """How a tensor lies in its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        return empty.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


class _Away:
    """The tensors of one block on the host, until their last reader has them back."""

    def __init__(
        self,
        lane: "_Lane",
        sources: list[torch.Tensor],
        readers: list[int],
        leave: tuple[int, ...],
        back: int,
    ) -> None:
        self.lane, self.readers, self.left = lane, readers, list(readers)
        self.back, self.age = back, -1
        self.here: dict[int, torch.Tensor] = {}
        self.arrived: list[torch.cuda.Event | None] = []
        self.sizes = [source.numel() for source in sources]
        # Small ones first: their memory is free early, the largest tensor's only at its end.
        order = sorted(range(len(sources)), key=self.sizes.__getitem__)
        self.leave = dict(zip(reversed(order), reversed(leave), strict=False))
        self.leave = {i: self.leave.get(i, leave[0]) for i in order}
        """By tensor, in the order of their copies."""
        self.host, self.sent = lane.send(sources, order)
        self.stream = lane.current()
        # Alive until the copy is given up on: the compute stream waits for it then and can use
        # the memory again without the host's help.
        self.sources: dict[int, torch.Tensor] = dict(enumerate(sources))
        lane.blocks.append(weakref.ref(self))

    def view(self, i: int, geometry: _Geometry) -> torch.Tensor:
        """One saved tensor, back on the device."""
        if i not in self.here:
            self._bring()
        self.lane.wait(self.arrived[i])
        memory = self.here[i]
        self.left[i] -= 1
        if not self.left[i]:
            del self.here[i]
        if not self.here:
            self.left = list(self.readers)
        return geometry.view(memory)

    def fetch(self) -> None:
        """Start the copies back, if nobody has."""
        if not self.here and self.left == self.readers:
            self._bring()

    def let_go(self, age: int | None = None) -> None:
        """Free the device's memory in the order of the compute stream.

        Of what leaves by ``age``; without it, of all.
        """
        due = (i for i, leave in self.leave.items() if age is None or leave <= age)
        gone = [i for i in due if i in self.sources]
        if gone:
            # Copies end one after another.
            self.lane.wait(self.sent[gone[-1]])
        for i in gone:
            del self.sources[i]

    def _bring(self) -> None:
        for i in self.here:  # not read by a pass that ended early
            self.lane.wait(self.arrived[i], self.stream)
        self.stream, self.left = self.lane.current(), list(self.readers)
        # What has not left need not come.
        self.here, self.sources, self.arrived = self.sources, {}, list(self.sent)
        away = [i for i in range(len(self.sizes)) if i not in self.here]
        if not away:
            return
        found = self.lane.bring([self.host[i] for i in away], [self.sizes[i] for i in away])
        for i, tensor, event in zip(away, *found, strict=True):
            self.here[i], self.arrived[i] = tensor, event

    def __del__(self) -> None:
        # The memory goes back to the stream it was taken on, whichever is current now.
        for i in self.sources:
            self.lane.wait(self.sent[i], self.stream)
        for i in self.here:
            self.lane.wait(self.arrived[i], self.stream)
        self.lane.give_back([piece for pieces in self.host for piece in pieces])


Refs = list["weakref.ref[_Away]"]


class _Lane:
    """The copies of one device: their stream, and the host buffers by size."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free: dict[int, list[torch.Tensor]] = {}
        self.blocks: Refs = []
        """Those that layers still to come have to do with."""

    def passed(self, output: torch.Tensor) -> None:
        """A layer has ended in forward: what has had its time leaves.

        Its backward begins with the gradient of ``output``. What is still here then leaves too,
        and what is due starts to come back.
        """
        blocks, leaving, coming = self.blocks, [], []
        self.blocks = []
        for ref in blocks:
            block = ref()
            if block is None:
                continue
            block.age += 1
            block.let_go(block.age)
            if block.age and block.sources:
                leaving.append(ref)
            if block.age and block.age == block.back:
                coming.append(ref)
            if block.sources or block.age < block.back:
                self.blocks.append(ref)
        if leaving or coming:
            output.register_hook(partial(_reached, leaving, coming[::-1]))

    def send(
        self, sources: list[torch.Tensor], order: list[int]
    ) -> tuple[list[list[torch.Tensor]], list[torch.cuda.Event | None]]:
        """Host copies of ``sources`` in pieces, under way in ``order``, and events of their end."""
        if self.stream is None:
            return [[source.clone()] for source in sources], [None] * len(sources)
        pieces = [source.split(PIECE_BYTES) for source in sources]
        host = [[self._buffer(piece.numel()) for piece in tensor] for tensor in pieces]
        groups = [list(zip(host[i], pieces[i], strict=True)) for i in order]
        ends = dict(zip(order, self._copy(self.stream, groups), strict=True))
        return host, [ends[i] for i in range(len(sources))]

    def bring(
        self, host: list[list[torch.Tensor]], sizes: list[int]
    ) -> tuple[list[torch.Tensor], list[torch.cuda.Event | None]]:
        """Device copies of what was sent, under way, the last first, and events of arrival."""
        if self.stream is None:
            return [piece.clone() for (piece,) in host], [None] * len(host)
        # Memory of the compute stream: the copies wait for what still runs in it.
        tensors = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in sizes]
        groups = [
            list(zip(tensor.split(PIECE_BYTES), pieces, strict=True))
            for tensor, pieces in zip(tensors, host, strict=True)
        ]
        return tensors, self._copy(self.stream, groups[::-1])[::-1]

    def current(self) -> torch.cuda.Stream | None:
        """The compute stream; None on a CPU."""
        return None if self.stream is None else torch.cuda.current_stream(self.device)

    def wait(self, event: torch.cuda.Event | None, stream: torch.cuda.Stream | None = None) -> None:
        """The compute stream, or ``stream``, waits for copies."""
        if event is not None:
            (stream or torch.cuda.current_stream(self.device)).wait_event(event)

    def give_back(self, buffers: list[torch.Tensor]) -> None:
        """Use host buffers again: a later copy into them runs after those out of them."""
        if self.stream is not None:
            for buffer in buffers:
                whole = _bytes_of(buffer)
                self.free.setdefault(whole.numel(), []).append(whole)

    def _copy(
        self,
        stream: torch.cuda.Stream,
        groups: list[list[tuple[torch.Tensor, torch.Tensor]]],
    ) -> list[torch.cuda.Event | None]:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        ends: list[torch.cuda.Event | None] = []
        with torch.cuda.stream(stream):
            for group in groups:
                for target, source in group:
                    target.copy_(source, non_blocking=True)
                done = torch.cuda.Event()
                done.record()
                ends.append(done)
        return ends

    def _buffer(self, size: int) -> torch.Tensor:
        # By powers of two: with every size for itself, inputs of many sizes would leave as many.
        room = buffer_bytes(size)
        free = self.free.get(room)
        return (free.pop() if free else pinned(room))[:size]


def buffer_bytes(size: int) -> int:
    """The host memory that a piece of ``size`` bytes takes: what pinning rounds it to anyway."""
    return 1 << (size - 1).bit_length()


def pinned(size: int) -> torch.Tensor:
    """Bytes of the host's memory that a GPU can read and write by itself."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


_lanes: dict[torch.device, _Lane] = {}


def _lane(device: torch.device) -> _Lane:
    if device not in _lanes:
        _lanes[device] = _Lane(device)
    return _lanes[device]


def _reached(leaving: Refs, coming: Refs, _: torch.Tensor) -> None:
    for ref in leaving:
        if (block := ref()) is not None:
            block.let_go()
    for ref in coming:
        if (block := ref()) is not None:
            block.fetch()


def _is_made(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # All of the memory the tensor lies in: views of it share one copy.
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))
