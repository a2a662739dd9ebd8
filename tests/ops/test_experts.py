from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from slipstream.errors import ShapeError
from slipstream.ops import dispatch
from slipstream.ops.activation import Activation, is_gated
from slipstream.ops.activation.reference import activation_reference
from slipstream.ops.moe import ExpertsOptions, Routing, experts
from slipstream.verify import routings
from slipstream.verify.routings import eager_experts
from tests.budget import Results, assert_budget, results
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import DTYPES, EXAMPLES, ONE, cases, draws, fast, forced, runnable
from tests.ops.routings import LOADS, SHAPES, Shape, draw, routing_of, small_integers

OP = "moe_experts"
ACTIVATIONS = list(get_args(Activation))
VARIANTS = {
    "bias": {"bias": True},
    "interleaved": {"interleaved": True},
    "clamped": {"activation": "swiglu_clamped", "bias": True, "limit": 5.0, "alpha": 1.3},
    "clamped-interleaved": {"activation": "swiglu_clamped", "interleaved": True, "bias": True},
    "plain-bias": {"activation": "gelu_tanh", "bias": True},
    "save-x": {"save": "x", "bias": True},
}
SMALL = settings(max_examples=EXAMPLES, deadline=None)


def _run(name: str, routing: Routing, **options):
    """The op through one implementation; rows of absent slots, which are undefined, cut off."""
    present = int(routing.offsets_E1[-1])

    def run(x, w13, w2, b13=None, b2=None):
        with forced(OP, name):
            y_ND = experts(x, w13, w2, routing, b13_EP=b13, b2_ED=b2, **options)
        return y_ND[:present]

    return run


def _stock(routing: Routing, **options):
    options = {name: value for name, value in options.items() if name != "save"}

    def run(**inputs):
        y_ND = eager_experts(expert=routing.expert_TK, **inputs, **options)
        return y_ND[: int(routing.offsets_E1[-1])]

    return run


def _sized(load: str, shape: Shape) -> Routing:
    return routing_of(load, shape.T, shape.E, shape.K)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_matches_a_loop_over_rows(activation, interleaved):
    gated = is_gated(activation)
    if interleaved and not gated:
        pytest.skip("has no up rows")
    shape = Shape(T=9, D=6, F=4)
    routing = _sized("absent", shape)
    inputs = {k: t.double() for k, t in draw(shape, activation, bias=True).items()}
    x, w13, w2, b13, b2 = inputs.values()
    function = ExpertsOptions(activation=activation).gating
    rows = []
    for slot in routing.order_N.tolist()[: int(routing.offsets_E1[-1])]:
        token, k = divmod(slot, 2)
        e = routing.expert_TK[token, k]
        h = w13[e] @ x[token] + b13[e]
        gate, up = (h[::2], h[1::2]) if interleaved else (h[:4], h[4:])
        a = (
            activation_reference(gate, up, function)
            if gated
            else activation_reference(h, None, function)
        )
        rows.append(w2[e] @ a + b2[e])
    run = _run("reference", routing, activation=activation, interleaved=interleaved)
    assert_close(run(**inputs), torch.stack(rows))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_of_the_reference_in_fp64(activation):
    shape = Shape(T=4, D=3, F=2)
    inputs = [t.double().requires_grad_() for t in draw(shape, activation, bias=True).values()]
    run = _run("reference", _sized("absent", shape), activation=activation)
    assert torch.autograd.gradcheck(run, inputs)


def test_the_reference_writes_zeros_for_absent_slots():
    shape = Shape()
    routing = _sized("absent", shape)
    with forced(OP, "reference"):
        y_ND = experts(*draw(shape).values(), routing)
    past = y_ND[int(routing.offsets_E1[-1]) :]
    assert len(past) > 0
    assert torch.equal(past, torch.zeros_like(past))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP))
def test_every_shape_stays_in_budget(implementation, dtype, shape):
    routing = _sized("random", shape)
    inputs = draws(lambda: draw(shape))
    assert_budget(_run(implementation, routing), _stock(routing), inputs, dtype)


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_calls_with_one_token_stay_in_budget(implementation, dtype):
    # Several calls are pooled: the error of a few numbers is luck.
    shape = Shape(T=8)
    expert_T1K = _sized("random", shape).expert_TK.split(1)

    def one_by_one(build):
        runs = [build(routings.routing_of(expert_1K, shape.E)) for expert_1K in expert_T1K]

        def run(x, **weights):
            rows = zip(runs, x.split(1), strict=True)
            return torch.cat([one(x=row, **weights) for one, row in rows])

        return run

    runs = (one_by_one(build) for build in (partial(_run, implementation), _stock))
    assert_budget(*runs, draw(shape), dtype)


@pytest.mark.parametrize("load", LOADS[1:])
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_every_load_stays_in_budget(implementation, dtype, load):
    routing = _sized(load, Shape())
    inputs = draws(lambda: draw(Shape()))
    assert_budget(_run(implementation, routing), _stock(routing), inputs, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_every_activation_stays_in_budget(implementation, dtype, activation):
    routing = _sized("random", Shape())
    runs = (f(routing, activation=activation) for f in (partial(_run, implementation), _stock))
    bias = activation == "swiglu_clamped"
    assert_budget(*runs, draws(lambda: draw(Shape(), activation, bias=bias)), dtype)


@pytest.mark.parametrize("shape", [Shape(), Shape(D=31, F=17)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_every_variant_stays_in_budget(implementation, dtype, variant, shape):
    routing, options = _sized("absent", shape), dict(VARIANTS[variant])
    activation, bias = options.get("activation", "swiglu"), options.pop("bias", False)
    inputs = draws(lambda: draw(shape, activation, bias=bias))
    runs = (f(routing, **options) for f in (partial(_run, implementation), _stock))
    assert_budget(*runs, inputs, dtype)


@pytest.mark.parametrize("implementation", fast(OP))
@SMALL
@given(
    shape=st.builds(
        Shape,
        T=st.integers(0, 40),
        D=st.integers(1, 9),
        F=st.integers(1, 20),
        E=st.integers(1, 6),
        K=st.integers(1, 6),
    ),
    load=st.sampled_from(LOADS),
    bias=st.booleans(),
    save=st.sampled_from(["h", "x"]),
)
def test_any_sizes_are_exact_where_arithmetic_is(implementation, shape, load, bias, save):
    shape = Shape(**{**vars(shape), "K": min(shape.K, shape.E)})
    routing, inputs = _sized(load, shape), small_integers(shape, bias=bias)
    runs = [_run(name, routing, activation="relu2", save=save) for name in (implementation, OP)]
    runs[1] = _run("reference", routing, activation="relu2")
    found, truth = ({k: t.detach() for k, t in _exact(run, inputs).items()} for run in runs)
    for key in truth:
        assert torch.equal(found[key], truth[key]), key


def _exact(run, inputs: Results) -> Results:
    """Output and gradients for an upstream gradient of small integers."""
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    y_ND = run(**leaves)
    steps = torch.arange(y_ND.numel()) % 3 - 1
    grads = torch.autograd.grad(
        y_ND, list(leaves.values()), steps.view_as(y_ND).float(), materialize_grads=True
    )
    return {"y": y_ND, **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize("implementation", fast(OP))
def test_gradients_of_many_slots_are_summed_in_fp32(implementation):
    # One expert taken K times over stands for K experts with the same rows.
    many, width = 16, 32
    routing = routing_of("random", 9, many, many)
    x, w13, w2 = (t.half() for t in draw(Shape(T=9, D=width, E=1)).values())
    x.requires_grad_()
    dout = torch.randn(9, width).half()
    y_ND = _run(implementation, routing)(x, w13.repeat(many, 1, 1), w2.repeat(many, 1, 1))
    (grad,) = torch.autograd.grad(y_ND, x, dout[routing.order_N // many])
    single = routing_of("random", 9, 1, 1)
    (one,) = torch.autograd.grad(_run(implementation, single)(x, w13, w2), x, dout)
    # 16 equal terms add up without rounding in fp32 and with it in fp16.
    assert torch.equal(grad, many * one)


@pytest.mark.parametrize("implementation", runnable(OP))
def test_experts_without_tokens_get_exactly_zero_gradients(implementation, poisoned):
    inputs = {name: t.requires_grad_() for name, t in draw(Shape(), bias=True).items()}
    run = _run(implementation, _sized("empty-experts", Shape()))
    run(**inputs).square().sum().backward()
    for name in ("w13", "w2", "b13", "b2"):
        grad = inputs[name].grad
        assert torch.equal(grad[1::2], torch.zeros_like(grad[1::2])), name
        assert (grad[::2].flatten(1).abs().amax(1) > 0).all(), name


@pytest.mark.parametrize("load", ["empty-experts", "absent"])
@pytest.mark.parametrize("save", ["h", "x"])
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_poisoned_memory_never_shows(implementation, dtype, save, load, poisoned):
    shape = Shape(D=31, F=17)
    inputs = {name: t.to(dtype) for name, t in draw(shape, bias=True).items()}
    found = results(_run(implementation, _sized(load, shape), save=save), inputs, dtype)
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name


@pytest.mark.parametrize("implementation", runnable(OP))
def test_upstream_gradients_of_absent_rows_are_not_read(implementation, poisoned):
    routing, inputs = _sized("absent", Shape()), draw(Shape(), bias=True)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    present = int(routing.offsets_E1[-1])
    found = []
    for poison in (0.0, float("nan")):
        with forced(OP, implementation):
            y_ND = experts(
                *list(leaves.values())[:3], routing, b13_EP=leaves["b13"], b2_ED=leaves["b2"]
            )
        grad = torch.ones_like(y_ND)
        grad[present:] = poison
        found.append(torch.autograd.grad(y_ND, list(leaves.values()), grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_zero_tokens(implementation, dtype, width, poisoned):
    inputs = draw(Shape(T=0, D=width, F=5), bias=True)
    leaves = {name: t.to(dtype).requires_grad_() for name, t in inputs.items()}
    y_ND = _run(implementation, _sized("random", Shape(T=0)))(**leaves)
    grads = torch.autograd.grad(y_ND.sum(), list(leaves.values()))
    assert y_ND.shape == grads[0].shape == (0, width)
    for leaf, grad in zip(leaves.values(), grads, strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


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
    if layout == "reversed-experts":
        return dense.transpose(0, 1).contiguous().transpose(0, 1)
    flat = torch.cat((dense.new_zeros(1), dense.flatten()))
    return flat[1:].view(dense.shape)


@pytest.mark.parametrize(
    "layout", ["transposed", "sliced", "strided", "offset", "reversed-experts"]
)
@pytest.mark.parametrize("which", ["x", "w13", "w2", "b13"])
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, DTYPES[::2], ONE))
def test_any_memory_layout_stays_in_budget(implementation, dtype, which, layout):
    # Not the same bits: a library may sum the products of another layout in another order.
    def strided() -> Results:
        dense = draw(Shape(), bias=True)
        return {**dense, which: _views(dense[which].to(dtype), layout)}

    routing = _sized("random", Shape())
    assert_budget(_run(implementation, routing), _stock(routing), draws(strided), dtype)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", fast(OP))
def test_weights_of_another_dtype_and_width(implementation, low):
    """Gradients have the dtype of their weights, whose rows the padding of x does not align."""
    shape = Shape(D=12, F=12)
    routing, inputs = _sized("random", shape), draw(shape)
    inputs |= {name: inputs[name].to(low) for name in ("w13", "w2")}
    wide = {name: tensor.float() for name, tensor in inputs.items()}
    found = results(_run(implementation, routing), inputs, torch.float32)
    expected = results(_stock(routing), wide, torch.float32)
    for name, tensor in found.items():
        unit = torch.finfo(tensor.dtype).eps
        scale = expected[name].abs().max().item()
        assert_close(tensor.float(), expected[name], rtol=unit, atol=1e-5 * scale)
        assert tensor.dtype == (low if name.endswith(("w13", "w2")) else torch.float32)


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset"])
@pytest.mark.parametrize("implementation", [name for name in fast(OP) if name == "triton"])
def test_a_width_of_one_in_any_layout(implementation, layout):
    """Strides of a dimension of one element say nothing, and padding keeps them."""

    def strided(shape: Shape) -> Results:
        dense = draw(shape, bias=True)
        return dense | {name: _views(dense[name], layout) for name in ("w13", "w2")}

    for shape in (Shape(F=1), Shape(D=1)):
        routing = _sized("random", shape)
        several = draws(partial(strided, shape))
        assert_budget(_run(implementation, routing), _stock(routing), several, torch.float32)


@pytest.mark.parametrize("implementation", fast(OP))
def test_one_weight_expanded_over_the_experts(implementation):
    routing, inputs = _sized("random", Shape()), draw(Shape())
    for name in ("w13", "w2"):
        inputs[name] = inputs[name][:1].expand(Shape().E, -1, -1)
    dense = {name: tensor.contiguous() for name, tensor in inputs.items()}
    assert_close(_run(implementation, routing)(**inputs), _run("reference", routing)(**dense))


@pytest.mark.parametrize("implementation", fast(OP))
def test_expanded_upstream_gradients(implementation):
    leaves = {name: t.requires_grad_() for name, t in draw(Shape()).items()}
    y_ND = _run(implementation, _sized("random", Shape()))(**leaves)
    expanded = torch.autograd.grad(y_ND.sum(), list(leaves.values()), retain_graph=True)
    dense = torch.autograd.grad(y_ND, list(leaves.values()), torch.ones(y_ND.shape))
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, DTYPES[1:]))
def test_weights_are_cast_to_the_dtype_of_x_and_keep_theirs_in_the_gradient(implementation, dtype):
    leaves = {name: t.requires_grad_() for name, t in draw(Shape(), bias=True).items()}
    run = _run(implementation, _sized("random", Shape()))
    y_ND = run(**{**leaves, "x": leaves["x"].to(dtype)})
    y_ND.sum().backward()
    assert y_ND.dtype == dtype
    assert {t.grad.dtype for t in leaves.values()} == {torch.float32}


@pytest.mark.parametrize("frozen", ["x", "w13", "w2", "b13", "b2"])
@pytest.mark.parametrize("implementation", fast(OP))
def test_what_needs_no_gradient_gets_none_and_changes_no_other(implementation, frozen):
    run, inputs = _run(implementation, _sized("random", Shape())), draw(Shape(), bias=True)
    found = []
    for skipped in (None, frozen):
        leaves = {n: t.detach().clone().requires_grad_(n != skipped) for n, t in inputs.items()}
        run(**leaves).square().sum().backward()
        found.append({name: t.grad for name, t in leaves.items()})
    assert found[1].pop(frozen) is None
    assert all(torch.equal(grad, found[0][name]) for name, grad in found[1].items())


@pytest.mark.parametrize("implementation", runnable(OP))
def test_autocast_computes_in_its_dtype(implementation):
    dtype = torch.float16 if implementation == "triton" else torch.bfloat16
    leaves = {name: t.requires_grad_() for name, t in draw(Shape(), bias=True).items()}
    run = _run(implementation, _sized("random", Shape()))
    with torch.autocast(torch.get_default_device().type, dtype):
        y_ND = run(**leaves)
        kept = run(**{**leaves, "x": leaves["x"].to(dtype)})
    expected = run(**{**leaves, "x": leaves["x"].to(dtype)})
    y_ND.sum().backward()
    assert y_ND.dtype == dtype
    assert torch.equal(y_ND, expected)
    assert torch.equal(kept, expected)
    assert {t.grad.dtype for t in leaves.values()} == {torch.float32}


def test_autocast_leaves_fp64_alone():
    inputs = {name: t.double() for name, t in draw(Shape()).items()}
    run = _run("reference", _sized("random", Shape()))
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        found = run(**inputs)
    assert torch.equal(found, run(**inputs))


@pytest.mark.parametrize(("save", "expected"), [("h", [(126, 48)]), ("x", [])])
@pytest.mark.parametrize("implementation", fast(OP))
def test_saves_what_it_promises_and_nothing_of_the_size_of_the_rows_besides(
    implementation, save, expected
):
    inputs = {name: t.requires_grad_() for name, t in draw(Shape()).items()}
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _run(implementation, _sized("random", Shape()), save=save)(**inputs)
    # 126 rows of 48 pre-activations; the gathered rows would be (126, 32).
    rows = [tuple(t.shape) for t in saved if t.dim() == 2 and len(t) == 126]
    assert rows == expected


@pytest.mark.parametrize("save", ["h", "x"])
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_two_runs_are_bitwise_equal(implementation, dtype, save):
    inputs = {name: t.to(dtype) for name, t in draw(Shape(), bias=True).items()}
    run = _run(implementation, _sized("absent", Shape()), save=save)
    first, second = (results(run, inputs, dtype) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("implementation", fast(OP))
def test_save_x_gives_the_very_gradients_of_save_h(implementation):
    routing, inputs = _sized("random", Shape()), draw(Shape(), bias=True)
    runs = (_run(implementation, routing, save=save) for save in ("h", "x"))
    kept, again = (results(run, inputs, torch.float32) for run in runs)
    assert all(torch.equal(kept[name], again[name]) for name in kept)


def test_fp64_is_served_by_the_reference_and_the_rest_by_the_fastest():
    routing = routing_of("random", 4, 5, 2)
    dispatch.reset_counts()
    for dtype in (torch.float64, torch.float32, torch.float16):
        experts(*(t.to(dtype) for t in draw(Shape(T=4)).values()), routing)
    counts = {key: n for key, n in dispatch.counts().items() if key[0] == OP}
    assert counts == {(OP, "reference"): 1, (OP, runnable(OP)[0]): 2}


@pytest.mark.parametrize(
    ("variant", "width"), [("bias", 13), ("clamped-interleaved", 16), ("save-x", 16)]
)
@pytest.mark.parametrize("implementation", fast(OP))
def test_compiles(implementation, width, variant):
    shape, options = Shape(T=9, D=width, F=8), dict(VARIANTS[variant])
    inputs = draw(shape, options.get("activation", "swiglu"), bias=options.pop("bias"))
    routing = _sized("random", shape)

    def run(x, w13, w2, b13, b2):
        return experts(x, w13, w2, routing, b13_EP=b13, b2_ED=b2, **options)

    with forced(OP, implementation):
        run(**inputs)  # a refusal shows here as what it is
        assert_compiles(run, inputs, truth=_stock(routing, **options))


INTEGERS = torch.zeros(3, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x_TD": torch.randn(4, 8)}, r"x has shape \(4, 8\), expected \(3, 8\)"),
        ({"x_TD": torch.randn(3, 7)}, r"x has shape \(3, 7\)"),
        ({"x_TD": INTEGERS}, "x has dtype torch.int64, expected float64, float32, bfloat16 or"),
        ({"x_TD": torch.zeros(3, 8).to(torch.float8_e5m2)}, "x has dtype torch.float8_e5m2"),
        ({"x_TD": None}, "x is None, expected a tensor"),
        ({"x_TD": [[0.0] * 8] * 3}, "x is a list of length 3, expected a tensor"),
        ({"w2_EDF": torch.zeros(5, 8, 6).to(torch.float8_e4m3fn)}, "w2 has dtype torch.float8"),
        ({"w13_EPD": torch.randn(5, 6, 8)}, r"w13 has shape \(5, 6, 8\), expected \(5, 12, 8\)"),
        ({"activation": "gelu"}, r"w13 has shape \(5, 12, 8\), expected \(5, 6, 8\)"),
        ({"w2_EDF": torch.randn(8, 6)}, r"w2 has shape \(8, 6\)"),
        ({"w2_EDF": torch.randn(5, 8, 0)}, r"w2 has shape \(5, 8, 0\), expected sizes above 0"),
        ({"b13_EP": torch.randn(5, 6)}, r"b13 has shape \(5, 6\), expected \(5, 12\)"),
        ({"b2_ED": torch.randn(5, 6)}, r"b2 has shape \(5, 6\), expected \(5, 8\)"),
        ({"b2_ED": torch.ones(5, 8).int()}, "b2 has dtype torch.int32"),
        ({"activation": "tanh"}, "activation = 'tanh', expected one of swiglu, swiglu_clamped"),
        ({"save": "a"}, "save = 'a', expected one of h, x"),
        ({"limit": 0.0}, "limit = 0.0, expected a number above 0"),
        ({"alpha": float("nan")}, "alpha = nan, expected a finite number"),
        ({"alpha": 2.0}, "alpha = 2.0, but swiglu has none; leave it out, or use swiglu_clamped"),
        ({"limit": 5.0, "activation": "geglu"}, "limit = 5.0, but geglu has none"),
        ({"routing": None}, "routing is None, expected a Routing, from route or routing_from"),
        ({"routing": tuple(routing_of("random", 3, 5, 2))}, "routing is a tuple of length 10"),
        ({"routing": routing_of("random", 3, 4, 2)}, r"routing.offsets has shape \(5,\)"),
        ({"w2_EDF": torch.randn(5, 8, 6, device="meta")}, "w2 on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    inputs = draw(Shape(T=3, D=8, F=6))
    valid = {"x_TD": inputs["x"], "w13_EPD": inputs["w13"], "w2_EDF": inputs["w2"]}
    with pytest.raises(ShapeError, match=message):
        experts(**{**valid, "routing": routing_of("random", 3, 5, 2), **arguments})


def test_interleaved_rows_need_a_gate():
    inputs = draw(Shape(T=3), "gelu")
    with pytest.raises(ShapeError, match="interleaved needs a gated activation, gelu has no up"):
        experts(
            *inputs.values(), routing_of("random", 3, 5, 2), activation="gelu", interleaved=True
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets_E1": torch.zeros(6)}, "routing.offsets has dtype torch.float32"),
        ({"order_N": torch.arange(5)}, r"routing.order has shape \(5,\), expected \(6\)"),
        ({"position_N": torch.zeros(6)}, "routing.position has dtype torch.float32"),
        ({"weight_TK": torch.ones(3, 1)}, r"routing.weight has shape \(3, 1\)"),
        ({"weight_TK": torch.ones(3, 2).int()}, "routing.weight has dtype torch.int32"),
        ({"position_N": None}, "routing.position is None, expected a tensor"),
        ({"expert_TK": torch.zeros(3, 0)}, "routing has 0 slots per token, expected 1 or more"),
        ({"schedule": torch.zeros(3)}, r"routing.schedule has shape \(3,\), expected \(any, 2\)"),
        ({"schedule": torch.zeros(3, 2)}, "routing.schedule has dtype torch.float32"),
    ],
)
def test_a_routing_that_does_not_fit_together_is_named(change, message):
    routing = routing_of("random", 3, 5, 2)._replace(**change)
    with pytest.raises(ShapeError, match=message):
        experts(*draw(Shape(T=3)).values(), routing)


@pytest.mark.parametrize("implementation", fast(OP))
@pytest.mark.usefixtures("poisoned")
def test_no_slot_of_any_expert(implementation):
    """Nothing is read by what the schedule says of tiles that are not there."""
    shape = Shape(T=8, D=16, F=8, E=2, K=2)
    inputs = draw(shape, "swiglu")
    routing = routings.routing_of(torch.full((8, 2), 2), 2, torch.rand(8, 2))
    leaves = [inputs[name].requires_grad_() for name in ("x", "w13", "w2")]
    with forced(OP, implementation):
        rows = experts(*leaves, routing)
        grads = torch.autograd.grad(rows, leaves, torch.ones_like(rows))
    assert all(not grad.any() for grad in grads)
