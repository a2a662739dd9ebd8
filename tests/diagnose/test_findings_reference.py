"""The reference of findings: complete, one with the documents, and honest about switches."""

import re
from pathlib import Path

import pytest

from slipstream.diagnose.hints import HINTS, reference
from slipstream.train import RunConfig

ROOT = Path(__file__).resolve().parents[2]
IDS = {
    *("straggler", "exposed-communication", "exposed-copies", "launch-bound", "host-bound"),
    *("host-synchronisation", "data-loading", "garbage-collection", "allocator"),
    *("idle-unexplained", "memory-bound", "fusible-chains", "recompute-cost"),
    *("tensor-cores-unused", "gemm-slowed-by-communication", "streams-competing"),
    *("expert-imbalance", "warm-up-in-window", "healthy", "not-a-training-window"),
}


def test_every_finding_has_a_hint() -> None:
    assert set(HINTS) == IDS


def test_documents_say_the_same() -> None:
    assert reference() in (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("finding", HINTS)
def test_switches_exist(finding: str) -> None:
    text = HINTS[finding].slipstream or ""
    for key in re.findall(r"\b(?:train|data|model|parallel|optim|recompute)\.[a-z_.]+", text):
        place = RunConfig.model_json_schema()
        for part in key.rstrip(".").split("."):
            place = resolve(place)["properties"][part]
            place = next((one for one in place.get("anyOf", []) if "$ref" in one), place)


def resolve(place: dict) -> dict:
    if "$ref" not in place:
        return place
    return RunConfig.model_json_schema()["$defs"][place["$ref"].rsplit("/", 1)[-1]]
