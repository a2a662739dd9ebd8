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
from slipstream.ops.activation.options import ActivationOptions
from slipstream.ops.activation.reference import activation_reference
from tests.budget import assert_budget, assert_within, results
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import cases, fast, forced, runnable

PLAIN = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
CLAMPS = {"default": {}, "low": {"alpha": 0.9, "limit": 0.5}, "none": {"limit": float("inf")}}
KINDS = [*PLAIN, *GATED, "swiglu_clamped"]
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


@pytest.mark.parametrize("kind", KINDS)
def test_compiles(kind):
    assert_compiles(lambda x: activation(x, kind=kind), {"x": torch.randn(5, 16)})


def _stock(kind):
    if kind in PLAIN:
        return lambda x: PLAIN[kind](x)

    def run(x, up=None):
        gate, up = x.chunk(2, dim=-1) if up is None else (x, up)
        if kind == "swiglu_clamped":
            return _clamped(gate, up, **CLAMPS["low"])
        return PLAIN[GATED[kind]](gate) * up

    return run


def _run(kind, name):
    def run(**tensors):
        with forced("activation", name):
            return activation(**tensors, kind=kind, **CLAMPS["low"])

    return run


@pytest.mark.parametrize("form", ["split", "fused"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("implementation", "dtype"), cases("activation"))
def test_every_implementation_stays_in_budget(implementation, dtype, kind, form):
    if kind in PLAIN and form == "fused":
        pytest.skip("not gated")
    inputs = {"x": torch.randn(63, 130 if form == "fused" else 65)}
    if kind not in PLAIN and form == "split":
        inputs["up"] = torch.randn(63, 65)
    assert_budget(_run(kind, implementation), _stock(kind), inputs, dtype)


@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("width", [1, 1023, 1024, 4097])
@pytest.mark.parametrize("implementation", fast("activation"))
def test_blocks_may_end_anywhere(implementation, width, rows, poisoned):
    inputs = {"x": torch.randn(rows, 2 * width)}
    assert_budget(_run("swiglu", implementation), _stock("swiglu"), inputs, torch.float16)


def _every_layout():
    """The two halves of x (2, 5, 3, 16), and x itself, in many layouts."""
    x = torch.randn(2, 5, 3, 32)
    odd = torch.cat((torch.zeros(1), x.flatten()))[1:].view(x.shape)
    wide = torch.zeros(2, 5, 3, 40)
    wide[..., 4:36] = x
    return {
        "dense": x,
        "offset": odd,
        "slice": wide[..., 4:36],
        "swapped": x.transpose(0, 1).contiguous().transpose(0, 1),
        "last first": x.movedim(-1, 0).contiguous().movedim(0, -1),
    }


@pytest.mark.parametrize("form", ["split", "fused"])
@pytest.mark.parametrize("layout", _every_layout())
@pytest.mark.parametrize("implementation", fast("activation"))
def test_every_layout_gives_the_same_bits(implementation, layout, form):
    def run(x, dout):
        leaf = x.detach().requires_grad_()
        parts = leaf.chunk(2, dim=-1) if form == "split" else (leaf, None)
        y = _run("geglu_tanh", implementation)(x=parts[0], up=parts[1])
        return y, torch.autograd.grad(y, leaf, dout)[0]

    layouts = _every_layout()
    dout = torch.randn(2, 5, 3, 16)
    apart = torch.randn(2, 5, 3, 32)[..., ::2]
    apart.copy_(dout)
    x = layouts[layout].copy_(layouts["dense"])
    for actual, expected in zip(run(x, apart), run(layouts["dense"], dout), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("implementation", fast("activation"))
def test_fused_halves_get_one_dense_gradient_equal_to_that_of_split_ones(implementation):
    x, dout = torch.randn(2, 7, 66, requires_grad=True), torch.randn(2, 7, 33)
    y = _run("swiglu", implementation)(x=x)
    (dx,) = torch.autograd.grad(y, x, dout)
    halves = [t.detach().contiguous().requires_grad_() for t in x.chunk(2, dim=-1)]
    split = _run("swiglu", implementation)(x=halves[0], up=halves[1])
    assert torch.equal(y, split)
    assert torch.equal(dx, torch.cat(torch.autograd.grad(split, halves, dout), dim=-1))
    # The node of the op itself made it: no cat, no zeros.
    assert y.grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"
    assert dx.is_contiguous()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", fast("activation"))
def test_nan_shows_in_the_output_and_in_the_gradients(implementation, kind):
    names = ("x",) if kind in PLAIN else ("x", "up")
    for bad in names:
        inputs = {name: torch.ones(3).requires_grad_() for name in names}
        with torch.no_grad():
            inputs[bad][1] = torch.nan
        y = _run(kind, implementation)(**inputs)
        assert y.isnan().tolist() == [False, True, False]
        (grad,) = torch.autograd.grad(y.sum(), inputs["x"])
        assert grad.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("implementation", fast("activation"))
def test_gate_and_up_may_be_one_tensor_or_of_two_dtypes(implementation):
    x = torch.randn(5, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(_run("swiglu", implementation)(x=x, up=x).sum(), x)
    (expected,) = torch.autograd.grad((F.silu(x) * x).sum(), x)
    assert_close(grad, expected)
    up = torch.randn(5, 8).half().requires_grad_()
    y = _run("swiglu", implementation)(x=x, up=up)
    dx, dup = torch.autograd.grad(y.sum(), (x, up))
    assert (y.dtype, dx.dtype, dup.dtype) == (torch.float32, torch.float32, torch.float16)
    assert_close(dup, F.silu(x.detach()).half())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["split", "fused"])
def test_the_backward_kernel_writes_the_output_again(kind, form):
    if "triton" not in runnable("activation"):
        pytest.skip("needs Triton")
    launch = pytest.importorskip("slipstream.ops.activation.launch")
    gated = kind not in PLAIN
    x = torch.randn(5, 66 if gated and form == "fused" else 33)
    up = torch.randn(5, 33) if gated and form == "split" else None
    gating = {**GATED, "swiglu_clamped": "clamped"}.get(kind, kind)
    options = ActivationOptions(gating=gating, gated=gated, alpha=0.9, limit=0.5)
    dout = torch.randn(5, 33)
    expected = launch.backward(dout, x, up, options)
    *grads, again = launch.backward(dout, x, up, options, want_output=True)
    assert torch.equal(again, launch.forward(x, up, options))
    assert expected[2] is None
    assert torch.equal(grads[0], expected[0])
    assert up is None or torch.equal(grads[1], expected[1])


def test_the_tuned_table_has_blocks_for_every_device():
    tuned = pytest.importorskip("slipstream.ops.activation.tuned")
    for direction in ("forward", "backward"):
        for element_size in (2, 4):
            for capability in (tuned.INTERPRETER, 80, 89, 90, 100, 120):
                blocks = tuned._find(direction, element_size, capability)
                assert blocks.block % (32 * blocks.num_warps) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "tanh"}, "kind = 'tanh', expected one of swiglu"),
        ({"kind": "swiglu_clamped", "limit": -1.0}, "limit = -1.0, expected a number above 0"),
        ({"kind": "swiglu_clamped", "alpha": float("inf")}, "alpha = inf, expected a finite"),
        ({"kind": "gelu", "up": torch.randn(3, 8)}, "gelu is not gated; leave out up"),
        ({"kind": "swiglu", "up": torch.randn(3, 7)}, r"gate \(3, 8\) and up \(3, 7\)"),
        ({"kind": "swiglu", "x": torch.randn(3, 7)}, "even last dimension, got 7"),
        ({"kind": "gelu", "x": torch.tensor(1.0)}, "x is a scalar"),
        ({"kind": "gelu", "x": None}, "x is None, expected a tensor"),
        ({"kind": "gelu", "x": torch.ones(3, 8).long()}, "x has dtype torch.int64"),
        ({"kind": "swiglu", "up": torch.ones(3, 8).cfloat()}, "up has dtype torch.complex64"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    with pytest.raises(ShapeError, match=message):
        activation(**{"x": torch.randn(3, 8), **arguments})
