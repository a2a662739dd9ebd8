"""What a report of a diagnosis says, gathered once for the terminal, JSON and the page.

Numbers are milliseconds and percentages of whole files. Over several ranks ``worst`` takes each
number from the rank where it is worst, so the worst numbers need not add up; those of a rank and
the means of the four parts do.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from slipstream.diagnose import Account, JobAccount, Kind, Split, Trace
from slipstream.diagnose.classify import KernelClass
from slipstream.diagnose.figures import StepAccount
from slipstream.diagnose.findings import Findings
from slipstream.diagnose.gate import HIGH_IS_GOOD
from slipstream.diagnose.roofline import roofline
from slipstream.report.diagnosis.words import percent

TOP_KERNELS = 15
PARTS = ("compute", "exposed_communication", "exposed_copies", "idle")
NUMBERS = (
    "span_ms",
    "busy_pct",
    "communication_ms",
    "overlap_pct",
    "span_with_copies_ms",
    "compute_ms",
    "exposed_communication_ms",
    "exposed_copies_ms",
    "idle_ms",
    "compute_pct",
    "exposed_communication_pct",
    "exposed_copies_pct",
    "idle_pct",
    "busy_with_copies_pct",
    "waiting_ms",
)
"""Names of a summary's numbers."""
COLUMNS = (
    ("span", "span_with_copies_ms"),
    ("compute", "compute_ms"),
    ("exposed comm", "exposed_communication_ms"),
    ("waiting", "waiting_ms"),
    ("copies", "exposed_copies_ms"),
    ("idle", "idle_ms"),
    ("busy", "busy_pct"),
    ("overlap", "overlap_pct"),
)
"""Columns of the table of ranks."""
_COLOUR = {
    KernelClass.GEMM: "gemm",
    KernelClass.GROUPED_GEMM: "gemm",
    KernelClass.CONVOLUTION: "gemm",
    KernelClass.ATTENTION: "attention",
    KernelClass.OPTIMIZER: "optimizer",
    KernelClass.COLLECTIVE: "communication",
    KernelClass.EXPERT_COMMUNICATION: "communication",
    KernelClass.COPY: "copy",
}
Numbers = dict[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One rank's numbers."""

    label: str
    """``rank 3``; where no rank is known ``trace``, or of several the file's name."""
    rank: int | None
    """Its number, None if unknown."""
    source: str
    """The file."""
    num_kernels: int
    """Kernels in it."""
    num_steps: int
    """Steps in it."""
    numbers: Numbers
    """By name, see ``numbers_of``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, on the rank that took longest for it."""

    number: int
    """N of ``ProfilerStep#N``."""
    label: str
    """The rank shown."""
    host_ms: float
    """Duration on the host."""
    numbers: Numbers
    """Split of its stretch of device time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A kind of work, mean over ranks."""

    name: str
    """Kind of kernels, or phase."""
    colour: str
    """Class of ``style.css``."""
    total_ms: float
    """Time of its kernels."""
    share_pct: float
    """Of the total of all kinds."""
    exposed_ms: float | None
    """Time in which nothing else ran; None for phases."""
    num: float
    """Kernels, mean over ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All launches of one kernel, over all ranks."""

    name: str
    """As in the trace."""
    klass: str
    """What it does."""
    colour: str
    """Class of ``style.css``."""
    num: int
    """Launches."""
    total_ms: float
    """Sum of durations."""
    mean_us: float
    """Mean duration."""
    share_pct: float
    """Of the time of all kernels."""
    limit: str | None
    """What bounds it and how near it comes, where shapes and the device are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Everything a report shows."""

    title: str
    """What was read."""
    device: str | None
    """Names of the GPUs, None if no file names one."""
    world_size: int | None
    """Ranks of the job, None if not given."""
    ranks: tuple[Rank, ...]
    """In order of rank."""
    worst: Numbers
    """Each number on the rank where it is worst."""
    mean: Numbers
    """Means over ranks that have the number."""
    steps: tuple[Step, ...]
    """In order; empty without steps."""
    phases: tuple[Share, ...]
    """Empty if no rank tells phases."""
    classes: tuple[Share, ...]
    """Largest first."""
    kernels: tuple[KernelRow, ...]
    """The ``TOP_KERNELS`` that took longest."""
    findings: Findings
    """Ranked, with what could not be judged."""
    problems: tuple[str, ...]
    """What was wrong with the files."""
    account: JobAccount
    """What was counted."""

    @property
    def several(self) -> bool:
        """Whether there is more than one rank."""
        return len(self.ranks) > 1

    @property
    def has_device_work(self) -> bool:
        """Whether any rank ran a kernel or a copy."""
        return bool(self.worst["span_with_copies_ms"])

    @property
    def refused(self) -> str | None:
        """Why waiting could not be told from transfer; None if it could, or for one rank."""
        return self.account.match.refused if self.account.match else None

    def notable(self, limit: int) -> list[Rank]:
        """All ranks if they are few; else those findings point at, then those that compute least.

        In order of rank.
        """
        pointed = {
            rank
            for one in self.findings.findings
            for rank in (
                *one.ranks[: 2 if len(one.ranks) <= 2 else 0],
                one.evidence.get("shown_rank"),
            )
        }

        def order(rank: Rank) -> tuple[bool, float]:
            return rank.rank not in pointed, rank.numbers["compute_pct"] or 0.0

        kept = sorted(self.ranks, key=order)[:limit]
        return [rank for rank in self.ranks if rank in kept]

    def not_judged(self) -> list[tuple[str, str]]:
        """Reasons, each with the findings that could not be judged for it."""
        reasons: dict[str, list[str]] = defaultdict(list)
        for one in self.findings.abstained:
            reasons[one.reason].append("anything" if one.id == "all" else one.id)
        return [(", ".join(names), reason) for reason, names in reasons.items()]

    def describe(self) -> str:
        """Ranks, GPU, steps and kernels in one line."""
        num = len(self.ranks)
        ranks = _count(num, "rank") if self.ranks[0].rank is None else self.ranks[0].label
        ranks = ranks if num == 1 else f"{num} ranks"
        if self.world_size is not None and self.world_size > num:
            ranks += f" of {self.world_size}"
        steps = max(rank.num_steps for rank in self.ranks)
        kernels = sum(rank.num_kernels for rank in self.ranks)
        parts = [
            ranks,
            self.device or "GPU not named",
            _count(steps, "step") if steps else "no steps marked",
            _count(kernels, "kernel"),
        ]
        return ", ".join(parts)


def gather(account: JobAccount, findings: Findings) -> View:
    """The view of one job."""
    traces = account.job.traces
    ranks = tuple(_rank(account, position) for position in range(len(traces)))
    numbers = [rank.numbers for rank in ranks]
    devices = sorted({t.device_name for t in traces if t.device_name})
    sizes = [t.world_size for t in traces if t.world_size is not None]
    found = [*account.job.problems]
    for trace in traces:
        found += [f"{_file(trace)}: {problem}" for problem in trace.problems]
    return View(
        title=account.job.title,
        device=", ".join(devices) or None,
        world_size=max(sizes, default=None),
        ranks=ranks,
        worst=_over(numbers, lambda name: min if name in HIGH_IS_GOOD else max),
        mean=_over(numbers, lambda name: fmean),
        steps=_steps(account, [rank.label for rank in ranks]),
        phases=_phases(account.ranks),
        classes=_classes(account.ranks),
        kernels=_kernels(account.ranks),
        findings=findings,
        problems=tuple(found),
        account=account,
    )


def numbers_of(split: Split, waiting_ns: int | None = None) -> Numbers:
    """Milliseconds and percentages of a split, by the names of ``NUMBERS``.

    ``span_ms`` and ``busy_pct`` are of kernels alone. ``span_with_copies_ms`` is the sum of
    ``compute_ms``, ``exposed_communication_ms``, ``exposed_copies_ms`` and ``idle_ms``, and what
    those parts' percentages are of. ``waiting_ms`` is the time in communication before the last
    rank arrived, None where ranks could not be matched.
    """
    values = (
        split.kernel_span_ns / 1e6,
        split.busy_pct,
        split.communication_ns / 1e6,
        split.overlap_pct,
        split.span_ns / 1e6,
        split.compute_ns / 1e6,
        split.exposed_communication_ns / 1e6,
        split.exposed_copies_ns / 1e6,
        split.idle_ns / 1e6,
        split.pct(split.compute_ns),
        split.pct(split.exposed_communication_ns),
        split.pct(split.exposed_copies_ns),
        split.pct(split.idle_ns),
        split.busy_with_copies_pct,
        None if waiting_ns is None else waiting_ns / 1e6,
    )
    return dict(zip(NUMBERS, values, strict=True))


def colour_of(klass: KernelClass) -> str:
    """Class of ``style.css`` a kind of kernel is drawn in."""
    return _COLOUR.get(klass, "compute")


def worst_step(account: JobAccount) -> int | None:
    """Number of the step that took longest on any rank; None without steps."""
    found = [(step.split.span_ns, -step.number) for rank in account.ranks for step in rank.steps]
    return -max(found)[1] if found else None


def _rank(account: JobAccount, position: int) -> Rank:
    counted = account.ranks[position]
    trace, match = counted.trace, account.match
    label = f"rank {trace.rank}"
    if trace.rank is None:
        label = "trace" if len(account.ranks) == 1 else _file(trace)
    matched = match is not None and match.refused is None
    waiting = int(match.waiting_ns[position]) if match and matched else None
    return Rank(
        label=label,
        rank=trace.rank,
        source=trace.source,
        num_kernels=counted.split.num_kernels,
        num_steps=len(counted.steps),
        numbers=numbers_of(counted.split, waiting),
    )


def _file(trace: Trace) -> str:
    return trace.source.rsplit("/", 1)[-1]


def _over(
    ranks: Sequence[Numbers], choose: Callable[[str], Callable[[list[float]], float]]
) -> Numbers:
    result: Numbers = {}
    for name in ranks[0]:
        values = [numbers[name] for numbers in ranks]
        known = [value for value in values if value is not None]
        result[name] = choose(name)(known) if known else None
    return result


def _steps(account: JobAccount, labels: Sequence[str]) -> tuple[Step, ...]:
    longest: dict[int, tuple[StepAccount, str]] = {}
    for counted, label in zip(account.ranks, labels, strict=True):
        for step in counted.steps:
            held = longest.get(step.number)
            if held is None or step.split.span_ns > held[0].split.span_ns:
                longest[step.number] = (step, label)
    return tuple(
        Step(
            number=number,
            label=label,
            host_ms=step.host_ns / 1e6,
            numbers=numbers_of(step.split),
        )
        for number, (step, label) in sorted(longest.items())
    )


def _shares(
    rows: Iterable[tuple[str, str, int, int, int]], ranks: int, *, exposed: bool
) -> tuple[Share, ...]:
    """Rows of name, colour, ns, exposed ns and count, added up by name and divided by ranks."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    colours = {}
    for name, colour, *values in rows:
        colours[name] = colour
        sums[name] = [a + b for a, b in zip(sums[name], values, strict=True)]
    whole = sum(total for total, _, _ in sums.values())
    return tuple(
        Share(
            name=name,
            colour=colours[name],
            total_ms=total / ranks / 1e6,
            share_pct=100 * total / whole if whole else 0.0,
            exposed_ms=alone / ranks / 1e6 if exposed else None,
            num=num / ranks,
        )
        for name, (total, alone, num) in sums.items()
    )


def _phases(ranks: Sequence[Account]) -> tuple[Share, ...]:
    rows = ((p.phase, "compute", p.exclusive_ns, 0, p.num_kernels) for r in ranks for p in r.phases)
    return _shares(rows, len(ranks), exposed=False)


def _classes(ranks: Sequence[Account]) -> tuple[Share, ...]:
    rows = (
        (c.label, colour_of(c.klass), c.total_ns, c.exposed_ns, c.num)
        for r in ranks
        for c in r.classes
    )
    shares = _shares(rows, len(ranks), exposed=True)
    return tuple(sorted(shares, key=lambda share: (-share.total_ms, share.name)))


def _kernels(ranks: Sequence[Account]) -> tuple[KernelRow, ...]:
    total: dict[str, int] = defaultdict(int)
    num: dict[str, int] = defaultdict(int)
    infos = {}
    for rank in ranks:
        trace = rank.trace
        kernels = trace.of_kind(Kind.KERNEL)
        sums = np.zeros(len(trace.names), dtype=np.int64)
        np.add.at(sums, trace.name[kernels], trace.dur_ns[kernels])
        counts = np.bincount(trace.name[kernels], minlength=len(trace.names))
        for index in np.flatnonzero(counts).tolist():
            name = trace.names[index]
            infos[name] = rank.infos[index]
            total[name] += int(sums[index])
            num[name] += int(counts[index])
    whole, limits = sum(total.values()), _limits(ranks)
    first = sorted(total, key=lambda name: (-total[name], name))[:TOP_KERNELS]
    return tuple(
        KernelRow(
            name=name,
            klass=infos[name].collective or infos[name].klass.value,
            colour=colour_of(infos[name].klass),
            num=num[name],
            total_ms=total[name] / 1e6,
            mean_us=total[name] / num[name] / 1e3,
            share_pct=100 * total[name] / whole if whole else 0.0,
            limit=limits.get(name),
        )
        for name in first
    )


def _limits(ranks: Sequence[Account]) -> dict[str, str]:
    """By kernel name what bounds the operators that launched it, and the share of the peak."""
    actual: dict[str, int] = defaultdict(int)
    ideal: dict[str, float] = defaultdict(float)
    memory: dict[str, float] = defaultdict(float)
    for rank in ranks:
        for one in roofline(rank).operators:
            name = rank.trace.name_of(one.kernel)
            actual[name] += one.dur_ns
            ideal[name] += one.ideal_ns
            memory[name] += one.ideal_ns if one.is_memory_bound else 0.0
    return {
        name: f"{'memory' if 2 * memory[name] >= ideal[name] else 'arithmetic'}, "
        f"{percent(100 * ideal[name] / actual[name])} of peak"
        for name in ideal
        if actual[name]
    }


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
