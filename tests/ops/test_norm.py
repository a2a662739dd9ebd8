import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from slipstream.errors import ShapeError
from slipstream.ops import norm
from tests.budget import assert_budget
from tests.ops.compiling import assert_compiles

KINDS = ["rms", "layer"]
EPS = 1e-6
ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}
DTYPES = [torch.float32, torch.bfloat16]


def _stock(x, weight_D, bias_D=None, residual=None, kind="rms", activation=None):
    s = x if activation is None else ACTIVATIONS[activation](x)
    s = s if residual is None else s + residual
    if kind == "layer":
        return F.layer_norm(s, s.shape[-1:], weight_D, bias_D, EPS), s
    y = F.rms_norm(s, s.shape[-1:], weight_D, EPS)
    return (y if bias_D is None else y + bias_D), s


def _inputs(*shape: int, bias: bool = True, residual: bool = True) -> dict[str, torch.Tensor]:
    inputs = {"x": torch.randn(shape) + 0.3, "weight_D": torch.randn(shape[-1])}
    if bias:
        inputs["bias_D"] = torch.randn(shape[-1])
    if residual:
        inputs["residual"] = torch.randn(shape)
    return inputs


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("cast", ["llama", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_matches_torch_in_fp64(kind, cast, activation):
    inputs = {name: tensor.double() for name, tensor in _inputs(7, 33).items()}
    actual = norm(**inputs, kind=kind, cast=cast, activation=activation)
    assert_close(actual, _stock(**inputs, kind=kind, activation=activation))


@pytest.mark.parametrize("shape", [(1, 63), (63, 257), (2, 5, 64)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_is_as_accurate_as_torch(kind, dtype, shape):
    inputs = _inputs(*shape, bias=kind == "layer")
    assert_budget(
        lambda **t: norm(**t, kind=kind, cast="fp32"),
        lambda **t: _stock(**t, kind=kind),
        inputs,
        dtype,
    )


def test_cast_llama_is_bitwise_the_norm_of_llama():
    x, weight_D = torch.randn(63, 64).bfloat16(), torch.randn(64).bfloat16()
    module = LlamaRMSNorm(64, eps=EPS).bfloat16()
    module.weight.data.copy_(weight_D)
    assert torch.equal(norm(x, weight_D, cast="llama")[0], module(x))
    assert not torch.equal(norm(x, weight_D, cast="fp32")[0], module(x))


def test_offset_with_cast_fp32_is_bitwise_the_norm_of_gemma():
    x, weight_D = torch.randn(63, 64).bfloat16(), torch.randn(64).bfloat16()
    module = GemmaRMSNorm(64, eps=EPS).bfloat16()
    module.weight.data.copy_(weight_D)
    assert torch.equal(norm(x, weight_D, cast="fp32", offset=1.0)[0], module(x))


@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_fp64(kind, activation):
    inputs = [tensor.double().requires_grad_() for tensor in _inputs(3, 5).values()]

    def run(x, weight_D, bias_D, residual):
        return norm(x, weight_D, bias_D, residual=residual, kind=kind, activation=activation)

    assert torch.autograd.gradcheck(run, inputs)


def test_without_activation_and_residual_s_is_x():
    x = torch.randn(3, 8)
    assert torch.equal(norm(x, torch.ones(8))[1], x)


def test_s_is_rounded_before_it_is_normalised():
    x, residual = torch.randn(2, 31, 64).bfloat16()
    y, s = norm(x, torch.ones(64).bfloat16(), residual=residual)
    assert torch.equal(s, x + residual)
    assert torch.equal(y, norm(s, torch.ones(64).bfloat16())[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_statistics_do_not_overflow_in_16_bit(dtype):
    x = torch.full((2, 8), 30000.0).to(dtype)
    assert torch.equal(norm(x, torch.ones(8).to(dtype))[0], torch.ones(2, 8).to(dtype))


def test_a_row_of_zeros_gives_zeros_and_finite_gradients():
    x = torch.zeros(2, 8, requires_grad=True)
    y, _ = norm(x, torch.ones(8))
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 8))
    assert x.grad.isfinite().all()


def test_zero_tokens():
    x, weight_D = torch.randn(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y, s = norm(x, weight_D, residual=torch.randn(0, 8))
    y.sum().backward()
    assert y.shape == s.shape == (0, 8)
    assert torch.equal(weight_D.grad, torch.zeros(8))


def test_strided_inputs_and_expanded_gradients():
    x = torch.randn(16, 9).T.requires_grad_()
    residual = torch.randn(9, 32)[:, ::2]
    weight_D = torch.randn(32)[::2].requires_grad_()
    y, s = norm(x, weight_D, residual=residual)
    (y.sum() + s.sum()).backward()
    copies = [t.detach().clone(memory_format=torch.contiguous_format) for t in (x, weight_D)]
    for copy in copies:
        copy.requires_grad_()
    y2, s2 = norm(*copies, residual=residual.contiguous())
    (y2 * torch.ones(9, 16) + s2 * torch.ones(9, 16)).sum().backward()
    assert_close((y, s), (y2, s2))
    assert_close((x.grad, weight_D.grad), (copies[0].grad, copies[1].grad))


@pytest.mark.parametrize("kind", KINDS)
def test_compiles(kind):
    assert_compiles(lambda **t: norm(**t, kind=kind, activation="gelu"), _inputs(5, 16))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_D": torch.ones(7)}, r"weight has shape \(7,\)"),
        ({"weight_D": torch.ones(2, 8)}, r"weight has shape \(2, 8\)"),
        ({"bias_D": torch.ones(9)}, r"bias has shape \(9,\)"),
        ({"residual": torch.ones(1, 8)}, r"residual \(1, 8\)"),
        ({"x": torch.tensor(1.0)}, "x is a scalar"),
        ({"kind": "batch"}, "kind = 'batch', expected one of rms, layer"),
        ({"cast": "bf16"}, "cast = 'bf16'"),
        ({"activation": "tanh"}, "activation = 'tanh'"),
        ({"weight_D": torch.ones(8, device="meta")}, "weight on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ShapeError, match=message):
        norm(**{"x": torch.randn(3, 8), "weight_D": torch.ones(8), **arguments})
