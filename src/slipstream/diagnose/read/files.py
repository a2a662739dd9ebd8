"""Byte streams of traces: plain or gzip files and members of tar archives, told by their content.

Streams are read once, front to back, and count what they deliver against ``Limits``.
"""

import io
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from slipstream.diagnose.read.limits import Limits
from slipstream.errors import DataError

SUFFIXES = (".json", ".json.gz", ".tar", ".tar.gz", ".tgz", ".sqlite")
SQLITE_MAGIC = b"SQLite format 3\0"
_GZIP_MAGIC = b"\x1f\x8b"
_BLOCK = 1 << 20
_FREE_BYTES = 64 * 2**20


def is_sqlite(path: Path) -> bool:
    """Whether the file is an SQLite database, as Nsight Systems exports them."""
    with path.open("rb") as file:
        return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC


def open_traces(
    path: Path, limits: Limits, advance: Callable[[int], None]
) -> Iterator[tuple[str, io.BufferedReader]]:
    """Name and decompressed stream of the trace in a file, or of each one in a tar archive.

    A stream is valid until the next one is asked for. ``advance`` is called with the bytes read
    from disk.
    """
    with path.open("rb") as file:
        stream = _inflated(io.BufferedReader(_Counted(file, advance), _BLOCK), str(path), limits)
        if _is_tar(stream):
            yield from _members(stream, str(path), limits)
        else:
            yield str(path), stream


def _members(
    archive: io.BufferedReader, source: str, limits: Limits
) -> Iterator[tuple[str, io.BufferedReader]]:
    try:
        with tarfile.open(fileobj=archive, mode="r|") as members:
            for member in members:
                name = Path(member.name).name
                if not member.isfile() or name.startswith("."):
                    continue
                content = members.extractfile(member)
                if content is None or not name.lower().endswith((".json", ".json.gz")):
                    continue
                label = f"{source}:{member.name}"
                yield label, _inflated(io.BufferedReader(content, _BLOCK), label, limits)  # pyrefly: ignore
    except (tarfile.TarError, EOFError) as error:
        raise DataError(f"{source}: damaged tar archive ({error}); copy it again") from error


def _inflated(stream: io.BufferedReader, source: str, limits: Limits) -> io.BufferedReader:
    if not stream.peek(2).startswith(_GZIP_MAGIC):
        return stream
    return io.BufferedReader(_Inflated(stream, source, limits), _BLOCK)


def _is_tar(stream: io.BufferedReader) -> bool:
    return stream.peek(tarfile.BLOCKSIZE)[257:262] == b"ustar"


class _Counted(io.RawIOBase):
    """A file that tells how many bytes were read from it."""

    def __init__(self, file: BinaryIO, advance: Callable[[int], None]) -> None:
        self._file, self._advance = file, advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._advance(len(data))
        return len(data)


class _Inflated(io.RawIOBase):
    """The content of a gzip stream of any number of members, within the limits."""

    def __init__(self, stream: io.BufferedReader, source: str, limits: Limits) -> None:
        self._stream, self._source, self._limits = stream, source, limits
        self._inflate = zlib.decompressobj(wbits=31)
        self._pending = b""
        self._taken = self._given = 0
        self._done = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        filled = 0
        while filled < len(buffer) and not self._done:
            data = self._some(len(buffer) - filled)
            buffer[filled : filled + len(data)] = data
            filled += len(data)
        self._given += filled
        self._check()
        return filled

    def _some(self, size: int) -> bytes:
        if self._inflate.eof:
            self._next_member()
            return b""
        if not self._pending:
            self._pending = self._stream.read1(_BLOCK)
            self._taken += len(self._pending)
            if not self._pending:
                raise DataError(
                    f"{self._source}: gzip data ends early, {self._given} bytes into the text; "
                    "the file is truncated, copy it again"
                )
        try:
            data = self._inflate.decompress(self._pending, size)
        except zlib.error as error:
            raise DataError(
                f"{self._source}: damaged gzip data, {self._given} bytes into the text "
                f"({error}); copy the file again"
            ) from error
        self._pending = self._inflate.unconsumed_tail
        return data

    def _next_member(self) -> None:
        """Go on with the next gzip member; what follows the last one is padding."""
        rest = self._inflate.unused_data or self._stream.read1(_BLOCK)
        if len(rest) == 1:
            rest += self._stream.read1(1)
        self._done = not rest.startswith(_GZIP_MAGIC)
        self._pending, self._inflate = rest, zlib.decompressobj(wbits=31)

    def _check(self) -> None:
        ratio = self._given / max(self._taken, 1)
        if self._given > _FREE_BYTES and ratio > self._limits.max_ratio:
            raise DataError(
                f"{self._source}: {self._taken} gzip bytes grow {ratio:.0f}-fold, at most "
                f"{self._limits.max_ratio}-fold is read; if you trust it, decompress it first"
            )
