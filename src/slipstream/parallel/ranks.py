"""The ranks of a run: one process, or as many as torchrun started.

``connect`` reads torchrun's environment; sums and votes work the same on one process, where they
are free.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from slipstream.errors import HardwareError


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among the others."""

    rank: int
    """Number of this process, from 0."""
    world: int
    """How many processes."""
    device: torch.device
    """Device of this process."""
    control: Any
    """gloo group for checkpoints and votes, apart from training traffic; None alone."""

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place where there are several."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def barrier(self) -> None:
        """Wait for every rank."""
        if self.world > 1:
            dist.barrier(group=self.control)

    def gather(self, value: Any) -> list[Any]:
        """A small picklable value of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_first(self, value: Any) -> Any:
        """Rank 0's small picklable value, on every rank."""
        if self.world == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]


@contextmanager
def connect(device: str = "auto") -> Generator[Ranks]:
    """Join the processes torchrun started (or run alone) and choose this process's device.

    ``device``: ``auto``, ``cpu`` or ``cuda``. Raises HardwareError.
    """
    world, local = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    chosen = _device(device, local)
    if world == 1:
        yield Ranks(rank=0, world=1, device=chosen, control=None)
        return
    backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, device_id=chosen if chosen.type == "cuda" else None)
    try:
        control = dist.new_group(backend="gloo")
        yield Ranks(rank=dist.get_rank(), world=world, device=chosen, control=control)
    finally:
        dist.destroy_process_group()


def _device(name: str, local: int) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise HardwareError("train.device = cuda, but PyTorch sees no CUDA device; use cpu or auto")
    if local >= torch.cuda.device_count():
        raise HardwareError(
            f"local rank {local} has no GPU: {torch.cuda.device_count()} visible; "
            "lower --nproc-per-node"
        )
    device = torch.device("cuda", local)
    torch.cuda.set_device(device)
    return device
