"""What crosses ranks: process start-up under torchrun, sums over ranks, data parallelism."""

from slipstream.parallel.config import DataParallelConfig, ParallelConfig
from slipstream.parallel.data_parallel import accumulate, wrap
from slipstream.parallel.ranks import Ranks, connect

__all__ = ["DataParallelConfig", "ParallelConfig", "Ranks", "accumulate", "connect", "wrap"]
