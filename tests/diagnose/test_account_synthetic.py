"""Accounting of generated traces whose split is known."""

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.diagnose import Account, account, read
from slipstream.diagnose.account import split_of
from tests.diagnose.synthetic import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    Block,
    blocks_trace,
    dumps,
    event,
    expected,
    host,
    launched,
    write,
)

SETTINGS = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
blocks = st.lists(
    st.builds(
        Block,
        what=st.sampled_from((COMPUTE, COMMUNICATION, COPY)),
        start_ns=st.integers(0, 60),
        dur_ns=st.integers(0, 25),
        stream=st.integers(1, 3),
    ),
    max_size=14,
)


def one(path: Path, content: bytes) -> Account:
    return account(read(write(path, content))).ranks[0]


def parts(counted: Account) -> dict[str, int]:
    split = counted.split
    return {
        "span": split.span_ns,
        "compute": split.compute_ns,
        "exposed_comm": split.exposed_communication_ns,
        "exposed_copies": split.exposed_copies_ns,
        "idle": split.idle_ns,
    }


@SETTINGS
@given(blocks)
def test_split_is_exact_for_any_overlap(tmp_path: Path, blocks: list[Block]) -> None:
    counted = one(tmp_path / "trace.json", blocks_trace(blocks))
    found = parts(counted)
    assert found == expected(blocks)
    assert found.pop("span") == sum(found.values())
    kernels = [block for block in blocks if block.what != COPY]
    assert counted.split.num_kernels == len(kernels)
    assert counted.split.num_copies == len(blocks) - len(kernels)


@SETTINGS
@given(blocks, st.integers(0, 2**32))
def test_split_is_invariant(tmp_path: Path, blocks: list[Block], seed: int) -> None:
    """Under the order of the events, the notation of the times, and their origin."""
    events = [event(block, row + 1) for row, block in enumerate(blocks)]
    random.Random(seed).shuffle(events)
    moved = [block_at(block, 1_700_000_000_000_000_000 + seed) for block in blocks]
    variants = (
        dumps(events),
        dumps(events, quoted=True),
        dumps(events, baseTimeNanoseconds=1_751_410_836_000_000_000),
        blocks_trace(moved),
    )
    for content in variants:
        assert parts(one(tmp_path / "trace.json", content)) == expected(blocks)


def block_at(block: Block, origin_ns: int) -> Block:
    return Block(
        what=block.what,
        start_ns=block.start_ns + origin_ns,
        dur_ns=block.dur_ns,
        stream=block.stream,
    )


@SETTINGS
@given(blocks, st.integers(0, 40), st.integers(0, 90))
def test_split_of_a_window_counts_only_what_lies_inside(
    blocks: list[Block], start: int, length: int
) -> None:
    window = (start, start + length)
    sets = [
        np.array(
            [(b.start_ns, b.start_ns + b.dur_ns) for b in blocks if b.what == what],
            dtype=np.int64,
        ).reshape(-1, 2)
        for what in (COMPUTE, COMMUNICATION, COPY)
    ]
    split = split_of(*sets, window_ns=window)
    clipped = [
        Block(what=b.what, start_ns=max(b.start_ns, window[0]), dur_ns=max(0, end - begin))
        for b in blocks
        for begin, end in [(max(b.start_ns, window[0]), min(b.start_ns + b.dur_ns, window[1]))]
    ]
    # A copy of no length at either edge makes the reference span the window.
    edges = [Block(what=COPY, start_ns=at, dur_ns=0) for at in window]
    truth = expected([b for b in clipped if b.dur_ns] + edges)
    assert split.span_ns == truth["span"] == length
    assert split.compute_ns == truth["compute"]
    assert split.exposed_communication_ns == truth["exposed_comm"]
    assert split.exposed_copies_ns == truth["exposed_copies"]
    assert split.idle_ns == truth["idle"]


@SETTINGS
@given(blocks)
def test_classes_and_streams_cover_the_same_events(tmp_path: Path, blocks: list[Block]) -> None:
    counted = one(tmp_path / "trace.json", blocks_trace(blocks))
    assert sum(entry.num for entry in counted.classes) == len(blocks)
    assert sum(entry.total_ns for entry in counted.classes) == sum(b.dur_ns for b in blocks)
    assert sum(s.num_kernels + s.num_copies for s in counted.streams) == len(blocks)
    truth = expected(blocks)
    alone = {entry.klass.value: entry.exposed_ns for entry in counted.classes}
    assert alone.get("copy", 0) == truth["exposed_copies"]
    assert sum(alone.values()) <= truth["span"] - truth["idle"]


def step_events() -> list[dict]:
    """Two steps; the device runs late, so kernels of a step run in the next one's host range."""
    events = [
        host("user_annotation", "ProfilerStep#4", 0, 100_000),
        host("user_annotation", "ProfilerStep#5", 100_000, 100_000),
    ]
    gemm = "ampere_bf16_s16816gemm_bf16_128x64_tn"
    events += launched(gemm, 10_000, 50_000, 40_000, 1)
    events += launched(gemm, 80_000, 90_000, 60_000, 2)
    events += launched(gemm, 110_000, 160_000, 30_000, 3)
    return events


def test_kernels_belong_to_the_step_that_launched_them(tmp_path: Path) -> None:
    first, second = one(tmp_path / "trace.json", dumps(step_events())).steps
    assert (first.number, second.number) == (4, 5)
    assert (first.start_ns, first.end_ns, second.end_ns) == (50_000, 160_000, 190_000)
    assert (first.split.num_kernels, second.split.num_kernels) == (2, 1)
    assert (first.split.compute_ns, first.split.idle_ns) == (100_000, 10_000)
    assert (second.split.compute_ns, second.split.idle_ns) == (30_000, 0)
    assert first.host_ns == second.host_ns == 100_000


def test_kernels_launched_before_the_trace_belong_to_no_step(tmp_path: Path) -> None:
    stray = event(Block(what=COMPUTE, start_ns=5_000, dur_ns=20_000), correlation=999)
    counted = one(tmp_path / "trace.json", dumps([*step_events(), stray]))
    assert counted.split.num_kernels == 4
    assert sum(step.split.num_kernels for step in counted.steps) == 3


@pytest.mark.parametrize(
    ("ranges", "phase"),
    [
        ([("user_annotation", "## forward ##")], "forward"),
        ([("user_annotation", "DistributedDataParallel.forward")], "forward"),
        ([("python_function", "nn.Module: Linear_0")], "forward"),
        ([("user_annotation", "backward")], "backward"),
        ([("cpu_op", "autograd::engine::evaluate_function: MmBackward0")], "backward"),
        ([("user_annotation", "Optimizer.step#AdamW.step")], "optimizer"),
        ([("user_annotation", "enumerate(DataLoader)#__next__")], "other"),
        (
            [
                ("cpu_op", "autograd::engine::evaluate_function: CheckpointFunctionBackward"),
                ("python_function", "nn.Module: Linear_0"),
            ],
            "recompute",
        ),
        (
            [
                ("cpu_op", "autograd::engine::evaluate_function: CheckpointFunctionBackward"),
                ("python_function", "nn.Module: Linear_0"),
                ("cpu_op", "autograd::engine::evaluate_function: MmBackward0"),
            ],
            "backward",
        ),
        (
            [
                ("user_annotation", "Optimizer.step#LBFGS.step"),
                ("user_annotation", "## forward ##"),
            ],
            "forward",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1][1].split(":")[-1].strip(),
)
def test_the_innermost_range_names_the_phase(
    tmp_path: Path, ranges: list[tuple[str, str]], phase: str
) -> None:
    events = [
        host(category, name, 1000 * depth, 100_000 - 2000 * depth)
        for depth, (category, name) in enumerate(ranges)
    ]
    events += launched("some_kernel", 20_000, 30_000, 5_000, 1)
    # A range elsewhere makes the phases known where the case itself is none.
    events.append(host("user_annotation", "forward", 300_000, 10))
    counted = one(tmp_path / "trace.json", dumps(events))
    assert [entry.phase for entry in counted.phases if entry.num_kernels] == [phase]


@pytest.mark.parametrize(
    ("function", "phase"),
    [
        ("autograd::engine::evaluate_function: MmBackward0", "recompute"),
        ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", "backward"),
    ],
    ids=["operator", "gradient-hook"],
)
def test_recording_operators_inside_autograd(tmp_path: Path, function: str, phase: str) -> None:
    events = [
        host("cpu_op", function, 0, 100_000, **{"Sequence number": 5, "Fwd thread id": 1}),
        host("cpu_op", "aten::mm", 10_000, 50_000, **{"Sequence number": 9, "Fwd thread id": 0}),
        *launched("some_kernel", 20_000, 30_000, 5_000, 1),
    ]
    counted = one(tmp_path / "trace.json", dumps(events))
    assert [entry.phase for entry in counted.phases if entry.num_kernels] == [phase]


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        ("allreduce", 2 * 3 / 4),
        ("_allgather_base", 3 / 4),
        ("reduce_scatter_tensor_coalesced", 3 / 4),
        ("all_to_allv", 3 / 4),
        ("broadcast", 1.0),
    ],
)
def test_bus_bandwidth_by_kind(tmp_path: Path, kind: str, factor: float) -> None:
    args = {
        "Collective name": kind,
        "In msg nelems": 1000,
        "Out msg nelems": 4000,
        "dtype": "BFloat16",
        "Group size": 4,
    }
    block = Block(what=COMMUNICATION, start_ns=0, dur_ns=8_000, args=tuple(args.items()))
    (entry,) = one(tmp_path / "trace.json", blocks_trace([block])).collectives
    assert entry.total_bytes == 8000
    assert entry.bus_bytes_per_s == pytest.approx(factor * 8000 / 8e-6)


def test_a_trace_without_device_events_has_an_empty_split(tmp_path: Path) -> None:
    counted = one(tmp_path / "trace.json", dumps([host("cpu_op", "aten::mm", 0, 10)]))
    assert counted.kernels is None
    assert counted.split.span_ns == 0
    assert counted.split.busy_pct is None
    assert counted.split.overlap_pct is None
    assert counted.classes == counted.streams == counted.steps == ()
