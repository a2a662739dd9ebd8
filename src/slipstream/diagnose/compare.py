"""What changed from one job to another, per step, and whether the difference is more than noise.

Steps are the sample. The shift between two jobs is the Hodges-Lehmann estimate (the median of all
pairwise differences) with the exact rank interval that belongs to it; it assumes nothing about how
step times are distributed, and with three steps on each side it can just reach 90 %. Jobs that are
not alike (another GPU, other ranks, another model) get their numbers, and no verdict.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist, fmean
from typing import Literal

import numpy as np

from slipstream.diagnose.classify import KernelClass
from slipstream.diagnose.figures import Account, JobAccount, StepAccount

CONFIDENCE = 0.9
"""Of the interval: what complete separation of three steps from three can reach."""
MIN_STEPS = 3
_EXACT = 10_000
"""Pairs of steps above which the normal approximation of the rank is used."""
_SAME_WORK = 1.25
"""Matrix products per step of one model differ by less; fusing and compiling keep them."""
_PRODUCTS = frozenset({KernelClass.GEMM, KernelClass.CONVOLUTION, KernelClass.ATTENTION})
_PARTS = ("compute", "exposed_communication", "exposed_copies", "idle")

Kind = Literal["step", "split", "class", "phase"]
Samples = dict[int, float]
"""A figure by step number, ms."""


class Verdict(enum.StrEnum):
    """Of the second job against the first."""

    BETTER = "better"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One figure in both jobs, ms per step (in all, if a job has no steps)."""

    kind: Kind
    """What the name is one of."""
    name: str
    """``step``, a part of the split, a class of kernels or a phase."""
    before_ms: float
    """Median over the steps of the first job."""
    after_ms: float
    """Median over the steps of the second."""
    shift_ms: float
    """Estimate of the difference, second less first."""
    low_ms: float | None
    """Lower end of its interval; None with fewer than ``MIN_STEPS`` steps on a side."""
    high_ms: float | None
    """Upper end."""

    @property
    def verdict(self) -> Verdict:
        """Whether the interval leaves zero out."""
        if self.low_ms is None or self.high_ms is None or self.low_ms <= 0 <= self.high_ms:
            return Verdict.INCONCLUSIVE
        return Verdict.BETTER if self.high_ms < 0 else Verdict.WORSE

    @property
    def pct(self) -> float | None:
        """The shift as a percentage of the first job's figure; None if that is 0."""
        return 100.0 * self.shift_ms / self.before_ms if self.before_ms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two jobs side by side."""

    before: str
    """Title of the first job."""
    after: str
    """Title of the second."""
    verdict: Verdict
    """On the step time; inconclusive if the jobs are not alike."""
    reasons: tuple[str, ...]
    """Why the verdict is what it is, one sentence each."""
    unlike: tuple[str, ...]
    """What makes the jobs not comparable like for like; empty if nothing does."""
    changes: tuple[Change, ...]
    """The step first, then the split, classes and phases, each by the size of the shift."""

    @property
    def step(self) -> Change:
        """The step time, or the whole span where a job has no steps."""
        return self.changes[0]


def compare(before: JobAccount, after: JobAccount) -> Comparison:
    """What changed from ``before`` to ``after``.

    Step times are the host's, of the slowest rank; parts, classes and phases are means over ranks.
    """
    unlike = tuple(_differences(before, after))
    by_step = all(one.steps for job in (before, after) for one in job.ranks)
    changes = [_change("step", "step", _step_times(before), _step_times(after))]
    for kind, figures in (("split", _split), ("class", _classes), ("phase", _phases)):
        a, b = _samples(before, figures), _samples(after, figures)
        none_a, none_b = (dict.fromkeys(_step_times(job), 0.0) for job in (before, after))
        rows = [
            _change(kind, name, a.get(name, none_a), b.get(name, none_b)) for name in {**a, **b}
        ]
        changes += sorted(rows, key=lambda row: (-abs(row.shift_ms), row.name))
    return Comparison(
        before=before.job.title,
        after=after.job.title,
        verdict=Verdict.INCONCLUSIVE if unlike else changes[0].verdict,
        reasons=(*_reasons(changes[0], unlike, by_step=by_step), *_moved(changes, unlike)),
        unlike=unlike,
        changes=tuple(changes),
    )


def shift(before: np.ndarray, after: np.ndarray) -> tuple[float, float | None, float | None]:
    """Hodges-Lehmann shift from ``before`` to ``after`` and its exact rank interval.

    The interval is None, None where the samples are too small for ``CONFIDENCE``. Source: Hollander
    and Wolfe, Nonparametric Statistical Methods, section 4.3.
    """
    differences = np.sort((after[None, :] - before[:, None]).ravel())
    estimate = float(np.median(differences))
    rank = _rank(len(before), len(after), (1 - CONFIDENCE) / 2)
    if rank < 1:
        return estimate, None, None
    return estimate, float(differences[rank - 1]), float(differences[-rank])


def _rank(n: int, m: int, tail: float) -> int:
    """How many of the sorted differences to leave out at each end, plus one; 0: too few."""
    if n * m > _EXACT:
        deviation = (n * m * (n + m + 1) / 12) ** 0.5
        return int(n * m / 2 - NormalDist().inv_cdf(1 - tail) * deviation)
    below = np.cumsum(u_probabilities(n, m))
    # 1/20 of three against three is to count as 5 %, whatever its last bit.
    return int(np.searchsorted(below, tail * (1 + 1e-9), side="right"))


def u_probabilities(n: int, m: int) -> np.ndarray:
    """float64 (n*m + 1,): distribution of the Mann-Whitney statistic of equal distributions.

    Its generating function is a Gaussian binomial, the product of (1 - q^(m+i)) / (1 - q^i).
    """
    counts = np.zeros(n * m + 1)
    counts[0] = 1.0
    for i in range(1, n + 1):
        top = np.zeros_like(counts)
        top[m + i :] = counts[: max(0, len(counts) - m - i)]
        counts = counts - top
        for residue in range(min(i, len(counts))):
            counts[residue::i] = np.cumsum(counts[residue::i])
    return counts / counts.sum()


def _change(kind: Kind, name: str, before: Samples, after: Samples) -> Change:
    a, b = np.array(list(before.values())), np.array(list(after.values()))
    estimate, low, high = shift(a, b)
    return Change(
        kind=kind,
        name=name,
        before_ms=float(np.median(a)),
        after_ms=float(np.median(b)),
        shift_ms=estimate,
        low_ms=low,
        high_ms=high,
    )


def _step_times(job: JobAccount) -> Samples:
    times: Samples = {}
    for one in job.ranks:
        for step in one.steps:
            times[step.number] = max(times.get(step.number, 0.0), step.host_ns / 1e6)
    return times or {0: max(one.split.span_ns for one in job.ranks) / 1e6}


Figures = Callable[[StepAccount | Account], dict[str, float]]


def _samples(job: JobAccount, figures: Figures) -> dict[str, Samples]:
    """Each figure by step, mean over the ranks; a figure a step does not have is 0."""
    found: dict[int, list[dict[str, float]]] = {}
    for one in job.ranks:
        for step in one.steps:
            found.setdefault(step.number, []).append(figures(step))
        if not one.steps:
            found.setdefault(0, []).append(figures(one))
    names = dict.fromkeys(name for rows in found.values() for row in rows for name in row)
    return {
        name: {number: fmean(row.get(name, 0.0) for row in rows) for number, rows in found.items()}
        for name in names
    }


def _split(one: StepAccount | Account) -> dict[str, float]:
    return {part: getattr(one.split, f"{part}_ns") / 1e6 for part in _PARTS}


def _classes(one: StepAccount | Account) -> dict[str, float]:
    return {row.label: row.total_ns / 1e6 for row in one.classes}


def _phases(one: StepAccount | Account) -> dict[str, float]:
    return {row.phase: row.exclusive_ns / 1e6 for row in one.phases}


def _differences(before: JobAccount, after: JobAccount) -> list[str]:
    """What makes two jobs unlike."""
    found = []
    a, b = (_devices(job) for job in (before, after))
    if a != b:
        found.append(f"other GPU: {a} and {b}")
    a, b = (_world(job) for job in (before, after))
    if a != b:
        found.append(f"other number of ranks: {a} and {b}")
    a, b = (_products(job) for job in (before, after))
    if max(a, b) > _SAME_WORK * min(a, b):
        found.append(f"other work: {a:.0f} and {b:.0f} matrix products in a step")
    return found


def _devices(job: JobAccount) -> str:
    names = sorted({one.trace.device_name or "not named" for one in job.ranks})
    return ", ".join(names)


def _world(job: JobAccount) -> int:
    return max(one.trace.world_size or len(job.ranks) for one in job.ranks)


def _products(job: JobAccount) -> float:
    """Matrix products, convolutions and attention kernels per step of a rank."""
    return fmean(
        sum(row.num for row in one.classes if row.klass in _PRODUCTS) / max(1, len(one.steps))
        for one in job.ranks
    )


def _reasons(step: Change, unlike: tuple[str, ...], *, by_step: bool) -> tuple[str, ...]:
    if unlike:
        return ("the jobs are not comparable like for like", *unlike)
    if not by_step:
        return ("a job has no steps marked, so nothing tells how much it varies",)
    if step.low_ms is None or step.high_ms is None:
        return (f"a job has fewer than {MIN_STEPS} steps, too few to tell a change from noise",)
    interval = (
        f"the step changes by {step.shift_ms:+.3g} ms, {100 * CONFIDENCE:.0f} % interval "
        f"{step.low_ms:+.3g} to {step.high_ms:+.3g} ms"
    )
    if step.verdict is Verdict.INCONCLUSIVE:
        return (interval, "the spread of the steps is larger than the difference")
    return (interval,)


def _moved(changes: list[Change], unlike: tuple[str, ...]) -> tuple[str, ...]:
    """Where time that kernels saved was lost again: why an optimisation brought nothing."""
    parts = {change.name: change for change in changes if change.kind == "split"}
    compute = parts.get("compute")
    if unlike or compute is None or compute.verdict is not Verdict.BETTER:
        return ()
    lost = max(parts.values(), key=lambda part: part.shift_ms)
    if lost.verdict is not Verdict.WORSE or 2 * lost.shift_ms < -compute.shift_ms:
        return ()
    return (
        f"kernels take {-compute.shift_ms:.3g} ms less, and {lost.name.replace('_', ' ')} grew by "
        f"{lost.shift_ms:.3g} ms: the step has another limit",
    )
