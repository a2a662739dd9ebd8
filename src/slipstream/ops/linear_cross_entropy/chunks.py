"""How many tokens a chunk has: a model of the time that the memory traffic of chunks costs.

Fewer chunks pass over the fp32 weight gradient less often, and hold more logits. What is chosen
depends on shapes, dtype and the kind of GPU alone, never on what memory happens to be free: a
different count would sum in a different order, and two runs would differ.
"""

import functools
from dataclasses import dataclass

import torch

from slipstream.ops.triton_support import cdiv

SLAB_BYTES = 1008 << 20
"""Logits of one chunk at most: 1 GiB less what else is allocated on the way."""
SHARE_OF_MEMORY = 64
"""A slab takes at most one part in this many of the device's memory."""
ALIGNMENT = 64
"""Elements between rows of logits are a multiple of this: aligned for wide loads and cuBLAS."""
ROWS = 128
"""Tokens of a chunk are a multiple of this where memory allows: tiles of matrix products."""
NEARLY = 1.01
"""The smallest slab wins among those at most this much slower than the fastest."""
FLOPS_PER_MS, BYTES_PER_MS = 790e9, 4.3e9
"""Matrix products and copies of an H200, measured. Only their ratio matters."""
TAIL_MS = 0.01
"""Start and end of a kernel, when it does not fill the GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The shape of a call."""

    tokens: int
    width: int
    vocab: int
    itemsize: int
    """Bytes of an element of logits."""
    x_grad: bool
    """A chunk also makes the gradient of x."""
    w_grad: bool
    """A chunk also adds to the gradient of w."""

    @property
    def row_bytes(self) -> int:
        """Logits of one token."""
        return row_stride(self.vocab) * self.itemsize


def row_stride(vocab: int) -> int:
    """Elements from one row of logits to the next."""
    return cdiv(vocab, ALIGNMENT) * ALIGNMENT


def cost_ms(head: Head, rows: int) -> float:
    """Time of a call in chunks of ``rows`` tokens: each step by its FLOPs or bytes, whichever long.

    Passes over the weight gradient are counted as if no product hid them.
    """
    full, rest = divmod(head.tokens, rows)
    times = full * _chunk_ms(head, rows) + (_chunk_ms(head, rest) if rest else 0.0)
    # The first chunk writes the gradient, the others read it too.
    passes = 2 * (full + bool(rest)) - 1
    gradient = passes * 4 * head.vocab * head.width if head.w_grad else 0
    return times + gradient / BYTES_PER_MS


def _chunk_ms(head: Head, rows: int) -> float:
    weight, slab = head.vocab * head.width * head.itemsize, rows * head.row_bytes
    tokens = rows * head.width * head.itemsize
    flops_ms = 2 * rows * head.width * head.vocab / FLOPS_PER_MS
    from_weight = max(flops_ms, (weight + slab + tokens) / BYTES_PER_MS) + TAIL_MS
    to_weight = max(flops_ms, (slab + tokens) / BYTES_PER_MS) + TAIL_MS
    gradients = head.x_grad or head.w_grad
    pointwise = (2 if gradients else 1) * slab / BYTES_PER_MS + TAIL_MS
    return (1 + head.x_grad) * from_weight + pointwise + head.w_grad * to_weight


def chunk_rows(head: Head, limit_bytes: int) -> int:
    """Tokens of a chunk: nearly the fastest split of those that fit, with the smallest slab."""
    if head.tokens == 0:
        return 1
    most = max(1, limit_bytes // head.row_bytes)
    most = most // ROWS * ROWS if most >= ROWS else most
    least = cdiv(head.tokens, most)
    choices = {min(most, _rounded(cdiv(head.tokens, n))) for n in range(least, 4 * least + 16)}
    costs = {rows: cost_ms(head, rows) for rows in choices}
    fastest = min(costs.values())
    return min(rows for rows, cost in costs.items() if cost <= NEARLY * fastest)


def _rounded(rows: int) -> int:
    return cdiv(rows, ROWS) * ROWS


@functools.lru_cache(maxsize=1024)
def _cached_rows(head: Head, limit_bytes: int) -> int:
    return chunk_rows(head, limit_bytes)


def rows_for(head: Head, device: torch.device) -> int:
    """``chunk_rows`` on a device, whose memory bounds the slab."""
    return min(max(1, head.tokens), _cached_rows(head, min(SLAB_BYTES, _share(device))))


def _share(device: torch.device) -> int:
    return _share_of_cuda(device.index or 0) if device.type == "cuda" else SLAB_BYTES


@functools.cache
def _share_of_cuda(index: int) -> int:
    return torch.cuda.get_device_properties(index).total_memory // SHARE_OF_MEMORY
