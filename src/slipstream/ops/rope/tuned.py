"""Tiles of the rope kernels: data by device, pass and element size."""

import functools
from dataclasses import dataclass

import torch

REGISTERS = 65536
"""Of a multiprocessor; a thread has at most 255."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a pass is cut up and run."""

    features: int
    """Features per program and step: rows times C."""
    num_warps: int
    programs_per_sm: int = 0
    """Size of the grid of ``norm_backward``, whose programs go through many tiles each."""
    num_stages: int = 1
    """Tiles in registers and on their way there; 1: none is loaded ahead."""

    @property
    def max_registers(self) -> int | None:
        """Of a thread, so that all programs of the grid run at once; None: no limit."""
        if not self.programs_per_sm:
            return None
        return min(255, REGISTERS // (32 * self.num_warps * self.programs_per_sm) // 8 * 8)


INTERPRETER = 0
"""Stands for a compute capability where Triton interprets the kernels on a CPU."""
INTERPRETED_PROGRAMS = 3
"""Programs of the backward with a norm there."""

TABLE: dict[tuple[str, int], tuple[tuple[int, Tile], ...]] = {
    ("turn", 2): (
        (80, Tile(features=2048, num_warps=4)),
        (INTERPRETER, Tile(features=2048, num_warps=4)),
    ),
    ("turn", 4): (
        (80, Tile(features=1024, num_warps=4)),
        (INTERPRETER, Tile(features=2048, num_warps=4)),
    ),
    ("norm_backward", 2): (
        (80, Tile(features=2048, num_warps=4, programs_per_sm=5, num_stages=3)),
        (INTERPRETER, Tile(features=256, num_warps=4, num_stages=2)),
    ),
    ("norm_backward", 4): (
        (80, Tile(features=1024, num_warps=4, programs_per_sm=4, num_stages=3)),
        (INTERPRETER, Tile(features=256, num_warps=4, num_stages=2)),
    ),
}
"""(pass, bytes per element) to tiles by the least compute capability, highest first."""


def lookup(direction: str, tensor: torch.Tensor) -> Tile:
    """The tile of a pass over ``tensor``."""
    return _find(direction, tensor.element_size(), _capability(tensor))


def programs(tile: Tile, tensor: torch.Tensor) -> int:
    """Size of the grid of the backward with a norm."""
    if not tensor.is_cuda:
        return INTERPRETED_PROGRAMS
    return tile.programs_per_sm * _multiprocessors(tensor.device.index)


def _capability(tensor: torch.Tensor) -> int:
    if not tensor.is_cuda:
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return major * 10 + minor


@functools.cache
def _find(direction: str, element_size: int, capability: int) -> Tile:
    rules = TABLE[direction, element_size]
    return next(tile for least, tile in rules if capability >= least)


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
