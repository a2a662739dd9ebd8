import importlib
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.testing import assert_close
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

import slipstream.integrations.hf as integration
from slipstream.errors import ConfigError, DependencyError, ShapeError
from slipstream.ops import dispatch
from tests.budget import Results, assert_within, results
from tests.integrations.families import D, E, K, experts_classes, tiny_experts
from tests.ops.compiling import assert_compiles

CLASSES = experts_classes()
# Gates with a clamp or a cap that is none of ours, and a norm after the experts.
STEPWISE = {
    "DeepseekV4Experts",
    "Glm5NextTextExperts",
    "HYV4Experts",
    "HYV4VLExperts",
    "Inkling2Experts",
    "Inkling2LoopExperts",
    "MuseSparkExperts",
}
COUNTED = ("moe_mlp", "grouped_gemm")
LAYOUTS = [
    name
    for name in (
        "MixtralExperts",
        "AriaExperts",
        "GptOssExperts",
        "NemotronHExperts",
        "MuseSparkExperts",
    )
    if name in CLASSES  # the last releases of transformers 5 have all
]

pytestmark = pytest.mark.filterwarnings("ignore:.*two grouped products:RuntimeWarning")


def _inputs(module: nn.Module, tokens: int = 33) -> Results:
    inputs = {"hidden": torch.randn(tokens, D), "weight": torch.rand(tokens, K)}
    return inputs | {name: p.detach() for name, p in module.named_parameters()}


def _index(tokens: int = 33, experts: int = E) -> torch.Tensor:
    return torch.rand(tokens, experts).topk(K, dim=1)[1]


def _with(module: nn.Module, implementation: str, index_TK: torch.Tensor):
    def run(hidden, weight, **parameters):
        module.config._experts_implementation = implementation
        return functional_call(module, parameters, (hidden, index_TK, weight))

    return run


def _cast(inputs: Results, dtype: torch.dtype) -> Results:
    return {name: tensor.to(dtype) for name, tensor in inputs.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_every_family_stays_in_the_budget_of_stock_experts(name, dtype):
    module, index_TK = tiny_experts(CLASSES[name]), _index()
    inputs = _cast(_inputs(module), dtype)
    found = results(_with(module, "slipstream", index_TK), inputs, dtype)
    # Some eager forwards compute in fp32 whatever they are given: no truth, no 16-bit budget.
    stock = _with(module, "batched_mm", index_TK)
    truth = results(stock, inputs, dtype, run_in=torch.float64)
    assert_within(found, results(stock, inputs, dtype), truth, dtype)
    if dtype == torch.float32:
        for key, expected in results(_with(module, "eager", index_TK), inputs, dtype).items():
            assert_close(found[key], expected)


def test_which_families_run_as_one_op():
    stepwise = set()
    for name, kind in CLASSES.items():
        module = tiny_experts(kind)
        dispatch.reset_counts()
        _with(module, "slipstream", _index())(**_inputs(module))
        calls = {op: n for (op, _), n in dispatch.counts().items() if op in COUNTED}
        if "grouped_gemm" in calls:
            stepwise.add(name)
        else:
            assert calls == {"moe_mlp": 1}
    assert stepwise == STEPWISE & CLASSES.keys()


@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_of_other_ranks_add_nothing(name):
    module, index_TK = tiny_experts(CLASSES[name]), _index(experts=E + 3)
    index_TK = index_TK.clamp(max=E)
    index_TK[5] = E
    module._is_expert_parallel = True
    inputs = _inputs(module)
    # Theirs wants the weights of such slots to be zero already; ours does not.
    stock_inputs = {**inputs, "weight": inputs["weight"].masked_fill(index_TK == E, 0)}
    found = results(_with(module, "slipstream", index_TK), inputs, torch.float32)
    stock = results(_with(module, "batched_mm", index_TK), stock_inputs, torch.float32)
    assert (found["output 0"][5] == 0).all()
    assert (found["gradient of weight"][index_TK == E] == 0).all()
    # Not all releases keep such slots out of this gradient of theirs.
    stock["gradient of weight"] *= index_TK < E
    for key in stock:
        assert_close(found[key], stock[key])


@pytest.mark.parametrize("name", LAYOUTS)
def test_ids_of_other_ranks_leave_no_trace_of_poisoned_memory(name, poisoned):
    module, index_TK = tiny_experts(CLASSES[name]), _index(experts=E + 3).clamp(max=E)
    module._is_expert_parallel = True
    found = results(_with(module, "slipstream", index_TK), _inputs(module), torch.float32)
    for key, tensor in found.items():
        assert tensor.isfinite().all(), key


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_tokens(name):
    module = tiny_experts(CLASSES[name])
    run = _with(module, "slipstream", torch.zeros(0, K, dtype=torch.int64))
    found = results(run, _inputs(module, 0), torch.float32)
    assert found["output 0"].shape == (0, D)
    assert torch.equal(
        found["gradient of down_proj"], torch.zeros_like(found["gradient of down_proj"])
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_compiles(name):
    module = tiny_experts(CLASSES[name])
    index_TK = _index(9)
    module.config._experts_implementation = "slipstream"

    def run(hidden, weight, **parameters):
        return functional_call(module, parameters, (hidden, index_TK, weight))

    assert_compiles(run, _inputs(module, 9))


def test_two_runs_are_bitwise_equal():
    module, index_TK = tiny_experts(CLASSES["GptOssExperts"]), _index()
    run, inputs = _with(module, "slipstream", index_TK), _inputs(module)
    first, second = (results(run, inputs, torch.float32) for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_autocast_computes_in_its_dtype_and_returns_that_of_the_hidden_states():
    module, index_TK = tiny_experts(CLASSES["MixtralExperts"]), _index()
    inputs = {name: t.requires_grad_() for name, t in _inputs(module).items()}
    run = _with(module, "slipstream", index_TK)
    with torch.autocast("cpu", torch.bfloat16):
        out = run(**inputs)
    out.sum().backward()
    low = {name: t.detach().bfloat16() for name, t in inputs.items()} | {"weight": inputs["weight"]}
    assert out.dtype == torch.float32
    assert torch.equal(out, run(**low).float())
    assert all(t.grad.dtype == torch.float32 for t in inputs.values())


def test_the_clamp_of_a_module_is_read_from_its_attributes():
    module, index_TK = tiny_experts(CLASSES["GptOssExperts"]), _index()
    inputs = _cast(_inputs(module), torch.float64)
    module.alpha, module.limit = 0.9, 0.25
    found, stock = (_with(module, name, index_TK)(**inputs) for name in ("slipstream", "eager"))
    assert_close(found, stock)


class _Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.5 * x)


def test_an_unknown_activation_is_computed_by_the_module_and_warned_about_once():
    class NewExperts(CLASSES["MixtralExperts"]):
        pass

    module, index_TK = tiny_experts(NewExperts), _index()
    module.act_fn = _Swish()
    inputs = _cast(_inputs(module), torch.float64)
    run = _with(module, "slipstream", index_TK)
    with pytest.warns(RuntimeWarning, match=r"NewExperts: .* wrap the model in torch.compile"):
        found = run(**inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(**inputs)
    assert_close(found, _with(module, "eager", index_TK)(**inputs))


def test_a_gate_that_is_changed_is_not_taken_for_the_old_one():
    class OtherExperts(CLASSES["GptOssExperts"]):
        def _apply_gate(self, gate_up):
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
            return gate * torch.sigmoid(gate) * (up + 2)

    module, index_TK = tiny_experts(OtherExperts), _index()
    inputs = _cast(_inputs(module), torch.float64)
    found, stock = (_with(module, name, index_TK)(**inputs) for name in ("slipstream", "eager"))
    assert_close(found, stock)


def test_quantised_weights_are_refused_by_name():
    module = tiny_experts(CLASSES["MixtralExperts"])
    inputs = _inputs(module)
    inputs["down_proj"] = inputs["down_proj"].to(torch.float8_e4m3fn)
    with pytest.raises(ShapeError, match=r"MixtralExperts.down_proj has dtype torch.float8_e4m3fn"):
        _with(module, "slipstream", _index())(**inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": torch.randn(32, D)}, r"x has shape \(32, 16\), expected \(33, 16\)"),
        ({"weight": torch.rand(33, K + 1)}, "weight"),
        (
            {"down_proj": torch.randn(E, D, 7)},
            r"w13 has shape \(5, 24, 16\), expected \(5, 14, 16\)",
        ),
    ],
)
def test_errors_name_the_argument(arguments, message):
    module = tiny_experts(CLASSES["MixtralExperts"])
    with pytest.raises(ShapeError, match=message):
        _with(module, "slipstream", _index())(**{**_inputs(module), **arguments})


def test_negative_ids_are_refused():
    module, index_TK = tiny_experts(CLASSES["MixtralExperts"]), _index()
    index_TK[3, 1] = -1
    with pytest.raises(ConfigError, match="expert holds -1"):
        _with(module, "slipstream", index_TK)(**_inputs(module))


def test_importing_registers_the_implementation():
    assert ALL_EXPERTS_FUNCTIONS["slipstream"] is integration.experts_forward


def test_without_transformers_5_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(DependencyError, match=r"pip install 'slipstream-train\[hf\]'"):
        importlib.reload(integration)
