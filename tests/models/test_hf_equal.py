"""Imported models compute what transformers computes, exported ones load there, bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream.models.folder import load_model_folder
from slipstream.models.hf import export_folder, import_folder
from tests.models.hf_models import CASES, EAGER, in_our_names, relative_error, save, tokens

TOLERANCE = 1e-5


@pytest.mark.parametrize("case", CASES)
def test_import_has_the_logits_and_gradients_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = save(case, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    ours = load_model_folder(tmp_path / "ours").eval()
    batch, generator = tokens(), torch.Generator().manual_seed(3)
    upstream = torch.randn(*batch.shape, ours.config.vocab_size, generator=generator)

    expected, actual = theirs(batch).logits, ours(batch).logits
    assert relative_error(actual, expected) < TOLERANCE
    expected.backward(upstream)
    actual.backward(upstream)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    mapped = dict(in_our_names(ours, theirs.config.model_type, wanted))
    parameters = dict(ours.named_parameters())
    assert mapped.keys() == parameters.keys()
    for name, gradient in mapped.items():
        assert relative_error(parameters[name].grad, gradient) < TOLERANCE, name


@pytest.mark.parametrize("case", CASES)
def test_export_loads_in_transformers_and_is_bitwise_what_was_imported(
    case: str, tmp_path: Path
) -> None:
    theirs = save(case, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    ours = load_model_folder(tmp_path / "ours")
    name = export_folder(ours, tmp_path / "out")
    assert name == theirs.config.model_type

    before = load_file(tmp_path / "hf" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True, **EAGER
    )
    assert not any(info.values()), info
    with torch.no_grad():
        assert torch.equal(loaded(tokens()).logits, theirs(tokens()).logits)
    again = import_folder(tmp_path / "out", tmp_path / "again")
    assert again == ours.config


@pytest.mark.parametrize("case", ["llama", "qwen3", "mixtral", "qwen3_moe", "olmoe"])
def test_bf16_travels_both_ways(case: str, tmp_path: Path) -> None:
    theirs = save(case, tmp_path / "hf", torch.bfloat16)
    import_folder(tmp_path / "hf", tmp_path / "ours")
    ours = load_model_folder(tmp_path / "ours")
    assert {p.dtype for p in ours.parameters()} == {torch.bfloat16}
    export_folder(ours, tmp_path / "out", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **EAGER)
    assert loaded.dtype == torch.bfloat16
    for (name, before), after in zip(theirs.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(before, after), name
    with torch.no_grad():
        ours_log, theirs_log = (
            F.log_softmax(logits.double(), -1)
            for logits in (ours.eval()(tokens()).logits, theirs(tokens()).logits)
        )
    # bf16 keeps 8 bits: both round at every layer, at other places (the router is fp32 here).
    assert (ours_log - theirs_log).abs().median() < 0.05


def test_export_casts_to_the_dtype_asked_for(tmp_path: Path) -> None:
    save("llama", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    export_folder(load_model_folder(tmp_path / "ours"), tmp_path / "out", dtype=torch.bfloat16)
    before = load_file(tmp_path / "hf" / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(before[key].bfloat16(), after[key]) for key in before)


def test_training_state_of_experts_stays_home(tmp_path: Path) -> None:
    save("mixtral", tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "ours")
    model = load_model_folder(tmp_path / "ours").train()
    model(tokens())
    for moe in model.moe_layers().values():
        moe.end_step()
        assert moe.steps.item() == 1
        assert moe.smoothed_E.sum().item() > 0
    export_folder(model, tmp_path / "out")
    keys = load_file(tmp_path / "out" / "model.safetensors").keys()
    assert not [key for key in keys if "smoothed" in key or "steps" in key]
