"""What a prepared folder says about itself: ``manifest.json``, and the hashes it carries.

A shard has two hashes: one of every byte, and one of a few blocks spread over the file that can be
checked in milliseconds however large the shard is.
"""

import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from slipstream.config import Config
from slipstream.errors import DataError

MANIFEST = "manifest.json"
FORMAT = "slipstream-tokens"
VERSION = 1
SAMPLED_BLOCKS = 16
BLOCK_BYTES = 1 << 16
REBUILD = "run slipstream prepare again with --overwrite"
Split = Literal["train", "val"]


class ShardEntry(Config):
    """One file of tokens."""

    file: str
    """Name inside the folder."""
    tokens: int
    """Tokens in the file."""
    bytes_of_text: int
    """UTF-8 bytes of the text pieces that begin in this shard."""
    documents: int
    """Documents that begin in this shard."""
    sha256: str
    """Hash of the whole file."""
    sampled_sha256: str
    """Hash of sampled blocks of the file (``sampled_hash``)."""


class SplitEntry(Config):
    """All tokens of one split."""

    shards: list[ShardEntry]
    """Shards in order."""
    documents_file: str
    """Little-endian int64 token offsets of document starts, counted over the whole split."""
    documents: int
    """Documents in the split."""
    documents_sha256: str
    """Hash of the offsets file."""


class TokenizerEntry(Config):
    """The tokenizer the tokens came from."""

    kind: Literal["byte", "huggingface"]
    """How ``tokenizer.json`` is read."""
    vocab_size: int
    """Number of ids."""
    eot_id: int
    """Id that ends every document."""
    hash: str
    """``Tokenizer.hash``."""


class Manifest(Config):
    """The whole of ``manifest.json``."""

    format: Literal["slipstream-tokens"] = FORMAT
    """Marks the folder as ours."""
    version: Literal[1] = VERSION
    """Layout version."""
    dtype: Literal["uint16", "uint32"]
    """Type of a token in the shards, little-endian."""
    tokenizer: TokenizerEntry
    """Where the ids come from."""
    splits: dict[Split, SplitEntry]
    """Tokens per split."""

    def save(self, folder: Path) -> None:
        """Write ``manifest.json`` into ``folder``."""
        (folder / MANIFEST).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def load_manifest(folder: Path) -> Manifest:
    """Read and check ``manifest.json``; DataError says what is wrong with it."""
    path = folder / MANIFEST
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values["version"]
        if version != VERSION:
            raise DataError(f"{path}: layout version {version}, this is {VERSION}; {REBUILD}")
        return Manifest.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DataError(f"{path}: damaged at {key}: {first['msg']}; {REBUILD}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: cannot be read ({error!r}); {REBUILD}") from None


def is_prepared(folder: Path) -> bool:
    """Whether ``folder`` holds a manifest of ours, whatever its version or state."""
    try:
        return FORMAT in (folder / MANIFEST).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False


def full_hash(path: Path) -> str:
    """SHA-256 of a file as hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_hash(path: Path) -> str:
    """SHA-256 over ``SAMPLED_BLOCKS`` evenly spread blocks, first and last included."""
    last = max(0, path.stat().st_size - BLOCK_BYTES)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for index in range(SAMPLED_BLOCKS):
            file.seek(last * index // (SAMPLED_BLOCKS - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
