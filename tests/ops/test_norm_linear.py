from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from slipstream.errors import ShapeError
from slipstream.ops import norm, norm_linear
from slipstream.verify.budget import bitwise_equal, results
from tests.budget import assert_budget
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import ONE, cases, draws, forced, runnable

IMPLEMENTATIONS = runnable("norm_linear")
GELU = {"kind": "layer", "cast": "fp32", "activation": "gelu"}


def _inputs(
    *shape: int, out: int = 20, bias: bool = True, residual: bool = True
) -> dict[str, torch.Tensor]:
    width = shape[-1]
    inputs = {
        "x": torch.randn(shape) + 0.3,
        "weight_D": torch.randn(width),
        "w_OD": torch.randn(out, width) / width**0.5,
    }
    if bias:
        inputs |= {"bias_D": torch.randn(width), "bias_O": torch.randn(out)}
    if residual:
        inputs["residual"] = torch.randn(shape)
    return inputs


def _eager(x, weight_D, w_OD, bias_D=None, bias_O=None, residual=None, activation=None, **_):
    s = x if activation is None else F.gelu(x)
    s = s if residual is None else s + residual
    return F.linear(F.layer_norm(s, s.shape[-1:], weight_D, bias_D, 1e-6), w_OD, bias_O), s


def _run(name: str, **options: Any):
    def run(**tensors):
        with forced("norm_linear", name):
            return norm_linear(**tensors, **options)

    return run


def _autocast() -> torch.autocast:
    return torch.autocast(torch.get_default_device().type, torch.bfloat16)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize(("name", "dtype"), cases("norm_linear", interpreted=ONE))
@pytest.mark.usefixtures("poisoned")
def test_is_as_accurate_as_torch(name, dtype, activation, residual, bias):
    options = {**GELU, "activation": activation}
    inputs = draws(lambda: _inputs(2, 17, 40, bias=bias, residual=residual))
    assert_budget(_run(name, **options), lambda **t: _eager(**t, **options), inputs, dtype)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("cast", ["llama", "fp32"])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("residual", [False, True])
def test_the_second_y_has_the_bits_of_the_first(residual, activation, cast, kind):
    """A product with the unit matrix shows ``y`` in ``z`` and, with one for ``dz``, in ``dw``."""
    options = {"kind": kind, "cast": cast, "offset": 1.0, "activation": activation}
    inputs = _inputs(24, 24, out=24, residual=residual)
    inputs = {n: t.half() for n, t in inputs.items() if n != "bias_O"}
    inputs["w_OD"] = torch.eye(24).half().requires_grad_()
    z, _ = _run("triton", **options)(**inputs)
    (dw_OD,) = torch.autograd.grad(z, inputs["w_OD"], torch.eye(24).half())
    of_norm = {n: t for n, t in inputs.items() if n != "w_OD"}
    with forced("norm", "triton"):
        y, _ = norm(**of_norm, **options)
    assert bitwise_equal(z, y)
    assert bitwise_equal(dw_OD, y)


def test_keeps_one_tensor_of_the_size_of_x():
    """``s`` and a number per row, where a norm and a linear layer keep ``s`` and ``y``."""
    inputs = {n: t.requires_grad_() for n, t in _inputs(64, 32).items()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _, s = _run("triton")(**inputs)
    parameters = {t.data_ptr() for name, t in inputs.items() if name not in ("x", "residual")}
    activations = {at: size for at, size in kept.items() if at not in parameters}
    assert activations.pop(s.data_ptr()) == 64 * 32
    assert sum(activations.values()) == 64


NAMES = ("x", "weight_D", "w_OD", "bias_D", "bias_O", "residual")


@pytest.mark.parametrize("wanted", [1, 2, 4, 8, 16, 32, 3, 5, 20, 36, 27, 59])
@pytest.mark.parametrize("options", [{}, GELU], ids=["plain", "gelu"])
@pytest.mark.usefixtures("poisoned")
def test_only_gradients_that_are_asked_for(wanted, options):
    inputs = {name: t.requires_grad_() for name, t in _inputs(9, 24).items()}
    upstream = torch.randn(9, 20), torch.randn(9, 24)
    run = _run("triton", **options)
    full = torch.autograd.grad(run(**inputs), list(inputs.values()), upstream)
    expected = dict(zip(inputs, full, strict=True))
    asked = [name for i, name in enumerate(NAMES) if wanted >> i & 1]
    some = {n: t.detach().requires_grad_(n in asked) for n, t in inputs.items()}
    outputs = run(**some)
    grads = torch.autograd.grad(outputs, [some[n] for n in asked], upstream)
    for name, grad in zip(asked, grads, strict=True):
        assert bitwise_equal(grad, expected[name])


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("options", [{}, GELU], ids=["plain", "gelu"])
def test_an_output_that_is_not_used(options, residual, output):
    inputs, found = _inputs(9, 24, residual=residual), []
    for name in ("triton", "reference"):
        leaves = {n: t.clone().requires_grad_() for n, t in inputs.items()}
        used = _run(name, **options)(**leaves)[output]
        wanted = [leaf for n, leaf in leaves.items() if output == 0 or n in ("x", "residual")]
        upstream = torch.linspace(-1, 1, used.numel()).view_as(used)
        found.append(torch.autograd.grad(used, wanted, upstream))
    assert_close(*found)


@pytest.mark.parametrize("options", [{}, GELU], ids=["plain", "gelu"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_autocast_chooses_the_dtype_of_the_product(name, options):
    """As for a norm and an ``nn.Linear`` with fp32 weights: only the product is in bf16."""
    inputs = _inputs(33, 40)

    def composed(x, weight_D, w_OD, bias_D, bias_O, residual):
        y, s = norm(x, weight_D, bias_D, residual=residual, **options)
        return F.linear(y, w_OD, bias_O), s

    found = []
    for run in (_run(name, **options), composed):
        with _autocast():
            found.append(results(run, inputs, torch.float32))
    actual, expected = found
    assert actual["output 0"].dtype == torch.bfloat16
    assert actual["output 1"].dtype == torch.float32
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype
        # Both round the same numbers to bf16, where neighbours are up to 2**-7 of them apart.
        scale = tensor.float().abs().max().item()
        assert_close(actual[key], tensor, atol=2**-7 * scale, rtol=0.0)


def test_weights_of_another_dtype():
    """fp32 weights with fp16 rows: cast for the product, gradients in fp32."""
    inputs = _inputs(33, 40)
    inputs |= {n: inputs[n].half() for n in ("x", "residual")}
    found = [results(_run(name), inputs, torch.float16) for name in ("triton", "reference")]
    for name, expected in found[1].items():
        assert found[0][name].dtype == expected.dtype
        # The reference rounds gradients on their way to fp16.
        assert_close(found[0][name], expected, atol=0.02, rtol=0.01)
    assert found[0]["gradient of w_OD"].dtype == torch.float32


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)], ids=str)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.usefixtures("poisoned")
def test_zero_tokens(name, shape):
    inputs = {n: t.requires_grad_() for n, t in _inputs(*shape).items()}
    z, s = _run(name)(**inputs)
    z.sum().backward()
    assert z.shape == (*shape[:-1], 20)
    assert s.shape == shape
    for parameter in ("weight_D", "w_OD", "bias_D", "bias_O"):
        assert torch.equal(inputs[parameter].grad, torch.zeros_like(inputs[parameter]))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_strided_inputs_and_expanded_gradients(name):
    inputs = _inputs(9, 16)
    strided = {n: t.repeat_interleave(2, dim=-1)[..., ::2] for n, t in inputs.items()}
    strided["x"], found = inputs["x"].T.contiguous().T, []
    for tensors in (inputs, strided):
        leaves = {n: t.detach().requires_grad_() for n, t in tensors.items()}
        z, s = _run(name)(**leaves)
        found.append((z, s, *torch.autograd.grad(z.sum() + s.sum(), list(leaves.values()))))
    assert_close(*found)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_compiles(name, activation, residual):
    options = {**GELU, "activation": activation}
    with forced("norm_linear", name):
        assert_compiles(
            lambda **t: norm_linear(**t, **options),
            _inputs(5, 16, residual=residual),
            truth=lambda **t: _eager(**t, **options),
        )


def test_compiles_under_autocast():
    inputs, found = _inputs(5, 16), []
    torch._dynamo.reset()
    compiled = torch.compile(norm_linear, fullgraph=True, backend="aot_eager")
    for run in (norm_linear, compiled):
        with forced("norm_linear", "triton"), _autocast():
            found.append(results(run, inputs, torch.float32))
    assert_close(*found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_D": torch.ones(7)}, r"norm_linear: weight has shape \(7,\)"),
        ({"w_OD": torch.ones(4, 7)}, r"norm_linear: w has shape \(4, 7\), expected \(any, 8\)"),
        ({"w_OD": torch.ones(4, 8).int()}, r"w is torch.int32, expected a float dtype"),
        ({"bias_O": torch.ones(8)}, r"bias_O has shape \(8,\), expected \(4\)"),
        ({"residual": torch.ones(1, 8)}, r"norm_linear: residual \(1, 8\)"),
        ({"kind": "batch"}, "norm_linear: kind = 'batch', expected one of rms, layer"),
        ({"w_OD": torch.ones(4, 8, device="meta")}, "w on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    good = {"x": torch.randn(3, 8), "weight_D": torch.ones(8), "w_OD": torch.ones(4, 8)}
    with pytest.raises(ShapeError, match=message):
        norm_linear(**{**good, **arguments})
