"""Plain data parallelism through PyTorch's DistributedDataParallel."""

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.parallel.config import DataParallelConfig
from slipstream.parallel.ranks import Ranks


def wrap(model: nn.Module, ranks: Ranks, config: DataParallelConfig) -> nn.Module:
    """The module to call in training: averages gradients over ranks; ``model`` itself if alone."""
    if ranks.world == 1:
        return model
    # Newer versions have another name for the same switch and warn about this one.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    switch = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    unsynchronised: dict[str, Any] = {switch: False}
    return DistributedDataParallel(
        model,
        device_ids=[ranks.device] if ranks.device.type == "cuda" else None,
        **unsynchronised,
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.bucket_mb,
    )


@contextmanager
def accumulate(module: nn.Module, *, last: bool) -> Generator[None]:
    """Backward within the block adds to the gradients; only the ``last`` one reduces them."""
    if last or not isinstance(module, DistributedDataParallel):
        yield
        return
    with module.no_sync():
        yield
