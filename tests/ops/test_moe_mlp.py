import inspect
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from slipstream.errors import ShapeError
from slipstream.ops import dispatch
from slipstream.ops.moe import Routing, combine, experts, moe_mlp, route
from slipstream.ops.moe.experts import passes
from slipstream.verify import routings
from slipstream.verify.routings import eager_combine, eager_experts
from tests.budget import Results, assert_budget, results
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import DTYPES, EXAMPLES, ONE, cases, draws, fast, forced, runnable
from tests.ops.routings import LOADS, SHAPES, Shape, draw, routing_of, small_integers

OP = "moe_mlp"
VARIANTS = {
    "bare": {"extras": ()},
    "residual": {"extras": ("residual",)},
    "shared": {"extras": ("shared",)},
    "bias": {"bias": True},
    "interleaved": {"interleaved": True},
    "clamped": {"activation": "swiglu_clamped", "bias": True, "limit": 5.0, "alpha": 1.3},
    "clamped-interleaved": {"activation": "swiglu_clamped", "interleaved": True, "bias": True},
    "geglu": {"activation": "geglu"},
    "plain-bias": {"activation": "relu2", "bias": True},
    "save-x": {"save": "x", "bias": True},
}
E, D, F = 4, 16, 24


def _sized(load: str, shape: Shape) -> Routing:
    return routing_of(load, shape.T, shape.E, shape.K)


def _draw(
    shape: Shape,
    activation: str = "swiglu",
    *,
    bias: bool = False,
    extras: tuple[str, ...] = ("residual", "shared"),
) -> Results:
    inputs = draw(shape, activation, bias=bias) | {"weight": torch.rand(shape.T, shape.K)}
    return inputs | {name: torch.randn(shape.T, shape.D) for name in extras}


def _variant(variant: str, shape: Shape) -> tuple[Callable[[], Results], dict]:
    """What draws the inputs, and options."""
    options = dict(VARIANTS[variant])
    drawn = {name: options.pop(name) for name in ("bias", "extras") if name in options}
    return partial(_draw, shape, options.get("activation", "swiglu"), **drawn), options


def _run(name: str, routing: Routing, **options):
    def run(x, w13, w2, weight, b13=None, b2=None, residual=None, shared=None):
        # fp32 in real runs, whatever the dtype of the rows; fp64 for the truth.
        wide = torch.promote_types(weight.dtype, torch.float32)
        extras = {"residual_TD": residual, "shared_TD": shared}
        changed = routing._replace(weight_TK=weight.to(wide))
        with forced(OP, name):
            return moe_mlp(x, w13, w2, changed, b13_EP=b13, b2_ED=b2, **extras, **options)

    return run


def _stock(routing: Routing, **options):
    options = {name: value for name, value in options.items() if name != "save"}

    def run(x, w13, w2, weight, b13=None, b2=None, residual=None, shared=None):
        y_ND = eager_experts(x, w13, w2, routing.expert_TK, b13, b2, **options)
        return eager_combine(y_ND, weight, routing.expert_TK, len(w2), residual, shared)

    return run


def _runs(implementation: str, routing: Routing, **options) -> tuple:
    return _run(implementation, routing, **options), _stock(routing, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP))
def test_every_shape_stays_in_budget(implementation, dtype, shape):
    inputs = draws(lambda: _draw(shape))
    assert_budget(*_runs(implementation, _sized("random", shape)), inputs, dtype)


@pytest.mark.parametrize("load", LOADS[1:])
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_every_load_stays_in_budget(implementation, dtype, load):
    inputs = draws(lambda: _draw(Shape(), bias=True))
    assert_budget(*_runs(implementation, _sized(load, Shape())), inputs, dtype)


@pytest.mark.parametrize("shape", [Shape(), Shape(D=31, F=17)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_every_variant_stays_in_budget(implementation, dtype, variant, shape):
    draw_inputs, options = _variant(variant, shape)
    runs = _runs(implementation, _sized("random", shape), **options)
    assert_budget(*runs, draws(draw_inputs), dtype)


@pytest.mark.parametrize("implementation", fast(OP))
@settings(max_examples=EXAMPLES, deadline=None)
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
    inputs["weight"] = torch.randint(-1, 2, (shape.T, shape.K)).float()
    inputs["residual"] = torch.randint(-9, 10, (shape.T, shape.D)).float()
    runs = (_run(implementation, routing, activation="relu2", save=save),)
    runs += (_stock(routing, activation="relu2"),)
    found = []
    for run in runs:
        leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
        out_TD = run(**leaves)
        steps = (torch.arange(out_TD.numel()) % 3 - 1).view_as(out_TD).float()
        grads = torch.autograd.grad(out_TD, list(leaves.values()), steps, materialize_grads=True)
        found.append({"output": out_TD, **dict(zip(leaves, grads, strict=True))})
    for name, expected in found[1].items():
        assert torch.equal(found[0][name], expected), name


@pytest.mark.parametrize("implementation", fast(OP))
def test_absent_slots_leave_no_trace(implementation, poisoned):
    routing, inputs = _sized("absent", Shape()), _draw(Shape(), bias=True)
    found = []
    for poison in (0.0, float("nan")):
        # The first token has no expert, so that nothing reads its row.
        inputs["x"][0] = poison
        found.append(results(_run(implementation, routing), inputs, torch.float32))
    absent_TK = routing.expert_TK >= Shape().E
    assert (found[0]["gradient of weight"][absent_TK] == 0).all()
    assert (found[0]["gradient of x"][0] == 0).all()
    assert torch.equal(found[0]["output 0"][0], inputs["residual"][0] + inputs["shared"][0])
    assert all(torch.equal(found[1][name], tensor) for name, tensor in found[0].items())


@pytest.mark.parametrize("save", ["h", "x"])
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_poisoned_memory_never_shows(implementation, dtype, save, poisoned):
    shape = Shape(D=31, F=17)
    inputs = {name: t.to(dtype) for name, t in _draw(shape, bias=True).items()}
    run = _run(implementation, _sized("empty-experts", shape), save=save)
    found = results(run, inputs, dtype)
    for name, tensor in found.items():
        assert torch.isfinite(tensor).all(), name
    for name in ("w13", "w2", "b13", "b2"):
        assert (found[f"gradient of {name}"][1::2] == 0).all(), name


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_zero_tokens(implementation, dtype, width, poisoned):
    shape = Shape(T=0, D=width, F=5)
    inputs = {name: t.to(dtype) for name, t in _draw(shape, bias=True).items()}
    found = results(_run(implementation, _sized("random", shape)), inputs, dtype)
    assert found["output 0"].shape == (0, width)
    for name, tensor in inputs.items():
        assert torch.equal(found[f"gradient of {name}"], torch.zeros_like(tensor)), name


@pytest.mark.parametrize("transposed", [False, True])
def test_columns_one_part_after_another_are_the_same_bits(monkeypatch, transposed):
    shape = Shape(T=5, D=1032, E=2, K=2)
    run, drawn = _run("triton", _sized("random", shape)), _draw(shape, bias=True)
    if transposed:
        drawn["w2"] = drawn["w2"].mT.contiguous().mT
    whole, widths = run(**drawn), []
    plain = passes.launch.rows

    def rows(x: torch.Tensor, weight_EOI: torch.Tensor, *rest) -> torch.Tensor:
        if not x.is_meta:  # kernels are compiled ahead with these
            widths.append(weight_EOI.shape[1])
        return plain(x, weight_EOI, *rest)

    monkeypatch.setattr(passes.launch, "rows", rows)
    monkeypatch.setattr(passes, "MOST_ROW_BYTES", 1)
    assert torch.equal(run(**drawn), whole)
    assert len(widths) > 4
    assert sum(widths) == shape.D


@pytest.mark.parametrize("implementation", fast(OP))
def test_transposed_and_strided_inputs_and_expanded_gradients(implementation):
    run, dense = _run(implementation, _sized("random", Shape())), _draw(Shape(), bias=True)
    found = []
    for strided in (False, True):
        leaves = {
            name: (t.mT.contiguous().mT if strided else t).detach().requires_grad_()
            for name, t in dense.items()
        }
        out_TD = run(**leaves)
        loss = out_TD.sum() if strided else (out_TD * torch.ones_like(out_TD)).sum()
        found.append([out_TD, *torch.autograd.grad(loss, list(leaves.values()))])
    for actual, expected in zip(found[1], found[0], strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, DTYPES[1:]))
def test_fp32_weights_under_16_bit_rows_keep_their_dtype_in_the_gradient(implementation, dtype):
    leaves = {name: t.requires_grad_() for name, t in _draw(Shape(), bias=True).items()}
    run = _run(implementation, _sized("random", Shape()))
    out_TD = run(**{**leaves, "x": leaves["x"].to(dtype)})
    out_TD.sum().backward()
    assert out_TD.dtype == dtype
    assert {t.grad.dtype for t in leaves.values()} == {torch.float32}


@pytest.mark.parametrize("frozen", ["x", "w13", "w2", "b13", "b2", "weight", "residual", "shared"])
@pytest.mark.parametrize("implementation", fast(OP))
def test_what_needs_no_gradient_gets_none_and_changes_no_other(implementation, frozen):
    run, inputs = _run(implementation, _sized("random", Shape())), _draw(Shape(), bias=True)
    found = []
    for skipped in (None, frozen):
        leaves = {n: t.detach().clone().requires_grad_(n != skipped) for n, t in inputs.items()}
        run(**leaves).square().sum().backward()
        found.append({name: t.grad for name, t in leaves.items()})
    assert found[1].pop(frozen) is None
    assert all(torch.equal(grad, found[0][name]) for name, grad in found[1].items())


@pytest.mark.parametrize("implementation", fast(OP))
def test_autocast_computes_in_its_dtype(implementation):
    dtype = torch.float16 if implementation == "triton" else torch.bfloat16
    leaves = {name: t.requires_grad_() for name, t in _draw(Shape(), bias=True).items()}
    run = _run(implementation, _sized("random", Shape()))
    with torch.autocast(torch.get_default_device().type, dtype):
        out_TD = run(**leaves)
    out_TD.sum().backward()
    assert out_TD.dtype == dtype
    assert torch.equal(out_TD, run(**{**leaves, "x": leaves["x"].to(dtype)}))
    assert {t.grad.dtype for t in leaves.values()} == {torch.float32}


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, interpreted=ONE))
def test_two_runs_are_bitwise_equal(implementation, dtype):
    inputs = {name: t.to(dtype) for name, t in _draw(Shape(), bias=True).items()}
    run = _run(implementation, _sized("random", Shape()))
    first, second = (results(run, inputs, dtype) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("variant", ["bare", "clamped-interleaved", "save-x"])
@pytest.mark.parametrize("implementation", fast(OP))
def test_compiles(implementation, variant):
    shape = Shape(T=9, D=13, F=8)
    routing, (draw_inputs, options) = _sized("absent", shape), _variant(variant, shape)

    def run(x, w13, w2, weight, b13=None, b2=None, residual=None, shared=None):
        changed = routing._replace(weight_TK=weight)
        extras = {"residual_TD": residual, "shared_TD": shared}
        return moe_mlp(x, w13, w2, changed, b13_EP=b13, b2_ED=b2, **extras, **options)

    with forced(OP, implementation):
        assert_compiles(run, draw_inputs(), truth=_stock(routing, **options))


def _layer_inputs(tokens: int) -> Results:
    return {
        "x": torch.randn(tokens, D),
        "router": torch.randn(E, D),
        "w13": torch.randn(E, 2 * F, D) / D**0.5,
        "w2": torch.randn(E, D, F) / F**0.5,
    }


def _routed(x, router):
    wide = torch.promote_types(x.dtype, torch.float32)
    return route(x.to(wide) @ router.to(wide).T, top_k=2, normalize=True)


def _layer(x, router, w13, w2):
    return moe_mlp(x, w13, w2, _routed(x, router), residual_TD=x)


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
    inputs = {name: t.double().requires_grad_() for name, t in _layer_inputs(63).items()}
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


def _stock_layer(x, router, w13, w2):
    """The layer with stock experts, in the dtype of ``x`` between its products."""
    routing = _routed(x, router)
    y_ND = eager_experts(x, w13, w2, routing.expert_TK)
    return eager_combine(y_ND, routing.weight_TK, routing.expert_TK, E, residual=x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_default_path_stays_in_the_budget_of_stock_code(dtype):
    assert_budget(_layer, _stock_layer, _layer_inputs(63), dtype)


@pytest.mark.parametrize("implementation", fast(OP))
def test_a_token_that_names_an_expert_twice_counts_twice(implementation):
    expert_TK = torch.tensor([[0, 0], [0, 1]])
    weight_TK = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    routing = routings.routing_of(expert_TK, 2, weight_TK)
    b2 = torch.zeros(2, 8, requires_grad=True)
    x, w13, w2 = torch.ones(2, 8), torch.ones(2, 16, 8), torch.ones(2, 8, 8)
    with forced(OP, implementation):
        out = moe_mlp(x, w13, w2, routing, b13_EP=torch.zeros(2, 16), b2_ED=b2)
    (found,) = torch.autograd.grad(out.sum(), b2)
    assert found[:, 0].tolist() == [1.5, 0.5]


def test_calls_with_one_token_stay_in_budget():
    # Many calls are pooled: the error of a few numbers is luck.
    def one_by_one(layer):
        return lambda x, **weights: torch.cat([layer(x=row, **weights) for row in x.split(1)])

    runs = (one_by_one(layer) for layer in (_layer, _stock_layer))
    assert_budget(*runs, _layer_inputs(31), torch.float32)


def test_the_default_path_uses_the_fastest_implementation():
    routing, inputs = _sized("random", Shape()), draw(Shape())
    dispatch.reset_counts()
    moe_mlp(*inputs.values(), routing)
    assert dispatch.counts()[OP, runnable(OP)[0]] == 1
    dispatch.reset_counts()
    with dispatch.force(moe_mlp="composed"):
        moe_mlp(*inputs.values(), routing)
    parts = {(op, runnable(op)[0]): 1 for op in ("moe_experts", "moe_combine")}
    assert dispatch.counts() == {(OP, "composed"): 1, **parts}


def test_takes_what_experts_and_combine_take():
    taken = [list(inspect.signature(function).parameters) for function in (experts, combine)]
    assert list(inspect.signature(moe_mlp).parameters) == taken[0] + taken[1][2:]


def test_a_balanced_layer_equals_the_sum_over_the_experts_it_used():
    inputs = {name: t.double() for name, t in _layer_inputs(63).items()}
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


@pytest.mark.parametrize("implementation", runnable(OP))
def test_one_graph_serves_any_number_of_tokens(implementation):
    def layer(x, w13, w2, logits):
        return moe_mlp(x, w13, w2, route(logits, top_k=2))

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    weights = torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    with forced(OP, implementation):
        for tokens in (9, 40, 3):
            inputs = torch.randn(tokens, 16), *weights, torch.randn(tokens, 4)
            assert_close(compiled(*inputs), layer(*inputs))


def test_compiles_with_its_router_for_the_default_backend():
    assert_compiles(_layer, _layer_inputs(9), "inductor", truth=_stock_layer)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x_TD": torch.randn(4, 8)}, r"moe_mlp: x has shape \(4, 8\), expected \(3, 8\)"),
        ({"b13_EP": torch.randn(5, 6)}, r"moe_mlp: b13 has shape \(5, 6\), expected \(5, 12\)"),
        ({"activation": "tanh"}, "moe_mlp: activation = 'tanh'"),
        ({"residual_TD": torch.randn(3, 7)}, r"residual has shape \(3, 7\), expected \(3, 8\)"),
        ({"shared_TD": torch.ones(3, 8).int()}, "shared has dtype torch.int32"),
        ({"shared_TD": torch.randn(3, 8, device="meta")}, "shared on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    inputs = draw(Shape(T=3, D=8, F=6))
    valid = {"x_TD": inputs["x"], "w13_EPD": inputs["w13"], "w2_EDF": inputs["w2"]}
    with pytest.raises(ShapeError, match=message):
        moe_mlp(**{**valid, "routing": routing_of("random", 3, 5, 2), **arguments})


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "transposed"])
@pytest.mark.parametrize("width", [16, 13])
@pytest.mark.parametrize("implementation", runnable(OP))
def test_gradients_of_weights_are_added_to_buffers(implementation, width, transposed):
    routing = routing_of("random", 37, 4, 2)
    x, w13, w2 = torch.randn(37, width), torch.randn(4, 24, width), torch.randn(4, width, 12)
    if transposed:
        w13, w2 = w13.mT.contiguous().mT, w2.mT.contiguous().mT
    weights = [w13.requires_grad_(), w2.requires_grad_()]
    buffers = [torch.randn(t.shape) for t in weights]
    before = [t.clone() for t in buffers]
    with forced(OP, implementation):
        grads = torch.autograd.grad(moe_mlp(x, *weights, routing).sum(), weights)
        moe_mlp(x, *weights, routing, accumulate=(buffers[0], buffers[1])).sum().backward()
    assert all(weight.grad is None for weight in weights)
    for buffer, start, grad in zip(buffers, before, grads, strict=True):
        torch.testing.assert_close(buffer - start, grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [0, 1], ids=["w13", "w2"])
@pytest.mark.parametrize("implementation", runnable(OP))
def test_the_gradient_of_a_frozen_weight_is_not_added_to_its_buffer(implementation, frozen):
    routing = routing_of("random", 9, 4, 2)
    weights = [torch.randn(4, 24, 16).requires_grad_(), torch.randn(4, 16, 12).requires_grad_()]
    weights[frozen].requires_grad_(False)
    buffers = (torch.zeros(4, 24, 16), torch.zeros(4, 16, 12))
    x = torch.randn(9, 16, requires_grad=True)
    with forced(OP, implementation):
        moe_mlp(x, *weights, routing, accumulate=buffers).sum().backward()
    assert buffers[frozen].eq(0).all()
    assert buffers[1 - frozen].ne(0).any()


@pytest.mark.parametrize("save", ["h", "x"])
@pytest.mark.parametrize("implementation", runnable(OP))
def test_a_second_backward_gives_the_very_gradients_of_the_first(implementation, save):
    routing = routing_of("random", 9, 4, 2)
    weight = routing.weight_TK.clone().requires_grad_()
    inputs = [torch.randn(s) for s in ((9, 16), (4, 24, 16), (4, 16, 12))]
    inputs = [*(t.requires_grad_() for t in inputs), weight]
    with forced(OP, implementation):
        out = moe_mlp(*inputs[:3], routing._replace(weight_TK=weight), save=save).square().sum()
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(out, inputs), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("implementation", runnable(OP))
def test_a_gradient_penalty_is_refused_by_autograd(implementation):
    x = torch.randn(9, 16, requires_grad=True)
    weights = torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    with forced(OP, implementation):
        out = moe_mlp(x, *weights, routing_of("random", 9, 4, 2))
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("implementation", runnable(OP))
def test_activation_checkpointing_changes_nothing(implementation, use_reentrant):
    routing = routing_of("random", 9, 4, 2)
    inputs = [torch.randn(s) for s in ((9, 16), (4, 24, 16), (4, 16, 12))]
    inputs = [t.requires_grad_() for t in inputs]
    with forced(OP, implementation):
        expected = torch.autograd.grad(moe_mlp(*inputs, routing).square().sum(), inputs)
        out = checkpoint(moe_mlp, *inputs, routing, use_reentrant=use_reentrant)
        out.square().sum().backward()  # computes forward again, so with the same implementation
    assert all(torch.equal(t.grad, grad) for t, grad in zip(inputs, expected, strict=True))


def test_shapes_without_memory():
    meta = partial(torch.randn, device="meta")
    x = meta(9, 16, requires_grad=True)
    out = moe_mlp(x, meta(4, 24, 16), meta(4, 16, 12), route(meta(9, 4), top_k=2))
    out.sum().backward()
    assert out.shape == x.shape
    assert x.grad.is_meta


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: a, "accumulate is a Tensor, expected two buffers, for w13 and for w2"),
        (lambda a, b: (a,), "accumulate is a tuple of length 1, expected two buffers"),
        (lambda a, b: (a, None), "accumulate for w2 is None, expected a tensor"),
        (lambda a, b: (a[:, :-1], b), "accumulate for w13 has shape"),
        (lambda a, b: (a.bfloat16(), b), "accumulate for w13 is torch.bfloat16"),
        (lambda a, b: (a, b.requires_grad_()), "accumulate for w2 is torch.float32, requires_grad"),
        (lambda a, b: (a.transpose(0, 1).contiguous().transpose(0, 1), b), "has strides"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(change, message):
    routing, weights = (
        routing_of("random", 9, 4, 2),
        (torch.randn(4, 24, 16), torch.randn(4, 16, 12)),
    )
    buffers = change(torch.zeros(4, 24, 16), torch.zeros(4, 16, 12))
    with pytest.raises(ShapeError, match=message):
        moe_mlp(torch.randn(9, 16), *weights, routing, accumulate=buffers)


@pytest.mark.parametrize("implementation", runnable(OP))
def test_a_compiled_graph_refuses_buffers_it_would_not_fill(implementation):
    routing, w13, w2 = routing_of("random", 9, 4, 2), torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    buffers = torch.zeros(4, 24, 16), torch.zeros(4, 16, 12)

    def run(x):
        return moe_mlp(x, w13, w2, routing, accumulate=buffers)

    compiled = torch.compile(run, fullgraph=True, backend="eager")
    with forced(OP, implementation), pytest.raises(Exception, match="accumulate works in eager"):
        compiled(torch.randn(9, 16))


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("implementation", fast(OP))
def test_maps_of_either_integer_dtype(implementation, dtype, scheduled):
    shape = Shape(T=9, D=16, F=8)
    inputs, routing = _draw(shape, bias=True), _sized("random", shape)
    maps = {
        name: t.to(dtype)
        for name, t in routing._asdict().items()
        if isinstance(t, torch.Tensor) and not t.is_floating_point()
    }
    if not scheduled:
        maps["schedule"] = None
    expected, found = (
        results(_run(implementation, r), inputs, torch.float32)
        for r in (routing, routing._replace(**maps))
    )
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
