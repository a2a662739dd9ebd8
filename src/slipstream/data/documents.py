"""Parts to text: check UTF-8, read JSON lines, and give every document its identity.

The identity is a hash of name and number of the document inside its source. It alone decides
between train and val, so the decision depends on nothing else.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.data.cutting import fragments
from slipstream.data.parts import Part
from slipstream.errors import DataError


@dataclass(frozen=True, slots=True)
class Fragment:
    """Text of a document, or a piece of it."""

    text: str
    """The text, never empty."""
    num_bytes: int
    """Its length in UTF-8."""
    identity: int
    """64-bit hash of the document."""
    opens: bool
    """The document begins here."""
    closes: bool
    """The document ends here."""


def identity(name: str, number: int) -> int:
    """64-bit hash of the document ``number`` of the source ``name``."""
    text = f"{number}:{name}".encode("utf-8", errors="surrogateescape")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def read_fragments(part: Part, text_field: str) -> Iterator[Fragment]:
    """The text in ``part``; DataError names file, line, byte offset or field and the fix."""
    if isinstance(part.data, tuple):
        for number, data in enumerate(part.data, part.first):
            yield from _document(data, f"{part.file}: row {number}", identity(part.name, number))
    elif part.kind == "lines":
        yield from _json_lines(part, part.data, text_field)
    else:
        text = _decode(part.data, part.file, part.offset)
        yield Fragment(
            text, len(part.data), identity(part.name, 0), opens=part.opens, closes=part.closes
        )


def _json_lines(part: Part, lines: bytes, text_field: str) -> Iterator[Fragment]:
    offset = part.offset
    for number, line in enumerate(lines.split(b"\n"), part.first):
        if line.strip():
            where = f"{part.file}:{number}"
            text = _json_text(_decode(line, where, offset), where, text_field)
            # A JSON escape can spell half of a surrogate pair, which is no text: _document says so.
            data = text.encode("utf-8", errors="surrogatepass")
            yield from _document(data, f"{where}: {text_field}", identity(part.name, number))
        offset += len(line) + 1


def _document(data: bytes, where: str, key: int) -> Iterator[Fragment]:
    for offset, piece, last in fragments([data]):
        text = _decode(piece, where, offset)
        yield Fragment(text, len(piece), key, opens=offset == 0, closes=last)


def _decode(data: bytes, where: str, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: not UTF-8 at byte {offset + error.start} (0x{data[error.start]:02x}); "
            "convert the text to UTF-8 (iconv -f ENCODING -t UTF-8) or leave it out"
        ) from None


def _json_text(line: str, where: str, text_field: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not valid JSON ({error}); fix or drop the line") from None
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__}, not an object with {text_field!r}")
    if text_field not in row:
        fields = ", ".join(map(str, row)) or "none"
        raise DataError(
            f"{where}: no field {text_field!r}; its fields are {fields}; name one with --text-field"
        )
    if not isinstance(row[text_field], str):
        kind = type(row[text_field]).__name__
        raise DataError(
            f"{where}: field {text_field!r} is {kind}, not text; drop the line or name another "
            "field with --text-field"
        )
    return row[text_field]
