"""Numbers that are none, and numbers too large: every field of a run is covered."""

from typing import Any, get_args

import pytest

from slipstream.config import load
from slipstream.config.load import keys_of
from slipstream.errors import ConfigError
from slipstream.train.config import RunConfig

MAY_BE_INFINITE = {"optim.clip", "model.moe.balance.threshold"}
EXPERTS = ["model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.d_ff=8"]


def holds(annotation: Any, kind: type) -> bool:
    return annotation is kind or any(holds(part, kind) for part in get_args(annotation))


KEYS = keys_of(RunConfig)
FLOATS = [key for key, annotation in KEYS.items() if holds(annotation, float)]


def test_the_float_fields_are_found() -> None:
    assert {"optim.lr", "model.rope.attention_factor", "model.rope.long_factor"} < set(FLOATS)
    assert set(FLOATS) > MAY_BE_INFINITE
    assert len(FLOATS) > 30


@pytest.mark.parametrize("bad", ["nan", "-nan", "inf", "-inf", "1e999", '"nan"'])
@pytest.mark.parametrize("key", FLOATS)
def test_a_float_is_finite(key: str, bad: str) -> None:
    text = f"[{bad}]" if holds(KEYS[key], tuple) or "tuple" in str(KEYS[key]) else bad
    given = [*EXPERTS, f"{key}={text}"]
    if key in MAY_BE_INFINITE and bad in ("inf", "1e999"):
        value: Any = load(RunConfig, None, given)
        for name in key.split("."):
            value = getattr(value, name)
        assert value == float("inf")
        return
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        load(RunConfig, None, given)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, 10**30])
def test_a_seed_that_no_generator_takes(seed: int) -> None:
    with pytest.raises(ConfigError, match=rf"override: train\.seed = {seed}: must be "):
        load(RunConfig, None, [f"train.seed={seed}"])


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_ends_of_the_range_of_seeds(seed: int) -> None:
    assert load(RunConfig, None, [f"train.seed={seed}"]).train.seed == seed
