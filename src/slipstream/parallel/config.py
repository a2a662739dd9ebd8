"""How a run is spread over ranks."""

from typing import Literal

from pydantic import PositiveFloat

from slipstream.config import Config


class DataParallelConfig(Config):
    """Data parallelism: every rank holds the model and a share of the batch."""

    engine: Literal["ddp"] = "ddp"
    """ddp: PyTorch's DistributedDataParallel."""
    bucket_mb: PositiveFloat = 25.0
    """Gradients are reduced in buckets of this many MiB."""


class ParallelConfig(Config):
    """Parallelism of a run."""

    data: DataParallelConfig = DataParallelConfig()
    """Data parallelism."""
