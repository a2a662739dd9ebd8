"""metrics.jsonl: nothing lost in silence, nothing half-written."""

import errno
import os
from pathlib import Path

import pytest

from slipstream.errors import CheckpointError
from slipstream.report import loss_curve, summarise
from slipstream.train.metrics import MetricsFile, read_metrics

GOOD = b'{"step": 1}\n{"step": 2}\n'
BAD_LINES = {
    "not-json": (b'{"step": 2, "lo', "is not JSON"),
    "empty": (b"", "is not JSON"),
    "zeros": (b"\0" * 40, "is not JSON"),
    "deep": (b"[" * 100_000, "is not JSON"),
    "not-utf8": (b'{"step": 2, "a": "\xff"}', "is not UTF-8"),
    "list": (b"[2]", "is not a JSON object"),
    "number": (b"2", "is not a JSON object"),
    "no-step": (b'{"loss": 1.0}', "has no whole number as step"),
    "text-step": (b'{"step": "2"}', "has no whole number as step"),
    "half-step": (b'{"step": 2.5}', "has no whole number as step"),
    "true-step": (b'{"step": true}', "has no whole number as step"),
}
bad_lines = pytest.mark.parametrize(("line", "reason"), BAD_LINES.values(), ids=BAD_LINES)


@bad_lines
def test_a_bad_line_inside_is_named_and_nothing_is_changed(
    line: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    content = GOOD + line + b'\n{"step": 3}\n'
    path.write_bytes(content)
    for action in (
        lambda: read_metrics(path),
        lambda: MetricsFile(path, keep_up_to=1),
        lambda: summarise(tmp_path),
        lambda: loss_curve(tmp_path, tmp_path / "loss.svg"),
    ):
        with pytest.raises(CheckpointError) as caught:
            action()
        assert f"{path}: line 3 {reason}" in str(caught.value)
        assert "delete that line" in str(caught.value)
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@bad_lines
def test_a_torn_last_line_is_dropped_whatever_is_in_it(
    line: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD + line)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}]
    file = MetricsFile(path)
    file.write({"step": 3})
    file.close()
    assert path.read_bytes() == GOOD + b'{"step": 3}\n'


def test_a_whole_last_record_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD[:-1])
    MetricsFile(path, keep_up_to=2).close()
    assert path.read_bytes() == GOOD


def test_every_torn_end_of_a_record_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for length in range(len(GOOD) + 1):
        path.write_bytes(GOOD[:length])
        expected = [{"step": n} for n in (1, 2) if length >= 12 * n - 1]
        assert read_metrics(path) == expected, length


def test_a_file_that_needs_no_cut_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD)
    before = path.stat().st_ino
    MetricsFile(path, keep_up_to=2).close()
    assert path.stat().st_ino == before


def test_a_failed_rewrite_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(GOOD)

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=f"{path}: cannot be written: No space left"):
        MetricsFile(path, keep_up_to=1)
    assert path.read_bytes() == GOOD
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_failed_record_is_named_and_leaves_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.write({"step": 1})
    real = file._stream

    class Full:
        """A disk with room for three more bytes."""

        room = 3

        def write(self, data: bytes) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            done = real.write(data[: self.room])
            self.room = 0
            return done

        def fileno(self) -> int:
            return real.fileno()

        def truncate(self, size: int) -> int:
            return real.truncate(size)

    file._stream = Full()
    with pytest.raises(CheckpointError, match=f"{path}: cannot be written: No space left"):
        file.write({"step": 2})
    real.close()
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_place_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    below = tmp_path / "file" / "metrics.jsonl"
    with pytest.raises(CheckpointError, match=f"{below}: cannot be written"):
        MetricsFile(below)
    with pytest.raises(CheckpointError, match=f"{below}: cannot be read"):
        read_metrics(below)


@pytest.mark.parametrize(
    ("line", "lacks"),
    [
        ('{"step": 1, "loss": 2}', "skipped, time, tokens"),
        ('{"step": 1, "loss": 2, "tokens": 1, "skipped": false, "time": 3}', "tok_per_s"),
        ('{"step": 1, "val_loss": 2}', "val_nats_per_byte"),
    ],
)
def test_records_of_something_else_are_refused_by_the_report(
    line: str, lacks: str, tmp_path: Path
) -> None:
    clock = '"data_ms": 1, "forward_ms": 1, "backward_ms": 1, "optimizer_ms": 1, "step_ms": 4'
    step = (
        '{"step": 1, "loss": 2, "tokens": 1, "skipped": false, '
        f'"time": {{{clock}, "tok_per_s": 1, "mfu": null, "peak_gib": 0}}}}'
    )
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{step}\n")
    assert summarise(tmp_path).steps == 1
    path.write_text(f"{step}\n{line}\n")
    with pytest.raises(CheckpointError, match=f"record of step 1 lacks.*{lacks}"):
        summarise(tmp_path)
