"""Blocks and warps of the kernels: data, by bytes of an element."""

from dataclasses import dataclass

from slipstream.ops.triton_support import next_power_of_2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """How a kernel goes over a row of logits."""

    block: int
    """Elements at a time."""
    num_warps: int
    stages: int
    """Depth of the pipeline of loads; 1: none."""


# A program owns a row and reads it twice. On an H200 many small programs beat few large ones, whose
# rows the L2 cache would keep between the two passes: 0.76 against 0.86 to 1.03 ms for 4096 rows of
# 128256 16-bit logits. The entries for 4 bytes take as many bytes a thread.
STATS = {2: Rows(block=4096, num_warps=8, stages=4), 4: Rows(block=2048, num_warps=8, stages=4)}
"""The kernel that reduces a row, and may overwrite it with its gradient."""
POINTWISE = {2: Rows(block=4096, num_warps=8, stages=3), 4: Rows(block=2048, num_warps=8, stages=3)}
"""The kernel that overwrites a row whose highest logit and sum are known."""
SCALE_BLOCK = 8192
SCALE_WARPS = 8
SUM_BLOCK = 4096


def for_row(table: dict[int, Rows], itemsize: int, stride: int) -> Rows:
    """The entry for rows of ``stride`` elements; short rows take one block and fewer warps."""
    entry = table[itemsize]
    block = min(entry.block, next_power_of_2(stride))
    warps = max(1, min(entry.num_warps, block // 256))
    return Rows(block=block, num_warps=warps, stages=entry.stages if stride > block else 1)
