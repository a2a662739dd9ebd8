"""Counts where the time of a trace goes; what the figures mean stands in ``figures``."""

import numpy as np

from slipstream.diagnose import intervals
from slipstream.diagnose.classify import KernelClass, KernelInfo, classify
from slipstream.diagnose.collectives import Communication, bus_factor, communications
from slipstream.diagnose.figures import (
    SHORT_KERNEL_NS,
    Account,
    ClassAccount,
    CollectiveAccount,
    JobAccount,
    KernelStats,
    PhaseAccount,
    Split,
    StepAccount,
    StreamAccount,
)
from slipstream.diagnose.phases import PHASES, PhaseMap
from slipstream.diagnose.ranks import match_collectives
from slipstream.diagnose.steps import (
    HostStep,
    events_by_step,
    host_steps,
    launches,
    step_of_events,
    step_stretches,
)
from slipstream.diagnose.trace import Job, Kind, Trace

__all__ = [
    "PHASES",
    "Account",
    "ClassAccount",
    "CollectiveAccount",
    "JobAccount",
    "KernelStats",
    "PhaseAccount",
    "Split",
    "StepAccount",
    "StreamAccount",
    "account",
    "account_trace",
    "split_of",
]


def account(job: Job) -> JobAccount:
    """Count every trace of a job and match its collectives over ranks."""
    ranks = tuple(account_trace(trace) for trace in job.traces)
    match = None
    if len(ranks) > 1:
        match = match_collectives(job.traces, [one.communications for one in ranks])
    return JobAccount(job=job, ranks=ranks, match=match)


def account_trace(trace: Trace) -> Account:
    """Count one trace. A trace without kernels and copies has an empty split."""
    infos = _infos(trace)
    launch = launches(trace)
    sets = _Sets(trace, infos)
    steps = host_steps(trace)
    step = step_of_events(trace, launch, steps)
    phases = PhaseMap(trace)
    phase = _phase_of_events(trace, launch, phases)
    carried = communications(trace, infos, launch)
    labels = _Labels(trace, infos, carried)
    of_step = events_by_step(trace, step, steps)
    stretches = step_stretches(trace, of_step, launch, steps)
    return Account(
        trace=trace,
        split=sets.split(),
        kernels=_kernel_stats(trace, sets),
        steps=tuple(
            _step(host, stretch, sets, labels, phases, phase, mine)
            for host, stretch, mine in zip(steps, stretches, of_step, strict=True)
        ),
        streams=_streams(trace, sets),
        classes=labels.account(sets.device),
        phases=_phases(sets, phases, phase, sets.device, None),
        collectives=_collectives(trace, carried),
        communications=carried,
        infos=infos,
        launch=launch,
        step=step,
        phase=phase,
    )


def _infos(trace: Trace) -> list[KernelInfo]:
    """Per name what a kernel of it does; class ``other`` for the many names of the host alone."""
    ours = np.zeros(len(trace.names), dtype=bool)
    ours[trace.name[trace.of_kind(Kind.KERNEL, Kind.COPY)]] = True
    host = KernelInfo(klass=KernelClass.OTHER)
    pairs = zip(trace.names, ours.tolist(), strict=True)
    return [classify(name) if used else host for name, used in pairs]


def split_of(
    compute: np.ndarray,
    communication: np.ndarray,
    copies: np.ndarray,
    window_ns: tuple[int, int] | None = None,
    counts: tuple[int, int, int] | None = None,
) -> Split:
    """The split of any three sets of intervals (int64, (n, 2), not necessarily disjoint).

    ``window_ns`` clips them and is the span; without it the span is theirs. ``counts``: kernels,
    communication kernels and copies to report, where these are not the lengths of the sets.
    """
    kernels = np.concatenate([compute, communication])
    everything = np.concatenate([kernels, copies])
    unions = [intervals.union(part) for part in (compute, communication, copies)]
    if window_ns is not None:
        unions = [intervals.clip(part, *window_ns) for part in unions]
        kernels = np.concatenate(unions[:2])
    busy = intervals.union(np.concatenate(unions[:2]))
    covered = intervals.measure(intervals.union(np.concatenate([busy, unions[2]])))
    span = _extent(everything) if window_ns is None else max(0, window_ns[1] - window_ns[0])
    compute_ns, busy_ns = intervals.measure(unions[0]), intervals.measure(busy)
    num = counts or (len(compute) + len(communication), len(communication), len(copies))
    return Split(
        span_ns=span,
        compute_ns=compute_ns,
        exposed_communication_ns=busy_ns - compute_ns,
        exposed_copies_ns=covered - busy_ns,
        idle_ns=span - covered,
        communication_ns=intervals.measure(unions[1]),
        copies_ns=intervals.measure(unions[2]),
        kernel_span_ns=_extent(kernels),
        num_kernels=num[0],
        num_communication_kernels=num[1],
        num_copies=num[2],
    )


def _extent(spans: np.ndarray) -> int:
    return int(spans[:, 1].max() - spans[:, 0].min()) if len(spans) else 0


class _Sets:
    """The device events of a trace, by what they count as."""

    def __init__(self, trace: Trace, infos: list[KernelInfo]) -> None:
        self.trace = trace
        is_comm = np.array([info.is_communication for info in infos] or [False], dtype=bool)
        self.device = trace.of_kind(Kind.KERNEL, Kind.COPY)
        kernel = trace.kind == Kind.KERNEL
        self.is_communication = kernel & is_comm[trace.name]
        self.is_compute = kernel & ~self.is_communication
        self.is_copy = trace.kind == Kind.COPY
        self.compute, self.communication, self.copies = (
            trace.intervals(np.flatnonzero(mask))
            for mask in (self.is_compute, self.is_communication, self.is_copy)
        )

        self.unions = [
            intervals.union(part) for part in (self.compute, self.communication, self.copies)
        ]

    def split(self) -> Split:
        """Of the whole trace."""
        return split_of(self.compute, self.communication, self.copies)

    def split_within(self, stretch: tuple[int, int], mine: np.ndarray) -> Split:
        """What runs in a stretch of time, with the counts of the events ``mine``."""
        near = [intervals.clip(part, *stretch) for part in self.unions]
        communication = int(self.is_communication[mine].sum())
        counts = (
            int(self.is_compute[mine].sum()) + communication,
            communication,
            int(self.is_copy[mine].sum()),
        )
        return split_of(*near, window_ns=stretch, counts=counts)


def _kernel_stats(trace: Trace, sets: _Sets) -> KernelStats | None:
    kernels = trace.of_kind(Kind.KERNEL)
    if not len(kernels):
        return None
    durations = trace.dur_ns[kernels]
    gaps = intervals.gaps(intervals.union(trace.intervals(kernels)))
    all_gaps = intervals.gaps(intervals.union(trace.intervals(sets.device)))
    return KernelStats(
        num=len(kernels),
        short_pct=100.0 * float((durations < SHORT_KERNEL_NS).mean()),
        median_ns=float(np.median(durations)),
        median_gap_ns=float(np.median(gaps[:, 1] - gaps[:, 0])) if len(gaps) else 0.0,
        longest_gap_ns=int((all_gaps[:, 1] - all_gaps[:, 0]).max()) if len(all_gaps) else 0,
    )


def _streams(trace: Trace, sets: _Sets) -> tuple[StreamAccount, ...]:
    keys = np.stack([trace.device[sets.device], trace.stream[sets.device]], axis=1)
    accounts = []
    for device, stream in np.unique(keys, axis=0).tolist():
        mine = sets.device[(keys[:, 0] == device) & (keys[:, 1] == stream)]
        communication = mine[sets.is_communication[mine]]
        copies = int(sets.is_copy[mine].sum())
        accounts.append(
            StreamAccount(
                device=device,
                stream=stream,
                busy_ns=intervals.measure(intervals.union(trace.intervals(mine))),
                num_kernels=len(mine) - copies,
                num_copies=copies,
                communication_ns=intervals.measure(intervals.union(trace.intervals(communication))),
            )
        )
    return tuple(sorted(accounts, key=lambda one: -one.busy_ns))


class _Labels:
    """The class and label of every device event."""

    def __init__(self, trace: Trace, infos: list[KernelInfo], carried: list[Communication]) -> None:
        self.trace = trace
        self.keys: list[tuple[KernelClass, str]] = []
        index: dict[tuple[KernelClass, str], int] = {}

        def number(klass: KernelClass, label: str) -> int:
            key = (klass, label)
            if key not in index:
                index[key] = len(self.keys)
                self.keys.append(key)
            return index[key]

        self.of_event = np.full(len(trace), -1, dtype=np.int64)
        kernels = trace.of_kind(Kind.KERNEL)
        used = np.unique(trace.name[kernels]).tolist()
        by_name = np.zeros(len(trace.names), dtype=np.int64)
        for name in used:
            by_name[name] = number(infos[name].klass, _label(infos[name]))
        self.of_event[kernels] = by_name[trace.name[kernels]]
        for one in carried:
            klass = infos[trace.name[one.event]].klass
            self.of_event[one.event] = number(klass, f"{klass} {one.kind}")
        copies = trace.of_kind(Kind.COPY)
        for name in np.unique(trace.name[copies]).tolist():
            mine = copies[trace.name[copies] == name]
            words = trace.names[name].lower().split("(")[0].split()
            label = " ".join(["copy", *(words[1:] if words[:1] == ["memcpy"] else words)])
            self.of_event[mine] = number(KernelClass.COPY, label)

    def account(self, mine: np.ndarray) -> tuple[ClassAccount, ...]:
        """What some device events spend, by class and label, largest first."""
        trace, of_event = self.trace, self.of_event[mine]
        unions, accounts = [], []
        present = np.unique(of_event)
        for label in present.tolist():
            events = mine[of_event == label]
            unions.append(intervals.union(trace.intervals(events)))
        alone = _alone(unions)
        for position, label in enumerate(present.tolist()):
            events = mine[of_event == label]
            accounts.append(
                ClassAccount(
                    klass=self.keys[label][0],
                    label=self.keys[label][1],
                    num=len(events),
                    total_ns=int(trace.dur_ns[events].sum()),
                    union_ns=intervals.measure(unions[position]),
                    exposed_ns=alone[position],
                )
            )
        return tuple(sorted(accounts, key=lambda one: (-one.total_ns, one.label)))


def _label(info: KernelInfo) -> str:
    return " ".join(part for part in (info.klass, info.library, info.dtype) if part)


def _alone(unions: list[np.ndarray]) -> list[int]:
    """Per union, how long it is the only one that is on."""
    if not unions:
        return []
    number = np.repeat(np.arange(len(unions)), [len(part) for part in unions])
    spans = np.concatenate(unions)
    times = spans.T.ravel()
    change = np.repeat([1, -1], len(spans))
    order = np.argsort(times, kind="stable")
    active = np.cumsum(change[order])
    which = np.cumsum((change * np.tile(number, 2))[order])
    lengths = np.diff(times[order], append=times[order][-1:])
    single = active == 1
    alone = np.zeros(len(unions), dtype=np.int64)
    np.add.at(alone, which[single], lengths[single])
    return alone.tolist()


def _phase_of_events(trace: Trace, launch: np.ndarray, phases: PhaseMap) -> np.ndarray:
    phase = np.full(len(trace), -1, dtype=np.int8)
    device = trace.of_kind(Kind.KERNEL, Kind.COPY)
    phase[device] = PHASES.index("other")
    launched = device[launch[device] >= 0]
    calls = launch[launched]
    phase[launched] = phases.at(trace.thread[calls], trace.start_ns[calls])
    return phase


def _phases(
    sets: _Sets,
    phases: PhaseMap,
    phase: np.ndarray,
    mine: np.ndarray,
    window_ns: tuple[int, int] | None,
) -> tuple[PhaseAccount, ...]:
    """``mine`` by phase; ``window_ns`` limits the host ranges counted."""
    if not phases.known:
        return ()
    trace, accounts = sets.trace, []
    before = intervals.EMPTY
    for number, name in enumerate(PHASES):
        events = mine[phase[mine] == number]
        kernels = events[~sets.is_copy[events]]
        both = intervals.union(np.concatenate([before, trace.intervals(events)]))
        host = phases.host[number]
        if window_ns is not None:
            host = intervals.clip(host, *window_ns)
        communication = events[sets.is_communication[events]]
        accounts.append(
            PhaseAccount(
                phase=name,
                num_kernels=len(kernels),
                total_ns=int(trace.dur_ns[kernels].sum()),
                union_ns=intervals.measure(intervals.union(trace.intervals(kernels))),
                exclusive_ns=intervals.measure(both) - intervals.measure(before),
                communication_ns=intervals.measure(intervals.union(trace.intervals(communication))),
                host_ns=intervals.measure(host),
            )
        )
        before = both
    return tuple(one for one in accounts if one.num_kernels or one.exclusive_ns or one.host_ns)


def _step(
    host: HostStep,
    stretch: tuple[int, int],
    sets: _Sets,
    labels: _Labels,
    phases: PhaseMap,
    phase: np.ndarray,
    mine: np.ndarray,
) -> StepAccount:
    return StepAccount(
        number=host.number,
        host_start_ns=host.start_ns,
        host_end_ns=host.end_ns,
        start_ns=stretch[0],
        end_ns=stretch[1],
        split=sets.split_within(stretch, mine),
        classes=labels.account(mine),
        phases=_phases(sets, phases, phase, mine, (host.start_ns, host.end_ns)),
    )


def _collectives(trace: Trace, carried: list[Communication]) -> tuple[CollectiveAccount, ...]:
    groups: dict[tuple[str, str, int], list[Communication]] = {}
    for one in carried:
        if one.num_bytes and one.dtype and one.group_size and trace.dur_ns[one.event] > 0:
            groups.setdefault((one.kind, one.dtype, one.group_size), []).append(one)
    accounts = []
    for (kind, dtype, size), members in groups.items():
        num_bytes = np.array([one.num_bytes for one in members], dtype=np.int64)
        times = trace.dur_ns[[one.event for one in members]]
        rates = bus_factor(kind, size) * num_bytes / (times / 1e9)
        total_bytes, total_ns = int(num_bytes.sum()), int(times.sum())
        accounts.append(
            CollectiveAccount(
                kind=kind,
                dtype=dtype,
                group_size=size,
                num=len(members),
                total_bytes=total_bytes,
                total_ns=total_ns,
                bus_bytes_per_s=bus_factor(kind, size) * total_bytes / (total_ns / 1e9),
                slowest_bytes_per_s=float(rates.min()),
                fastest_bytes_per_s=float(rates.max()),
            )
        )
    return tuple(sorted(accounts, key=lambda one: -one.total_ns))
