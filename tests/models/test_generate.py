"""Sampling: what is refused, and temperatures at which a quotient would overflow."""

import copy
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli.sample import app
from slipstream.errors import ConfigError
from slipstream.models import ModelConfig, Transformer
from slipstream.models.generate import generate

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=37, num_layers=2, d_model=24, num_heads=2, d_ff=20, max_seq_len=16, init_std=0.5
    )
    return Transformer(config).eval()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("temperature", v) for v in (NAN, INF, -INF, -1.0, -1e-40)),
        *(("top_p", v) for v in (NAN, INF, -INF, 0.0, -0.5, 1.5)),
        *(("seed", v) for v in (-1, 2**63, 2**70)),
    ],
)
def test_a_wrong_option_is_named_with_what_is_allowed(
    option: str, value: float, model: Transformer, tmp_path: Path
) -> None:
    name = "--" + option.replace("_", "-")
    with pytest.raises(ConfigError, match=rf"^{name} {value}: give a "):
        generate(model, [1], 1, **{option: value})
    # The command line says so before it reads a model, of which there is none here.
    words = [str(tmp_path), f"{name}={value}"]
    with pytest.raises(ConfigError, match=rf"^{name} {value}: give a "):
        CliRunner().invoke(app, words, catch_exceptions=False)


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1e-45, 1e-40, 1e-38, 1e-20, 1e-6, 1e-5])
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_a_tiny_temperature_is_greedy(temperature: float, scale: float, model: Transformer) -> None:
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.head.weight.mul_(scale)
    wanted = generate(model, [3, 4], 20, temperature=0.0)
    assert generate(model, [3, 4], 20, temperature=temperature, top_p=1.0, seed=5) == wanted


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_ends_of_the_ranges_are_accepted(seed: int, model: Transformer) -> None:
    made = generate(model, [3], 5, temperature=1e30, top_p=1e-300, seed=seed)
    assert len(made) == 5
    assert generate(model, [3], 5, temperature=1.0, top_p=1.0, seed=seed) == generate(
        model, [3], 5, temperature=1.0, top_p=1.0, seed=seed
    )
