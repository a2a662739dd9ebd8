"""Sources as a stream of parts: a few hundred KiB of one file, small enough to hand to a worker.

Reading is sequential and the same on every run; decoding, JSON and tokenising are left to workers.
"""

import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from slipstream.data.cutting import FRAGMENT_BYTES, cut_point, fragments
from slipstream.data.optional import require
from slipstream.data.sources import Source
from slipstream.data.streams import ByteStream
from slipstream.errors import DataError, SlipstreamError

MAX_LINE_BYTES = 64 << 20
_ROWS_PER_BATCH = 256


class ResumableError(DataError):
    """A failure that running the same command again may get past: finished work is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Bytes of one file, in order."""

    file: str
    """Shown in errors."""
    name: str
    """Identity of the documents."""
    kind: Literal["text", "lines", "rows"]
    """A piece of one document, JSON lines, or one document per row."""
    data: bytes | tuple[bytes, ...]
    """The bytes; a tuple for rows."""
    first: int = 0
    """Number of the first line, from 1 (lines), or of the first row, from 0 (rows)."""
    offset: int = 0
    """Where ``data`` begins in the unpacked file, in bytes (text, lines)."""
    opens: bool = True
    """The document begins here (text)."""
    closes: bool = True
    """The document ends here (text)."""
    read_bytes: int = 0
    """Progress: bytes of the file on disk read for this part."""

    @property
    def num_bytes(self) -> int:
        """Bytes of data."""
        return len(self.data) if isinstance(self.data, bytes) else sum(map(len, self.data))


class Reader:
    """Iterates over the parts of sources; ``skipped`` lists stdlib files that are no text."""

    def __init__(self, sources: list[Source], text_field: str, max_bytes: int | None) -> None:
        self.sources = sources
        self.text_field = text_field
        self.max_bytes = max_bytes
        self.skipped: set[str] = set()

    def __iter__(self) -> Iterator[Part]:
        parts = (part for source in self.sources for part in self._checked(source))
        return parts if self.max_bytes is None else _limit(parts, self.max_bytes)

    def _checked(self, source: Source) -> Iterator[Part]:
        empty = True
        for part in self._read(source):
            empty = False
            yield part
        if empty and source.named:
            raise DataError(f"SOURCE {source.path}: holds no text; leave it out or put text in it")

    def _read(self, source: Source) -> Iterator[Part]:
        match source.kind:
            case "text":
                return _text_parts(source)
            case "jsonl":
                return _line_parts(source)
            case "python":
                return self._python_parts(source)
            case "parquet":
                return _parquet_parts(source, self.text_field)
            case "hf":
                return _hf_parts(source, self.text_field)

    def _python_parts(self, source: Source) -> Iterator[Part]:
        try:
            with tokenize.open(source.path) as file:
                data = file.read().encode()
        except (SyntaxError, UnicodeError):
            self.skipped.add(source.path)
            return
        for offset, piece, last in fragments([data]):
            yield Part(
                file=source.path,
                name=source.name,
                kind="text",
                data=piece,
                offset=offset,
                opens=offset == 0,
                closes=last,
                read_bytes=len(piece),
            )


def _text_parts(source: Source) -> Iterator[Part]:
    stream = ByteStream(source.path)
    position = 0
    for offset, piece, last in fragments(stream):
        yield Part(
            file=source.path,
            name=source.name,
            kind="text",
            data=piece,
            offset=offset + stream.bom_bytes,
            opens=offset == 0,
            closes=last,
            read_bytes=stream.position - position,
        )
        position = stream.position


def _line_parts(source: Source) -> Iterator[Part]:
    stream = ByteStream(source.path)
    buffer = bytearray()
    line, offset, position = 1, 0, 0
    for chunk in stream:
        buffer += chunk
        if len(buffer) < FRAGMENT_BYTES:
            continue
        end = buffer.rfind(b"\n") + 1
        if end:
            yield _lines(source, stream, bytes(buffer[:end]), line, offset, position)
            line, position = line + buffer.count(b"\n", 0, end), stream.position
            offset += end
            del buffer[:end]
        elif len(buffer) > MAX_LINE_BYTES:
            raise DataError(
                f"{source.path}:{line}: longer than {MAX_LINE_BYTES >> 20} MiB, the limit of a "
                "JSON line; split the document, or write its text to a .txt file"
            )
    if buffer:
        yield _lines(source, stream, bytes(buffer), line, offset, position)


def _lines(
    source: Source, stream: ByteStream, data: bytes, line: int, offset: int, position: int
) -> Part:
    return Part(
        file=source.path,
        name=source.name,
        kind="lines",
        data=data,
        first=line,
        offset=offset + stream.bom_bytes,
        read_bytes=stream.position - position,
    )


def _parquet_parts(source: Source, text_field: str) -> Iterator[Part]:
    pyarrow: Any = require("pyarrow", f"reading {source.path}")
    parquet: Any = require("pyarrow.parquet", f"reading {source.path}")
    try:
        with parquet.ParquetFile(source.path) as file:
            _check_column(pyarrow, file.schema_arrow, source, text_field)
            total = max(1, file.metadata.num_rows)
            first = 0
            for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=[text_field]):
                values = batch.column(0).cast(pyarrow.large_binary()).to_pylist()
                yield _rows(source, values, first, source.size * len(values) // total)
                first += len(values)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{source.path}: corrupt or truncated parquet ({error}); copy or write it again"
        ) from None


def _check_column(pyarrow: Any, schema: Any, source: Source, text_field: str) -> None:
    if text_field not in schema.names:
        raise DataError(
            f"{source.path}: no column {text_field!r}; its columns are {', '.join(schema.names)}; "
            "name one with --text-field"
        )
    kind = schema.field(text_field).type
    types = pyarrow.types
    if not any(
        check(kind) for check in (types.is_string, types.is_large_string, types.is_string_view)
    ):
        raise DataError(
            f"{source.path}: column {text_field!r} is {kind}, not text; name another one with "
            "--text-field"
        )


def _rows(source: Source, values: list[bytes | None], first: int, read_bytes: int) -> Part:
    if None in values:
        raise DataError(
            f"{source.path}: row {first + values.index(None)} has no text (null); drop such rows"
        )
    return Part(
        file=source.path,
        name=source.name,
        kind="rows",
        data=tuple(value for value in values if value is not None),
        first=first,
        read_bytes=read_bytes,
    )


def _hf_parts(source: Source, text_field: str) -> Iterator[Part]:
    datasets: Any = require("datasets", f"reading {source.name}")
    name, *config, split = source.path.removeprefix("hf:").split(":")
    batch: list[bytes | None] = []
    first = size = 0
    try:
        for row in datasets.load_dataset(name, *config, split=split, streaming=True):
            batch.append(_row_text(source, row, first + len(batch), text_field))
            size += len(batch[-1] or b"")
            if size >= FRAGMENT_BYTES:
                yield _rows(source, batch, first, size)
                first, batch, size = first + len(batch), [], 0
    except (SlipstreamError, GeneratorExit):
        raise
    # The hub client raises types of requests, httpx, fsspec, pyarrow and its own.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ResumableError(f"{source.path}: cannot be read from the hub ({reason})") from error
    if batch:
        yield _rows(source, batch, first, size)


def _row_text(source: Source, row: dict[str, Any], number: int, text_field: str) -> bytes | None:
    if text_field not in row:
        raise DataError(
            f"{source.path}: no field {text_field!r}; its fields are {', '.join(row)}; name one "
            "with --text-field"
        )
    text = row[text_field]
    if text is not None and not isinstance(text, str):
        raise DataError(
            f"{source.path}: field {text_field!r} of row {number} is a {type(text).__name__}, not "
            "text; name another one with --text-field"
        )
    return None if text is None else text.encode("utf-8", errors="surrogatepass")


def _limit(parts: Iterator[Part], max_bytes: int) -> Iterator[Part]:
    """Parts up to ``max_bytes`` of data; of the part at the limit, whole lines or rows."""
    left = max_bytes
    for part in parts:
        if part.num_bytes < left:
            left -= part.num_bytes
            yield part
            continue
        if part.num_bytes > left:
            part = _shorten(part, left)
        yield replace(part, closes=True)
        return


def _shorten(part: Part, limit: int) -> Part:
    if isinstance(part.data, tuple):
        kept, size = 1, len(part.data[0])
        while size + len(part.data[kept]) <= limit:
            size += len(part.data[kept])
            kept += 1
        return replace(part, data=part.data[:kept])
    if part.kind == "lines":
        end = part.data.rfind(b"\n", 0, limit) + 1 or part.data.find(b"\n") + 1 or len(part.data)
        return replace(part, data=part.data[:end])
    return replace(part, data=part.data[: cut_point(part.data, limit)])
