import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from slipstream.errors import ShapeError
from slipstream.ops import activation_linear
from slipstream.verify.cases.activation import GATED, eager_activation
from tests.budget import Results, assert_budget
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import cases, fast, forced, runnable

OP = "activation_linear"
KINDS = ["swiglu", "swiglu_clamped", "geglu_tanh", "gelu", "relu2"]
CLAMP = {"alpha": 1.702, "limit": 1.0}


def _inputs(kind: str, form: str = "split", *, bias: bool = True, rows: int = 63) -> Results:
    gated = kind in GATED
    inputs = {"x": torch.randn(rows, 66 if gated and form == "fused" else 33)}
    if gated and form == "split":
        inputs["up"] = torch.randn(rows, 33)
    inputs["w_DF"] = torch.randn(17, 33) / 6
    return inputs | ({"bias_D": torch.randn(17)} if bias else {})


def _run(kind: str, name: str):
    def run(**tensors: torch.Tensor) -> torch.Tensor:
        with forced(OP, name):
            return activation_linear(**tensors, kind=kind, **CLAMP)

    return run


def _stock(kind: str):
    def run(x, w_DF, up=None, bias_D=None):
        return F.linear(eager_activation(kind, x, up), w_DF, bias_D)

    return run


@pytest.mark.parametrize("form", ["split", "fused"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP))
def test_stays_in_budget(implementation, dtype, kind, form):
    inputs = _inputs(kind, form, bias=form == "split")
    assert_budget(_run(kind, implementation), _stock(kind), inputs, dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["reemit", "reference"])
def test_gradients_in_fp64(implementation, kind):
    inputs = {n: t.double().requires_grad_() for n, t in _inputs(kind, rows=3).items()}
    run = _run(kind, implementation)
    assert torch.autograd.gradcheck(
        lambda *t: run(**dict(zip(inputs, t, strict=True))), [*inputs.values()]
    )


@pytest.mark.parametrize("form", ["split", "fused"])
@pytest.mark.parametrize("implementation", fast(OP))
def test_saves_the_pre_activation_and_the_weight_alone(implementation, form):
    inputs = {n: t.requires_grad_() for n, t in _inputs("swiglu", form).items()}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        _run("swiglu", implementation)(**inputs)
    expected = {inputs[name].data_ptr() for name in inputs if name != "bias_D"}
    assert {t.data_ptr() for t in saved} == expected


@pytest.mark.parametrize("implementation", runnable(OP))
def test_weights_may_be_wider_than_the_tokens(implementation):
    inputs = _inputs("swiglu")
    narrow = {n: t.half() if n in ("x", "up") else t for n, t in inputs.items()}
    leaves = [t.requires_grad_() for t in narrow.values()]
    z = _run("swiglu", implementation)(**narrow)
    assert z.dtype == torch.float16
    for grad, leaf in zip(torch.autograd.grad(z.float().sum(), leaves), leaves, strict=True):
        assert (grad.dtype, grad.shape) == (leaf.dtype, leaf.shape)


@pytest.mark.parametrize("frozen", [("w_DF", "bias_D"), ("x", "up"), ("x", "up", "w_DF"), ("up",)])
@pytest.mark.parametrize("implementation", runnable(OP))
def test_frozen_inputs_change_no_other_gradient(implementation, frozen):
    inputs = _inputs("geglu")
    everything = [t.requires_grad_() for t in inputs.values()]
    dz = torch.randn(63, 17)
    run = _run("geglu", implementation)
    expected = dict(zip(inputs, torch.autograd.grad(run(**inputs), everything, dz), strict=True))
    leaves = {n: t.detach().requires_grad_(n not in frozen) for n, t in inputs.items()}
    run(**leaves).backward(dz)
    for name, leaf in leaves.items():
        if name in frozen:
            assert leaf.grad is None
        else:
            assert torch.equal(leaf.grad, expected[name])


@pytest.mark.parametrize("implementation", runnable(OP))
def test_follows_autocast(implementation):
    inputs = {n: t.requires_grad_() for n, t in _inputs("swiglu").items()}
    with torch.autocast(torch.get_default_device().type, dtype=torch.float16):
        z = _run("swiglu", implementation)(**inputs)
    assert z.dtype == torch.float16
    narrow = {n: t.detach().half() for n, t in inputs.items()}
    assert torch.equal(z, _run("swiglu", implementation)(**narrow))
    z.sum().backward()
    assert {t.grad.dtype for t in inputs.values()} == {torch.float32}


@pytest.mark.parametrize("implementation", runnable(OP))
def test_any_leading_dimensions_zero_tokens_and_expanded_gradients(implementation):
    run = _run("swiglu", implementation)
    w_DF = torch.randn(5, 8, requires_grad=True)
    x = torch.randn(2, 3, 16, requires_grad=True)
    z = run(x=x, w_DF=w_DF)
    z.sum().backward()
    rows = run(x=x.detach().flatten(0, 1), w_DF=w_DF)
    assert_close(z.flatten(0, 1), rows)
    expected = torch.autograd.grad(_stock("swiglu")(x, w_DF).sum(), (x, w_DF))
    assert_close((x.grad, w_DF.grad), expected)
    empty = torch.randn(0, 16, requires_grad=True)
    (dw_DF,) = torch.autograd.grad(run(x=empty, w_DF=w_DF).sum(), w_DF)
    assert torch.equal(dw_DF, torch.zeros(5, 8))


@pytest.mark.parametrize("form", ["split", "fused"])
@pytest.mark.parametrize("implementation", runnable(OP))
def test_compiles(implementation, form):
    def run(**tensors):
        return activation_linear(**tensors, kind="swiglu")

    with forced(OP, implementation):
        assert_compiles(run, _inputs("swiglu", form), truth=_stock("swiglu"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "tanh"}, "kind = 'tanh', expected one of swiglu"),
        ({"up": torch.randn(3, 7)}, r"gate \(3, 8\) and up \(3, 7\)"),
        ({"up": None}, r"w has shape \(5, 8\), expected \(any, 4\)"),
        ({"w_DF": torch.randn(5, 9)}, r"w has shape \(5, 9\), expected \(any, 8\)"),
        ({"bias_D": torch.randn(4)}, r"bias has shape \(4,\), expected \(5\)"),
        ({"w_DF": torch.ones(5, 8, dtype=torch.int64)}, "w has dtype torch.int64"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    valid = {"x": torch.randn(3, 8), "up": torch.randn(3, 8), "w_DF": torch.randn(5, 8)}
    with pytest.raises(ShapeError, match=message):
        activation_linear(**{**valid, "kind": "swiglu", **arguments})
