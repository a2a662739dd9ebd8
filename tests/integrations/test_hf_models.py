import pytest
import torch
from torch.func import functional_call
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

import slipstream.integrations.hf  # noqa: F401
from slipstream.ops import dispatch
from tests.budget import Results, assert_budget, assert_within, results
from tests.integrations.families import MODELS, tiny_model, tokens


def _logits(model: torch.nn.Module, implementation: str, ids_BL: torch.Tensor):
    def run(**parameters):
        model.set_experts_implementation(implementation)
        return functional_call(model, parameters, (ids_BL,), {"use_cache": False}).logits

    return run


def _parameters(model: torch.nn.Module) -> Results:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _served() -> int:
    return sum(calls for (op, _), calls in dispatch.counts().items() if op == "moe_mlp")


@pytest.mark.parametrize("family", MODELS)
def test_logits_and_every_gradient_stay_in_the_budget_of_eager(family):
    model, ids_BL = tiny_model(family), tokens()
    dispatch.reset_counts()
    assert_budget(
        _logits(model, "slipstream", ids_BL),
        _logits(model, "eager", ids_BL),
        _parameters(model),
        torch.float32,
    )
    assert _served() == 2


def _pooled(found: Results, truth: Results) -> Results:
    """The logits, and all gradients as one vector, each scaled to the size of its truth."""
    names = [name for name in truth if name.startswith("gradient")]
    scaled = [(found[name] / truth[name].square().mean().sqrt()).flatten() for name in names]
    return {"output 0": found["output 0"], "gradients": torch.cat(scaled)}


@pytest.mark.parametrize("family", MODELS)
def test_16_bit_models_stay_in_the_budget_of_eager(family):
    # One layer: past it, the rounding of either implementation may choose another expert. Pooled:
    # the error of a few numbers, after all the other layers rounded, is luck.
    model, ids_BL = tiny_model(family, num_hidden_layers=1), tokens()
    inputs = {name: tensor.bfloat16() for name, tensor in _parameters(model).items()}
    runs = [_logits(model, name, ids_BL) for name in ("slipstream", "eager")]
    found, stock = (results(run, inputs, torch.bfloat16) for run in runs)
    truth = results(runs[1], inputs, torch.bfloat16, run_in=torch.float64)
    assert_within(*(_pooled(r, truth) for r in (found, stock, truth)), torch.bfloat16)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_gradient_checkpointing_changes_nothing(family):
    model, ids_BL = tiny_model(family).train(), tokens()
    model.set_experts_implementation("slipstream")
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.zero_grad()
        model(ids_BL, labels=ids_BL, use_cache=False).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_compiled_model_has_the_same_loss_and_gradients(family):
    model, ids_BL = tiny_model(family), tokens()
    model.set_experts_implementation("slipstream")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    found = []
    for run in (model, compiled):
        model.zero_grad()
        loss = run(ids_BL, labels=ids_BL, use_cache=False).loss
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_saved_and_loaded_models_keep_their_logits(family, tmp_path):
    model, ids_BL = tiny_model(family), tokens()
    model.set_experts_implementation("slipstream")
    expected = model(ids_BL).logits
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="slipstream")
    dispatch.reset_counts()
    assert torch.equal(loaded(ids_BL).logits, expected)
    assert _served() == 2


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe"])
def test_generates_what_eager_generates(family):
    model, ids_BL = tiny_model(family), tokens(2, 6)
    texts = []
    for implementation in ("eager", "slipstream"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(ids_BL, max_new_tokens=12, do_sample=False))
    assert texts[0].shape[1] > 6
    assert torch.equal(*texts)
