"""Files made to exhaust the machine, and damaged archives: one line, bounded memory."""

import gzip
import io
import json
import tarfile
import tracemalloc
from pathlib import Path

import pytest

from slipstream.diagnose import Limits, read
from slipstream.diagnose.read import chunks, files
from slipstream.errors import DataError
from tests.diagnose.synthetic import COMPUTE, Block, blocks_trace, write

MIB = 2**20
BLOCKS = [Block(what=COMPUTE, start_ns=1000 * row, dur_ns=500) for row in range(300)]
SMALL = Limits(max_bytes=4 * MIB, max_event_bytes=MIB, max_name_bytes=MIB, max_events=1000)


def refusal(path: Path, limits: Limits | None = None) -> str:
    with pytest.raises(DataError) as caught:
        read(path, limits=limits)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


def bomb(path: Path, head: bytes, fill: bytes, mib: int) -> Path:
    with gzip.open(path, "wb", compresslevel=9) as file:
        file.write(head)
        for _ in range(mib):
            file.write(fill * (MIB // len(fill)))
    return path


@pytest.mark.parametrize(
    ("head", "fill", "reason"),
    [
        (b"", b"\0", "no JSON"),
        (b'{"traceEvents": [', b" ", "no end of an event within"),
        (b'{"traceEvents": [{"name": "', b"a", "no end of an event within"),
        (b'{"traceEvents": [', b"[", "nest deeper than 1000"),
        (b'{"traceEvents": [{"args": [', b"[],,", "no end of an event within"),
        (b'{"note": "', b"a", "no traceEvents within"),
        (b'{"traceEvents": [], "note": "', b"a", "no end within"),
    ],
    ids=["zeros", "blanks", "one-name", "nested", "flat", "head", "tail"],
)
def test_bombs_stop_early_in_bounded_memory(
    tmp_path: Path, head: bytes, fill: bytes, reason: str
) -> None:
    file = bomb(tmp_path / "t.json.gz", head, fill, mib=12)
    assert file.stat().st_size < MIB // 8
    tracemalloc.start()
    message = refusal(file, Limits(max_event_bytes=4 * MIB))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reason in message
    assert peak < 250 * MIB


def test_a_bomb_of_valid_events_stops_at_the_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_FREE_BYTES", 2 * MIB)
    packed = bomb(tmp_path / "t.json.gz", b'{"traceEvents": [', b'{"ph": "i"},    ', mib=6)
    assert "300-fold" in refusal(packed)


def test_text_beyond_the_limit(tmp_path: Path) -> None:
    content = b'{"traceEvents": [' + b'{"ph": "i", "pad": "%s"},' % (b"x" * 1000) * 6000
    assert "more than 4194304 bytes" in refusal(write(tmp_path / "t.json", content), SMALL)


def test_more_events_than_the_limit(tmp_path: Path) -> None:
    file = write(tmp_path / "t.json", blocks_trace(BLOCKS * 4))
    assert "more than 1000 events" in refusal(file, SMALL)


def test_more_names_than_the_limit(tmp_path: Path) -> None:
    events = [{"ph": "X", "name": f"{n}" * 3000, "ts": n} for n in range(900)]
    file = write(tmp_path / "t.json", json.dumps(events).encode())
    assert "names and arguments take more than" in refusal(file, SMALL)


def test_more_traces_than_the_limit(tmp_path: Path) -> None:
    for rank in range(4):
        write(tmp_path / f"rank{rank}.json", blocks_trace(BLOCKS[:1]))
    with pytest.raises(DataError, match="more than 3 traces"):
        read(tmp_path, limits=Limits(max_traces=3))


@pytest.mark.parametrize("keep", [20, 0.5, 0.99, -1])
def test_a_truncated_gzip_file_says_where(tmp_path: Path, keep: float) -> None:
    whole = gzip.compress(blocks_trace(BLOCKS))
    cut = int(keep * len(whole)) if isinstance(keep, float) else keep
    (tmp_path / "t.json.gz").write_bytes(whole[:cut])
    message = refusal(tmp_path / "t.json.gz")
    assert "gzip data ends early" in message
    assert "bytes into the text" in message


@pytest.mark.parametrize("at", [12, 100, -6])
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, at: int) -> None:
    damaged = bytearray(gzip.compress(blocks_trace(BLOCKS)))
    damaged[at] ^= 0x55
    (tmp_path / "t.json.gz").write_bytes(damaged)
    with pytest.raises(DataError, match="gzip data"):
        read(tmp_path / "t.json.gz")


def test_several_gzip_members_and_padding_are_one_text(tmp_path: Path) -> None:
    content = blocks_trace(BLOCKS)
    half = len(content) // 2
    packed = gzip.compress(content[:half]) + gzip.compress(content[half:]) + bytes(1000)
    (tmp_path / "t.json.gz").write_bytes(packed)
    assert len(read(tmp_path / "t.json.gz").traces[0]) == len(BLOCKS)


def test_memory_does_not_grow_with_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The columns stay, some 65 bytes per event; the text, here 4 kB per event, goes."""
    monkeypatch.setattr(chunks, "BLOCK_BYTES", 2**18)
    args = tuple((f"padding {n}", "x" * 180) for n in range(20))
    blocks = [Block(what=COMPUTE, start_ns=9 * n, dur_ns=5, args=args) for n in range(4000)]
    file = write(tmp_path / "t.json", blocks_trace(blocks))
    del blocks
    tracemalloc.start()
    trace = read(file).traces[0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(trace) == 4000
    assert peak < 0.5 * file.stat().st_size


def tar_of(content: bytes, name: str = "rank0.json") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.mark.parametrize("keep", [600, 5000, 20_000])
def test_a_cut_archive_is_refused(tmp_path: Path, keep: int) -> None:
    (tmp_path / "t.tar").write_bytes(tar_of(blocks_trace(BLOCKS))[:keep])
    with pytest.raises(DataError) as caught:
        read(tmp_path / "t.tar")
    assert "\n" not in str(caught.value)


def test_an_archive_without_traces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.tar").write_bytes(tar_of(b"text", "notes.txt"))
    with pytest.raises(DataError, match="no trace found"):
        read(tmp_path / "t.tar")


def test_links_and_devices_in_archives_are_passed_over(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name, kind in (("rank0.json", tarfile.SYMTYPE), ("rank1.json", tarfile.FIFOTYPE)):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    with pytest.raises(DataError, match="no trace found"):
        read(tmp_path / "t.tar")


@pytest.mark.parametrize(("what", "num"), [("threads", 4), ("streams", 4), ("", 3)])
def test_more_threads_or_streams_than_the_limit(tmp_path: Path, what: str, num: int) -> None:
    row = {"ph": "X", "cat": "kernel", "name": "k", "dur": 1, "pid": 0, "tid": 0}
    rows = [
        row | {"ts": n, "args": {"stream": n}} if what == "streams" else row | {"ts": n, "tid": n}
        for n in range(num)
    ]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    limits = Limits(max_rows=3)
    if what:
        with pytest.raises(DataError, match=f"t.json: more than 3 {what}"):
            read(tmp_path / "t.json", limits=limits)
    else:
        assert len(read(tmp_path / "t.json", limits=limits).traces[0]) == num


def test_an_archive_is_read_as_a_folder_is(tmp_path: Path) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "k", "ts": 1, "dur": 1}
    texts = {"rank1/t.json": [event], "rank0/t.json": [event], "config.json": {"lr": 1}}
    for name, content in texts.items():
        file = tmp_path / "all" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content))
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "all", "all")
    for path in (tmp_path / "all", tmp_path / "all.tar.gz"):
        job = read(path)
        assert [trace.rank for trace in job.traces] == [0, 1]
        assert len(job.problems) == 1
        assert "config.json: JSON without a traceEvents array" in job.problems[0]


def test_a_file_named_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    file.write_text('{"traceEvents": []}')
    for paths in ([file, file], [file, tmp_path], [tmp_path / "." / "t.json", str(file)]):
        with pytest.raises(DataError, match=r"t\.json: the same file as"):
            read(paths)


def test_two_captures_of_one_process_are_not_two_ranks(tmp_path: Path) -> None:
    for number in (1, 2):
        file = tmp_path / f"host_{40 + number}.1796004635367456540.pt.trace.json"
        file.write_text('{"traceEvents": []}')
    assert len(read(tmp_path).traces) == 2
    (tmp_path / "host_41.1796004635500938457.pt.trace.json").write_text('{"traceEvents": []}')
    with pytest.raises(DataError, match="of one process at two times"):
        read(tmp_path)
