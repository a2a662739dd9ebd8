"""The report as one JSON object, for programs. Strict JSON: no NaN, null where nothing is known."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from slipstream.diagnose.compare import Comparison
from slipstream.diagnose.findings import Finding
from slipstream.report.diagnosis.change import as_object
from slipstream.report.diagnosis.view import Rank, View
from slipstream.report.diagnosis.words import printable


def to_json(view: View, change: Comparison | None = None, failed: Sequence[str] = ()) -> str:
    """The view as JSON text that ends in a newline. The same view gives the same bytes.

    ``summary`` has, flat, each number from the rank where it is worst, and ``mean`` over ranks.
    ``change`` adds ``comparison``; ``failed`` are the limits passed.
    """
    content = {
        "title": view.title,
        "device": view.device,
        "world_size": view.world_size,
        "num_ranks": len(view.ranks),
        "num_steps": max(rank.num_steps for rank in view.ranks),
        "summary": {**view.worst, "mean": view.mean},
        "findings": [_finding(one) for one in view.findings.findings],
        "abstained": [{"id": one.id, "reason": one.reason} for one in view.findings.abstained],
        "resolved": list(view.findings.resolved),
        "ranks": [_rank(rank) for rank in view.ranks],
        "waiting_refused": view.refused,
        "steps": [
            {"step": s.number, "rank": s.label, "host_ms": s.host_ms, **s.numbers}
            for s in view.steps
        ],
        "phases": [_row(share, "colour", "exposed_ms") for share in view.phases],
        "classes": [_row(share, "colour") for share in view.classes],
        "kernels": [_row(kernel, "colour") for kernel in view.kernels],
        "collectives": _collectives(view),
        "problems": list(view.problems),
        "failed": list(failed),
        "comparison": None if change is None else as_object(change),
    }
    return json.dumps(_clean(content), indent=2, allow_nan=False) + "\n"


def _finding(one: Finding) -> dict[str, Any]:
    return {
        "id": one.id,
        "title": one.title,
        "ms": one.ms,
        "per": one.per,
        "pct": one.pct,
        "confidence": str(one.confidence),
        "evidence": one.evidence,
        "kernels": list(one.kernels),
        "start_ms": one.start_ms,
        "end_ms": one.end_ms,
        "ranks": list(one.ranks),
        "detail": one.detail,
        "action": one.action_pytorch,
        "action_slipstream": one.action_slipstream,
    }


def _rank(rank: Rank) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "source": rank.source,
        "num_kernels": rank.num_kernels,
        "num_steps": rank.num_steps,
        **rank.numbers,
    }


def _row(row: Any, *without: str) -> dict[str, Any]:
    return {name: value for name, value in asdict(row).items() if name not in without}


def _collectives(view: View) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank.trace.rank,
            "kind": one.kind,
            "dtype": one.dtype,
            "group_size": one.group_size,
            "num": one.num,
            "total_bytes": one.total_bytes,
            "total_ms": one.total_ns / 1e6,
            "bus_bytes_per_s": one.bus_bytes_per_s,
            "slowest_bytes_per_s": one.slowest_bytes_per_s,
            "fastest_bytes_per_s": one.fastest_bytes_per_s,
        }
        for rank in view.account.ranks
        for one in rank.collectives
    ]


def _clean(value: Any) -> Any:
    # A lone half of a surrogate pair in a kernel's name is no text, and not every parser takes it.
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items()}
    return [_clean(item) for item in value] if isinstance(value, list | tuple) else value
