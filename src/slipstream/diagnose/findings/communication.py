"""Communication: waiting for a slow rank, and what is exposed beyond that."""

import numpy as np

from slipstream.diagnose import intervals
from slipstream.diagnose.figures import JobAccount
from slipstream.diagnose.findings.context import Found, View, longest, ms
from slipstream.diagnose.findings.model import Abstention, Confidence, Value
from slipstream.diagnose.idle import Cause
from slipstream.diagnose.ranks import RankMatch

_BLAME = 0.5
"""The slow rank is to cause half of the waiting ..."""
_UNTOLD = "Transfer and waiting for a slower rank are not told apart here."
_TWICE = 2
"""... and twice as much as any other, or of two ranks that take turns one would always be slow."""


def waiting(view: View, match: RankMatch | None) -> np.ndarray:
    """Union of the exposed time this rank spends in collectives before the last rank starts."""
    position = view.position
    if match is None or match.refused is not None:
        return intervals.EMPTY
    spans = [
        (one.start_ns[position], one.start_ns[position] + one.waiting_ns[position])
        for one in match.collectives
    ]
    waits = intervals.union(np.array(spans, dtype=np.int64).reshape(-1, 2))
    return intervals.intersect(waits, view.exposed_communication)


def straggler(counted: JobAccount, views: list[View]) -> Found:
    """Ranks that wait for another one; of the rank that waits most."""
    match = counted.match
    if match is None:
        if len(views[0].communication):
            yield Abstention(
                "straggler", "the trace of one rank does not tell waiting from transfer"
            )
        return
    if match.refused is not None:
        yield Abstention("straggler", match.refused)
        return
    waits = [waiting(view, match) for view in views]
    lost = [intervals.measure(spans) for spans in waits]
    row = int(np.argmax(lost))
    worst, blame = views[row], _blame(match)
    if not blame.any():
        return
    slow = int(np.argmax(blame))
    share, others = float(blame[slow] / blame.sum()), np.delete(blame, slow)
    alone = share >= _BLAME and blame[slow] >= _TWICE * others.max(initial=0)
    late = f"rank {match.ranks[slow]}" if alone else "a rank, another one from time to time"
    evidence: dict[str, Value] = {
        "shown_rank": match.ranks[worst.position],
        "waiting_ms": ms(match.waiting_ns[worst.position]),
        "waiting_exposed_ms": ms(lost[row]),
        "transfer_at_most_ms": ms(match.wire_ns),
        "caused_by_slow_rank_pct": round(100 * share, 1),
        "collectives": len(match.collectives),
        "slow_rank_last_in": int(match.last_counts[slow]),
        "largest_start_skew_us": max(one.start_skew_ns for one in match.collectives) / 1e3,
    }
    yield from worst.finding(
        "straggler",
        lost[row],
        f"ranks wait for {late}, and that is not transfer",
        confidence=Confidence.HIGH if alone else Confidence.MEDIUM,
        evidence=evidence,
        kernels=_kernels(worst, match),
        where=longest(waits[row]),
        detail=_excess(views, slow) if alone else "",
        ranks=(match.ranks[slow],) if alone else (),
    )


def exposed(view: View, match: RankMatch | None) -> Found:
    """Communication that nothing runs beside, without the waiting for a slow rank."""
    alone = view.exposed_communication
    if not len(alone):
        return
    waits = waiting(view, match)
    transfer = intervals.subtract(alone, waits)
    split, events = view.account.split, view.kernels[view.is_communication]
    covered = intervals.covered(transfer, view.trace.start_ns[events], view.trace.end_ns[events])
    evidence: dict[str, Value] = {
        "exposed_ms": ms(split.exposed_communication_ns),
        "exposed_pct": round(split.pct(split.exposed_communication_ns), 2),
        "communication_ms": ms(split.communication_ns),
        "overlap_pct": round(split.overlap_pct or 0.0, 2),
    }
    told = match is not None and match.refused is None
    if told:
        evidence["of_it_waiting_ms"] = ms(intervals.measure(waits))
    evidence |= _kinds(view, events, covered)
    for one in view.account.collectives[:3]:
        key = f"{one.kind.replace('-', '_').replace('/', '_')}_bus_bytes_per_s"
        evidence.setdefault(key, one.bus_bytes_per_s)
    yield from view.finding(
        "exposed-communication",
        intervals.measure(transfer),
        "communication with nothing beside it",
        confidence=Confidence.HIGH,
        evidence=evidence,
        kernels=view.top_names(events, covered),
        where=longest(transfer),
        detail="" if told else _UNTOLD,
    )


def _blame(match: RankMatch) -> np.ndarray:
    """float64 per rank: waiting of all ranks it causes by starting last, ns."""
    blame = np.zeros(len(match.ranks))
    for one in match.collectives:
        blame[one.last_ranks] += one.waiting_ns.sum() / len(one.last_ranks)
    return blame


def _kernels(view: View, match: RankMatch) -> tuple[str, ...]:
    """Names of the collectives that are waited in longest."""
    mine = [one for one in match.collectives if one.members[view.position]]
    events = np.array([one.events[view.position] for one in mine], dtype=np.int64)
    waited = np.array([one.waiting_ns[view.position] for one in mine], dtype=np.int64)
    return view.top_names(events, waited)


def _kinds(view: View, events: np.ndarray, covered: np.ndarray) -> dict[str, Value]:
    """Exposed milliseconds by kind of collective."""
    kinds = {one.event: one.kind for one in view.account.communications}
    sums: dict[str, int] = {}
    for event, part in zip(events.tolist(), covered.tolist(), strict=True):
        sums[kinds[event]] = sums.get(kinds[event], 0) + part
    return {f"exposed_{kind}_ms": ms(part) for kind, part in sums.items() if part}


def _excess(views: list[View], slow: int) -> str:
    """What the rank at position ``slow`` has more of than the median of the others."""
    rows = {}
    for view in views:
        idle = {f"idle for {cause.value}": view.idle.ns(cause) for cause in Cause}
        rows[view.position] = {"computing": view.account.split.compute_ns, **idle}
    others = [row for position, row in rows.items() if position != slow]
    if slow not in rows or not others:
        return ""
    more = {
        name: own - float(np.median([row[name] for row in others]))
        for name, own in rows[slow].items()
    }
    name = max(more, key=lambda key: more[key])
    if more[name] <= 0:
        return ""
    return f"In the whole file it is {more[name] / 1e6:.3g} ms longer {name} than the others."
