"""Nsight Systems exports, made here with the tables and columns of several versions."""

import sqlite3
from pathlib import Path

import pytest

from slipstream.diagnose import Kind, account, read
from slipstream.errors import DataError

PID = 4711
PROCESS = PID << 24
THREAD = PROCESS | 99
STRINGS = {1: "sm90_xmma_gemm_bf16bf16", 2: "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
           3: "cudaLaunchKernel_v7000", 4: "train step"}  # fmt: skip


def export(path: Path, *, new: bool = True, process: int = PROCESS) -> Path:
    """Two kernels, a copy, a set, a wait, two launches and a step.

    Not ``new``: without demangled names, NVTX strings by index, devices, or a session time.
    """
    database = sqlite3.connect(path)
    thread = process | 99
    run = database.execute
    run("CREATE TABLE StringIds (id INTEGER, value TEXT)")
    database.executemany("INSERT INTO StringIds VALUES (?, ?)", STRINGS.items())
    name = "demangledName" if new else "shortName"
    grid = ", gridX, gridY, gridZ, blockX, blockY, blockZ, registersPerThread" if new else ""
    run(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId, correlationId, "
        f"globalPid, {name}{grid})"
    )
    shape = ", 8, 2, 1, 128, 1, 1, 64" if new else ""
    run(
        "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES "
        f"(1000, 5000, 0, 7, 11, {process}, 1{shape}), (4000, 9000, 0, 8, 12, {process}, 2{shape})"
    )
    run(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start, end, deviceId, streamId, correlationId, "
        "globalPid, bytes, copyKind)"
    )
    run(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (9000, 9500, 0, 7, 13, {process}, 64, 1)")
    run(
        "CREATE TABLE CUPTI_ACTIVITY_KIND_MEMSET (start, end, deviceId, streamId, globalPid, bytes)"
    )
    run(f"INSERT INTO CUPTI_ACTIVITY_KIND_MEMSET VALUES (10000, 10500, 0, 7, {process}, 32)")
    run("CREATE TABLE CUPTI_ACTIVITY_KIND_SYNCHRONIZATION (start, end, globalPid, syncType)")
    run(f"INSERT INTO CUPTI_ACTIVITY_KIND_SYNCHRONIZATION VALUES (10500, 11000, {process}, 3)")
    run("CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, end, globalTid, correlationId, nameId)")
    database.executemany(
        "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, 3)",
        [(500, 700, thread, 11), (700, 900, thread, 12)],
    )
    if new:
        run("CREATE TABLE NVTX_EVENTS (start, end, text, textId, globalTid)")
        run(f"INSERT INTO NVTX_EVENTS VALUES (0, 12000, NULL, 4, {thread})")
        run(f"INSERT INTO NVTX_EVENTS VALUES (100, NULL, 'mark', NULL, {thread})")
        run(f"INSERT INTO NVTX_EVENTS VALUES (100, 11000, 'step 3', NULL, {thread})")
        run("CREATE TABLE TARGET_INFO_GPU (id, name, smCount)")
        run("INSERT INTO TARGET_INFO_GPU VALUES (0, 'NVIDIA H100 80GB HBM3', 132)")
        run("CREATE TABLE TARGET_INFO_SESSION_START_TIME (utcEpochNs)")
        run("INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES (1700000000000000000)")
        run("CREATE TABLE ThreadNames (nameId, globalTid)")
        run(f"INSERT INTO ThreadNames VALUES (4, {thread})")
    database.commit()
    database.close()
    return path


@pytest.mark.parametrize("new", [True, False], ids=["new", "old"])
def test_figures(tmp_path: Path, new: bool) -> None:
    (counted,) = account(read(export(tmp_path / "rank2.sqlite", new=new))).ranks
    split = counted.split
    assert (split.span_ns, split.compute_ns, split.exposed_communication_ns) == (9500, 4000, 4000)
    assert (split.exposed_copies_ns, split.idle_ns) == (1000, 500)
    assert (split.num_kernels, split.num_communication_kernels, split.num_copies) == (2, 1, 2)
    trace = counted.trace
    assert trace.rank == 2
    runtime = trace.of_kind(Kind.RUNTIME)
    assert [trace.name_of(row) for row in runtime] == ["cudaLaunchKernel"] * 2
    assert [int(row) for row in counted.launch[trace.of_kind(Kind.KERNEL)]] == runtime.tolist()
    assert trace.name_of(trace.of_kind(Kind.SYNC)[0]) == "Stream Sync"
    assert {entry.label for entry in counted.classes if entry.klass == "copy"} == {
        "copy htod",
        "copy memset",
    }


def test_names_ranges_device_and_clock(tmp_path: Path) -> None:
    (counted,) = account(read(export(tmp_path / "t.sqlite"))).ranks
    trace = counted.trace
    assert trace.device_name == "NVIDIA H100 80GB HBM3"
    assert trace.device_props["numSms"] == 132
    assert trace.start_ns[0] == 1_700_000_000_000_000_000
    assert trace.name_of(0) == "train step"
    assert trace.threads[trace.thread[0]].name == "train step"
    assert [step.number for step in counted.steps] == [3]
    assert counted.steps[0].split.num_kernels == 2
    kernel = trace.args(trace.of_kind(Kind.KERNEL)[0])
    assert (kernel["grid"], kernel["block"]) == ([8, 2, 1], [128, 1, 1])
    assert trace.args(trace.of_kind(Kind.COPY)[0]) == {"bytes": 64}


def test_one_trace_per_process(tmp_path: Path) -> None:
    file = export(tmp_path / "t.sqlite")
    database = sqlite3.connect(file)
    other = (PID + 1) << 24
    database.execute(
        f"INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (2000, 2500, 1, 7, 11, {other}, 1,"
        " 1, 1, 1, 32, 1, 1, 8)"
    )
    database.commit()
    database.close()
    job = read(file)
    assert [len(trace.of_kind(Kind.KERNEL)) for trace in job.traces] == [2, 1]
    assert [len(trace.of_kind(Kind.RUNTIME)) for trace in job.traces] == [2, 0]
    assert [trace.source.rpartition(":")[2] for trace in job.traces] == ["pid 4711", "pid 4712"]


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'soon'", "2 events left out"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 0", "negative or absurd duration"),
        ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = 9e18", "2 events left out"),
    ],
)
def test_bad_rows_are_left_out_and_counted(tmp_path: Path, statement: str, problem: str) -> None:
    file = export(tmp_path / "t.sqlite")
    database = sqlite3.connect(file)
    database.execute(statement)
    database.commit()
    database.close()
    (trace,) = read(file).traces
    assert len(trace.of_kind(Kind.KERNEL)) == 0
    assert problem in trace.problems[0]


def test_other_databases_are_refused(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "t.sqlite")
    database.execute("CREATE TABLE things (a)")
    database.commit()
    database.close()
    with pytest.raises(DataError, match="SQLite without events of Nsight"):
        read(tmp_path / "t.sqlite")


@pytest.mark.parametrize("keep", [100, 5000, 20_000])
def test_a_cut_export_is_refused(tmp_path: Path, keep: int) -> None:
    whole = export(tmp_path / "whole.sqlite").read_bytes()
    (tmp_path / "cut.sqlite").write_bytes(whole[:keep])
    with pytest.raises(DataError, match=r"cut\.sqlite") as caught:
        read(tmp_path / "cut.sqlite")
    assert "\n" not in str(caught.value)
