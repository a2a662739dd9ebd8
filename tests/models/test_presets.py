"""Presets have the published sizes, and the parameters of the class in transformers exactly."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.errors import ConfigError
from slipstream.models import ModelConfig, size
from slipstream.models.hf import FAMILIES, family_of
from slipstream.models.hf.weights import weight_map
from slipstream.models.presets import PRESETS, preset

PUBLISHED = {
    "llama3-8b": (8.03, 8.03),
    "llama3.2-1b": (1.24, 1.24),
    "qwen3-0.6b": (0.596, 0.596),
    "qwen3-8b": (8.19, 8.19),
    "qwen3-30b-a3b": (30.5, 3.35),
    "mixtral-8x7b": (46.7, 12.9),
    "olmoe-1b-7b": (6.92, 1.28),
    "deepseek-moe-16b": (16.4, 2.83),
}
"""Billions, total and active, both embeddings counted, as the model cards and papers do."""
IN_TRANSFORMERS = [name for name in PRESETS if name != "deepseek-moe-16b"]


def test_every_preset_is_checked() -> None:
    assert PUBLISHED.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", PRESETS)
def test_published_parameter_counts(name: str) -> None:
    config = ModelConfig.model_validate(preset(name))
    counted = size(config)
    look_up = 0 if config.tie_embeddings else config.vocab_size * config.d_model
    total, active = PUBLISHED[name]
    assert counted.total / 1e9 == pytest.approx(total, rel=4e-3)
    assert (counted.active + look_up) / 1e9 == pytest.approx(active, rel=4e-3)


@pytest.mark.parametrize("name", IN_TRANSFORMERS)
def test_parameters_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = ModelConfig.model_validate(preset(name))
    family = FAMILIES[family_of(config)]
    values = {"model_type": family.name, "pad_token_id": None, **family.write(config)}
    (tmp_path / "config.json").write_text(json.dumps(values))
    hf_config = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config)
    expected = {parameter: tuple(p.shape) for parameter, p in model.named_parameters()}
    assert sum(torch.Size(shape).numel() for shape in expected.values()) == size(config).total
    stacked = weight_map(config, family.moe.names if family.moe else None)
    ours = {}
    for weight in stacked:
        layout = next(la for la in weight.layouts if all(piece.name in expected for piece in la))
        ours |= {piece.name: piece.shape for piece in layout}
    assert ours == expected


def test_a_preset_is_a_copy() -> None:
    values = preset("olmoe-1b-7b")
    values["moe"]["top_k"] = 1
    assert preset("olmoe-1b-7b")["moe"]["top_k"] == 8


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean llama3-8b\?"):
        preset("llama-8b")
    with pytest.raises(ConfigError, match="presets are llama3-8b, "):
        preset("xyz")
