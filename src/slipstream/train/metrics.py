"""metrics.jsonl: one JSON object per step and evaluation, the truth of a run.

Everything a machine's speed can change stands under ``time``; the rest of a record is a function of
the recipe and the data, so two runs can be compared by dropping that key.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.train.run_folder import replace_file, write_error

Record = dict[str, Any]


class MetricsFile:
    """Appends records; each is with the system when ``write`` returns, whatever happens after.

    ``keep_up_to``: a resumed run repeats the steps after its checkpoint; their old records go.
    """

    def __init__(self, path: Path, *, keep_up_to: int | None = None) -> None:
        self.path = path
        if path.exists():
            _tidy(path, keep_up_to)
        try:
            self._stream = open(path, "ab", buffering=0)  # noqa: SIM115  # closed in close()
        except OSError as error:
            raise write_error(path, error) from None

    def write(self, record: Record) -> None:
        """Append one line, all of it or nothing; CheckpointError if that fails."""
        line = (json.dumps(record) + "\n").encode()
        before = os.fstat(self._stream.fileno()).st_size
        try:
            while line:
                line = line[self._stream.write(line) :]
        except OSError as error:
            with suppress(OSError):
                self._stream.truncate(before)
            raise write_error(self.path, error) from None

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_metrics(path: Path) -> list[Record]:
    """All records; a last line cut by a crash is left out, CheckpointError for any other damage."""
    return [record for _, record in _read(path)]


def _read(path: Path) -> list[tuple[bytes, Record]]:
    try:
        *lines, last = path.read_bytes().split(b"\n")
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {error.strerror or error}; change that and run again"
        ) from None
    found = []
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if isinstance(record, str):
            raise CheckpointError(
                f"{path}: line {number} {record}, so the file is damaged; delete that line, or "
                "move the file away to go on without the records so far"
            )
        found.append((line, record))
    # Every record ends its line, so only a write that was cut leaves something after the last end.
    record = _parse(last)
    if not isinstance(record, str):
        found.append((last, record))
    return found


def _parse(line: bytes) -> Record | str:
    # The record, or what is wrong with the line.
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return "is not UTF-8"
    except (ValueError, RecursionError):
        return "is not JSON"
    if not isinstance(record, dict):
        return "is not a JSON object"
    if type(record.get("step")) is not int:
        return "has no whole number as step"
    return record


def _tidy(path: Path, keep_up_to: int | None) -> None:
    kept = [
        line for line, record in _read(path) if keep_up_to is None or record["step"] <= keep_up_to
    ]
    wanted = b"".join(line + b"\n" for line in kept)
    if path.stat().st_size != len(wanted):
        replace_file(path, wanted)
