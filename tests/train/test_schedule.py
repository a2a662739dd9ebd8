"""Learning rates as written in the recipe."""

from itertools import pairwise

import pytest

from slipstream.train.config import OptimConfig
from slipstream.train.schedule import learning_rate


def rates(steps: int, **values: object) -> list[float]:
    config = OptimConfig(lr=1.0, **values)
    return [learning_rate(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_warmup_is_linear_and_ends_at_the_peak(schedule: str) -> None:
    found = rates(100, schedule=schedule, warmup_steps=10)
    assert found[:10] == pytest.approx([(i + 1) / 10 for i in range(10)])
    assert max(found) == 1.0


def test_cosine_ends_at_the_floor_and_is_half_way_in_the_middle() -> None:
    found = rates(110, schedule="cosine", warmup_steps=10, min_lr_ratio=0.1)
    assert found[-1] == pytest.approx(0.1)
    assert found[59] == pytest.approx(0.55)
    assert all(a > b for a, b in pairwise(found[10:]))


def test_wsd_is_flat_then_falls_in_a_line_to_the_floor() -> None:
    found = rates(100, schedule="wsd", warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.0)
    assert found[10:80] == [1.0] * 70
    assert found[89] == pytest.approx(0.5)
    assert found[-1] == 0.0


def test_constant_stays() -> None:
    assert rates(20, schedule="constant", warmup_steps=0) == [1.0] * 20


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
def test_a_run_shorter_than_its_warmup_only_warms_up(schedule: str) -> None:
    assert rates(4, schedule=schedule, warmup_steps=100) == pytest.approx([0.25, 0.5, 0.75, 1.0])
