"""Traces of our own trainer on H200s with a fault put in: the fault is the first finding."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from slipstream.diagnose import JobAccount, Trace, account, intervals, read
from slipstream.diagnose.findings import MATERIAL_PCT, Findings, find
from slipstream.diagnose.idle import Cause, Idle, explain
from slipstream.diagnose.replay import saved_ns
from slipstream.diagnose.trace import Kind

ASSETS = Path(__file__).parent / "assets" / "h200"
FAULTS = {
    "slow_data": "data-loading",
    "synchronisation": "host-synchronisation",
    "tiny_kernels": "launch-bound",
    "slow_rank": "straggler",
}
RANKS = {"slow_rank": 2}
SLEEP_MS = 15
STEPS = 2
MAX_BYTES = 1_000_000
SLOT_NS = 10_000


@cache
def counted(fault: str) -> JobAccount:
    files = sorted(ASSETS.glob(f"{fault}*.json.gz"))
    assert len(files) == RANKS.get(fault, 1), f"{ASSETS} lacks {fault}"
    return account(read(files))


@cache
def diagnose(fault: str) -> Findings:
    return find(counted(fault))


@pytest.mark.parametrize("fault", FAULTS)
def test_first_finding(fault: str) -> None:
    found = diagnose(fault)
    assert found.first is not None
    assert found.first.id == FAULTS[fault]
    assert found.first.per == "step"
    assert [len(one.steps) for one in counted(fault).ranks] == [STEPS] * RANKS.get(fault, 1)


@pytest.mark.parametrize(("fault", "finding"), FAULTS.items())
def test_what_was_not_put_in_is_not_found(fault: str, finding: str) -> None:
    without, injected = diagnose("baseline").of(finding), diagnose(fault).of(finding)
    assert injected is not None
    assert without is None or without.weight < injected.weight / 2


def test_milliseconds_of_slow_data() -> None:
    first = diagnose("slow_data").first
    assert first is not None
    # Besides the sleep there is the fetch itself, and the way to the first launch at the most.
    steps = counted("slow_data").ranks[0].steps
    assert SLEEP_MS <= first.ms <= max(one.start_ns - one.host_start_ns for one in steps) / 1e6


def operator_ns(trace: Trace) -> dict[str, float]:
    """Median duration of every host operator by name."""
    events = trace.of_kind(Kind.CPU_OP)
    return {
        trace.names[name]: float(np.median(trace.dur_ns[events[trace.name[events] == name]]))
        for name in np.unique(trace.name[events]).tolist()
    }


def excess(fault: str, idle: Idle) -> np.ndarray:
    """What the host of a trace takes more than that of the baseline for the same, as intervals.

    The processes ran on hosts of different speed: the same operators took up to twice as long in
    one as in the other, far from the fault. The ratio is the median over all operators, and its
    share of every slot of host work that is neither a fetch nor a wait is in excess.
    """
    usual, mine = (operator_ns(counted(one).ranks[0].trace) for one in ("baseline", fault))
    ratio = float(np.median([mine[name] / usual[name] for name in usual if name in mine]))
    assert ratio > 1
    slots = np.arange(idle.segments[0, 0], idle.segments[-1, 1], SLOT_NS)
    spans = np.stack([slots, slots + round(SLOT_NS * (1 - 1 / ratio))], axis=1)
    for other in (Cause.DATA, Cause.SYNC):
        spans = intervals.subtract(spans, idle.spans[other])
    return spans


def reading(trace: Trace) -> np.ndarray:
    """The host time of the synchronisations put in: from the tensor's view to its fourth value."""

    spans = []
    for event in np.flatnonzero(trace.named("^aten::min$")[trace.name]).tolist():
        views, values = (
            np.flatnonzero(trace.named(name)[trace.name] & (trace.thread == trace.thread[event]))
            for name in ("^aten::flatten$", "^aten::item$")
        )
        view = views[views < event][-1]
        spans.append((trace.start_ns[view], trace.end_ns[values[values > event][3]]))
    return intervals.union(np.array(spans, dtype=np.int64))


def without(idle: Idle, cause: Cause, host: np.ndarray) -> float:
    """Milliseconds of the trace by replay without ``cause`` and host work in ``host``."""
    # No collector ran, so its place is free for any other host work.
    assert not len(idle.spans[Cause.COLLECTION])
    changed = replace(idle, spans={**idle.spans, Cause.COLLECTION: host})
    saved = saved_ns(changed, frozenset({cause, Cause.COLLECTION}))
    return (int(idle.segments[-1, 1] - idle.segments[0, 0]) - saved) / 1e6


def test_replay_without_the_sleep_is_the_baseline() -> None:
    """Two runs of one program: what the diagnosis calls immaterial may lie between them."""
    baseline, slow = counted("baseline").ranks[0], counted("slow_data").ranks[0]
    idle = explain(slow.trace)
    assert slow.split.span_ns > 1.5 * baseline.split.span_ns
    predicted = without(idle, Cause.DATA, excess("slow_data", idle))
    assert predicted == pytest.approx(baseline.split.span_ns / 1e6, rel=MATERIAL_PCT / 100)


def test_replay_without_synchronisation_is_the_baseline_without() -> None:
    """As above; the reductions that were put in stay on the device, and the waits that any step
    has are taken out of both.
    """
    baseline, slow = counted("baseline").ranks[0], counted("synchronisation").ranks[0]
    idle, usual = explain(slow.trace), explain(baseline.trace)
    added = (slow.split.span_ns - idle.total_ns - baseline.split.span_ns + usual.total_ns) / 1e6
    assert slow.split.span_ns > 1.5 * baseline.split.span_ns
    host = intervals.union(np.concatenate([excess("synchronisation", idle), reading(slow.trace)]))
    predicted = without(idle, Cause.SYNC, host)
    expected = without(usual, Cause.SYNC, intervals.EMPTY) + added
    assert predicted == pytest.approx(expected, rel=MATERIAL_PCT / 100)


def test_the_slow_rank() -> None:
    first = diagnose("slow_rank").first
    assert first is not None
    assert first.ranks == (1,)


def test_assets_are_small() -> None:
    assert 0 < sum(path.stat().st_size for path in ASSETS.glob("*.json.gz")) < MAX_BYTES
