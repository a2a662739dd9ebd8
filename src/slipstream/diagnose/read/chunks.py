"""Cuts the JSON text of a trace into metadata and batches of events, without holding it whole.

Brackets outside strings are found with numpy over a block of text at a time, which costs a few
milliseconds per MiB; a JSON parser then reads the block's events in one call. Where it refuses, the
events of the block are repaired and read one by one, and those beyond repair are counted.
"""

import io
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from slipstream.diagnose.read.limits import Limits
from slipstream.errors import DataError

BLOCK_BYTES = 4 * 2**20
MAX_DEPTH = 1000
_STEP = np.zeros(256, dtype=np.int8)
_STEP[list(b"{[")] = 1
_STEP[list(b"}]")] = -1
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\Z')
_NOT_JSON_NUMBER = re.compile(rb"(?<=[:,\[])(\s*)[-+]?(?:nan|inf|infinity)\b", re.IGNORECASE)
_CONTROL = re.compile(rb"[\x00-\x1f]")
_TIME = re.compile(rb'("(?:ts|dur)"\s*:\s*)(-?[0-9][-+.0-9eE]*)')


class NotATraceError(DataError):
    """The file is readable and holds no trace events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Some consecutive events of the file."""

    text: bytes
    """JSON of the events, separated by commas."""
    ends: np.ndarray = field(repr=False)
    """int64: end of each top-level bracket in ``text``, exclusive."""

    def events(self, *, exact: bool) -> tuple[list[Any], int]:
        """The events, and how many could not be read.

        ``exact`` leaves times as text, which holds what a float64 cannot.
        """
        text = _TIME.sub(rb'\1"\2"', self.text) if exact else self.text
        try:
            return orjson.loads(b"[" + text.strip(b" \t\r\n,") + b"]"), 0
        except orjson.JSONDecodeError:
            return self._one_by_one(exact)

    def _one_by_one(self, exact: bool) -> tuple[list[Any], int]:
        events, bad, start = [], 0, 0
        for end in self.ends.tolist():
            text = self.text[start:end].lstrip(b" \t\r\n,")
            start = end
            try:
                events.append(repaired(_TIME.sub(rb'\1"\2"', text) if exact else text))
            except orjson.JSONDecodeError:
                bad += 1
        return events, bad


def repaired(text: bytes) -> Any:
    """Parse JSON with the faults profilers are known for: not-a-number, control characters, and
    names that are not UTF-8. JSONDecodeError for any other.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        text = text.decode("utf-8", errors="replace").encode()
        return orjson.loads(_NOT_JSON_NUMBER.sub(rb"\1null", _CONTROL.sub(b" ", text)))


class EventReader:
    """Reads one trace; ``metadata`` is complete once all batches were taken."""

    def __init__(self, stream: io.BufferedReader, source: str, limits: Limits) -> None:
        self.metadata: dict[str, Any] = {}
        self.problems: list[str] = []
        self.is_list = False
        """The file is the list of events, without metadata."""
        self._stream, self._source, self._limits = stream, source, limits
        self._read = 0

    def batches(self) -> Iterator[Batch]:
        """The events in order of the file, a few MiB of text at a time."""
        head, rest = self._head()
        self.is_list = head.strip() == b"["
        tail = b""
        while True:
            structure = self._structure(rest)
            end = structure.end_of_array
            cut = len(rest) if end is None else end
            ends = structure.element_ends
            taken = cut if end is not None else int(ends[-1]) if len(ends) else 0
            if taken:
                yield Batch(text=rest[:taken], ends=ends)
            if end is not None:
                tail = rest[end + 1 :]
                break
            rest = self._more(rest[taken:])
            if rest is None:
                return
        self._finish(head, tail)

    def _head(self) -> tuple[bytes, bytes]:
        """The text up to the array of events, and the first of what follows."""
        text = b""
        while block := self._block():
            text += block
            start = _events_start(text, self._structure(text))
            if start is not None:
                return text[:start], text[start:]
            if text.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] not in (b"{", b"[", b""):
                break
            self._check_size(len(text), "no traceEvents")
        self._refuse(text)
        raise AssertionError  # _refuse always raises

    def _refuse(self, text: bytes) -> None:
        """Say why a text without an array of events is no trace."""
        if not text.strip():
            raise NotATraceError(f"{self._source}: empty; it should hold a trace (export it again)")
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError as error:
            what = "truncated" if text.lstrip()[:1] in (b"{", b"[") else "no JSON"
            raise NotATraceError(
                f"{self._source}: {what} at byte {error.pos} ({error.msg}); a trace is the JSON "
                "file torch.profiler exports, plain or gzip"
            ) from error
        raise NotATraceError(
            f"{self._source}: JSON without a traceEvents array; a trace is what "
            "torch.profiler's export_chrome_trace writes"
        )

    def _more(self, rest: bytes) -> bytes | None:
        """``rest`` with the next block; None at the end of a bare list that lacks its bracket."""
        self._check_size(len(rest), "no end of an event")
        block = self._block()
        if block:
            return rest + block
        if self.is_list and not rest.strip(b" \t\r\n,"):
            self.problems.append("the list of events is not closed; it may have been cut off")
            return None
        raise DataError(
            f"{self._source}: JSON ends inside the events, at byte {self._read}; "
            "the file is truncated, copy or export it again"
        )

    def _finish(self, head: bytes, tail: bytes) -> None:
        """Read the metadata around the events."""
        while block := self._block():
            tail += block
            self._check_size(len(tail), "no end")
        try:
            whole = repaired(head + b"]" + tail)
        except orjson.JSONDecodeError as error:
            raise DataError(
                f"{self._source}: broken JSON after the events, before byte {self._read} "
                f"({error.msg}); the file is truncated or damaged, export it again"
            ) from error
        if isinstance(whole, dict):
            self.metadata = whole

    def _structure(self, text: bytes) -> "_Structure":
        structure = _Structure(text)
        if len(structure.depth) and structure.depth.max() > MAX_DEPTH:
            raise DataError(
                f"{self._source}: brackets nest deeper than {MAX_DEPTH}, before byte "
                f"{self._read}; the file is damaged or no trace"
            )
        return structure

    def _block(self) -> bytes:
        block = self._stream.read(BLOCK_BYTES)
        if not self._read:
            block = block.removeprefix(b"\xef\xbb\xbf")
        self._read += len(block)
        if self._read > self._limits.max_bytes:
            raise DataError(
                f"{self._source}: more than {self._limits.max_bytes} bytes of text, the most "
                "that is read; profile fewer steps"
            )
        return block

    def _check_size(self, size: int, what: str) -> None:
        if size > self._limits.max_event_bytes:
            raise DataError(
                f"{self._source}: {what} within {self._limits.max_event_bytes} bytes, around "
                f"byte {self._read - size}; the file is damaged or no trace"
            )


class _Structure:
    """Where the brackets outside strings are in a text that starts outside of them."""

    def __init__(self, text: bytes) -> None:
        codes = np.frombuffer(text, dtype=np.uint8)
        quotes = np.flatnonzero(codes == ord('"'))
        if b"\\" in text:
            quotes = quotes[~_escaped(codes, quotes)]
        steps = _STEP[codes]
        at = np.flatnonzero(steps)
        at = at[np.searchsorted(quotes, at) % 2 == 0]
        self.at = at
        self.steps = steps[at]
        self.depth = np.cumsum(self.steps, dtype=np.int32)

    @property
    def end_of_array(self) -> int | None:
        """Offset of the bracket that closes the array around the text, None if there is none."""
        below = np.flatnonzero(self.depth < 0)
        return int(self.at[below[0]]) if len(below) else None

    @property
    def element_ends(self) -> np.ndarray:
        """int64: exclusive ends of the elements of the array that the text is the inside of."""
        below = np.flatnonzero(self.depth < 0)
        stop = below[0] if len(below) else len(self.at)
        return self.at[:stop][self.depth[:stop] == 0] + 1


def _events_start(text: bytes, structure: _Structure) -> int | None:
    """Offset behind the bracket that opens the array of events; None if not in this text."""
    opening = len(text) - len(text.lstrip())
    if text[opening : opening + 1] == b"[":
        return opening + 1
    arrays = structure.at[(structure.depth == 2) & (structure.steps == 1)]
    for offset in arrays.tolist():
        if text[offset : offset + 1] == b"[" and _EVENTS_KEY.search(
            text[max(0, offset - 256) : offset]
        ):
            return offset + 1
    return None


def _escaped(codes: np.ndarray, quotes: np.ndarray) -> np.ndarray:
    """bool per quote: an odd number of backslashes precedes it."""
    slashes = np.flatnonzero(codes == ord("\\"))
    row = np.searchsorted(slashes, quotes - 1)
    row = np.minimum(row, len(slashes) - 1)
    preceded = slashes[row] == quotes - 1
    new_run = np.concatenate([[True], np.diff(slashes) != 1])
    first = np.maximum.accumulate(np.where(new_run, np.arange(len(slashes)), 0))
    return preceded & ((row - first[row]) % 2 == 0)
