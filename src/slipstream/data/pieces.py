"""A piece: a few MiB of parts, tokenised by one worker into one file that resuming can reuse.

A piece file holds the tokens of its fragments in order and a table of the fragments. It appears
under its name only when it is complete.
"""

import os
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.data.documents import Fragment, read_fragments
from slipstream.data.parts import Part, ResumableError
from slipstream.data.tokenizers import Tokenizer, require_eot

PIECE_BYTES = 4 << 20
PIECE_PARTS = 4096
_BATCH_BYTES = 1 << 17
FRAGMENT = np.dtype(
    [("identity", "<u8"), ("tokens", "<i8"), ("bytes", "<i8"), ("opens", "?"), ("closes", "?")]
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Work for one worker."""

    index: int
    """Place in the order of all pieces."""
    parts: tuple[Part, ...]
    """What to tokenise."""

    @property
    def read_bytes(self) -> int:
        """Progress: bytes of files on disk read for this piece."""
        return sum(part.read_bytes for part in self.parts)


def cut_pieces(parts: Iterable[Part]) -> Iterator[Piece]:
    """Group parts, in order, into pieces of about ``PIECE_BYTES``."""
    index, size, group = 0, 0, list[Part]()
    for part in parts:
        group.append(part)
        size += part.num_bytes
        if size >= PIECE_BYTES or len(group) >= PIECE_PARTS:
            yield Piece(index, tuple(group))
            index, size, group = index + 1, 0, []
    if group:
        yield Piece(index, tuple(group))


def piece_path(folder: Path, index: int) -> Path:
    """Where the finished piece ``index`` lies."""
    return folder / f"{index:08d}.npz"


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, else uint32."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def write_piece(piece: Piece, tokenizer: Tokenizer, text_field: str, folder: Path) -> None:
    """Tokenise ``piece`` into its file; DataError for text that cannot be read."""
    tokens, table = _encode(piece, tokenizer, text_field)
    path = piece_path(folder, piece.index)
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            np.savez(file, tokens=tokens, fragments=table)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_piece(folder: Path, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and fragment table of a finished piece; a damaged one is removed and reported."""
    return _read(folder, index, "tokens"), read_table(folder, index)


def read_table(folder: Path, index: int) -> np.ndarray:
    """The fragment table (dtype ``FRAGMENT``) of a finished piece."""
    return _read(folder, index, "fragments")


def _read(folder: Path, index: int, key: str) -> np.ndarray:
    path = piece_path(folder, index)
    try:
        with np.load(path) as arrays:
            return arrays[key]
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError) as error:
        path.unlink()
        raise ResumableError(f"{path}: damaged ({error}) and removed; run again") from None


def _encode(piece: Piece, tokenizer: Tokenizer, text_field: str) -> tuple[np.ndarray, np.ndarray]:
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([require_eot(tokenizer, "PATH")], dtype=dtype)
    tokens: list[np.ndarray] = []
    rows: list[tuple[int, int, int, bool, bool]] = []
    for batch in _batches(piece, text_field):
        arrays = tokenizer.encode_arrays([fragment.text for fragment in batch])
        for item, ids in zip(batch, arrays, strict=True):
            tokens += [ids.astype(dtype), end] if item.closes else [ids.astype(dtype)]
            count = len(ids) + item.closes
            rows.append((item.identity, count, item.num_bytes, item.opens, item.closes))
    joined = np.concatenate(tokens) if tokens else np.empty(0, dtype=dtype)
    return joined, np.array(rows, dtype=FRAGMENT)


def _batches(piece: Piece, text_field: str) -> Iterator[list[Fragment]]:
    batch: list[Fragment] = []
    size = 0
    for part in piece.parts:
        for fragment in read_fragments(part, text_field):
            batch.append(fragment)
            size += fragment.num_bytes
            if size >= _BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
