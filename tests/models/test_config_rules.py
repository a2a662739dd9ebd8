"""Configs that would divide by zero, turn nothing or hold no expert are refused by name."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from slipstream.models import ModelConfig
from slipstream.ops import rope_tables

MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "d_ff": 8}
PAIRS = {"long_factor": (1.0,) * 4, "short_factor": (1.0,) * 4}


def build(**values: Any) -> ModelConfig:
    return ModelConfig.model_validate({"d_model": 32, "num_heads": 4, "num_layers": 3, **values})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope": {"scaling": "yarn", "theta": 1.0}}, "theta = 1.0 must be above 1"),
        ({"rope": {"scaling": "yarn", "theta": 0.5}}, "theta = 0.5 must be above 1"),
        (
            {"rope": {"scaling": "longrope", "original_len": 1, **PAIRS}},
            "original_len = 1 must be above 1",
        ),
        (
            {"rope": {"scaling": "llama3", "low_freq_factor": 4.0}},
            "low_freq_factor = 4.0 must be below high_freq_factor = 4.0",
        ),
        (
            {"rope": {"scaling": "llama3", "high_freq_factor": 0.5}},
            "low_freq_factor = 1.0 must be below high_freq_factor = 0.5",
        ),
        ({"rope": {"scaling": "dynamic"}, "head_dim": 2}, "4 are needed with rope.scaling = dyn"),
        ({"rope": {"scaling": "dynamic", "fraction": 0.25}}, "rope.fraction = 0.25 turns 2 of"),
        ({"rope": {"fraction": 0.01}}, "rope.fraction = 0.01 turns 0 of the 8 features"),
        ({"rope": {"fraction": 0.2}}, "rope.fraction = 0.2 turns 1 of the 8 features"),
        ({"head_dim": 1}, "rope turns 1 features of a head"),
        ({"rope": {"attention_factor": 0.0}}, "rope.attention_factor"),
        ({"rope": {"attention_factor": -1.0}}, "rope.attention_factor"),
        ({"rope": {"attention_factor": float("nan")}}, "rope.attention_factor"),
        ({"rope": {"long_factor": (1.0, 0.0)}}, "rope.long_factor.1"),
        ({"rope": {"short_factor": (-1.0,)}}, "rope.short_factor.0"),
    ],
)
def test_a_rope_that_cannot_be_computed(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        build(**values)
    assert named in str(caught.value)


@pytest.mark.parametrize("scaling", ["none", "linear", "dynamic", "llama3", "yarn", "longrope"])
@pytest.mark.parametrize("theta", [1.001, 1e4, 1e30])
@pytest.mark.parametrize("original_len", [2, 8])
@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_what_is_accepted_has_finite_tables(
    scaling: str, theta: float, original_len: int, factor: float
) -> None:
    rope: dict[str, Any] = {"scaling": scaling, "theta": theta, "factor": factor}
    rope |= {"original_len": original_len, **(PAIRS if scaling == "longrope" else {})}
    for length in (1, 8, 33):
        for table in rope_tables(build(rope=rope).rope_spec(), length):
            assert table.shape == (length, 4)
            assert torch.isfinite(table).all()


@pytest.mark.parametrize("num_layers", [1, 2, 3, 5])
@pytest.mark.parametrize("first_dense", [0, 1, 2, 3, 5, 100])
@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_a_moe_model_has_a_moe_layer(num_layers: int, first_dense: int, every: int) -> None:
    moe = {**MOE, "first_dense": first_dense, "every": every}
    if first_dense < num_layers:
        config = build(num_layers=num_layers, moe=moe)
        assert any(config.is_moe(layer) for layer in range(num_layers))
        return
    with pytest.raises(ValidationError) as caught:
        build(num_layers=num_layers, moe=moe)
    message = f"moe.first_dense = {first_dense} leaves no MoE layer of num_layers = {num_layers}"
    assert message in str(caught.value)
