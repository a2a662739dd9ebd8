import pytest
import torch
from torch.testing import assert_close

from slipstream.errors import ShapeError
from slipstream.ops import dispatch
from slipstream.ops.moe import Routing, experts, route
from tests.budget import Results, assert_budget, results
from tests.ops.compiling import assert_compiles
from tests.ops.routings import ACTIVATIONS, GATED, LOADS, routing_of, stock_experts

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = {"T63-D64-F48": (63, 64, 48), "T257-D31-F17": (257, 31, 17), "T1-D64-F48": (1, 64, 48)}
E = 5


def _inputs(tokens: int, width: int, hidden: int, gated: bool = True) -> Results:
    rows = 2 * hidden if gated else hidden
    return {
        "x": torch.randn(tokens, width),
        "w13": torch.randn(E, rows, width) / width**0.5,
        "w2": torch.randn(E, width, hidden) / hidden**0.5,
    }


def _forced(name: str, routing: Routing, activation: str = "swiglu"):
    def run(x, w13, w2):
        with dispatch.force(moe_experts=name):
            return experts(x, w13, w2, routing, activation=activation)

    return run


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_matches_a_loop_over_rows(activation):
    gated = activation in GATED
    routing = routing_of("random", 9, E, 2)
    x, w13, w2 = (t.double() for t in _inputs(9, 6, 4, gated).values())
    rows = []
    for slot in routing.order_N.tolist():
        token, k = divmod(slot, 2)
        expert = routing.expert_TK[token, k]
        h = w13[expert] @ x[token]
        a = ACTIVATIONS[activation](h[:4]) * (h[4:] if gated else 1)
        rows.append(w2[expert] @ a)
    actual = _forced("reference", routing, activation)(x, w13, w2)
    assert_close(actual, torch.stack(rows))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_the_reference_in_fp64(activation):
    routing = routing_of("random", 4, E, 2)
    inputs = [t.double().requires_grad_() for t in _inputs(4, 3, 2, activation in GATED).values()]
    assert torch.autograd.gradcheck(_forced("reference", routing, activation), inputs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("load", LOADS)
def test_grouped_mm_stays_in_budget(load, dtype, size):
    tokens, width, hidden = SIZES[size]
    routing = routing_of(load, tokens, E, 2)
    assert_budget(
        _forced("grouped_mm", routing),
        stock_experts(routing),
        _inputs(tokens, width, hidden),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_of_grouped_mm_stays_in_budget(activation, dtype):
    routing = routing_of("random", 63, E, 2)
    assert_budget(
        _forced("grouped_mm", routing, activation),
        stock_experts(routing, activation),
        _inputs(63, 32, 24, activation in GATED),
        dtype,
    )


def test_gradients_of_many_slots_are_summed_in_fp32():
    # One expert taken K times over stands for K experts with the same rows.
    many, width = 64, 32
    routing = route(torch.randn(63, many), top_k=many)
    inputs = _inputs(63, width, 24)
    inputs["w13"] = inputs["w13"][:1].repeat(many, 1, 1)
    inputs["w2"] = inputs["w2"][:1].repeat(many, 1, 1)
    x, w13, w2 = (t.bfloat16() for t in inputs.values())
    x.requires_grad_()
    dout = torch.randn(63, width).bfloat16()
    y_ND = _forced("grouped_mm", routing)(x, w13, w2)
    (grad,) = torch.autograd.grad(y_ND, x, dout[routing.order_N // many])
    single = route(torch.zeros(63, 1), top_k=1)
    y_TD = _forced("grouped_mm", single)(x, w13[:1], w2[:1])
    (one,) = torch.autograd.grad(y_TD, x, dout)
    # 64 equal terms add up without rounding in fp32 and with it in bf16.
    assert torch.equal(grad, many * one)


@pytest.mark.parametrize("implementation", dispatch.implementations("moe_experts"))
def test_experts_without_tokens_get_exactly_zero_gradients(implementation, poisoned):
    routing = routing_of("empty-experts", 63, E, 2)
    x, w13, w2 = (t.requires_grad_() for t in _inputs(63, 32, 24).values())
    _forced(implementation, routing)(x, w13, w2).square().sum().backward()
    for grad in (w13.grad, w2.grad):
        assert torch.equal(grad[1::2], torch.zeros_like(grad[1::2]))
        assert (grad[::2].abs().amax(dim=(1, 2)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_poisoned_memory_never_shows(dtype, poisoned):
    routing = routing_of("empty-experts", 63, E, 2)
    inputs = {name: tensor.to(dtype) for name, tensor in _inputs(63, 31, 17).items()}
    found = results(_forced("grouped_mm", routing), inputs, dtype)
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", dispatch.implementations("moe_experts"))
def test_zero_tokens(implementation, dtype, width, poisoned):
    routing = route(torch.randn(0, E), top_k=2)
    x, w13, w2 = (t.to(dtype).requires_grad_() for t in _inputs(0, width, 5).values())
    y_ND = _forced(implementation, routing)(x, w13, w2)
    y_ND.sum().backward()
    assert y_ND.shape == (0, width)
    assert x.grad is None or x.grad.shape == (0, width)
    for weight in (w13, w2):
        assert weight.grad is None or torch.equal(weight.grad, torch.zeros_like(weight))


def _views(dense: torch.Tensor, layout: str) -> torch.Tensor:
    """The values of ``dense`` in another memory layout."""
    if layout == "transposed":
        return dense.mT.contiguous().mT
    if layout == "sliced":
        wide = dense.new_zeros(*dense.shape[:-1], dense.shape[-1] + 3)
        wide[..., : dense.shape[-1]] = dense
        return wide[..., : dense.shape[-1]]
    if layout == "strided":
        return dense.repeat_interleave(2, dim=-1)[..., ::2]
    flat = torch.cat((dense.new_zeros(1), dense.flatten()))
    return flat[1:].view(dense.shape)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "offset"])
@pytest.mark.parametrize("which", ["x", "w13", "w2"])
def test_memory_layout_does_not_change_the_result(which, layout):
    routing = routing_of("random", 63, E, 2)
    dense = _inputs(63, 32, 24)
    strided = {**dense, which: _views(dense[which], layout)}
    outputs = []
    for inputs in (dense, strided):
        leaves = [t.detach().requires_grad_() for t in inputs.values()]
        y_ND = _forced("grouped_mm", routing)(*leaves)
        grads = torch.autograd.grad(y_ND.sum(), leaves)
        outputs.append([y_ND, *grads])
    for actual, expected in zip(outputs[1], outputs[0], strict=True):
        assert_close(actual, expected)


def test_one_weight_expanded_over_the_experts():
    routing = routing_of("random", 63, E, 2)
    inputs = _inputs(63, 32, 24)
    inputs["w13"] = inputs["w13"][:1].expand(E, -1, -1)
    inputs["w2"] = inputs["w2"][:1].expand(E, -1, -1)
    actual = _forced("grouped_mm", routing)(**inputs)
    dense = {name: tensor.contiguous() for name, tensor in inputs.items()}
    assert_close(actual, _forced("reference", routing)(**dense))


def test_expanded_upstream_gradients():
    routing = routing_of("random", 63, E, 2)
    leaves = [t.requires_grad_() for t in _inputs(63, 32, 24).values()]
    y_ND = _forced("grouped_mm", routing)(*leaves)
    expanded = torch.autograd.grad(y_ND.sum(), leaves, retain_graph=True)
    dense = torch.autograd.grad(y_ND, leaves, torch.ones(y_ND.shape))
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


def test_weights_are_cast_to_the_dtype_of_x_and_keep_theirs_in_the_gradient():
    routing = routing_of("random", 63, E, 2)
    x, w13, w2 = (t.requires_grad_() for t in _inputs(63, 32, 24).values())
    y_ND = experts(x.bfloat16(), w13, w2, routing)
    y_ND.sum().backward()
    assert y_ND.dtype == torch.bfloat16
    assert w13.grad.dtype == w2.grad.dtype == torch.float32


def test_saves_the_pre_activation_and_nothing_of_the_size_of_the_rows_besides():
    routing = routing_of("random", 63, E, 2)
    inputs = {name: t.requires_grad_() for name, t in _inputs(63, 32, 24).items()}
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _forced("grouped_mm", routing)(**inputs)
    # 126 rows of 48 pre-activations; the gathered rows would be (126, 32).
    assert [tuple(t.shape) for t in saved if t.dim() == 2 and len(t) == 126] == [(126, 48)]


def test_two_runs_are_bitwise_equal():
    routing = routing_of("random", 63, E, 2)
    leaves = [t.bfloat16().requires_grad_() for t in _inputs(63, 32, 24).values()]
    runs = [torch.autograd.grad(experts(*leaves, routing).sum(), leaves) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_fp64_is_served_by_the_reference_and_the_rest_by_grouped_mm():
    routing = routing_of("random", 4, E, 2)
    dispatch.reset_counts()
    for dtype in (torch.float64, *DTYPES):
        experts(*(t.to(dtype) for t in _inputs(4, 8, 8).values()), routing)
    assert dispatch.counts() == {
        ("moe_experts", "reference"): 1,
        ("moe_experts", "grouped_mm"): 3,
    }


@pytest.mark.parametrize("width", [16, 13])
def test_compiles(width):
    routing = routing_of("random", 9, E, 2)
    assert_compiles(lambda **t: experts(**_renamed(t), routing=routing), _inputs(9, width, 8))


def _renamed(tensors: Results) -> Results:
    return {"x_TD": tensors["x"], "w13_EPD": tensors["w13"], "w2_EDF": tensors["w2"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x_TD": torch.randn(4, 8)}, r"x has shape \(4, 8\), expected \(3, 8\)"),
        ({"x_TD": torch.randn(3, 7)}, r"x has shape \(3, 7\)"),
        ({"w13_EPD": torch.randn(E, 6, 8)}, r"w13 has shape \(5, 6, 8\), expected \(5, 12, 8\)"),
        ({"activation": "gelu"}, r"w13 has shape \(5, 12, 8\), expected \(5, 6, 8\)"),
        ({"w2_EDF": torch.randn(8, 6)}, r"w2 has shape \(8, 6\)"),
        ({"activation": "tanh"}, "activation = 'tanh'"),
        ({"routing": route(torch.randn(3, 4), top_k=2)}, r"routing.offsets has shape \(5,\)"),
        ({"w2_EDF": torch.randn(E, 8, 6, device="meta")}, "w2 on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    valid = {**_renamed(_inputs(3, 8, 6)), "routing": routing_of("random", 3, E, 2)}
    with pytest.raises(ShapeError, match=message):
        experts(**{**valid, **arguments})
