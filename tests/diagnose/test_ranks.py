"""Collectives matched over ranks: public truth, and made-up jobs."""

import random
from pathlib import Path

import numpy as np
import pytest

from slipstream.diagnose import JobAccount, account, read
from slipstream.diagnose.ranks import RankMatch
from tests.diagnose.real import counted
from tests.diagnose.synthetic import (
    COMMUNICATION,
    COMPUTE,
    Block,
    blocks_trace,
    dumps,
    host,
    launched,
    write,
)
from tests.diagnose.truth import FIRST_RANKS, NCCL_MS, STRAGGLER, WAITING_MS


@pytest.fixture
def dlrm() -> JobAccount:
    return counted("dlrm")


def matched(job: JobAccount) -> RankMatch:
    assert job.match is not None
    return job.match


def test_straggler_table(dlrm: JobAccount) -> None:
    found = [
        (
            one.kind,
            one.start_skew_ns / 1e3,
            one.end_skew_ns / 1e3,
            tuple(one.last_ranks.tolist()),
            one.transfer_ns / 1e3,
            float((one.end_ns - one.start_ns).max()) / 1e3,
        )
        for one in matched(dlrm).collectives
    ]
    assert found == list(STRAGGLER)
    first = [
        np.flatnonzero(one.start_ns == one.start_ns.min()) for one in matched(dlrm).collectives
    ]
    assert tuple(tuple(ranks.tolist()) for ranks in first) == FIRST_RANKS


def test_waiting_and_transfer_per_rank(dlrm: JobAccount) -> None:
    match = matched(dlrm)
    assert match.refused is None
    assert match.unmatched == 0
    assert match.ranks == tuple(range(8))
    assert match.last_counts.tolist() == [0, 0, 0, 0, 1, 2, 0, 5]
    assert match.waiting_ns / 1e6 == pytest.approx(WAITING_MS, rel=0.01)
    assert match.wire_ns / 1e6 == pytest.approx(0.22, abs=0.005)
    total = (match.waiting_ns + match.transfer_ns) / 1e6
    assert total == pytest.approx(NCCL_MS, rel=0.01)
    assert int(np.argmin(total)) == 7


def test_sampled_traces_are_refused_with_the_reason() -> None:
    match = matched(counted("sampled"))
    assert match.refused is not None
    assert "ms apart" in match.refused
    assert "clocks" in match.refused
    assert match.collectives == ()
    assert match.unmatched == 20
    assert match.waiting_ns.tolist() == [0, 0]


RANKS = 4
WIRE_NS = 50_000


def job(
    folder: Path,
    delays: list[list[int]],
    *,
    clock_ns: tuple[int, ...] = (0,) * RANKS,
    drop: tuple[int, int] | None = None,
    args: dict | None = None,
    name: str = "rank{}.json",
) -> list[Path]:
    """Traces of a job: ``delays[k][rank]`` is when a rank reaches the k-th all-reduce, in ns after
    the k-th millisecond; every rank leaves ``WIRE_NS`` after the last one came.
    """
    files = []
    for rank in range(RANKS):
        blocks = []
        for order, arrivals in enumerate(delays):
            origin = 10_000_000 + 1_000_000 * order + clock_ns[rank]
            start, end = arrivals[rank], max(arrivals) + WIRE_NS
            blocks.append(Block(what=COMPUTE, start_ns=origin - 200_000, dur_ns=100_000))
            if drop != (order, rank):
                blocks.append(
                    Block(
                        what=COMMUNICATION,
                        start_ns=origin + start,
                        dur_ns=end - start,
                        stream=20 + rank,
                        args=tuple((args or {}).items()),
                    )
                )
        metadata = {"distributedInfo": {"rank": rank, "world_size": RANKS}}
        files.append(write(folder / name.format(rank), blocks_trace(blocks, **metadata)))
    return files


def arrivals(seed: int, num: int = 12) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(0, 300_000, 1000) for _ in range(RANKS)] for _ in range(num)]


@pytest.mark.parametrize("seed", range(4))
def test_waiting_is_exact_whatever_the_order_of_the_files(tmp_path: Path, seed: int) -> None:
    delays = arrivals(seed)
    files = job(tmp_path, delays)
    random.Random(seed).shuffle(files)
    match = matched(account(read(files)))
    assert match.refused is None
    assert match.ranks == (0, 1, 2, 3)
    assert match.end_skew_ns == 0
    waiting = [sum(max(row) - row[rank] for row in delays) for rank in range(RANKS)]
    assert match.waiting_ns.tolist() == waiting
    assert match.transfer_ns.tolist() == [len(delays) * WIRE_NS] * RANKS
    last = [sum(row[rank] == max(row) for row in delays) for rank in range(RANKS)]
    assert match.last_counts.tolist() == last


def test_clocks_that_differ_a_little_are_tolerated(tmp_path: Path) -> None:
    shift = (0, 20_000, -20_000, 0)
    match = matched(account(read(job(tmp_path, arrivals(0), clock_ns=shift))))
    assert match.refused is None
    assert match.end_skew_ns == 40_000


def test_clocks_further_apart_than_a_transfer_are_refused(tmp_path: Path) -> None:
    files = job(tmp_path, arrivals(0), clock_ns=(0, 3_000_000, 0, 0))
    match = matched(account(read(files)))
    assert match.refused is not None
    assert "3.000 ms apart" in match.refused


@pytest.mark.parametrize("order", [0, 11], ids=["first", "last"])
def test_a_trace_cut_at_an_end_is_matched_without_that_collective(
    tmp_path: Path, order: int
) -> None:
    delays = arrivals(0)
    match = matched(account(read(job(tmp_path, delays, drop=(order, 2)))))
    assert match.refused is None
    assert match.unmatched == RANKS - 1
    kept = [row for position, row in enumerate(delays) if position != order]
    waiting = [sum(max(row) - row[rank] for row in kept) for rank in range(RANKS)]
    assert match.waiting_ns.tolist() == waiting


def test_a_kernel_missing_in_the_middle_is_refused(tmp_path: Path) -> None:
    match = matched(account(read(job(tmp_path, arrivals(0), drop=(5, 2)))))
    assert match.refused is not None
    assert "different numbers of all-reduce" in match.refused


def test_ranks_without_communication_are_refused(tmp_path: Path) -> None:
    blocks = [Block(what=COMPUTE, start_ns=0, dur_ns=10)]
    files = [write(tmp_path / f"rank{rank}.json", blocks_trace(blocks)) for rank in range(2)]
    match = matched(account(read(files)))
    assert match.refused == "the traces hold no communication kernels"


def test_a_group_of_some_ranks_is_matched_among_them(tmp_path: Path) -> None:
    """Two groups of two ranks, as tensor parallelism makes them, with one kernel each."""
    files = []
    for rank in range(RANKS):
        group = [0, 1] if rank < 2 else [2, 3]
        args = {
            "Collective name": "allreduce",
            "Process Group Name": str(group[0]),
            "Process Group Ranks": str(group),
        }
        start = 1000 * rank
        block = Block(
            what=COMMUNICATION,
            start_ns=start,
            dur_ns=1000 * group[1] + WIRE_NS - start,
            args=tuple(args.items()),
        )
        metadata = {"distributedInfo": {"rank": rank, "world_size": RANKS}}
        files.append(write(tmp_path / f"{rank}.json", blocks_trace([block], **metadata)))
    match = matched(account(read(files)))
    assert match.refused is None
    assert [one.members.tolist() for one in match.collectives] == [
        [True, True, False, False],
        [False, False, True, True],
    ]
    assert match.waiting_ns.tolist() == [1000, 0, 1000, 0]
    assert match.last_counts.tolist() == [0, 1, 0, 1]


def test_what_only_one_rank_saw_the_host_call_of_is_matched(tmp_path: Path) -> None:
    files = []
    for rank in range(2):
        events = launched("ncclDevKernel_Generic(args)", 1000, 50_000 - rank, 70_000 + rank, 1)
        if rank == 0:
            args = {"Collective name": "allreduce", "Process Group Name": "0"}
            events.append(host("cpu_op", "record_param_comms", 500, 9000, **args))
        metadata = {"distributedInfo": {"rank": rank, "world_size": 2}}
        files.append(write(tmp_path / f"{rank}.json", dumps(events, **metadata)))
    match = matched(account(read(files)))
    assert match.refused is None
    assert [one.kind for one in match.collectives] == ["all-reduce"]
    assert match.waiting_ns.tolist() == [0, 1]


def test_a_single_trace_is_not_matched() -> None:
    assert counted("nccl_data").match is None
