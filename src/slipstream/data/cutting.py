"""Cut text into pieces of bounded size, at the same places whatever the size of the reads.

A cut falls behind a newline that stands between two visible ASCII characters where there is one:
word splitters of byte-level BPE tokenizers break there anyway, so the tokens do not change.
"""

from collections.abc import Iterable, Iterator

FRAGMENT_BYTES = 1 << 17


def cut_point(data: bytes | bytearray, limit: int) -> int:
    """Where to cut ``data`` (longer than ``limit`` bytes), at most ``limit`` and never 0.

    Tries, in the upper half of the range: a newline between visible ASCII characters, any newline,
    before a space; else the last border of a UTF-8 character.
    """
    floor = max(1, limit // 2)
    end = limit
    while (newline := data.rfind(b"\n", floor, end)) >= 0:
        if _visible(data[newline - 1]) and _visible(data[newline + 1]):
            return newline + 1
        end = newline
    if (newline := data.rfind(b"\n", floor, limit)) >= 0:
        return newline + 1
    if (space := data.rfind(b" ", floor, limit)) >= 0:
        return space
    return _character_border(data, limit)


def fragments(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes, bool]]:
    """Pieces of at most ``FRAGMENT_BYTES`` of one document: (byte offset, bytes, is the last).

    Nothing comes out of an empty document.
    """
    buffer = bytearray()
    offset = 0
    for chunk in chunks:
        buffer += chunk
        while len(buffer) > FRAGMENT_BYTES:
            cut = cut_point(buffer, FRAGMENT_BYTES)
            yield offset, bytes(buffer[:cut]), False
            del buffer[:cut]
            offset += cut
    if buffer:
        yield offset, bytes(buffer), True


def _visible(byte: int) -> bool:
    return 0x20 < byte < 0x7F


def _character_border(data: bytes | bytearray, limit: int) -> int:
    for cut in range(limit, max(0, limit - 4), -1):
        if data[cut] & 0xC0 != 0x80:
            return cut
    return limit
