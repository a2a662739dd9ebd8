"""Raw rows on disk."""

from pathlib import Path

import pytest

from slipstream.bench.results import append_row, read_rows
from slipstream.errors import DataError


def test_rows_are_appended_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.jsonl"
    rows = [{"peer": "a", "total_ms": {"median": 1.25}}, {"peer": "b", "reason": "absent"}]
    for row in rows:
        append_row(path, row)
    assert read_rows(path) == rows


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": 1}\nnot json'])
def test_what_is_not_rows_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(
        DataError, match=rf"rows\.jsonl:{len(text.splitlines())}: not a JSON object"
    ):
        read_rows(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_rows(tmp_path / "none.jsonl")
