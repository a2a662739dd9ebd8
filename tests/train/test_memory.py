"""Recompute in a run: training to the bit the same, plans shown, refusals before writing."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import recompute
from slipstream.errors import ConfigError
from slipstream.recompute import Plan
from slipstream.train.config import RunConfig
from slipstream.train.memory import announcement, deviation, plan_memory
from slipstream.train.metrics import read_metrics
from slipstream.train.setup import initial_model
from tests.train.runs import arguments, records, slipstream


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))


def test_every_mode_trains_the_same(corpus: Path, tmp_path: Path) -> None:
    found = {}
    for mode in ("none", "selective", "full", "auto"):
        run = tmp_path / mode
        extra = [f"recompute.mode={mode}", "train.steps=3", "train.micro_batch=4"]
        extra += ["recompute.budget_gib=64"] if mode == "auto" else []
        done = slipstream(*arguments("moe", corpus, run, *extra))
        assert done.returncode == 0, done.stderr
        found[mode] = records(run)
        if mode == "auto":
            assert re.search(r"predicted peak \d+\.\d\d GiB of 64, for 0\.00 ms", done.stdout)
            steps = [r for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
            assert all(r["time"]["predicted_gib"] > 0 for r in steps)
        elif mode == "full":
            assert re.search(r"recompute: \d+ x full", done.stdout)
    assert found["none"] == found["selective"] == found["full"] == found["auto"]


def test_a_budget_that_cannot_be_met_is_refused_before_writing(
    corpus: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    extra = ("recompute.mode=auto", "recompute.budget_gib=0.0001")
    done = slipstream(*arguments("dense", corpus, run, *extra))
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert re.search(r"recompute\.budget_gib = 0\.0001, the least .* can do with is 0\.\d+", line)
    assert not run.exists()


class Second:
    """Rank 1 of two; rank 0 said ``answer``."""

    is_first, world, device = False, 2, torch.device("cpu")

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def from_first(self, value: Any) -> Any:
        assert value is None  # this rank measured nothing
        return self.answer


def test_ranks_take_the_plan_of_the_first(dense_config: RunConfig) -> None:
    config = dense_config.model_copy(
        update={"recompute": recompute.RecomputeConfig(mode="auto", budget_gib=1.0)}
    )
    model = initial_model(config, torch.device("cpu"))
    given = recompute.fixed(model, "full")
    assert plan_memory(config, model, Second(given)) is given
    assert {layer.attention.recompute for layer in model.layers} == {"full"}
    with pytest.raises(ConfigError, match="no room"):
        plan_memory(config, model, Second(ConfigError("no room")))


def test_a_peak_that_is_not_the_predicted_one_is_reported() -> None:
    plan = Plan(actions={}, predicted_gib=40.0, budget_gib=41.0)
    gpu = torch.device("cuda")
    assert deviation(plan, 41.6, gpu) == (
        "recompute: measured peak 41.60 GiB, predicted 40.00 (+4.0%)"
    )
    line = deviation(plan, 43.0, gpu)
    assert line is not None
    assert line.startswith("WARNING: recompute: measured peak 43.00 GiB, predicted 40.00 (+7.5%)")
    assert deviation(plan, 43.0, torch.device("cpu")) is None
    assert deviation(None, 43.0, gpu) is None
    assert deviation(Plan(actions={}), 43.0, gpu) is None


def test_fixed_plans_are_counted() -> None:
    plan = Plan(actions={"a": "full", "b": "keep", "c": "full", "d": "norm"})
    assert announcement(plan) == ["recompute: 2 x full, 1 x norm"]
