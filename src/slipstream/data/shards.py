"""Read token shards as one long memory-mapped line of tokens.

Opens folders written by ``slipstream prepare`` and raw ``.bin`` files of llm.c and nanoGPT. Damage
is found when a set is opened, never in the middle of a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

import numpy as np

from slipstream.data.manifest import (
    MANIFEST,
    REBUILD,
    ShardEntry,
    Split,
    SplitEntry,
    full_hash,
    load_manifest,
    sampled_hash,
)
from slipstream.data.raw_bin import TokenFile, describe, raw_files
from slipstream.data.tokenizer_file import TOKENIZER_FILE
from slipstream.data.tokenizers import file_hash
from slipstream.errors import DataError

Verify = Literal["auto", "full", "size"]
AUTO_HASH_BYTES = 2 << 30
_NO_DOCUMENTS = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetInfo:
    """What is known of a shard set besides its tokens; None where a raw .bin cannot tell."""

    path: Path
    """Folder or file it was opened from."""
    vocab_size: int | None = None
    """Number of ids of the tokenizer."""
    tokenizer_hash: str | None = None
    """``Tokenizer.hash`` of the tokenizer."""
    bytes_per_token: float | None = None
    """UTF-8 bytes of text per token, end-of-text tokens counted as tokens."""
    content_hash: str | None = None
    """Hash over the hashes of the split's shards: another text has another."""


class ShardSet:
    """The tokens of one split, in order, over all its shards."""

    def __init__(
        self, files: Sequence[TokenFile], info: SetInfo, document_starts: np.ndarray | None
    ) -> None:
        self.path = info.path
        self.vocab_size = info.vocab_size
        self.tokenizer_hash = info.tokenizer_hash
        self.bytes_per_token = info.bytes_per_token
        self.content_hash = info.content_hash
        self.has_documents = document_starts is not None
        self.document_starts = _NO_DOCUMENTS if document_starts is None else document_starts
        """Sorted int64 token offsets at which documents begin; empty for raw .bin files."""
        self._shards = [
            np.memmap(file.path, dtype=file.dtype, mode="r", offset=file.offset, shape=file.tokens)
            for file in files
        ]
        self._bounds = np.cumsum([0] + [file.tokens for file in files])

    @property
    def num_tokens(self) -> int:
        """Tokens over all shards."""
        return int(self._bounds[-1])

    def read(self, start: int, count: int) -> np.ndarray:
        """``count`` tokens from offset ``start`` as a new int64 array; IndexError out of range."""
        end = start + count
        if not 0 <= start <= end <= self.num_tokens:
            raise IndexError(f"tokens {start} to {end} of {self.num_tokens}")
        tokens = np.empty(count, dtype=np.int64)
        index = int(np.searchsorted(self._bounds, start, side="right")) - 1
        done = 0
        while done < count:
            offset = start + done - int(self._bounds[index])
            piece = self._shards[index][offset : offset + count - done]
            tokens[done : done + len(piece)] = piece
            done += len(piece)
            index += 1
        return tokens

    def require_tokenizer(self, tokenizer_hash: str) -> None:
        """DataError unless the shards came from this tokenizer (raw .bin files cannot tell)."""
        if self.tokenizer_hash not in (None, tokenizer_hash):
            raise DataError(
                f"data.path = {self.path}: its tokens come from another tokenizer (hash "
                f"{self.tokenizer_hash}) than the model's ({tokenizer_hash}); prepare the text "
                "again with the tokenizer of the model"
            )


def has_split(path: str | Path, split: Split) -> bool:
    """Whether the data at ``path`` has tokens of ``split``; DataError if there is no data."""
    root = _existing(path)
    if not _is_manifest_folder(root):
        return bool(raw_files(root, split))
    entry = load_manifest(root).splits.get(split)
    return entry is not None and bool(entry.shards)


def open_shards(path: str | Path, split: Split, verify: Verify = "auto") -> ShardSet:
    """Open and check a split; DataError names the file that is missing or damaged and the fix."""
    root = _existing(path)
    if not has_split(root, split):
        raise DataError(f"data.path = {root}: no {split} split; {_how_to_get(split)}")
    if _is_manifest_folder(root):
        return _open_prepared(root, split, verify)
    files = [describe(file) for file in raw_files(root, split)]
    return ShardSet(files, SetInfo(path=root), None)


def _existing(path: str | Path) -> Path:
    root = Path(path)
    if not str(path):
        raise DataError("data.path is not set; give a folder written by slipstream prepare")
    if not root.exists():
        raise DataError(
            f"data.path = {root}: does not exist; make it with "
            f"slipstream prepare SOURCE --out {root} --tokenizer byte"
        )
    if not _is_manifest_folder(root) and not raw_files(root, "train") + raw_files(root, "val"):
        raise DataError(
            f"data.path = {root}: holds neither {MANIFEST} nor .bin files; give a folder written "
            "by slipstream prepare"
        )
    return root


def _is_manifest_folder(root: Path) -> bool:
    return (root / MANIFEST).is_file()


def _how_to_get(split: Split) -> str:
    if split == "val":
        return "prepare at least two documents with --val-fraction above 0, or set no evaluation"
    return "every file is validation data; prepare more text or rename the files"


def _open_prepared(root: Path, split: Split, verify: Verify) -> ShardSet:
    manifest = load_manifest(root)
    entry = manifest.splits[split]
    itemsize = np.dtype(manifest.dtype).itemsize
    _check_sizes(root, entry, itemsize)
    _check_content(root, entry, itemsize, verify)
    if file_hash(root / TOKENIZER_FILE) != manifest.tokenizer.hash:
        raise DataError(f"{root / TOKENIZER_FILE}: not the tokenizer of these shards; {REBUILD}")
    little = np.dtype(manifest.dtype).newbyteorder("<")
    files = [
        TokenFile(path=root / shard.file, dtype=little, offset=0, tokens=shard.tokens)
        for shard in entry.shards
    ]
    tokens = sum(shard.tokens for shard in entry.shards)
    info = SetInfo(
        path=root,
        vocab_size=manifest.tokenizer.vocab_size,
        tokenizer_hash=manifest.tokenizer.hash,
        bytes_per_token=sum(shard.bytes_of_text for shard in entry.shards) / tokens,
        content_hash=sha256("".join(shard.sha256 for shard in entry.shards).encode()).hexdigest(),
    )
    return ShardSet(files, info, _map_documents(root, entry))


def _map_documents(root: Path, entry: SplitEntry) -> np.ndarray:
    if entry.documents == 0:
        return _NO_DOCUMENTS
    return np.memmap(root / entry.documents_file, dtype="<i8", mode="r", shape=entry.documents)


def _check_sizes(root: Path, entry: SplitEntry, itemsize: int) -> None:
    expected = {shard.file: shard.tokens * itemsize for shard in entry.shards}
    expected[entry.documents_file] = entry.documents * 8
    for name, size in expected.items():
        path = root / name
        if not path.is_file():
            raise DataError(f"{path}: missing; {REBUILD}")
        if path.stat().st_size != size:
            raise DataError(f"{path}: {path.stat().st_size} bytes, not {size}; {REBUILD}")


def _check_content(root: Path, entry: SplitEntry, itemsize: int, verify: Verify) -> None:
    if verify == "size":
        return
    total = sum(shard.tokens for shard in entry.shards) * itemsize
    full = verify == "full" or total < AUTO_HASH_BYTES
    for shard in entry.shards:
        if not _shard_matches(root, shard, full):
            raise DataError(f"{root / shard.file}: corrupt (wrong hash); {REBUILD}")
    if full and full_hash(root / entry.documents_file) != entry.documents_sha256:
        raise DataError(f"{root / entry.documents_file}: corrupt (wrong hash); {REBUILD}")


def _shard_matches(root: Path, shard: ShardEntry, full: bool) -> bool:
    if full:
        return full_hash(root / shard.file) == shard.sha256
    return sampled_hash(root / shard.file) == shard.sampled_sha256
