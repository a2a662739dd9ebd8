"""Read files as a stream of byte chunks, plain, gzip or zstandard.

Compressed data that is damaged or cut short is an error, never a silent end.
"""

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any

from slipstream.data.optional import require
from slipstream.errors import DataError

CHUNK_BYTES = 1 << 18
# A chunk of zstandard data can unpack to thousands of times its size.
_ZSTD_CHUNK_BYTES = 1 << 12
_BOM = b"\xef\xbb\xbf"


class ByteStream:
    """Chunks of the unpacked content of a file, without a UTF-8 byte order mark.

    ``position`` is how many bytes of the file on disk have been read. Raises DataError if the file
    cannot be read or unpacked.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.position = 0
        self.bom_bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        chunks = self._checked()
        head = b""
        while len(head) < len(_BOM) and (chunk := next(chunks, b"")):
            head += chunk
        if head.startswith(_BOM):
            self.bom_bytes = len(_BOM)
            head = head[len(_BOM) :]
        if head:
            yield head
        yield from chunks

    def _checked(self) -> Iterator[bytes]:
        try:
            with open(self.path, "rb") as file:
                for chunk in self._unpacked(file):
                    self.position = file.tell()
                    yield chunk
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{self.path}: corrupt or truncated gzip ({error}); {_AGAIN}") from None
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from None

    def _unpacked(self, file: io.BufferedReader) -> Iterator[bytes]:
        lower = self.path.lower()
        if lower.endswith(".gz"):
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield from iter(lambda: unpacked.read(CHUNK_BYTES), b"")
        elif lower.endswith(".zst"):
            yield from _unpack_zstd(self.path, file)
        else:
            yield from iter(lambda: file.read(CHUNK_BYTES), b"")


_AGAIN = "copy or compress it again"


def _unpack_zstd(path: str, file: io.BufferedReader) -> Iterator[bytes]:
    zstandard: Any = require("zstandard", f"reading {path}")
    frame = None
    try:
        while data := file.read(_ZSTD_CHUNK_BYTES):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                if chunk := frame.decompress(data):
                    yield chunk
                data = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise DataError(f"{path}: corrupt zstandard data ({error}); {_AGAIN}") from None
    if frame is not None:
        raise DataError(f"{path}: truncated zstandard data; {_AGAIN}")
