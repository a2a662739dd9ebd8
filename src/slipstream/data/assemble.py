"""Pieces, in order, to the shards, document offsets and manifest of a prepared folder."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.data.manifest import (
    Manifest,
    ShardEntry,
    Split,
    SplitEntry,
    TokenizerEntry,
    sampled_hash,
)
from slipstream.data.pieces import read_piece, read_table, token_dtype
from slipstream.data.tokenizers import Tokenizer, require_eot
from slipstream.errors import DataError

SHARD_TOKENS = 1 << 27
SPLITS: tuple[Split, Split] = ("train", "val")


@dataclass(frozen=True, slots=True)
class ValRule:
    """A document is validation data if its identity is below ``threshold``."""

    threshold: int
    """0 for none, 2**64 for all."""

    def is_val(self, identities: np.ndarray) -> np.ndarray:
        """Boolean per identity (uint64)."""
        if self.threshold <= 0:
            return np.zeros(len(identities), dtype=bool)
        return identities <= np.uint64(self.threshold - 1)


def assemble(pieces: Path, count: int, out: Path, tokenizer: Tokenizer, val: float) -> Manifest:
    """Write the prepared set of ``count`` pieces into the empty folder ``out``.

    DataError if no piece holds any text.
    """
    rule = choose_val(_identities(pieces, count), val)
    dtype = token_dtype(tokenizer.vocab_size)
    writers = {split: SplitWriter(out, split, dtype) for split in SPLITS}
    try:
        for index in range(count):
            tokens, table = read_piece(pieces, index)
            is_val = rule.is_val(table["identity"])
            of_val = np.repeat(is_val, table["tokens"])
            writers["train"].add(tokens[~of_val], table[~is_val])
            writers["val"].add(tokens[of_val], table[is_val])
        splits = {split: writer.finish() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.close()
    entry = TokenizerEntry(
        kind=tokenizer.kind,
        vocab_size=tokenizer.vocab_size,
        eot_id=require_eot(tokenizer, "PATH"),
        hash=tokenizer.hash,
    )
    manifest = Manifest(
        dtype="uint16" if dtype.itemsize == 2 else "uint32", tokenizer=entry, splits=splits
    )
    tokenizer.save(out)
    manifest.save(out)
    return manifest


def choose_val(identities: Iterator[np.ndarray], fraction: float) -> ValRule:
    """The rule for ``fraction``, moved so that neither split is empty if two documents exist."""
    low, high, second, total = 1 << 64, -1, -1, 0
    for chunk in identities:
        total += len(chunk)
        if len(chunk):
            low = min(low, int(chunk.min()))
            top = sorted({high, second, *map(int, np.unique(chunk)[-2:])})
            second, high = top[-2], top[-1]
    if total == 0:
        raise DataError("SOURCE: no text in any of them; every document is empty")
    threshold = int(fraction * (1 << 64))
    if fraction <= 0 or second < 0:
        return ValRule(0)
    return ValRule(min(max(threshold, low + 1), high))


class SplitWriter:
    """Appends tokens to shards of ``SHARD_TOKENS``, and document starts beside them."""

    def __init__(self, folder: Path, split: Split, dtype: np.dtype) -> None:
        self._folder, self._split, self._dtype = folder, split, dtype
        self._shards: list[ShardEntry] = []
        self._open: HashedFile | None = None
        self._tokens = self._documents = self._shard_documents = self._shard_bytes = 0
        self._offsets = HashedFile(folder / f"{split}-documents.int64")

    def add(self, tokens: np.ndarray, table: np.ndarray) -> None:
        """Append the fragments of ``table``, whose tokens are ``tokens``."""
        ends = self._tokens + np.cumsum(table["tokens"])
        starts = ends - table["tokens"]
        done = 0
        while done < len(tokens):
            begin = self._tokens
            shard_end = (len(self._shards) + 1) * SHARD_TOKENS
            part = tokens[done : done + shard_end - begin]
            self._write(part)
            here = (starts >= begin) & (starts < begin + len(part))
            self._count(starts[here & table["opens"]], int(table["bytes"][here].sum()))
            done += len(part)
            if self._tokens == shard_end:
                self._finish_shard()

    def finish(self) -> SplitEntry:
        """Close the last shard and describe the split."""
        if self._open is not None:
            self._finish_shard()
        return SplitEntry(
            shards=self._shards,
            documents_file=self._offsets.path.name,
            documents=self._documents,
            documents_sha256=self._offsets.finish(),
        )

    def close(self) -> None:
        """Close files without finishing them."""
        self._offsets.close()
        if self._open is not None:
            self._open.close()

    def _write(self, tokens: np.ndarray) -> None:
        if self._open is None:
            self._open = HashedFile(self._folder / f"{self._split}-{len(self._shards):05d}.bin")
        self._open.write(np.ascontiguousarray(tokens, dtype=self._dtype))
        self._tokens += len(tokens)

    def _count(self, document_starts: np.ndarray, text_bytes: int) -> None:
        self._offsets.write(np.ascontiguousarray(document_starts, dtype="<i8"))
        self._documents += len(document_starts)
        self._shard_documents += len(document_starts)
        self._shard_bytes += text_bytes

    def _finish_shard(self) -> None:
        assert self._open is not None
        digest, path = self._open.finish(), self._open.path
        self._open = None
        entry = ShardEntry(
            file=path.name,
            tokens=path.stat().st_size // self._dtype.itemsize,
            bytes_of_text=self._shard_bytes,
            documents=self._shard_documents,
            sha256=digest,
            sampled_sha256=sampled_hash(path),
        )
        self._shards.append(entry)
        self._shard_documents = self._shard_bytes = 0


class HashedFile:
    """A file being written whose SHA-256 is known at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._digest = hashlib.sha256()

    def write(self, array: np.ndarray) -> None:
        """Append the bytes of a contiguous array."""
        self._file.write(array.data)
        self._digest.update(array.data)

    def finish(self) -> str:
        """Put the file on the disk and return its hash as hex digits."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()


def _identities(pieces: Path, count: int) -> Iterator[np.ndarray]:
    for index in range(count):
        yield read_table(pieces, index)["identity"]
