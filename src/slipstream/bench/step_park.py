"""An arm's memory moved to the host and back, so that several large models share one device.

Whole storages are moved and every tensor stays what it is, a view of a flat buffer too.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_LOOKED_INTO = ("slipstream.", "torch.optim.")
"""Modules whose objects may hold tensors of an arm."""


class Parking:
    """The storages behind an arm's tensors, on the device or on the host."""

    def __init__(self, tensors: Iterable[torch.Tensor], *, movable: bool = True) -> None:
        self.movable = movable
        storages = [tensor.untyped_storage() for tensor in tensors]
        found = {storage.data_ptr(): storage for storage in storages if storage.nbytes()}
        self._storages = list(found.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._on_host: list[torch.Tensor] = []
        self.parked = False
        self.turns = 0

    @property
    def nbytes(self) -> int:
        """Memory of the arm between steps, wherever it is."""
        return sum(self._sizes)

    def leave(self) -> None:
        """Copy everything to the host and free it on the device."""
        assert self.movable
        if self.parked:
            return
        if not self._on_host:
            self._on_host = [_host(storage) for storage in self._storages]
        for storage, kept in zip(self._storages, self._on_host, strict=True):
            kept.copy_(_bytes(storage))
            storage.resize_(0)
        self.parked = True
        self.turns += 1

    def come_back(self) -> None:
        """Bring everything back to the device."""
        if not self.parked:
            return
        for storage, kept, size in zip(self._storages, self._on_host, self._sizes, strict=True):
            storage.resize_(size)
            _bytes(storage).copy_(kept)
        self.parked = False


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of containers and of optimizers, ours and PyTorch's."""
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif isinstance(item, list | tuple | set):
            stack.extend(item)
        elif type(item).__module__.startswith(_LOOKED_INTO):
            stack.extend(getattr(item, "__dict__", {}).values())


def who_leaves(
    wanted: str, parkings: dict[str, Parking], *, working_bytes: int, total_bytes: int
) -> list[str]:
    """Arms to park, the first movable ones first, so that ``wanted`` and a step of it fit.

    ``working_bytes``: most that a step needs above what its arm keeps between steps.
    """
    needed = working_bytes + (parkings[wanted].nbytes if wanted in parkings else 0)
    held = {n: p.nbytes for n, p in parkings.items() if n != wanted and not p.parked}
    leaving = []
    for name in [name for name in held if parkings[name].movable]:
        if sum(held.values()) + needed <= total_bytes:
            break
        leaving.append(name)
        del held[name]
    return leaving


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host(storage: torch.UntypedStorage) -> torch.Tensor:
    pinned = storage.device.type == "cuda"
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu", pin_memory=pinned)
