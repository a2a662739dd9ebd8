"""metrics.jsonl: one JSON object per step and evaluation, the truth of a run.

Everything a machine's speed can change stands under ``time``; the rest of a record is a function of
the recipe and the data, so two runs can be compared by dropping that key.
"""

import json
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class MetricsFile:
    """Appends records; each is on disk when ``write`` returns, whatever happens to the process."""

    def __init__(self, path: Path, *, keep_up_to: int | None = None) -> None:
        if keep_up_to is not None and path.exists():
            _cut(path, keep_up_to)
        self._stream = open(path, "a", encoding="utf-8")  # noqa: SIM115  # closed in close()

    def write(self, record: Record) -> None:
        """Append one line."""
        self._stream.write(json.dumps(record) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def read_metrics(path: Path) -> list[Record]:
    """All records; a last line cut by a crash is left out."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def _cut(path: Path, step: int) -> None:
    # A resumed run repeats the steps after its checkpoint; their old records go.
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
    partial.replace(path)
