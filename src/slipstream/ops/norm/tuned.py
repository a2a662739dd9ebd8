"""How the norm's kernels are cut up and run: data, chosen by device, direction and width."""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from slipstream.ops.triton_support import next_power_of_2

Direction = Literal["forward", "backward"]
INTERPRETER = 0
"""Stands for a compute capability where Triton interprets the kernels on a CPU."""
REGISTERS = 65536
"""Of a multiprocessor; a thread has at most 255."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """What a program takes at a time."""

    block_t: int
    """Rows."""
    block_d: int
    """Columns: a power of two; less than a row where rows are wide."""
    num_warps: int
    num_stages: int
    """Blocks of rows in registers and on their way; 1: none is loaded ahead."""
    programs_per_sm: int
    """Size of the grid; 0: a program for every block of rows."""

    @property
    def max_registers(self) -> int | None:
        """Of a thread, so that all programs of the grid run at once; None: no limit."""
        if not self.programs_per_sm:
            return None
        return min(255, REGISTERS // (32 * self.num_warps * self.programs_per_sm) // 8 * 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How rows up to a width are taken; the first rule of a direction that fits is used."""

    direction: Direction
    capability: int
    """Major * 10 + minor, the least it is for."""
    max_width: int
    """Largest ``D`` it is for."""
    elements: int
    """Of a block. Narrow rows are taken several at a time."""
    num_warps: int
    num_stages: int = 1
    """At most: as many as shared memory holds."""
    programs_per_sm: int = 0
    wide: bool = False
    """Whether a row is taken in several blocks of columns."""
    activated: bool = False
    """Only for what is the activation of 16-bit rows, whose arithmetic takes as long as memory."""


_ANY = 2**31

TABLE: list[Rule] = [
    # 32 elements a thread: 20 % fewer instructions an element than with 16.
    *[
        Rule(
            direction="forward",
            capability=80,
            max_width=width,
            elements=32 * 32 * warps,
            num_warps=warps,
            activated=True,
        )
        for width, warps in ((4096, 4), (8192, 8))
    ],
    *[
        Rule(
            direction="backward",
            capability=80,
            max_width=width,
            elements=width,
            num_warps=warps,
            num_stages=4,
            programs_per_sm=programs,
            activated=True,
        )
        for width, warps, programs in ((2048, 4, 3), (4096, 4, 2), (8192, 8, 1))
    ],
    *[
        Rule(
            direction="forward", capability=80, max_width=width, elements=elements, num_warps=warps
        )
        for width, elements, warps in (
            (2048, 2048, 4),
            (4096, 4096, 8),
            (8192, 8192, 8),
            (16384, 16384, 16),
        )
    ],
    *[
        Rule(
            direction="backward",
            capability=80,
            max_width=width,
            elements=elements,
            num_warps=warps,
            num_stages=stages,
            programs_per_sm=programs,
        )
        for width, elements, warps, stages, programs in (
            (2048, 2048, 4, 3, 4),
            (4096, 4096, 8, 3, 2),
            (8192, 8192, 16, 3, 1),
            (16384, 16384, 16, 2, 1),
        )
    ],
    Rule(direction="forward", capability=80, max_width=_ANY, elements=4096, num_warps=8, wide=True),
    Rule(
        direction="backward", capability=80, max_width=_ANY, elements=4096, num_warps=8, wide=True
    ),
    *[
        Rule(
            direction=direction,
            capability=INTERPRETER,
            max_width=width,
            elements=4096,
            num_warps=4,
            num_stages=2,
            programs_per_sm=3,
            wide=wide,
        )
        for direction in ("forward", "backward")
        for width, wide in ((16384, False), (_ANY, True))
    ],
]
"""Special ones first, then highest capability, then narrowest rows."""

SHARED_BYTES = {100: 220 << 10, 90: 220 << 10, 86: 90 << 10, 80: 150 << 10, INTERPRETER: 1 << 20}
"""What blocks on their way may take of a multiprocessor, by capability."""
CONSUMER_BLACKWELL = 120
"""From here on, shared memory is that of capability 8.6."""

COLUMN_TILES: dict[str, dict[int, Tile]] = {
    "weight": {
        80: Tile(block_t=16, block_d=256, num_warps=4, num_stages=1, programs_per_sm=4),
        INTERPRETER: Tile(block_t=16, block_d=4096, num_warps=4, num_stages=1, programs_per_sm=3),
    },
    "sum": {
        80: Tile(block_t=256, block_d=16, num_warps=8, num_stages=3, programs_per_sm=0),
        INTERPRETER: Tile(block_t=8, block_d=4096, num_warps=4, num_stages=1, programs_per_sm=0),
    },
}
"""Of the kernels that go down columns: parts of the gradients of weight and bias where rows are
wide, and the sums of all parts (their rows). By capability, highest first."""

_FORCED: dict[str, Tile] = {}


def lookup(
    direction: Direction, capability: int, width: int, column_bytes: int, activated: bool = False
) -> Tile:
    """The tile for rows of ``width`` elements.

    ``column_bytes``: of one element of every tensor that is loaded by rows; ``activated``: whether
    the rows are activated here, have 16 bits and no residual.
    """
    return _FORCED.get(direction) or _find(direction, capability, width, column_bytes, activated)


def lookup_columns(kernel: str, capability: int) -> Tile:
    """The tile of a kernel of ``COLUMN_TILES``."""
    tiles = COLUMN_TILES[kernel]
    return _FORCED.get(kernel) or next(tiles[least] for least in tiles if least <= capability)


@contextmanager
def force(**tiles: Tile) -> Generator[None]:
    """Within the block, use these tiles for ``forward``, ``backward``, ``weight`` or ``sum``.

    For tuning and tests.
    """
    before = dict(_FORCED)
    _FORCED.update(tiles)
    try:
        yield
    finally:
        _FORCED.clear()
        _FORCED.update(before)


def capability_of(device: torch.device) -> int:
    """Major * 10 + minor of a CUDA device; ``INTERPRETER`` for a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


@functools.cache
def _find(
    direction: Direction, capability: int, width: int, column_bytes: int, activated: bool
) -> Tile:
    rule = next(
        rule
        for rule in TABLE
        if rule.direction == direction
        and rule.capability <= capability
        and width <= rule.max_width
        and (activated or not rule.activated)
    )
    block_d = rule.elements if rule.wide else next_power_of_2(width)
    block_t = max(1, rule.elements // block_d)
    memory = 86 if capability >= CONSUMER_BLACKWELL else capability
    shared = next(SHARED_BYTES[least] for least in SHARED_BYTES if least <= memory)
    programs = max(1, rule.programs_per_sm)
    ahead = shared // (programs * block_t * block_d * column_bytes)
    return Tile(
        block_t=block_t,
        block_d=block_d,
        num_warps=rule.num_warps,
        num_stages=min(rule.num_stages, 1 + ahead),
        programs_per_sm=rule.programs_per_sm,
    )
