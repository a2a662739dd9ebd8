"""The same collective on every rank: who came last, how long the others waited for it.

The k-th collective of a process group and kind is taken to be the same one on every rank. That is
checked: a collective ends on all ranks at nearly the same time, so where the ends disagree, the
clocks or the order do, and the answer is a reason in place of numbers.
"""

from dataclasses import dataclass

import numpy as np

from slipstream.diagnose.collectives import Communication
from slipstream.diagnose.trace import Trace

MIN_AGREEING = 0.9
"""Share of the collectives of a group and kind whose ends must agree, or none of them is used: an
order that is wrong somewhere is wrong from there on, while single kernels may be cut off."""

MAX_SHIFT = 256
"""Kernels by which one trace may begin later than another and still be matched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective over all ranks. Arrays have one entry per rank, in order of the traces.

    A rank outside the process group has event -1, and start and end are the last member's start.
    """

    kind: str
    """``all-reduce`` ...; ``send/recv`` and ``unknown`` as well."""
    group: str
    """Name of the process group, or ``stream N`` where the trace names none."""
    order: int
    """k: position among the collectives of this kind and group."""
    events: np.ndarray
    """int64: index of the kernel in each trace, -1 for a rank outside the group."""
    start_ns: np.ndarray
    """int64: start on each rank."""
    end_ns: np.ndarray
    """int64: end on each rank."""

    @property
    def last_ranks(self) -> np.ndarray:
        """Positions (not rank numbers) of the traces that start last."""
        return np.flatnonzero((self.start_ns == self.start_ns.max()) & self.members)

    @property
    def members(self) -> np.ndarray:
        """bool per rank: it takes part."""
        return self.events >= 0

    @property
    def start_skew_ns(self) -> int:
        """Latest minus earliest start."""
        return int(np.ptp(self.start_ns[self.members]))

    @property
    def end_skew_ns(self) -> int:
        """Latest minus earliest end."""
        return int(np.ptp(self.end_ns[self.members]))

    @property
    def waiting_ns(self) -> np.ndarray:
        """int64: per rank, last start minus own start, at most its own duration."""
        return np.minimum(self.start_ns.max(), self.end_ns) - self.start_ns

    @property
    def transfer_ns(self) -> int:
        """Shortest duration over ranks, an upper bound of the transfer alone."""
        return int((self.end_ns - self.start_ns)[self.members].min())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMatch:
    """Collectives matched over ranks, or why they could not be."""

    ranks: tuple[int, ...]
    """Rank number of each trace, in order of the traces."""
    collectives: tuple[Collective, ...]
    """In order of their last start; empty if refused."""
    refused: str | None
    """Why waiting cannot be told from transfer, one sentence; None if it can."""
    end_skew_ns: int
    """Largest end skew of the collectives matched."""
    unmatched: int = 0
    """Communication kernels without a partner on every rank, left out."""

    @property
    def waiting_ns(self) -> np.ndarray:
        """int64 per rank: time in communication kernels before the last rank started."""
        zero = np.zeros(len(self.ranks), dtype=np.int64)
        return sum((one.waiting_ns for one in self.collectives), start=zero)

    @property
    def transfer_ns(self) -> np.ndarray:
        """int64 per rank: the rest of its time in the matched kernels."""
        zero = np.zeros(len(self.ranks), dtype=np.int64)
        return sum((c.end_ns - c.start_ns - c.waiting_ns for c in self.collectives), start=zero)

    @property
    def wire_ns(self) -> int:
        """Sum of the shortest durations: an upper bound of the transfers alone."""
        return sum(one.transfer_ns for one in self.collectives)

    @property
    def last_counts(self) -> np.ndarray:
        """int64 per rank: collectives at which it arrived last (ties count for each)."""
        counts = np.zeros(len(self.ranks), dtype=np.int64)
        for one in self.collectives:
            counts[one.last_ranks] += 1
        return counts


@dataclass(frozen=True, slots=True)
class _Key:
    """Collectives that are ordered among themselves on every rank."""

    kind: str
    group: str


def match_collectives(
    traces: tuple[Trace, ...], communications: list[list[Communication]]
) -> RankMatch:
    """Match the collectives of one job over its ranks, or say why that is not possible.

    ``communications``: of each trace, as ``collectives.communications`` gives them.
    """
    ranks = tuple(trace.rank if trace.rank is not None else row for row, trace in enumerate(traces))
    by_key = [_by_key(trace, one) for trace, one in zip(traces, communications, strict=True)]
    total = sum(map(len, communications))
    agreeing: list[Collective] = []
    worst: list[Collective] = []
    uneven: list[_Key] = []
    for key in dict.fromkeys(key for one in by_key for key in one):
        lists = [one.get(key) for one in by_key]
        if sum(kernels is not None for kernels in lists) < 2:
            continue
        even = len({len(kernels) for kernels in lists if kernels is not None}) == 1
        candidates = _pair(traces, key, lists if even else _trimmed(traces, lists))
        good = [one for one in candidates if _agrees(one)]
        if len(good) >= MIN_AGREEING * len(candidates):
            agreeing += good
        elif not even:
            uneven.append(key)
        else:
            worst.append(max(candidates, key=lambda one: one.end_skew_ns))
    matched_ns = sum(int((one.end_ns - one.start_ns).sum()) for one in agreeing)
    all_ns = sum(
        int(trace.dur_ns[[one.event for one in carried]].sum())
        for trace, carried in zip(traces, communications, strict=True)
        if carried
    )
    refused = None
    if matched_ns < all_ns / 2 or not agreeing:
        refused = _reason(total, worst, uneven)
        agreeing = []
    agreeing.sort(key=lambda one: int(one.start_ns.max()))
    return RankMatch(
        ranks=ranks,
        collectives=tuple(agreeing),
        refused=refused,
        end_skew_ns=max((one.end_skew_ns for one in agreeing), default=0),
        unmatched=total - sum(int(one.members.sum()) for one in agreeing),
    )


def _by_key(trace: Trace, communications: list[Communication]) -> dict[_Key, list[Communication]]:
    """Kernels of each group and kind in order; without a group, streams stand in by their order.

    Only what the kernel itself tells counts: not every rank's trace holds the launch.
    """
    streams = (
        np.unique(trace.stream[[one.event for one in communications]]) if communications else []
    )
    found: dict[_Key, list[Communication]] = {}
    for one in communications:
        order = int(np.searchsorted(streams, trace.stream[one.event]))
        group = one.kernel_group or f"communication stream {order}"
        found.setdefault(_Key(one.kernel_kind, group), []).append(one)
    return found


def _trimmed(
    traces: tuple[Trace, ...], lists: list[list[Communication] | None]
) -> list[list[Communication] | None]:
    """The lists cut to the length of the shortest, each where its ends fit that one best.

    A trace that begins or ends a moment later than the others lacks their first or last kernels.
    """
    ends = [
        None
        if kernels is None
        else np.array([trace.start_ns[one.event] + trace.dur_ns[one.event] for one in kernels])
        for trace, kernels in zip(traces, lists, strict=True)
    ]
    shortest = min((one for one in ends if one is not None), key=len)
    num = len(shortest)
    trimmed: list[list[Communication] | None] = []
    for kernels, mine in zip(lists, ends, strict=True):
        if kernels is None or mine is None:
            trimmed.append(None)
            continue
        shifts = range(min(len(mine) - num, MAX_SHIFT) + 1)
        best = min(shifts, key=lambda at: np.median(np.abs(mine[at : at + num] - shortest)))
        trimmed.append(kernels[best : best + num])
    return trimmed


def _pair(
    traces: tuple[Trace, ...], key: _Key, lists: list[list[Communication] | None]
) -> list[Collective]:
    """The k-th kernels of all members, for every k."""
    collectives = []
    for order in range(next(len(one) for one in lists if one is not None)):
        kernels = [None if one is None else one[order] for one in lists]
        events = np.array([-1 if one is None else one.event for one in kernels], dtype=np.int64)
        pairs = list(zip(traces, events.tolist(), strict=True))
        starts = np.array([trace.start_ns[at] if at >= 0 else 0 for trace, at in pairs])
        ends = starts + [trace.dur_ns[at] if at >= 0 else 0 for trace, at in pairs]
        last = starts[events >= 0].max()
        collectives.append(
            Collective(
                kind=next(one.kind for one in kernels if one is not None),
                group=key.group,
                order=order,
                events=events,
                start_ns=np.where(events >= 0, starts, last),
                end_ns=np.where(events >= 0, ends, last),
            )
        )
    return collectives


def _agrees(one: Collective) -> bool:
    """Whether the kernels can be one collective: all run at one instant, and they end together.

    The last rank to arrive waits for nobody, so the shortest duration bounds the transfer, and
    ranks of one collective cannot end further apart than it takes.
    """
    return bool(
        one.start_ns.max() <= one.end_ns[one.members].min() and one.end_skew_ns <= one.transfer_ns
    )


def _reason(total: int, worst: list[Collective], uneven: list[_Key]) -> str:
    if not total:
        return "the traces hold no communication kernels"
    if worst:
        one = max(worst, key=lambda candidate: candidate.end_skew_ns)
        return (
            f"paired by order, the ends of one {one.kind} ({one.group}) lie "
            f"{one.end_skew_ns / 1e6:.3f} ms apart, more than its shortest kernel takes "
            f"({one.transfer_ns / 1e6:.3f} ms): the clocks of the ranks differ, or the traces do "
            "not hold the same collectives"
        )
    if uneven:
        return (
            f"the ranks hold different numbers of {uneven[0].kind} kernels ({uneven[0].group}), "
            "so their order does not pair them"
        )
    return "no collective is in the traces of two ranks"
