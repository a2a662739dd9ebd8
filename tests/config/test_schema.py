"""The schema of recipes is JSON that every parser reads."""

import json

import pytest
from typer.testing import CliRunner

from slipstream.cli.config import app


def test_the_schema_holds_no_infinity_and_loses_nothing_else() -> None:
    text = CliRunner().invoke(app, ["schema"], catch_exceptions=False).output
    schema = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    balance = schema["$defs"]["BalanceConfig"]["properties"]
    assert "default" not in balance["threshold"]
    assert balance["threshold"]["minimum"] == 1.0
    assert balance["window"]["default"] == 32
    clip = schema["$defs"]["OptimConfig"]["properties"]["clip"]
    assert (clip["default"], clip["exclusiveMinimum"]) == (1.0, 0.0)


def test_whole_numbers_are_written_alike_by_every_release_of_pydantic() -> None:
    text = CliRunner().invoke(app, ["schema"], catch_exceptions=False).output
    numbers: list[str] = []
    json.loads(text, parse_float=lambda number: numbers.append(number) or float(number))
    assert len(numbers) > 5
    assert not [number for number in numbers if float(number).is_integer()]
