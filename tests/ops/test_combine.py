import pytest
import torch
from torch.testing import assert_close

from slipstream.errors import ShapeError
from slipstream.ops import dispatch
from slipstream.ops.moe import Routing, combine, route
from tests.budget import Results, assert_budget
from tests.ops.compiling import assert_compiles
from tests.ops.routings import LOADS, routing_of

IMPLEMENTATIONS = dispatch.implementations("moe_combine")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EXTRAS = {"none": (), "residual": ("residual",), "both": ("residual", "shared")}
E = 5


def _inputs(routing: Routing, width: int, extras: str = "both") -> Results:
    tokens, top_k = routing.expert_TK.shape
    inputs = {"y": torch.randn(tokens * top_k, width), "weight": torch.rand(tokens, top_k)}
    return inputs | {name: torch.randn(tokens, width) for name in EXTRAS[extras]}


def _forced(name: str, routing: Routing):
    def run(y, weight, residual=None, shared=None):
        # fp32 in real runs, whatever the dtype of the rows; fp64 for the truth.
        wide = torch.promote_types(weight.dtype, torch.float32)
        with dispatch.force(moe_combine=name):
            return combine(
                y,
                routing._replace(weight_TK=weight.to(wide)),
                residual_TD=residual,
                shared_TD=shared,
            )

    return run


@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_matches_a_loop_over_slots(implementation, extras):
    routing = routing_of("random", 9, E, 3)
    inputs = {name: t.double() for name, t in _inputs(routing, 6, extras).items()}
    expected = sum((inputs[name] for name in EXTRAS[extras]), torch.zeros(9, 6).double())
    for row, slot in enumerate(routing.order_N.tolist()):
        token, k = divmod(slot, 3)
        expected[token] += inputs["weight"][token, k] * inputs["y"][row]
    assert_close(_forced(implementation, routing)(**inputs), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_in_fp64(implementation):
    routing = routing_of("random", 4, E, 2)
    inputs = [t.double().requires_grad_() for t in _inputs(routing, 3).values()]
    assert torch.autograd.gradcheck(_forced(implementation, routing), inputs)


@pytest.mark.parametrize("tokens", [1, 63, 257])
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("load", LOADS)
def test_gather_sum_stays_in_budget(load, dtype, extras, tokens):
    routing = routing_of(load, tokens, E, 2)
    assert_budget(
        _forced("gather_sum", routing),
        _forced("reference", routing),
        _inputs(routing, 65, extras),
        dtype,
    )


def test_many_slots_stay_in_budget():
    routing = routing_of("random", 63, 16, 16)
    assert_budget(
        _forced("gather_sum", routing),
        _forced("reference", routing),
        _inputs(routing, 32),
        torch.bfloat16,
    )


def test_poisoned_memory_never_shows(poisoned):
    routing = routing_of("empty-experts", 63, E, 2)
    assert_budget(
        _forced("gather_sum", routing),
        _forced("reference", routing),
        _inputs(routing, 33),
        torch.bfloat16,
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_extras_of_other_dtypes_get_gradients_of_theirs(implementation):
    routing = routing_of("random", 9, E, 2)
    inputs = _inputs(routing, 8)
    y, residual = inputs["y"].bfloat16().requires_grad_(), inputs["residual"].requires_grad_()
    shared = inputs["shared"].half().requires_grad_()
    out = _forced(implementation, routing)(y, inputs["weight"], residual, shared)
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    for tensor in (y, residual, shared):
        assert tensor.grad.dtype == tensor.dtype
    assert torch.equal(residual.grad, torch.ones(9, 8))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_tensor_as_residual_and_shared_gets_both_gradients(implementation):
    routing = routing_of("random", 9, E, 2)
    inputs = _inputs(routing, 8)
    extra = inputs["residual"].requires_grad_()
    _forced(implementation, routing)(inputs["y"], inputs["weight"], extra, extra).sum().backward()
    assert torch.equal(extra.grad, torch.full((9, 8), 2.0))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_residual_and_shared_do_not_share_memory_with_each_other(implementation):
    routing = routing_of("random", 9, E, 2)
    inputs = {name: t.requires_grad_() for name, t in _inputs(routing, 8).items()}
    _forced(implementation, routing)(**inputs).backward(torch.randn(9, 8))
    expected = inputs["shared"].grad.clone()
    inputs["residual"].grad.zero_()
    assert torch.equal(inputs["shared"].grad, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_zero_tokens(implementation):
    routing = route(torch.randn(0, E), top_k=2)
    inputs = {name: t.requires_grad_() for name, t in _inputs(routing, 8).items()}
    out = _forced(implementation, routing)(**inputs)
    out.sum().backward()
    assert out.shape == inputs["residual"].grad.shape == (0, 8)
    assert inputs["y"].grad.shape == (0, 8)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_strided_inputs_and_expanded_gradients(implementation):
    routing = routing_of("random", 9, E, 2)
    dense = _inputs(routing, 8)
    outcomes = []
    for strided in (False, True):
        leaves = {
            name: (t.T.contiguous().T if strided else t).detach().requires_grad_()
            for name, t in dense.items()
        }
        out = _forced(implementation, routing)(**leaves)
        loss = out.sum() if strided else (out * torch.ones(9, 8)).sum()
        outcomes.append([out, *torch.autograd.grad(loss, list(leaves.values()))])
    for actual, expected in zip(outcomes[1], outcomes[0], strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_16_bit_rows_are_summed_in_fp32_and_rounded_once(implementation):
    routing = routing_of("random", 63, E, 3)
    inputs = {name: t.bfloat16() for name, t in _inputs(routing, 33).items()}
    run = _forced(implementation, routing)
    wide = run(**{name: t.float() for name, t in inputs.items()})
    assert torch.equal(run(**inputs), wide.bfloat16())


def test_slots_are_added_in_order():
    # 2^24 + 1 - 2^24 is 0 in fp32 when added from the left and 1 otherwise.
    routing = route(torch.tensor([[3.0, 2.0, 1.0]]), top_k=3)
    routing = routing._replace(weight_TK=torch.ones(1, 3))
    big = 2.0**24
    y_ND = torch.tensor([[big], [1.0], [-big]])
    with dispatch.force(moe_combine="gather_sum"):
        assert combine(y_ND, routing).item() == 0.0
        assert combine(y_ND, routing, residual_TD=torch.tensor([[1.0]])).item() == 1.0


def test_two_runs_are_bitwise_equal():
    routing = routing_of("random", 63, E, 2)
    leaves = [t.requires_grad_() for t in _inputs(routing, 33).values()]
    run = _forced("gather_sum", routing)
    runs = [[run(*leaves), *torch.autograd.grad(run(*leaves).sum(), leaves)] for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_compiles():
    routing = routing_of("random", 9, E, 2)

    def run(y, weight, residual, shared):
        changed = routing._replace(weight_TK=weight)
        return combine(y, changed, residual_TD=residual, shared_TD=shared)

    assert_compiles(run, _inputs(routing, 8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"y_ND": torch.randn(5, 8)}, r"y has shape \(5, 8\), expected \(6, any\)"),
        ({"residual_TD": torch.randn(3, 7)}, r"residual has shape \(3, 7\), expected \(3, 8\)"),
        ({"shared_TD": torch.randn(6, 8)}, r"shared has shape \(6, 8\)"),
        ({"shared_TD": torch.randn(3, 8, device="meta")}, "shared on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    valid = {"y_ND": torch.randn(6, 8), "routing": routing_of("random", 3, E, 2)}
    with pytest.raises(ShapeError, match=message):
        combine(**{**valid, **arguments})
