"""Block sizes of the activation kernels: data by device, direction and element size."""

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How a pass is cut up and run."""

    block: int
    """Elements of the output per program."""
    num_warps: int


INTERPRETER = 0
"""Stands for a compute capability where Triton interprets the kernels on a CPU."""

TABLE: dict[tuple[str, int], tuple[tuple[int, Blocks], ...]] = {
    ("forward", 2): (
        (80, Blocks(block=1024, num_warps=4)),
        (INTERPRETER, Blocks(block=4096, num_warps=4)),
    ),
    ("forward", 4): (
        (80, Blocks(block=1024, num_warps=4)),
        (INTERPRETER, Blocks(block=4096, num_warps=4)),
    ),
    ("backward", 2): (
        (80, Blocks(block=1024, num_warps=4)),
        (INTERPRETER, Blocks(block=4096, num_warps=4)),
    ),
    ("backward", 4): (
        (80, Blocks(block=1024, num_warps=4)),
        (INTERPRETER, Blocks(block=4096, num_warps=4)),
    ),
}
"""(pass, bytes per element) to blocks by the least compute capability, highest first."""


def lookup(direction: str, tensor: torch.Tensor) -> Blocks:
    """The blocks of a pass over ``tensor``."""
    capability = INTERPRETER
    if tensor.is_cuda:
        major, minor = torch.cuda.get_device_capability(tensor.device)
        capability = major * 10 + minor
    return _find(direction, tensor.element_size(), capability)


@functools.cache
def _find(direction: str, element_size: int, capability: int) -> Blocks:
    rules = TABLE[direction, element_size]
    return next(blocks for least, blocks in rules if capability >= least)
