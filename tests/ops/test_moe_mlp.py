"""The whole MoE layer: routing, experts and combine together."""

import pytest
import torch
from torch.testing import assert_close
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from slipstream.ops import dispatch
from slipstream.ops.moe import combine, moe_mlp, route
from tests.budget import Results, assert_budget
from tests.ops.compiling import assert_compiles
from tests.ops.routings import stock_experts

E, D, F = 4, 16, 24


def _inputs(tokens: int) -> Results:
    return {
        "x": torch.randn(tokens, D),
        "router": torch.randn(E, D),
        "w13": torch.randn(E, 2 * F, D) / D**0.5,
        "w2": torch.randn(E, D, F) / F**0.5,
    }


def _layer(x, router, w13, w2):
    wide = torch.promote_types(x.dtype, torch.float32)
    logits_TE = x.to(wide) @ router.to(wide).T
    return moe_mlp(x, w13, w2, route(logits_TE, top_k=2, normalize=True), residual_TD=x)


def _mixtral(**weights) -> MixtralSparseMoeBlock:
    config = MixtralConfig(
        hidden_size=D, intermediate_size=F, num_local_experts=E, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    block = MixtralSparseMoeBlock(config).double()
    block.gate.weight.data.copy_(weights["router"])
    block.experts.gate_up_proj.data.copy_(weights["w13"])
    block.experts.down_proj.data.copy_(weights["w2"])
    return block


def test_matches_the_layer_of_mixtral_with_every_gradient():
    inputs = {name: t.double().requires_grad_() for name, t in _inputs(63).items()}
    block = _mixtral(**{name: t.detach() for name, t in inputs.items()})
    x = inputs["x"].detach().clone().requires_grad_()
    dout = torch.randn(63, D, dtype=torch.float64)
    expected = block(x[None])[0] + x
    expected.backward(dout)
    actual = _layer(**inputs)
    actual.backward(dout)
    # Their router scores and ours are fp64 here but theirs pass through fp32 once.
    tolerance = {"rtol": 1.3e-6, "atol": 1e-5}
    assert_close(actual, expected, **tolerance)
    assert_close(inputs["x"].grad, x.grad, **tolerance)
    assert_close(inputs["router"].grad, block.gate.weight.grad, **tolerance)
    assert_close(inputs["w13"].grad, block.experts.gate_up_proj.grad, **tolerance)
    assert_close(inputs["w2"].grad, block.experts.down_proj.grad, **tolerance)


def _stock(x, router, w13, w2):
    """The layer with stock experts, in the dtype of ``x`` between its products."""
    wide = torch.promote_types(x.dtype, torch.float32)
    routing = route(x.to(wide) @ router.to(wide).T, top_k=2, normalize=True)
    y_ND = stock_experts(routing)(x, w13, w2)
    with dispatch.force(moe_combine="reference"):
        return combine(y_ND, routing, residual_TD=x)


@pytest.mark.parametrize("tokens", [63, 257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_default_path_stays_in_the_budget_of_stock_code(dtype, tokens):
    assert_budget(_layer, _stock, _inputs(tokens), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_with_one_token_stay_in_budget(dtype):
    # Many calls are pooled: the error of a few numbers is luck.
    def one_by_one(layer):
        return lambda x, **weights: torch.cat([layer(x=row, **weights) for row in x.split(1)])

    assert_budget(one_by_one(_layer), one_by_one(_stock), _inputs(63), dtype)


def test_the_default_path_uses_the_fast_implementations():
    dispatch.reset_counts()
    _layer(**_inputs(9))
    assert dispatch.counts() == {
        ("moe_route", "reference"): 1,
        ("moe_experts", "grouped_mm"): 1,
        ("moe_combine", "gather_sum"): 1,
    }


def test_a_balanced_layer_equals_the_sum_over_the_experts_it_used():
    inputs = {name: t.double() for name, t in _inputs(63).items()}
    logits_TE = inputs["x"] @ inputs["router"].T
    logits_TE[:, 0] += 2
    load_E = torch.tensor([9.0, 1, 1, 1])
    routing = route(logits_TE, top_k=2, load_E=load_E, threshold=1.0)
    assert routing.rerouted > 0
    score_TE = logits_TE.softmax(-1)
    expected = torch.zeros(63, D, dtype=torch.float64)
    for token, chosen in enumerate(routing.expert_TK.tolist()):
        for e in chosen:
            gate, up = (inputs["w13"][e] @ inputs["x"][token]).chunk(2)
            y = inputs["w2"][e] @ (torch.nn.functional.silu(gate) * up)
            expected[token] += score_TE[token, e] * y
    assert_close(moe_mlp(inputs["x"], inputs["w13"], inputs["w2"], routing), expected)


def test_zero_tokens():
    inputs = {name: t.requires_grad_() for name, t in _inputs(0).items()}
    out = _layer(**inputs)
    out.sum().backward()
    assert out.shape == (0, D)
    assert torch.equal(inputs["w13"].grad, torch.zeros(E, 2 * F, D))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiles(backend):
    routing = route(torch.randn(9, E), top_k=2)

    def run(x, w13, w2):
        return moe_mlp(x, w13, w2, routing, residual_TD=x, shared_TD=2 * x)

    inputs = _inputs(9)
    del inputs["router"]
    assert_compiles(run, inputs, backend)


def test_compiles_with_its_router():
    assert_compiles(_layer, _inputs(9))
