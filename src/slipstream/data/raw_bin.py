"""Token files of other trainers: llm.c shards (1024-byte header) and headerless nanoGPT uint16."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.data.manifest import Split
from slipstream.errors import DataError

HEADER_BYTES = 256 * 4
_FORMATS = {20240520: (1, np.dtype("<u2")), 20240801: (7, np.dtype("<u4"))}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """Where the tokens of one file lie."""

    path: Path
    """The file."""
    dtype: np.dtype
    """Type of one token, little-endian."""
    offset: int
    """Bytes before the first token."""
    tokens: int
    """Tokens in the file."""


def raw_files(path: Path, split: Split) -> list[Path]:
    """The .bin files of ``split``: those with "val" in their name are validation data."""
    files = [path] if path.is_file() else sorted(path.glob("*.bin"))
    return [file for file in files if ("val" in file.name.lower()) == (split == "val")]


def describe(path: Path) -> TokenFile:
    """Read the header of a raw .bin file; DataError if its size does not fit."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES), dtype=np.uint8)
    words = header[: len(header) // 4 * 4].view("<i4")
    if len(words) and int(words[0]) in _FORMATS:
        return _with_header(path, words, size)
    if size == 0:
        raise DataError(f"{path}: empty; it should hold tokens (copy or export it again)")
    if size % 2:
        raise DataError(f"{path}: {size} bytes is no whole number of uint16 tokens; truncated?")
    return TokenFile(path=path, dtype=np.dtype("<u2"), offset=0, tokens=size // 2)


def _with_header(path: Path, words: np.ndarray, size: int) -> TokenFile:
    if len(words) < HEADER_BYTES // 4:
        raise DataError(f"{path}: truncated inside its {HEADER_BYTES}-byte header; copy it again")
    version, dtype = _FORMATS[int(words[0])]
    if int(words[1]) != version:
        raise DataError(
            f"{path}: header version {int(words[1])}, supported is {version}; export it again"
        )
    tokens = int(words[2])
    expected = HEADER_BYTES + tokens * dtype.itemsize
    if size != expected or tokens <= 0:
        raise DataError(
            f"{path}: {size} bytes, but its header says {tokens} tokens = {expected} bytes; "
            "the file is truncated or corrupt, copy or export it again"
        )
    return TokenFile(path=path, dtype=dtype, offset=HEADER_BYTES, tokens=tokens)
