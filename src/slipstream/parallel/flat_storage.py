"""Parameters in flat buckets: one contiguous tensor each, in forward order; modules hold views.

Gradients stay where autograd or DistributedDataParallel puts them and are read there, unless they
are asked for flat as well. Names, shapes and state dicts of the modules do not change.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from slipstream.errors import ConfigError, TrainingError
from slipstream.ops.scattered import ALIGN, Layout, Piece, Scattered

BUCKET_ELEMENTS = 1 << 28
"""Upper limit of a bucket of several parameters: 1 GiB in fp32."""

Block = tuple[nn.Parameter, ...]
"""One parameter, or several (E, ...) whose slices of an expert lie side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a parameter lies in its bucket."""

    offset: int
    """First element."""
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of ``flat``, a bucket or one like it, that is this parameter's."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)

    def pieces(self, tensor: int) -> list[Piece]:
        """Its contiguous runs, for the ``tensor``-th parameter of a bucket."""
        size = self.shape.numel()
        if size == 0:
            return []
        rows = self.shape[0] if self.shape and self.stride[0] * self.shape[0] != size else 1
        row = size // rows
        return [
            Piece(
                start=self.offset + i * (self.stride[0] if rows > 1 else 0),
                tensor=tensor,
                inner=i * row,
                size=row,
            )
            for i in range(rows)
        ]


class Bucket:
    """Parameters of one dtype and device in one tensor, with fp32 masters where asked for."""

    def __init__(self, blocks: Sequence[Block], *, dtype: torch.dtype, masters: bool) -> None:
        self.params = [param for block in blocks for param in block]
        self.places = _places(blocks)
        self.interleaved = any(len(block) > 1 for block in blocks)
        size = _aligned(max((_end(place) for place in self.places), default=0))
        pieces = [piece for i, place in enumerate(self.places) for piece in place.pieces(i)]
        self.layout = Layout(pieces, size)
        device = self.params[0].device
        self.data = torch.zeros(size, dtype=dtype, device=device)
        self.master = torch.zeros(size, dtype=torch.float32, device=device) if masters else None
        with torch.no_grad():
            for param, place in zip(self.params, self.places, strict=True):
                place.view(self.data).copy_(param)
                if self.master is not None:
                    place.view(self.master).copy_(param)
                param.data = place.view(self.data)
        self._addresses = [param.data_ptr() for param in self.params]
        self._parts: dict[tuple[int, ...], Layout] = {}
        self.note_versions()

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Another flat tensor of this geometry."""
        return torch.zeros_like(self.data, dtype=dtype)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """The parts of a flat tensor of this geometry, in the order of ``params``."""
        return [place.view(flat) for place in self.places]

    def scattered(self) -> Scattered | None:
        """The gradients of those parameters that have one; None where none has."""
        grads = [param.grad for param in self.params]
        present = tuple(i for i, grad in enumerate(grads) if grad is not None)
        if not present:
            return None
        if any(grad.layout is not torch.strided for grad in grads if grad is not None):
            raise TrainingError(
                "a parameter in a flat bucket has a sparse gradient; make its nn.Embedding with "
                "sparse=False"
            )
        return Scattered(self._layout_of(present), [g for g in grads if g is not None])

    def follow_params(self) -> None:
        """Take over what others wrote into the parameters since; TrainingError if one has moved."""
        for i, param in enumerate(self.params):
            if param.data_ptr() != self._addresses[i] or param.dtype != self.data.dtype:
                raise TrainingError(
                    f"a parameter of shape {tuple(param.shape)} has left its flat bucket (through "
                    "model.to(), .half() or load_state_dict(assign=True)); make the optimizer "
                    "after such changes"
                )
            if self.master is not None and param._version != self._versions[i]:
                self.places[i].view(self.master).copy_(param.detach())
        self.note_versions()

    def note_versions(self) -> None:
        """Regard the masters as those of the parameters as they are."""
        self._versions = [param._version for param in self.params]

    def note_step(self) -> None:
        """Tell autograd, which sees only the parameters, that a step has changed them."""
        torch.autograd.graph.increment_version(self.params)
        self.note_versions()

    def _layout_of(self, present: tuple[int, ...]) -> Layout:
        if len(present) == len(self.params):
            return self.layout
        if present not in self._parts:
            number = {tensor: i for i, tensor in enumerate(present)}
            pieces = [
                Piece(start=p.start, tensor=number[p.tensor], inner=p.inner, size=p.size)
                for p in self.layout.pieces
                if p.tensor in number
            ]
            self._parts = {present: Layout(pieces, self.layout.num_elements)}
        return self._parts[present]


def flatten(
    params: Iterable[nn.Parameter],
    *,
    dtype: torch.dtype | None = None,
    masters: bool = False,
    adjacent: Iterable[Block] = (),
    bucket_elements: int | None = None,
) -> list[Bucket]:
    """Move ``params`` into buckets, in this order, one dtype and device each.

    ``dtype``: store them in it; None: in their own. ``masters``: keep fp32 copies, taken before
    they are rounded, of parameters that are not fp32 then. ``adjacent``: groups of parameters
    (E, ...) whose slices of each expert are to lie side by side. Raises ConfigError.
    """
    limit = BUCKET_ELEMENTS if bucket_elements is None else bucket_elements
    params = list(params)
    known = {id(param) for param in params}
    wanted = [_checked(b, known) for b in adjacent if any(id(param) in known for param in b)]
    together = {id(block[0]): block for block in wanted}
    others = {id(param) for block in together.values() for param in block[1:]}
    buckets: list[Bucket] = []
    pending: dict[tuple[torch.dtype, torch.device], list[Block]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}

    def close(key: tuple[torch.dtype, torch.device]) -> None:
        wide = masters and key[0] != torch.float32
        buckets.append(Bucket(pending.pop(key), dtype=key[0], masters=wide))
        sizes[key] = 0

    for param in params:
        if id(param) in others:
            continue
        block = together.get(id(param), (param,))
        key = (dtype or param.dtype, param.device)
        size = sum(p.numel() for p in block)
        if pending.get(key) and sizes[key] + size > limit:
            close(key)
        pending.setdefault(key, []).append(block)
        sizes[key] = sizes.get(key, 0) + size
    for key in list(pending):
        close(key)
    return buckets


def _checked(block: Block, known: set[int]) -> Block:
    if not all(id(param) in known for param in block):
        raise ConfigError(
            "adjacent: of the parameters of a block only some are trained in this group; put them "
            "into one group, or leave the block out"
        )
    shapes = {(param.shape[0] if param.dim() > 1 else None, param.dtype) for param in block}
    if len(shapes) != 1 or None in {experts for experts, _ in shapes}:
        found = ", ".join(str(tuple(param.shape)) for param in block)
        raise ConfigError(
            f"adjacent: parameters of shapes {found} have no common first dimension and dtype; "
            "give tensors (E, ...) of one layer"
        )
    return block


def _places(blocks: Sequence[Block]) -> list[Place]:
    places, offset = [], 0
    for block in blocks:
        if len(block) == 1:
            shape = block[0].shape
            places.append(Place(offset=offset, shape=shape, stride=_strides(shape)))
            offset += _aligned(shape.numel())
            continue
        rows = [_aligned(param[0].numel()) for param in block]
        for i, param in enumerate(block):
            stride = (sum(rows), *_strides(param.shape[1:]))
            places.append(Place(offset=offset + sum(rows[:i]), shape=param.shape, stride=stride))
        offset += sum(rows) * block[0].shape[0]
    return places


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _end(place: Place) -> int:
    if place.shape.numel() == 0:
        return place.offset
    reach = sum((n - 1) * s for n, s in zip(place.shape, place.stride, strict=True))
    return place.offset + reach + 1


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
