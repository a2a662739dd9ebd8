"""Tensors anywhere in memory that stand for the pieces of one flat bucket.

Gradients are born where autograd or a communication library puts them. A kernel that updates a
flat bucket reads them there, through a table of addresses, instead of having them copied first.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

ALIGN = 64
"""Elements: pieces begin at multiples of it, which are 128 bytes or more in every dtype."""
COLUMNS = 4
"""Of a chunk: start in the bucket, number of its tensor, start in the tensor, elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A run of elements that is contiguous in the bucket and in its tensor."""

    start: int
    """First element in the bucket, a multiple of ``ALIGN``."""
    tensor: int
    """Number of the tensor."""
    inner: int
    """First element in the tensor's memory."""
    size: int
    """Elements."""


class Layout:
    """Where the pieces of a bucket are."""

    def __init__(self, pieces: Sequence[Piece], num_elements: int) -> None:
        self.pieces, self.num_elements = tuple(pieces), num_elements
        self._addresses: tuple[tuple[int, ...], torch.Tensor] | None = None
        self._chunks: dict[tuple[int, torch.device], torch.Tensor] = {}

    def chunks(self, block: int, device: torch.device) -> torch.Tensor:
        """int64 ``(chunks, COLUMNS)``: the pieces cut into chunks of ``block`` elements at most."""
        key = (block, device)
        if key not in self._chunks:
            self._chunks[key] = self._cut(block).to(device)
        return self._chunks[key]

    def _cut(self, block: int) -> torch.Tensor:
        starts, tensors, inners, sizes = (
            torch.tensor([getattr(p, name) for p in self.pieces], dtype=torch.int64, device="cpu")
            for name in ("start", "tensor", "inner", "size")
        )
        counts = (sizes + block - 1) // block
        piece = torch.repeat_interleave(torch.arange(len(counts), device="cpu"), counts)
        first = counts.cumsum(0) - counts
        skip = (torch.arange(len(piece), device="cpu") - first[piece]) * block
        count = (sizes[piece] - skip).clamp(max=block)
        return torch.stack((starts[piece] + skip, tensors[piece], inners[piece] + skip, count), 1)

    def addresses(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """int64 device tensor of their addresses; made anew only if one has moved."""
        now = tuple(tensor.data_ptr() for tensor in tensors)
        if self._addresses is None or self._addresses[0] != now:
            device = tensors[0].device
            host = torch.tensor(now, dtype=torch.int64, device="cpu")
            if device.type == "cuda":
                host = host.pin_memory()
            self._addresses = (now, host.to(device, non_blocking=True))
        return self._addresses[1]


class Scattered:
    """The tensors of a ``Layout``, on one device, brought to one dtype and contiguous memory."""

    def __init__(self, layout: Layout, tensors: Sequence[torch.Tensor]) -> None:
        self.layout = layout
        self.dtype = functools.reduce(torch.promote_types, (t.dtype for t in tensors))
        self.device = tensors[0].device
        self.tensors = [tensor.to(self.dtype).contiguous() for tensor in tensors]

    @property
    def shape(self) -> torch.Size:
        """That of the bucket."""
        return torch.Size((self.layout.num_elements,))

    @property
    def addresses(self) -> torch.Tensor:
        """Where the tensors are, on their device."""
        return self.layout.addresses(self.tensors)

    @property
    def aligned(self) -> bool:
        """Whether every chunk can be loaded 16 bytes at a time."""
        return all(tensor.data_ptr() % 16 == 0 for tensor in self.tensors) and all(
            piece.inner * self.tensors[piece.tensor].element_size() % 16 == 0
            for piece in self.layout.pieces
        )

    def flat(self) -> torch.Tensor:
        """A copy as one bucket, zeros between the pieces."""
        bucket = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        flats = [tensor.view(-1) for tensor in self.tensors]
        for piece in self.layout.pieces:
            source = flats[piece.tensor][piece.inner : piece.inner + piece.size]
            bucket[piece.start : piece.start + piece.size] = source
        return bucket


Grads = Sequence[torch.Tensor | Scattered]


def as_flat(grads: Grads) -> list[torch.Tensor]:
    """Every element as one tensor; scattered ones are copied."""
    return [grad.flat() if isinstance(grad, Scattered) else grad for grad in grads]


def samples(grads: Grads) -> list[torch.Tensor]:
    """One tensor of each element: for its dtype and device."""
    return [grad.tensors[0] if isinstance(grad, Scattered) else grad for grad in grads]
