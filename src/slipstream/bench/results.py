"""Raw rows as JSON lines, appended as they are measured, and read back for tables."""

import json
from pathlib import Path
from typing import Any

from slipstream.errors import DataError

Row = dict[str, Any]


def append_row(path: Path, row: Row) -> None:
    """Add one row to ``path``; it is on disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(path: Path) -> list[Row]:
    """All rows of ``path``. Raises DataError for a file that is missing or not JSON lines."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; expected JSON lines that slipstream bench wrote")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}:{number}: not a JSON object ({error.msg})") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: not a JSON object; expected one row a line")
        rows.append(row)
    return rows
