"""Loss curves of two arms, judged by the spread of seeds."""

import json

import pytest
import torch

from slipstream.bench import step_curve
from slipstream.bench.ops_case import Missing
from slipstream.bench.step_arms import Arm, Setting
from slipstream.bench.step_curve import CurveRequest, agreement, bench_curve, windows
from slipstream.bench.step_model import step_model
from slipstream.errors import ConfigError

CPU = torch.device("cpu")
TINY = step_model("tiny", layers=1, batch=2, seq_len=16)


def request(arms: str, steps: int = 20, seeds: int = 3) -> CurveRequest:
    return CurveRequest(
        model=TINY, arms=arms.split(","), device=CPU, steps=steps, seeds=seeds, lr=1e-2
    )


def test_windows_are_means_of_equal_parts() -> None:
    assert windows([1.0, 3.0, 5.0, 7.0, 100.0], 2) == [2.0, 6.0]


def test_an_arm_may_differ_by_as_much_as_seeds_do_and_no_more() -> None:
    stock = [[4.0] * 10 + [2.0] * 10, [4.0] * 10 + [2.5] * 10]
    near = [[4.0] * 10 + [2.25] * 10, [4.0] * 10 + [2.5] * 10]
    found = agreement(near, stock)
    assert found.spread == [0.0] * 5 + [0.5] * 5
    assert found.difference == [0.0] * 5 + [0.125] * 5
    assert found.paired == [0.0] * 5 + [0.25] * 5
    assert found.within
    far = [stock[0], [4.0] * 10 + [3.75] * 10]
    assert agreement(far, stock).difference[-1] == 0.625
    assert not agreement(far, stock).within
    # In the first windows seeds agree exactly here, and so must the arm.
    assert not agreement([[4.01] * 20, stock[1]], stock).within


def test_seeds_that_drift_both_ways_are_noise_and_a_shift_of_all_is_not() -> None:
    stock = [[2.0] * 10, [2.5] * 10, [3.0] * 10]
    swapped = [stock[2], stock[1], stock[0]]
    found = agreement(swapped, stock)
    assert found.paired == [1.0] * 10
    assert found.difference == [0.0] * 10
    assert found.within
    assert not agreement([[x + 1.01 for x in curve] for curve in stock], stock).within


def test_nan_is_never_within() -> None:
    stock = [[4.0] * 20, [5.0] * 20]
    assert not agreement([[float("nan")] * 20, [5.0] * 20], stock).within
    # Nor is anything beside a stock arm that diverged.
    assert not agreement(stock, [[4.0] * 20, [float("inf")] * 20]).within


def test_the_optimized_arm_trains_like_the_stock_one() -> None:
    with torch.compiler.set_stance("force_eager"):
        stock, ours = bench_curve(request("stock,slipstream-cache"), lambda text: None)
    json.dumps([stock, ours])
    assert stock["status"] == ours["status"] == "ok"
    assert len(stock["windows"]) == 3
    assert len(stock["windows"][0]) == 10
    assert stock["last_loss"][0] == pytest.approx(stock["windows"][0][-1], abs=1e-5)
    # It learns, so that there is something to agree on.
    assert all(curve[-1] < curve[0] - 0.1 for curve in stock["windows"])
    assert "within" not in stock
    assert ours["compared_to"] == "stock"
    assert ours["within"] is all(
        d <= s for d, s in zip(ours["difference"], ours["spread"], strict=True)
    )
    assert max(ours["difference"]) < 0.1


def test_an_arm_that_trains_otherwise_is_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    real = step_curve.make_arm

    def make(name: str, setting: Setting) -> Arm:
        if name == "stock-liger":
            raise Missing("it is not here")
        arm = real("stock", setting)
        if name == "slipstream":
            arm.optimizer.param_groups[0]["lr"] = 0.0
        return arm

    monkeypatch.setattr(step_curve, "make_arm", make)
    with torch.compiler.set_stance("force_eager"):
        rows = list(bench_curve(request("stock,slipstream,stock-liger"), lambda text: None))
    assert [row["status"] for row in rows] == ["ok", "ok", "absent"]
    assert rows[1]["within"] is False
    assert rows[2]["reason"] == "it is not here"


def test_what_cannot_be_judged_is_refused() -> None:
    with pytest.raises(ConfigError, match="--seeds 1: expected at least 2"):
        list(bench_curve(request("stock", seeds=1), print))
    with pytest.raises(ConfigError, match="--curve 5: expected at least 10"):
        list(bench_curve(request("stock", steps=5), print))
