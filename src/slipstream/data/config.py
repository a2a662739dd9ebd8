"""The ``data`` section of a recipe."""

from typing import Literal

from pydantic import Field

from slipstream.config import Config


class DataConfig(Config):
    """Which tokens a run reads and how they become batches."""

    path: str = ""
    """Folder written by slipstream prepare, or a llm.c / nanoGPT .bin file or folder of them."""
    seq_len: int = Field(default=1024, gt=0)
    """Tokens per sample that get a loss."""
    shuffle: bool = True
    """Visit samples in a pseudo-random order, another one in each epoch."""
    mask_documents: bool = False
    """Keep attention and targets inside one document of a sample."""
    prefetch: int = Field(default=2, ge=1)
    """Steps built ahead of the one that is training."""
    verify: Literal["auto", "full", "size"] = "auto"
    """Check shards at start: auto hashes all below 2 GB and samples above; size trusts content."""
