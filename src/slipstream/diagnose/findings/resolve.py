"""Contradictions between findings: advice that another finding makes pointless is withdrawn."""

from dataclasses import replace

from slipstream.diagnose.findings.host import HOST_FINDINGS
from slipstream.diagnose.findings.model import Confidence, Finding

_HOST_LIMITED_PCT = 50.0
"""Above this the device waits for the host more than it works."""
_DEVICE_FINDINGS = frozenset(
    {
        "memory-bound",
        "fusible-chains",
        "tensor-cores-unused",
        "recompute-cost",
        "gemm-slowed-by-communication",
        "streams-competing",
    }
)


def resolve(found: list[Finding]) -> tuple[list[Finding], list[str]]:
    """The findings that stay, and a sentence for each that was withdrawn or weakened.

    - The device waits for the host most of the time: faster kernels would only lengthen the wait.
      Communication may be exposed because the host has not issued what could run beside it.
    - Ranks wait for a slow one: more overlap would hide waiting, not remove it; what is left of
      the exposed communication was reduced to transfer when it was measured.
    """
    by_id = {one.id: one for one in found}
    notes: list[str] = []
    kept = _host_first(found, notes)
    slow, exposed = by_id.get("straggler"), by_id.get("exposed-communication")
    if slow is not None and (exposed is None or exposed.ms < slow.ms):
        notes.append(
            "exposed-communication: mostly waiting for a slow rank; overlap or a faster network "
            "would not bring that time back"
        )
    return kept, notes


def _host_first(found: list[Finding], notes: list[str]) -> list[Finding]:
    limits = [one for one in found if one.id in HOST_FINDINGS]
    limit = max(limits, key=lambda one: one.pct, default=None)
    if limit is None or limit.pct < _HOST_LIMITED_PCT:
        return found
    kept = []
    for one in found:
        if one.id in _DEVICE_FINDINGS:
            notes.append(
                f"{one.id}: withdrawn, since the device waits for the host ({limit.id}) for "
                f"{limit.pct:.0f} % of the time; faster kernels would only make it wait longer"
            )
        elif one.id == "exposed-communication" and one.confidence is Confidence.HIGH:
            late = "The host is late, so part of it is exposed for lack of issued work."
            detail = f"{one.detail} {late}".strip()
            kept.append(replace(one, confidence=Confidence.MEDIUM, detail=detail))
        else:
            kept.append(one)
    return kept
