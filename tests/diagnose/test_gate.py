"""Limits for CI."""

import pytest

from slipstream.diagnose.gate import gate
from slipstream.errors import ConfigError

SUMMARY = {"exposed_communication_pct": 18.92, "busy_pct": 79.7, "overlap_pct": None, "idle_ms": 0}


@pytest.mark.parametrize(
    ("rule", "fails"),
    [
        ("exposed_communication_pct=20", False),
        ("exposed_communication_pct=18.92", False),
        ("exposed_communication_pct = 18", True),
        ("busy_pct=80", True),
        ("busy_pct=79", False),
        ("overlap_pct=99", False),
        ("idle_ms=0", False),
    ],
)
def test_rule(rule: str, fails: bool) -> None:
    assert bool(gate(SUMMARY, [rule])) is fails


def test_message() -> None:
    (failure,) = gate(SUMMARY, ["busy_pct=80"])
    assert str(failure) == "busy_pct = 79.70 is below the limit 80"
    (failure,) = gate(SUMMARY, ["exposed_communication_pct=5"])
    assert str(failure) == "exposed_communication_pct = 18.92 is above the limit 5"


def test_all_rules_are_looked_at() -> None:
    rules = ["busy_pct=80", "idle_ms=1", "exposed_communication_pct=5"]
    assert [one.name for one in gate(SUMMARY, rules)] == ["busy_pct", "exposed_communication_pct"]


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("exposed_comunication_pct=20", "did you mean exposed_communication_pct?"),
        ("x=1", "there are exposed_communication_pct, busy_pct, overlap_pct, idle_ms"),
        ("busy_pct", "is not name=limit"),
        ("busy_pct=", "is not name=limit"),
        ("=3", "is not name=limit"),
        ("busy_pct=high", "the limit is not a number"),
        ("busy_pct=nan", "the limit is not a number"),
        ("busy_pct=inf", "the limit is not a number"),
    ],
)
def test_mistakes(rule: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^--fail-on") as error:
        gate(SUMMARY, [rule])
    assert message in str(error.value)
