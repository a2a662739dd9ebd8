"""What the reader takes: layouts, notations of time, metadata, and what it reads around."""

import gc
import gzip
import io
import json
import tarfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.diagnose import Kind, Trace, account, read
from slipstream.diagnose.read import chunks
from slipstream.diagnose.read.times import MAX_NS, InexactTimesError, ns_of, whole_ns
from slipstream.errors import DataError
from tests.diagnose.synthetic import COMPUTE, Block, blocks_trace, dumps, event, host, us, write

ASSETS = Path(__file__).parent / "assets"
BLOCKS = [Block(what=COMPUTE, start_ns=1000 * row, dur_ns=500) for row in range(5)]
EVENTS = [event(block, row) for row, block in enumerate(BLOCKS)]


def one(path: Path, content: bytes | str) -> Trace:
    raw = content.encode() if isinstance(content, str) else content
    (trace,) = read(write(path, raw)).traces
    return trace


def raw_event(**fields: object) -> dict:
    """A kernel of 1 us at 5 us, with fields replaced."""
    base = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5, "dur": 1}
    return base | fields


def wrap(*events: object, **metadata: object) -> str:
    return json.dumps(metadata | {"traceEvents": list(events)})


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize(
    "layout",
    ["object", "list", "events-last", "events-first", "indented", "bom", "crlf"],
)
def test_layouts(tmp_path: Path, suffix: str, layout: str) -> None:
    meta = {"schemaVersion": 1, "distributedInfo": {"rank": 3, "world_size": 8}, "x": [[{}], "]"]}
    events = [raw_event(ts=1000 * row, args={"a": ["}", '{"', "\\"]}) for row in range(5)]
    content = {
        "object": json.dumps({"traceEvents": events} | meta),
        "list": json.dumps(events),
        "events-last": json.dumps(meta | {"traceEvents": events}),
        "events-first": json.dumps({"traceEvents": events, **meta}),
        "indented": json.dumps({"traceEvents": events} | meta, indent=2),
        "bom": "\ufeff" + json.dumps({"traceEvents": events} | meta),
        "crlf": json.dumps({"traceEvents": events} | meta, indent=1).replace("\n", "\r\n"),
    }[layout]
    trace = one(tmp_path / f"t{suffix}", content)
    assert trace.start_ns.tolist() == [1_000_000 * row for row in range(5)]
    assert trace.rank == (None if layout == "list" else 3)
    assert trace.world_size == (None if layout == "list" else 8)
    assert trace.problems == ()


def test_a_list_without_its_closing_bracket_is_read(tmp_path: Path) -> None:
    trace = one(tmp_path / "t.json", json.dumps([raw_event()])[:-1] + ",\n")
    assert len(trace) == 1
    assert trace.problems == ("the list of events is not closed; it may have been cut off",)


def test_blocks_are_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the size of a block, also inside strings with brackets and escaped quotes."""
    names = ['a"}]{["', "back\\slash\\", "\\", '\\"', "}, {", "][", '"traceEvents": [', "x" * 90]
    events = [raw_event(name=name, ts=row) for row, name in enumerate(names * 3)]
    content = json.dumps({"note": '"traceEvents": [', "traceEvents": events, "end": "]}"})
    for size in (1, 2, 3, 7, 64, 1000):
        monkeypatch.setattr(chunks, "BLOCK_BYTES", size)
        trace = one(tmp_path / "t.json", content)
        assert [trace.name_of(row) for row in range(len(trace))] == names * 3
        assert trace.problems == ()


def archive(path: Path, members: dict[str, bytes], mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("mode", ["w:gz", "w"])
def test_an_archive_of_ranks(tmp_path: Path, mode: str) -> None:
    members = {f"run/rank{rank}.json": blocks_trace(BLOCKS) for rank in (2, 0)}
    members["run/rank1.json.gz"] = gzip.compress(blocks_trace(BLOCKS))
    members |= {"run/README.md": b"text", "run/._rank0.json": b"mac"}
    job = read(archive(tmp_path / "run.tar.gz", members, mode))
    assert [trace.rank for trace in job.traces] == [0, 1, 2]
    assert [len(trace) for trace in job.traces] == [5, 5, 5]


def test_a_folder_equals_its_archive(tmp_path: Path) -> None:
    with tarfile.open(ASSETS / "dlrm_kineto.tar.gz") as tar:
        members = [one for one in tar if "worker6" in one.name or "worker7" in one.name]
        contents = {one.name: tar.extractfile(one).read() for one in members}  # type: ignore[union-attr]
    packed = archive(tmp_path / "packed.tar.gz", contents)
    folder = tmp_path / "folder"
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / f"{name}.gz", content)
    (folder / "config.json").write_text('{"lr": 1}')
    apart, whole = account(read(folder)), account(read(packed))
    assert [one.split for one in apart.ranks] == [one.split for one in whole.ranks]
    assert [trace.rank for trace in apart.job.traces] == [6, 7]
    assert "config.json: JSON without a traceEvents array" in apart.job.problems[0]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("rank7.json", 7),
        ("trace_rank-12.json", 12),
        ("worker3_step_12.pt.trace.json", 3),
        ("host_4711.1694.pt.trace.json", None),
    ],
)
def test_rank_from_the_file_name(tmp_path: Path, name: str, rank: int | None) -> None:
    assert one(tmp_path / name, wrap(raw_event())).rank == rank


def test_progress_reaches_the_size_on_disk(tmp_path: Path) -> None:
    files = [write(tmp_path / f"rank{n}.json.gz", blocks_trace(BLOCKS)) for n in range(2)]
    calls: list[tuple[int, int]] = []
    read(files, progress=lambda done, total: calls.append((done, total)))
    size = sum(file.stat().st_size for file in files)
    assert calls[-1] == (size, size)
    assert sorted(calls) == calls


TIMES = [
    (5, 5000),
    (-5, -5000),
    (5.125, 5125),
    ("5.125", 5125),
    ("-0.001", -1),
    ("1682725898236567.891", 1_682_725_898_236_567_891),
    (1_682_725_898_236_567, 1_682_725_898_236_567_000),
    ("1e3", 1_000_000),
    ("0.0005", 0),
    ("0.0015", 2),
]


@pytest.mark.parametrize(("value", "ns"), TIMES, ids=[str(value) for value, _ in TIMES])
def test_times_are_exact(value: object, ns: int) -> None:
    assert ns_of(value) == ns
    assert whole_ns([value, value]).tolist() == [ns, ns]


@settings(max_examples=300, deadline=None)
@given(st.integers(-(2**43) * 1000 + 1, 2**43 * 1000 - 1))
def test_floats_below_2_43_tell_every_nanosecond(ns: int) -> None:
    assert ns_of(float(us(ns))) == ns


@settings(max_examples=200, deadline=None)
@given(st.integers(-MAX_NS, MAX_NS))
def test_text_tells_every_nanosecond(ns: int) -> None:
    assert ns_of(us(ns)) == ns
    assert ns_of(str(Decimal(ns) / 1000)) == ns


def test_large_floats_ask_for_the_text() -> None:
    with pytest.raises(InexactTimesError):
        whole_ns([1.0, 2.0**43])


@pytest.mark.parametrize(
    "value", [None, True, [], {}, "", "abc", "nan", "inf", "1e400", "9" * 30, 10**30, float("nan")]
)
def test_what_is_no_time(value: object) -> None:
    with pytest.raises((ValueError, OverflowError)):
        ns_of(value, texts=True)


@pytest.mark.parametrize("origin", [0, 4_398_046_511_104_000, 1_682_725_898_236_567_000])
def test_unix_times_with_fractions_are_exact_in_files(tmp_path: Path, origin: int) -> None:
    starts = [origin + step for step in (1, 2, 999, 1000, 12_345)]
    events = [host("kernel", "k", start, 7) for start in starts]
    trace = one(tmp_path / "t.json", dumps(events))
    assert trace.start_ns.tolist() == starts
    assert trace.dur_ns.tolist() == [7] * 5


def test_base_time_and_metadata(tmp_path: Path) -> None:
    base = 1_751_410_836_000_000_000
    trace = one(
        tmp_path / "t.json",
        wrap(
            raw_event(args={"device": 1, "stream": 9, "correlation": 4, "External id": 6}),
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": 7, "args": {"name": "stream 7"}},
            baseTimeNanoseconds=base,
            deviceProperties=[{"id": 0, "name": "A"}, {"id": 1, "name": "B", "numSms": 132}],
            distributedInfo={
                "rank": 1,
                "world_size": 2,
                "pg_config": [{"pg_name": "0", "ranks": [0, 1]}],
            },
        ),
    )
    assert trace.start_ns.tolist() == [base + 5000]
    assert (trace.device_name, trace.device_props["numSms"]) == ("B", 132)
    assert (trace.rank, trace.world_size) == (1, 2)
    assert trace.group_ranks == {"0": (0, 1)}
    assert trace.device[0] == 1
    assert trace.stream[0] == 9
    assert trace.correlation[0] == 4
    assert trace.external[0] == 6
    thread = trace.threads[trace.thread[0]]
    assert (thread.process_name, thread.name) == ("python", "stream 7")


def test_categories_of_all_vendors_in_any_case(tmp_path: Path) -> None:
    kinds = {
        "Kernel": Kind.KERNEL,
        "gpu_memcpy": Kind.COPY,
        "Memset": Kind.COPY,
        "CPU_OP": Kind.CPU_OP,
        "cuda_driver": Kind.RUNTIME,
        "hip_runtime": Kind.RUNTIME,
        "xpu_runtime": Kind.RUNTIME,
        "cuda_sync": Kind.SYNC,
        "user_annotation": Kind.ANNOTATION,
        "gpu_user_annotation": Kind.GPU_ANNOTATION,
        "python_function": Kind.PYTHON,
        "Overhead": Kind.OVERHEAD,
        "something": Kind.OTHER,
    }
    events = [raw_event(cat=cat, ts=row) for row, cat in enumerate(kinds)]
    trace = one(tmp_path / "t.json", wrap(*events, {"ph": "X", "name": "n", "ts": 99}))
    assert trace.kind.tolist() == [*kinds.values(), Kind.OTHER]


def test_events_are_sorted_and_parents_come_first(tmp_path: Path) -> None:
    events = [raw_event(ts=5, dur=1, name="child"), raw_event(ts=5, dur=9, name="parent")]
    trace = one(tmp_path / "t.json", wrap(*events, raw_event(ts=1, name="first")))
    assert [trace.name_of(row) for row in range(3)] == ["first", "parent", "child"]


def test_equal_arguments_are_stored_once(tmp_path: Path) -> None:
    args = {"Input Dims": [[2, 3]], "Input type": ["float"], "Ev Idx": 1}
    events = [raw_event(cat="cpu_op", ts=n, args=args | {"Ev Idx": n}) for n in range(4)]
    trace = one(tmp_path / "t.json", wrap(*events))
    assert len(trace.details) == 1
    assert trace.args(3) == {"Input Dims": [[2, 3]], "Input type": ["float"]}


def test_forward_backward_arrows(tmp_path: Path) -> None:
    def flow(phase: str, number: int, ts: int, tid: int) -> dict:
        return {"ph": phase, "cat": "fwdbwd", "id": number, "pid": 1, "tid": tid, "ts": ts}

    arrows = [flow("s", 1, 10, 1), flow("f", 1, 50, 2), flow("s", 2, 20, 1), flow("f", 3, 60, 2)]
    flows = one(tmp_path / "t.json", wrap(raw_event(), *arrows)).flows
    assert flows.start_ns.tolist() == [10_000]
    assert flows.end_ns.tolist() == [50_000]


BAD_EVENTS = {
    "no-name": ({"ph": "X", "ts": 1, "dur": 1}, "not an event"),
    "name-is-number": (raw_event(name=3), "not an event"),
    "not-an-object": (3, "not an event"),
    "null": (None, "not an event"),
    "list": ([1], "not an event"),
    "no-time": ({"ph": "X", "name": "k"}, "not an event"),
    "time-is-text": (raw_event(ts="soon"), "no number"),
    "time-is-null": (raw_event(ts=None), "no number"),
    "time-is-true": (raw_event(ts=True), "no number"),
    "time-is-huge": (raw_event(ts=10**18), "no number"),
    "time-beyond-64-bits": (raw_event(ts=10**25), "no number"),
    "duration-is-list": (raw_event(dur=[1]), "no number"),
    "negative-duration": (raw_event(dur=-1), "duration"),
    "absurd-duration": (raw_event(dur=10**14), "duration"),
    "far-away": (raw_event(ts=10**13), "a week"),
}


@pytest.mark.parametrize("case", BAD_EVENTS)
def test_single_bad_events_are_left_out_and_counted(tmp_path: Path, case: str) -> None:
    bad, reason = BAD_EVENTS[case]
    trace = one(tmp_path / "t.json", wrap(*[raw_event(ts=row) for row in range(5)], bad))
    assert len(trace) == 5
    (problem,) = trace.problems
    assert problem.startswith("1 event left out: ")
    assert reason in problem


@pytest.mark.parametrize(
    "args",
    [None, 3, "x", [], {"device": "none", "stream": None, "correlation": 2**70}, {"stream": -1}],
    ids=str,
)
def test_odd_arguments_do_not_lose_the_event(tmp_path: Path, args: object) -> None:
    trace = one(tmp_path / "t.json", wrap(raw_event(args=args, tid=[1], pid={})))
    assert len(trace) == 1
    assert trace.correlation[0] == -1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'"args": {"occupancy": NaN}', "k"),
        (b'"args": {"bandwidth": inf, "other": -Infinity, "list": [nan]}', "k"),
        (b'"args": {"a": "tab\there"}', "k"),
        (b'"name": "caf\xe9 \xff"', "caf\ufffd \ufffd"),
    ],
    ids=["nan", "inf", "control-character", "invalid-utf8"],
)
def test_faults_of_profilers_are_repaired(tmp_path: Path, text: bytes, name: str) -> None:
    faulty = b'{"ph": "X", "cat": "kernel", "name": "k", "ts": 9, "dur": 1, ' + text + b"}"
    content = json.dumps([raw_event()]).encode()[:-1] + b", " + faulty + b"]"
    trace = one(tmp_path / "t.json", content)
    assert [trace.name_of(row) for row in range(2)] == ["k", name]
    assert trace.problems == ()


def test_the_same_device_event_twice_counts_once(tmp_path: Path) -> None:
    launch = raw_event(args={"stream": 7, "correlation": 4})
    other = raw_event(args={"stream": 7, "correlation": 5})
    trace = one(tmp_path / "t.json", wrap(launch, launch, other))
    assert len(trace) == 2
    assert trace.problems == ("1 event left out: the same device event twice",)


def test_integers_beyond_2_53_keep_their_value(tmp_path: Path) -> None:
    number = 2**53 + 1
    trace = one(tmp_path / "t.json", wrap(raw_event(args={"correlation": number})))
    assert trace.correlation.tolist() == [number]


REFUSED = {
    "empty": (b"", "empty"),
    "blank": (b" \n", "empty"),
    "text": (b"hello", "no JSON"),
    "html": (b"<html>", "no JSON"),
    "object": (b'{"a": 1}', "without a traceEvents array"),
    "list": (b"[1, 2, {}]", "list without a single complete event"),
    "null-events": (b'{"traceEvents": null}', "without a traceEvents array"),
    "cut-before-events": (b'{"schemaVersion": 1, "trace', "truncated at byte"),
    "cut-in-events": (b'{"traceEvents": [{"ph": "X", "na', "ends inside the events"),
    "cut-after-event": (b'{"traceEvents": [{"ph": "X"}', "ends inside the events"),
    "cut-in-metadata": (b'{"traceEvents": [], "distributedInfo": {"ra', "after the events"),
    "no-closing-brace": (b'{"traceEvents": []', "after the events"),
    "deep": (b'{"traceEvents": [' + b"[" * 5000, "nest deeper"),
    "zeros": (bytes(1000), "no JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, case: str, suffix: str) -> None:
    content, reason = REFUSED[case]
    file = write(tmp_path / f"t{suffix}", content)
    with pytest.raises(DataError, match=reason) as caught:
        read(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    assert "\n" not in message


def test_the_cycle_collector_is_left_as_it_was(tmp_path: Path) -> None:
    file = write(tmp_path / "t.json", b'{"traceEvents": [')
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with pytest.raises(DataError):
                read(file)
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def test_missing_files_folders_and_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "gone.json")
    with pytest.raises(DataError, match="no trace in this folder"):
        read(tmp_path)
    with pytest.raises(DataError, match="none given"):
        read([])
    write(tmp_path / "config.json", b"{}")
    with pytest.raises(DataError, match="no trace found"):
        read(tmp_path)
    with pytest.raises(DataError, match="not a regular file"):
        read("/dev/null")


def test_two_traces_of_one_rank_are_refused(tmp_path: Path) -> None:
    for name in ("rank1_a.json", "rank1_b.json"):
        write(tmp_path / name, wrap(raw_event()).encode())
    with pytest.raises(DataError, match="both of rank 1"):
        read(tmp_path)


def test_impossible_ranks_are_ignored(tmp_path: Path) -> None:
    trace = one(
        tmp_path / "t.json", wrap(raw_event(), distributedInfo={"rank": 9, "world_size": 2})
    )
    assert (trace.rank, trace.world_size) == (None, None)
    assert "impossible" in trace.problems[0]


def test_a_trace_without_events_is_empty(tmp_path: Path) -> None:
    trace = one(tmp_path / "t.json", '{"traceEvents": []}')
    assert len(trace) == 0
    assert trace.start_ns.dtype == np.int64
