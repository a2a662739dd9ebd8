"""From text to batches: ``prepare`` writes token shards, ``Loader`` feeds them to training.

Sources are read as a stream, tokenised by worker processes and written as memory-mapped shards with
a manifest. Training addresses shards by a global sample number, so the position of a run is one
integer on any number of ranks. Public names load on first use: tokenising workers need no torch.
"""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Batch": "loader",
    "ByteTokenizer": "tokenizers",
    "DataConfig": "config",
    "Loader": "loader",
    "PrepareRequest": "prepare",
    "Sampler": "sampler",
    "ShardSet": "shards",
    "Summary": "prepare",
    "Tokenizer": "tokenizers",
    "build_batch": "loader",
    "has_split": "shards",
    "load_tokenizer": "tokenizers",
    "make_tokenizer": "tokenizers",
    "open_shards": "shards",
    "prepare_shards": "prepare",
    "sequential_batches": "loader",
}

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'slipstream.data' has no attribute {name!r}")
    return getattr(import_module(f"slipstream.data.{_PUBLIC[name]}"), name)
