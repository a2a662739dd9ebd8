"""Saved tensors that wait for backward in the host's memory.

On a GPU copies run on a stream of their own, from and to pinned buffers that are used again; a
layer's tensors come back while the layer after it is still in backward. Events order everything;
the host waits for nothing. On a CPU a copy stands in.
"""

import weakref
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from slipstream.nn.saved import Box, Scope, storage_of

MIN_BYTES = 1 << 16


@contextmanager
def offloading(module: nn.Module, *, enabled: bool) -> Generator[None]:
    """Offload what autograd saves within the block, but for the weights of ``module``."""
    on = enabled and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    with Offload(module) if on else nullcontext():
        yield


class Offload(Scope):
    """Moves saved tensors to the host when the block ends.

    Weights stay, small tensors too, and whatever lies in memory of ``MIN_BYTES`` or less.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
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
            away = _Away(_lane(sources[0].device), sources, readers)
            for box, tensor in chosen:
                i, like = moved[storage_of(tensor)], _Geometry(tensor)
                box.empty(partial(away.view, i, like))
        self.boxes = left

    def _moves(self, tensor: torch.Tensor) -> bool:
        size = tensor.untyped_storage().nbytes()
        return size > MIN_BYTES and storage_of(tensor) not in self._stays


class _Geometry:
    """How a tensor lies in its memory."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return memory.view(self.dtype).as_strided(self.size, self.stride, self.offset)


class _Away:
    """The tensors of one block on the host, until their last reader has them back."""

    def __init__(self, lane: "_Lane", sources: list[torch.Tensor], readers: list[int]) -> None:
        self.lane, self.readers, self.left = lane, readers, list(readers)
        self.here: dict[int, torch.Tensor] = {}
        self.before = lane.last
        previous = self._previous()
        if previous is not None:
            previous.let_go()
        self.host, self.sent = lane.send(sources)
        self.arrived = self.sent
        # Alive until the next block has been launched: the copy overlaps it, and the compute
        # stream, which waits for the copy then, can use the memory again without the host's help.
        self.sources: list[torch.Tensor] | None = sources
        lane.last = weakref.ref(self)

    def view(self, i: int, geometry: _Geometry) -> torch.Tensor:
        """One saved tensor, back on the device."""
        if i not in self.here:
            self.fetch()
        self.lane.wait(self.arrived)
        previous = self._previous()
        if previous is not None and not previous.here and previous.left == previous.readers:
            previous.fetch()
        memory = self.here[i]
        self.left[i] -= 1
        if not self.left[i]:
            del self.here[i]
        if not self.here:
            self.left = list(self.readers)
        return geometry.view(memory)

    def fetch(self) -> None:
        """Start the copies back, unless the tensors have not left yet."""
        tensors, self.sources = self.sources, None
        if tensors is None:
            tensors, self.arrived = self.lane.bring(self.host)
        self.here, self.left = dict(enumerate(tensors)), list(self.readers)

    def let_go(self) -> None:
        """Free the device's memory, in the order of the compute stream."""
        if self.sources is not None:
            self.lane.wait(self.sent)
            self.sources = None

    def _previous(self) -> "_Away | None":
        return None if self.before is None else self.before()

    def __del__(self) -> None:
        if self.sources is not None or self.here:
            self.lane.wait(self.arrived)
        self.lane.give_back(self.host)


class _Lane:
    """The copies of one device: their stream, and the host buffers by size."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.free: dict[int, list[torch.Tensor]] = {}
        self.last: weakref.ref[_Away] | None = None

    def send(
        self, sources: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        """Host copies of ``sources``, under way, and the event of their end."""
        if self.stream is None:
            return [source.clone() for source in sources], None
        buffers = [self._buffer(source.numel()) for source in sources]
        return buffers, self._copy(self.stream, buffers, sources)

    def bring(self, host: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.cuda.Event | None]:
        """Device copies of ``host``, under way, and the event of their arrival."""
        if self.stream is None:
            return [buffer.clone() for buffer in host], None
        # Memory of the compute stream: the copies wait for what still runs in it.
        tensors = [torch.empty_like(buffer, device=self.device) for buffer in host]
        return tensors, self._copy(self.stream, tensors, host)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """The compute stream waits for copies."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def give_back(self, buffers: list[torch.Tensor]) -> None:
        """Use host buffers again: a later copy into them runs after those out of them."""
        if self.stream is not None:
            for buffer in buffers:
                self.free.setdefault(buffer.numel(), []).append(buffer)

    def _copy(
        self, stream: torch.cuda.Stream, into: list[torch.Tensor], out_of: list[torch.Tensor]
    ) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for target, source in zip(into, out_of, strict=True):
                target.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record()
        return done

    def _buffer(self, size: int) -> torch.Tensor:
        free = self.free.get(size)
        if free:
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


_lanes: dict[torch.device, _Lane] = {}


def _lane(device: torch.device) -> _Lane:
    if device not in _lanes:
        _lanes[device] = _Lane(device)
    return _lanes[device]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    # All of the memory the tensor lies in: views of it share one copy.
    storage = tensor.untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(storage, 0, (storage.nbytes(),), (1,))
