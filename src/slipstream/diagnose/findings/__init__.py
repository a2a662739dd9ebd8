"""Findings: what costs time, ranked by the milliseconds at stake, and what to do about each.

Every finder looks at one thing in the trace of one rank (or of all) and yields findings, or says
why it cannot judge. Here they are merged over ranks, contradictions are resolved, and the rest is
ranked. Adding a finding is a finder, a line in ``_FINDERS`` and an entry in ``hints.HINTS``.
"""

from collections.abc import Callable
from dataclasses import replace

from slipstream.diagnose.figures import JobAccount
from slipstream.diagnose.findings import (
    communication,
    compute,
    copies,
    experts,
    host,
    interference,
    window,
)
from slipstream.diagnose.findings.context import Found, View
from slipstream.diagnose.findings.model import (
    WEIGHT,
    Abstention,
    Confidence,
    Finding,
    Findings,
    Value,
)
from slipstream.diagnose.findings.resolve import resolve
from slipstream.diagnose.ranks import RankMatch
from slipstream.diagnose.trace import Kind, Trace

__all__ = ["WEIGHT", "Abstention", "Confidence", "Finding", "Findings", "find"]

MATERIAL_PCT = 5.0
"""A device that loses less than this to anything (weighed by confidence) is called healthy."""

_FINDERS: tuple[Callable[[View], Found], ...] = (
    copies.exposed,
    host.causes,
    compute.memory_bound,
    compute.chains,
    compute.tensor_cores,
    compute.recompute,
    interference.slowed_products,
    interference.competing_streams,
    window.warm_up,
)


def find(counted: JobAccount) -> Findings:
    """The diagnosis of a job: findings, the main one first, and what could not be judged.

    Milliseconds are per step where steps are marked, of the rank where they are most (beside a slow
    rank: of the median rank). Those of different findings overlap and do not add up.
    """
    views, abstained = _usable(counted)
    if not views:
        return Findings(findings=(), abstained=tuple(abstained))
    unsteady = [found for found in map(window.not_steady, views) if found is not None]
    if len(unsteady) == len(views):
        reason = "throughput cannot be judged from a start-up or from what happens once"
        return Findings(findings=(unsteady[0],), abstained=(*abstained, Abstention("all", reason)))
    per_rank = [_of_rank(view, counted.match, abstained) for view in views]
    of_job = [*communication.straggler(counted, views), *experts.imbalance(views)]
    abstained += [one for one in of_job if isinstance(one, Abstention)]
    whole = [one for one in of_job if isinstance(one, Finding)]
    slow = any(one.id == "straggler" and one.pct >= MATERIAL_PCT for one in whole)
    merged = [*whole, *_merge(per_rank, usual=slow)]
    kept, resolved = resolve(merged)
    ranked = sorted(kept, key=lambda one: (-one.weight, one.id))
    if not any(WEIGHT[one.confidence] * one.pct >= MATERIAL_PCT for one in ranked):
        ranked.insert(0, _healthy(views))
    distinct = tuple(dict.fromkeys(abstained))
    return Findings(findings=tuple(ranked), abstained=distinct, resolved=tuple(resolved))


def _usable(counted: JobAccount) -> tuple[list[View], list[Abstention]]:
    """Ranks with device work; where some have none, why."""
    views, without = [], []
    for position, one in enumerate(counted.ranks):
        if one.split.span_ns > one.split.idle_ns and one.split.num_kernels:
            views.append(View(account=one, position=position))
        else:
            without.append(Abstention("all", f"{one.trace.source}: {_emptiness(one.trace)}"))
    return views, without


def _emptiness(trace: Trace) -> str:
    """Why there is no device work to look at."""
    record = "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]"
    if len(trace.of_kind(Kind.GPU_ANNOTATION)):
        return f"it has ranges of the profiler on the device but no kernels; {record}"
    if len(trace.of_kind(Kind.RUNTIME)):
        return "it has launches but no kernels: the profiler was not allowed to record the device"
    if len(trace.of_kind(Kind.CPU_OP)):
        return f"it has operators of the host but no GPU kernels; {record}"
    return f"it has no GPU kernels; {record}"


def _of_rank(view: View, match: RankMatch | None, abstained: list[Abstention]) -> list[Finding]:
    """Findings of one rank; what it could not judge is added to ``abstained``."""
    found = [*communication.exposed(view, match)]
    for finder in _FINDERS:
        found += finder(view)
    abstained += [one for one in found if isinstance(one, Abstention)]
    return [one for one in found if isinstance(one, Finding)]


def _merge(per_rank: list[list[Finding]], *, usual: bool) -> list[Finding]:
    """One finding of each kind: that of the worst rank, or of the median one if ``usual``.

    Beside a slow rank the worst is not the job's: what only the slow rank has is why it is slow.
    """
    if len(per_rank) == 1:
        return per_rank[0]
    merged = []
    for name in dict.fromkeys(one.id for found in per_rank for one in found):
        mine = sorted((x for found in per_rank for x in found if x.id == name), key=_cost)
        missing = len(per_rank) - len(mine)
        place = (len(per_rank) - 1) // 2 - missing if usual else len(mine) - 1
        if place < 0:
            continue
        shown = mine[place]
        evidence: dict[str, Value] = {"ranks": len(mine)}
        if shown.ranks:
            evidence["shown_rank"] = shown.ranks[0]
        ranks = tuple(sorted(rank for one in mine for rank in one.ranks))
        merged.append(replace(shown, evidence=evidence | shown.evidence, ranks=ranks))
    return merged


def _cost(one: Finding) -> float:
    return one.ms


def _healthy(views: list[View]) -> Finding:
    """The verdict where nothing material was found."""
    view = max(views, key=lambda one: one.account.split.pct(one.account.split.idle_ns))
    split = view.account.split
    return view.finding(
        "healthy",
        0,
        f"the device is busy for {split.busy_with_copies_pct or 0:.2f} % of the time and nothing "
        "seen costs much",
        confidence=Confidence.HIGH,
        evidence={
            "busy_pct": round(split.busy_with_copies_pct or 0.0, 2),
            "idle_pct": round(split.pct(split.idle_ns), 2),
            "exposed_communication_pct": round(split.pct(split.exposed_communication_ns), 2),
            "exposed_copies_pct": round(split.pct(split.exposed_copies_ns), 2),
        },
        always=True,
    )[0]
