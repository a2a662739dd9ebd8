from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from slipstream.errors import ShapeError
from slipstream.ops import activation
from slipstream.ops.activation.backward import activation_backward
from slipstream.ops.activation.reference import activation_reference
from tests.budget import assert_budget, assert_within, results
from tests.ops.compiling import assert_compiles

PLAIN = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
CLAMPS = {"default": {}, "low": {"alpha": 0.9, "limit": 0.5}, "none": {"limit": float("inf")}}
DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 63), (63, 257), (2, 3, 64)]


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_kinds_match_torch_in_fp64(kind):
    x = torch.randn(63, 33, dtype=torch.float64)
    assert_close(activation(x, kind=kind), PLAIN[kind](x))


@pytest.mark.parametrize("kind", GATED)
def test_gated_kinds_match_torch_and_the_gate_is_the_first_half(kind):
    gate, up = torch.randn(2, 63, 33, dtype=torch.float64)
    expected = PLAIN[GATED[kind]](gate) * up
    assert_close(activation(gate, up, kind=kind), expected)
    assert_close(activation(torch.cat((gate, up), dim=-1), kind=kind), expected)


def _clamped(gate, up, alpha=1.702, limit=7.0):
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


@pytest.mark.parametrize("clamp", CLAMPS)
def test_the_clamped_kind_matches_its_formula_and_that_of_gpt_oss(clamp):
    gate, up = 4 * torch.randn(2, 63, 33, dtype=torch.float64)
    options = CLAMPS[clamp]
    actual = activation(gate, up, kind="swiglu_clamped", **options)
    assert_close(actual, _clamped(gate, up, **options))
    module = SimpleNamespace(**{"alpha": 1.702, "limit": 7.0, **options})
    gate_up = torch.stack((gate, up), dim=-1).flatten(1)
    assert_close(actual, GptOssExperts._apply_gate(module, gate_up))


@pytest.mark.parametrize("clamp", CLAMPS)
def test_gradients_of_the_clamped_kind_in_fp64(clamp):
    x = 4 * torch.randn(3, 8, dtype=torch.float64)
    run = partial(activation, kind="swiglu_clamped", **CLAMPS[clamp])
    assert torch.autograd.gradcheck(run, x.requires_grad_())


def test_a_clamped_value_gets_no_gradient_and_one_on_the_edge_does():
    gate, up = torch.tensor([8.0, 7.0, -9.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 8, 7, -8.0])
    dgate, dup = activation_backward(gate, up, torch.ones(6), "clamped")
    assert (dgate != 0).tolist() == [False, True, True, True, True, True]
    assert (dup != 0).tolist() == [True, True, True, False, True, False]
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    expected = torch.autograd.grad(_clamped(*leaves).sum(), leaves)
    assert_close((dgate, dup), expected)


@pytest.mark.parametrize("kind", [*PLAIN, *GATED])
def test_gradients_in_fp64(kind):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: activation(x, kind=kind), x)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", GATED)
def test_gated_kinds_are_as_accurate_as_torch(kind, dtype, shape):
    inputs = {"gate": torch.randn(shape), "up": torch.randn(shape)}
    assert_budget(
        lambda gate, up: activation(gate, up, kind=kind),
        lambda gate, up: PLAIN[GATED[kind]](gate) * up,
        inputs,
        dtype,
    )


@pytest.mark.parametrize("clamp", CLAMPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_clamped_kind_and_its_backward_stay_in_budget(dtype, clamp):
    options = CLAMPS[clamp]
    inputs = {
        "gate": (4 * torch.randn(63, 65)).to(dtype),
        "up": (4 * torch.randn(63, 65)).to(dtype),
    }

    def run(gate, up):
        return activation(gate, up, kind="swiglu_clamped", **options)

    def eager(gate, up):
        return _clamped(gate, up, **options)

    assert_budget(run, eager, inputs, dtype)
    stock = results(eager, inputs, dtype)
    truth = results(eager, inputs, dtype, run_in=torch.float64)
    dgate, dup = activation_backward(
        **inputs, dout=_upstream(inputs["up"]), gating="clamped", **options
    )
    actual = {"output 0": stock["output 0"], "gradient of gate": dgate, "gradient of up": dup}
    assert_within(actual, stock, truth, dtype)


def _upstream(like: torch.Tensor) -> torch.Tensor:
    """The gradient that ``results`` sends back."""
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float64, device="cpu")
    return drawn.to(like.dtype).to(like.device)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", PLAIN)
def test_backward_from_the_pre_activation_stays_in_budget(kind, dtype, gated):
    shape = (63, 65)
    inputs = {"gate": (2 * torch.randn(shape)).to(dtype)}
    if gated:
        inputs["up"] = torch.randn(shape).to(dtype)

    def forward(gate, up=None):
        return activation_reference(gate, up, kind)

    eager = results(forward, inputs, dtype)
    truth = results(forward, inputs, dtype, run_in=torch.float64)
    dout = _upstream(inputs["gate"])
    dgate, dup = activation_backward(inputs["gate"], inputs.get("up"), dout, kind)
    actual = {"output 0": eager["output 0"], "gradient of gate": dgate}
    if gated:
        actual["gradient of up"] = dup
    else:
        assert dup is None
    assert_within(actual, eager, truth, dtype)


def test_16_bit_products_are_rounded_once():
    gate, up, dout = torch.randn(3, 63, 64).bfloat16()
    value = F.silu(gate.float())
    assert torch.equal(activation(gate, up, kind="swiglu"), (value * up.float()).bfloat16())
    _, dup = activation_backward(gate, up, dout, "silu")
    assert torch.equal(dup, (value * dout.float()).bfloat16())


def test_large_values_stay_finite():
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4], requires_grad=True)
    for kind in ("silu", "gelu", "gelu_tanh"):
        (grad,) = torch.autograd.grad(activation(x, kind=kind).sum(), x)
        assert_close(activation(x, kind=kind), torch.tensor([0.0, 0.0, 0.0, 100.0, 1e4]))
        assert_close(grad, torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))


def test_zero_tokens():
    x = torch.randn(0, 8, requires_grad=True)
    y = activation(x, kind="swiglu")
    y.sum().backward()
    assert y.shape == (0, 4)
    assert x.grad.shape == (0, 8)


def test_strided_inputs_and_expanded_gradients():
    gate = torch.randn(8, 5, dtype=torch.float64).T.requires_grad_()
    up = torch.randn(5, 16, dtype=torch.float64)[:, ::2].requires_grad_()
    activation(gate, up, kind="swiglu").sum().backward()
    sigmoid = gate.detach().sigmoid()
    assert_close(up.grad, gate.detach() * sigmoid)
    assert_close(gate.grad, up.detach() * sigmoid * (1 + gate.detach() * (1 - sigmoid)))


@pytest.mark.parametrize("kind", [*PLAIN, *GATED, "swiglu_clamped"])
def test_compiles(kind):
    assert_compiles(lambda x: activation(x, kind=kind), {"x": torch.randn(5, 16)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "tanh"}, "kind = 'tanh', expected one of swiglu"),
        ({"kind": "swiglu_clamped", "limit": -1.0}, "limit = -1.0, expected a number above 0"),
        ({"kind": "swiglu_clamped", "alpha": float("inf")}, "alpha = inf, expected a finite"),
        ({"kind": "gelu", "up": torch.randn(3, 8)}, "gelu is not gated; leave out up"),
        ({"kind": "swiglu", "up": torch.randn(3, 7)}, r"gate \(3, 8\) and up \(3, 7\)"),
        ({"kind": "swiglu", "x": torch.randn(3, 7)}, "even last dimension, got 7"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ShapeError, match=message):
        activation(**{"x": torch.randn(3, 8), **arguments})
