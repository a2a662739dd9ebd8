"""Model folders: what is saved comes back, and what does not match is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import CheckpointError, ConfigError
from slipstream.models import ModelConfig, Transformer
from slipstream.models.folder import (
    is_model_folder,
    load_model_folder,
    read_model_config,
    save_model_folder,
)
from slipstream.models.tensor_file import Entry, write_tensors

MOE = {"num_experts": 4, "top_k": 2, "d_ff": 8, "shared_d_ff": 8, "expert_bias": True}
CONFIG = ModelConfig.model_validate(
    {"vocab_size": 31, "num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 24, "moe": MOE}
)


@pytest.fixture
def model() -> Transformer:
    model = Transformer(CONFIG).train()
    model(torch.arange(20).view(2, 10))
    for moe in model.moe_layers().values():
        moe.end_step()
    return model


def test_a_model_comes_back_with_its_balancing_state(model: Transformer, tmp_path: Path) -> None:
    save_model_folder(model, CONFIG, tmp_path / "m", '{"model": {}}')
    assert is_model_folder(tmp_path / "m")
    assert read_model_config(tmp_path / "m") == CONFIG
    assert (tmp_path / "m" / "tokenizer.json").read_text() == '{"model": {}}'
    again = load_model_folder(tmp_path / "m")
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert again.layers[0].moe.steps.item() == 1
    # A loaded model can go on training: counters exist, and start at zero.
    assert not any(buffer.is_meta for buffer in again.buffers())
    assert again.layers[0].moe.load_E.tolist() == [0.0] * 4
    loss = again.train()(torch.arange(20).view(2, 10), torch.ones(2, 10, dtype=torch.int64)).loss
    loss.objective.backward()
    assert all(parameter.grad is not None for parameter in again.parameters())


def test_weights_are_copies_of_the_file(model: Transformer, tmp_path: Path) -> None:
    save_model_folder(model, CONFIG, tmp_path / "m")
    loaded = load_model_folder(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(loaded.embed.weight, model.embed.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype, model: Transformer, tmp_path: Path) -> None:
    state = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    save_model_folder(state, CONFIG, tmp_path / "m")
    loaded = load_model_folder(tmp_path / "m")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    # Balancing state counts steps and stays fp32.
    assert loaded.layers[0].moe.steps.dtype == torch.float32
    wide = load_model_folder(tmp_path / "m", dtype=torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}
    assert torch.equal(wide.embed.weight, model.embed.weight.to(dtype).float())


def test_mixed_dtypes_in_one_file_are_read_by_the_library(
    model: Transformer, tmp_path: Path
) -> None:
    state = dict(model.state_dict())
    for index, name in enumerate(state):
        if index % 2:
            state[name] = state[name].to(torch.bfloat16)
    state["norm.weight"] = state["norm.weight"].double()
    save_model_folder(state, CONFIG, tmp_path / "m")
    stored = load_file(tmp_path / "m" / "model.safetensors")
    assert {name: t.dtype for name, t in stored.items()} == {n: t.dtype for n, t in state.items()}
    assert all(torch.equal(state[name], stored[name]) for name in state)


def test_every_tensor_starts_at_a_multiple_of_its_item_size(tmp_path: Path) -> None:
    values = [torch.arange(3).to(torch.bfloat16), torch.ones(5), torch.ones(()).double()]
    entries = [
        Entry(name=str(i), shape=tuple(t.shape), dtype=t.dtype, pieces=lambda t=t: (t,))
        for i, t in enumerate(values)
    ]
    write_tensors(tmp_path / "x", entries)
    raw = (tmp_path / "x").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert (8 + length) % 8 == 0
    for name, tensor in enumerate(values):
        assert header[str(name)]["data_offsets"][0] % tensor.itemsize == 0
    stored = load_file(tmp_path / "x")
    assert all(torch.equal(tensor, stored[str(name)]) for name, tensor in enumerate(values))


def test_non_contiguous_and_transposed_tensors_are_saved_by_value(tmp_path: Path) -> None:
    state = dict(Transformer(CONFIG).state_dict())
    state["embed.weight"] = state["embed.weight"].t().contiguous().t()
    assert not state["embed.weight"].is_contiguous()
    save_model_folder(state, CONFIG, tmp_path / "m")
    assert torch.equal(load_model_folder(tmp_path / "m").embed.weight, state["embed.weight"])


@pytest.mark.parametrize("damage", ["missing", "extra", "shape", "other config"])
def test_tensors_that_do_not_match_are_named(damage: str, tmp_path: Path) -> None:
    save_model_folder(Transformer(CONFIG), CONFIG, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    if damage == "missing":
        del tensors["layers.1.moe.router"]
        named = "layers.1.moe.router is missing"
    elif damage == "extra":
        tensors["layers.9.moe.router"] = torch.ones(2)
        named = "layers.9.moe.router is not part of the model"
    elif damage == "shape":
        tensors["norm.weight"] = torch.ones(3)
        named = "norm.weight is [3], expected [16]"
    else:
        toml = tmp_path / "m" / "config.toml"
        toml.write_text(toml.read_text().replace("num_layers = 2", "num_layers = 3"))
        named = "layers.2.attention.wo.weight is missing"
    save_file(tensors, path)
    with pytest.raises(CheckpointError) as caught:
        load_model_folder(tmp_path / "m")
    assert named in str(caught.value)


def test_saving_checks_the_tensors_against_the_config(tmp_path: Path) -> None:
    state: dict[str, Any] = dict(Transformer(CONFIG).state_dict())
    del state["norm.weight"]
    with pytest.raises(CheckpointError, match=r"norm\.weight is missing"):
        save_model_folder(state, CONFIG, tmp_path / "m")
    state["norm.weight"] = torch.ones(16, dtype=torch.int64)
    with pytest.raises(CheckpointError, match=r"norm\.weight: dtype torch\.int64"):
        save_model_folder(state, CONFIG, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "error", "named"),
    [
        (None, CheckpointError, "config.toml: no such file"),
        ("[model", ConfigError, "not valid TOML"),
        ("[data]", ConfigError, "no [model] table"),
        ("[model]\nd_mdel = 3", ConfigError, "d_mdel"),
        ("[model]\nd_model = 'x'", ConfigError, "d_model"),
    ],
)
def test_config_errors(
    content: str | None, error: type[Exception], named: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "config.toml").write_text(content)
    with pytest.raises(error) as caught:
        load_model_folder(tmp_path)
    assert named in str(caught.value)


def test_what_is_a_model_folder(tmp_path: Path) -> None:
    assert not is_model_folder(tmp_path / "nowhere")
    (tmp_path / "config.toml").write_text("[model]")
    assert not is_model_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors"):
        load_model_folder(tmp_path)
