import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call

import slipstream
from slipstream.errors import ConfigError
from slipstream.integrations.hf_optimize import NAMES
from slipstream.ops import dispatch
from tests.budget import Results, assert_within, results
from tests.integrations.families import tokens
from tests.integrations.optimized import (
    FAMILIES,
    MOE,
    loss_and_gradients,
    model_of,
    parameters,
    switch,
)

# Of two layers.
NORMS = {"llama": 5, "qwen3": 9, "gemma": 5, "gemma2": 9, "gemma3_text": 13, "mixtral": 5}
NORMS |= {"qwen3_moe": 9, "olmoe": 9}


def evaluated(model: nn.Module, ids_BL: torch.Tensor, optimized: bool):
    """Logits and loss by parameters, of the model as it is or optimized."""

    def run(**given):
        switch(model.eval(), optimized)
        out = functional_call(model, given, (ids_BL,), {"labels": ids_BL, "use_cache": False})
        return out.logits, out.loss

    return run


def trained(model: nn.Module, ids_BL: torch.Tensor, optimized: bool):
    """The training loss of every sequence by parameters, some tokens ignored."""
    labels = ids_BL.clone()
    labels[:, :4] = -100

    def run(**given):
        switch(model.train(), optimized)
        losses = []
        for ids, label in zip(ids_BL.split(1), labels.split(1), strict=True):
            out = functional_call(model, given, (ids,), {"labels": label, "use_cache": False})
            assert (out.logits is None) == optimized
            losses.append(out.loss)
        return torch.stack(losses)

    return run


def assert_pooled_budget(ours, stock, inputs: Results, dtype: torch.dtype) -> None:
    """Hold what ``ours`` returns, and all gradients together, to the budget of ``stock``.

    Each gradient is scaled to the size of its truth; the error of a few numbers alone, after all
    the layers rounded, is luck.
    """
    inputs = {name: tensor.to(dtype) for name, tensor in inputs.items()}
    truth = results(stock, inputs, dtype, run_in=torch.float64)
    found = (results(ours, inputs, dtype), results(stock, inputs, dtype), truth)
    assert_within(*(_pooled(r, truth) for r in found), dtype)


def _pooled(found: Results, truth: Results) -> Results:
    names = [name for name in truth if name.startswith("gradient")]
    scaled = [(found[name] / truth[name].square().mean().sqrt()).flatten() for name in names]
    outputs = {name: found[name] for name in truth if not name.startswith("gradient")}
    return {**outputs, "gradients": torch.cat(scaled)}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_stay_in_the_budget_of_stock(family):
    model, ids_BL = model_of(family), tokens()
    runs = [evaluated(model, ids_BL, optimized) for optimized in (True, False)]
    assert_pooled_budget(*runs, parameters(model), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_loss_and_gradients_stay_in_the_budget_of_stock(family):
    model, ids_BL = model_of(family), tokens(8)
    runs = [trained(model, ids_BL, optimized) for optimized in (True, False)]
    assert_pooled_budget(*runs, parameters(model), torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_16_bit_models_stay_in_the_budget_of_stock(family):
    # One layer: past it, the rounding of either implementation may choose another expert.
    model, ids_BL = model_of(family, num_hidden_layers=1), tokens(8)
    runs = [trained(model, ids_BL, optimized) for optimized in (True, False)]
    assert_pooled_budget(*runs, parameters(model), torch.bfloat16)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_report_counts_every_replacement(family):
    report = slipstream.optimize(model_of(family))
    assert not report.kept
    assert not report.already
    expected = {"norm": NORMS[family], "attention": 2, "layer": 2, "loss": 1}
    block = {"moe": 2, "router": 2, "experts": 2} if family in MOE else {"mlp": 2}
    assert {row.kind: row.count for row in report.replaced} == expected | block
    assert f"{NORMS[family]} x " in str(report)


@pytest.mark.parametrize("family", MOE)
def test_routing_goes_to_the_experts_as_it_is(family):
    model = model_of(family).train()
    slipstream.optimize(model)
    dispatch.reset_counts()
    model(tokens(), labels=tokens(), use_cache=False)
    calls = {op: n for (op, _), n in dispatch.counts().items()}
    assert (calls["moe_mlp"], calls["moe_route"], calls["moe_router"]) == (2, 2, 2)
    assert "moe_sort" not in calls


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma2"])
def test_restore_puts_everything_back(family):
    model, ids_BL = model_of(family), tokens()
    before = [dict(vars(module)) for module in model.modules()]
    expected = model(ids_BL, labels=ids_BL)
    slipstream.optimize(model)
    slipstream.restore(model)
    found = model(ids_BL, labels=ids_BL)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.loss, expected.loss)
    assert [vars(module).keys() for module in model.modules()] == [b.keys() for b in before]


def test_state_and_names_stay():
    model = model_of("qwen3_moe")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name, _ in model.named_modules()]
    slipstream.optimize(model)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert [name for name, _ in model.named_modules()] == names


def test_optimizing_twice_changes_nothing():
    model = model_of("llama")
    first = slipstream.optimize(model)
    forwards = [vars(module).get("forward") for module in model.modules()]
    second = slipstream.optimize(model)
    assert second.already
    assert second.replaced == first.replaced
    assert [vars(module).get("forward") for module in model.modules()] == forwards
    assert "already optimized" in str(second)


def test_other_instances_stay_stock():
    model, other = model_of("llama"), model_of("llama")
    slipstream.optimize(model)
    assert not any("forward" in vars(module) for module in other.modules())


def test_a_copy_of_an_optimized_model_runs_on_its_own_weights():
    model, ids_BL = model_of("qwen3_moe"), tokens()
    slipstream.optimize(model.train())
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    slipstream.restore(model)
    loss = twin(ids_BL, labels=ids_BL, use_cache=False).loss
    loss.backward()
    assert loss.item() != pytest.approx(torch.tensor(48.0).log().item(), abs=1e-4)
    assert all(p.grad is None for p in model.parameters())


class _Scaled(nn.Module):
    """A norm that is none of ours, under a name that says norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


class MeanNorm(_Scaled):
    """Of another family."""


def test_what_is_not_recognised_is_listed_and_still_right():
    model, ids_BL = model_of("llama"), tokens()
    model.model.layers[0].input_layernorm = MeanNorm(model.model.layers[0].input_layernorm)
    expected = model(ids_BL).logits
    report = slipstream.optimize(model)
    (row,) = report.kept
    assert (row.module, row.count, row.first) == ("MeanNorm", 1, "model.layers.0.input_layernorm")
    assert "none of the norms" in row.reason
    assert row.first in str(report)
    torch.testing.assert_close(model(ids_BL).logits, expected)


MOE_LAYER = ("experts", "router", "moe")


@pytest.mark.parametrize("skip", [*((kind,) for kind in NAMES), MOE_LAYER, NAMES], ids="-".join)
@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_skipped_kinds_stay_and_the_rest_still_fits(family, skip):
    model, ids_BL = model_of(family), tokens()
    expected = loss_and_gradients(model, ids_BL)
    whole = {row.kind: row.count for row in slipstream.optimize(model).replaced}
    slipstream.restore(model)
    report = slipstream.optimize(model, skip=skip)
    left = {kind: count for kind, count in whole.items() if kind not in skip}
    assert {row.kind: row.count for row in report.replaced} == left
    assert all(row.reason == "skipped" for row in report.kept)
    assert sum(row.count for row in report.kept) == sum(whole.values()) - sum(left.values())
    assert str(report).count("skipped") == len(report.kept)
    assert (model(ids_BL, labels=ids_BL).logits is None) == ("loss" in left)
    for actual, wanted in zip(loss_and_gradients(model, ids_BL), expected, strict=True):
        torch.testing.assert_close(actual, wanted)


@pytest.mark.parametrize(
    ("skip", "reason"),
    [
        (("moe", "exprts"), "skip has no kind 'exprts'; there are norm, mlp, experts, router, moe"),
        ("moe", "skip='moe' is a str, expected a tuple of kinds"),
        (None, "skip=None is a NoneType, expected a tuple of kinds"),
        ([["moe"]], r"skip has no kind \['moe'\]"),
    ],
    ids=["misspelt", "str", "none", "nested"],
)
def test_kinds_that_cannot_be_skipped_are_refused(skip, reason):
    model = model_of("qwen3_moe")
    with pytest.raises(ConfigError, match=reason):
        slipstream.optimize(model, skip=skip)
    assert not any("forward" in vars(module) for module in model.modules())


def test_what_is_replaced_already_cannot_be_skipped():
    model = model_of("qwen3_moe")
    slipstream.optimize(model, skip=(kind for kind in ("moe",)))
    assert slipstream.optimize(model, skip=["moe"]).count("moe") == 0
    with pytest.raises(ConfigError, match=r"skip names norm, which .* slipstream\.restore"):
        slipstream.optimize(model, skip=["norm", "moe"])


@pytest.mark.parametrize(
    ("norm", "replaced"),
    [
        (nn.LayerNorm(32), 5),
        (nn.LayerNorm(32, bias=False), 5),
        (nn.RMSNorm(32, eps=1e-5), 5),
        (nn.RMSNorm(32), 4),  # an epsilon that depends on the dtype
        (nn.LayerNorm(32, elementwise_affine=False), 4),
    ],
    ids=str,
)
def test_norms_of_pytorch(norm, replaced):
    model, ids_BL = model_of("llama"), tokens()
    model.model.norm = copy.deepcopy(norm)
    expected = model(ids_BL).logits
    assert slipstream.optimize(model).count("norm") == replaced
    torch.testing.assert_close(model(ids_BL).logits, expected)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("cohere", {"logit_scale": 0.25}, "its forward does more than lm_head"),
        ("phimoe", {"lm_head_bias": True, "num_local_experts": 8}, "lm_head has a bias"),
        ("granite", {"logits_scaling": 2.0}, "its forward does more than lm_head"),
        ("granite", {"residual_multiplier": 0.5}, "put together in another way"),
        ("mixtral", {"router_jitter_noise": 0.1}, "more than the experts its router chooses"),
        ("qwen2_moe", {}, "more than the experts its router chooses"),
        ("deepseek_v3", {}, "in a way ops.moe.route does not read from it"),
        ("phi3", {}, "arranged in another way"),
    ],
)
def test_families_that_compute_more_keep_that_part(family, changes, reason):
    model, ids_BL = model_of(family, **changes), tokens()
    expected = model(ids_BL, labels=ids_BL)
    report = slipstream.optimize(model)
    assert any(reason in row.reason for row in report.kept)
    found = model(ids_BL, labels=ids_BL)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_what_is_no_hugging_face_model_is_refused():
    with pytest.raises(ConfigError, match=r"Linear without a transformers\.PreTrainedModel"):
        slipstream.optimize(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="model is a str"):
        slipstream.optimize("gpt2")


def test_a_compiled_model_is_refused():
    model = model_of("llama")
    model.model.layers[1].compile(backend="eager")
    with pytest.raises(ConfigError, match=r"model\.layers\.1 is compiled already"):
        slipstream.optimize(model)
    with pytest.raises(ConfigError, match="compiled already"):
        slipstream.optimize(torch.compile(model_of("llama"), backend="eager"))
