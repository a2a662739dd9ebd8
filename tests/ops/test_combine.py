import pytest
import torch
from torch.testing import assert_close

from slipstream.errors import ShapeError
from slipstream.ops.moe import Routing, combine
from slipstream.verify.routings import eager_combine
from tests.budget import Results, assert_budget, results
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import DTYPES, cases, fast, forced, runnable
from tests.ops.routings import LOADS, routing_of

OP = "moe_combine"
EXTRAS = {"none": (), "residual": ("residual",), "both": ("residual", "shared")}
E = 5


def _inputs(routing: Routing, width: int, extras: str = "both") -> Results:
    tokens, top_k = routing.expert_TK.shape
    inputs = {"y": torch.randn(tokens * top_k, width), "weight": torch.rand(tokens, top_k)}
    return inputs | {name: torch.randn(tokens, width) for name in EXTRAS[extras]}


def _run(name: str, routing: Routing):
    def run(y, weight, residual=None, shared=None):
        # fp32 in real runs, whatever the dtype of the rows; fp64 for the truth.
        wide = torch.promote_types(weight.dtype, torch.float32)
        with forced(OP, name):
            return combine(
                y,
                routing._replace(weight_TK=weight.to(wide)),
                residual_TD=residual,
                shared_TD=shared,
            )

    return run


def _stock(routing: Routing):
    return lambda **t: eager_combine(expert=routing.expert_TK, num_experts=E, **t)


@pytest.mark.parametrize("load", ["random", "absent"])
@pytest.mark.parametrize("extras", EXTRAS)
def test_the_reference_matches_a_loop_over_slots(extras, load):
    routing = routing_of(load, 9, E, 3)
    inputs = {name: t.double() for name, t in _inputs(routing, 6, extras).items()}
    expected = sum((inputs[name] for name in EXTRAS[extras]), torch.zeros(9, 6).double())
    for row, slot in enumerate(routing.order_N.tolist()[: int(routing.offsets_E1[-1])]):
        token, k = divmod(slot, 3)
        expected[token] += inputs["weight"][token, k] * inputs["y"][row]
    assert_close(_run("reference", routing)(**inputs), expected)


@pytest.mark.parametrize("load", ["random", "absent"])
def test_gradients_of_the_reference_in_fp64(load):
    routing = routing_of(load, 4, E, 2)
    inputs = [t.double().requires_grad_() for t in _inputs(routing, 3).values()]
    assert torch.autograd.gradcheck(_run("reference", routing), inputs)


@pytest.mark.parametrize("tokens", [1, 63, 257])
@pytest.mark.parametrize("extras", EXTRAS)
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP))
def test_stays_in_budget(implementation, dtype, extras, tokens):
    routing = routing_of("random", tokens, E, 2)
    assert_budget(
        _run(implementation, routing), _stock(routing), _inputs(routing, 65, extras), dtype
    )


@pytest.mark.parametrize("load", LOADS[1:])
@pytest.mark.parametrize(("implementation", "dtype"), cases(OP))
def test_every_load_stays_in_budget(implementation, dtype, load):
    routing = routing_of(load, 63, E, 2)
    assert_budget(_run(implementation, routing), _stock(routing), _inputs(routing, 65), dtype)


@pytest.mark.parametrize(("width", "top_k"), [(1, 2), (64, 1), (130, 5)])
@pytest.mark.parametrize("implementation", fast(OP))
def test_other_widths_and_numbers_of_slots_stay_in_budget(implementation, width, top_k):
    routing = routing_of("random", 63, E, top_k)
    assert_budget(
        _run(implementation, routing), _stock(routing), _inputs(routing, width), torch.float32
    )


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, DTYPES[1:]))
def test_many_slots_stay_in_budget(implementation, dtype):
    routing = routing_of("random", 31, 16, 16)
    stock = lambda **t: eager_combine(expert=routing.expert_TK, num_experts=16, **t)  # noqa: E731
    assert_budget(_run(implementation, routing), stock, _inputs(routing, 32), dtype)


@pytest.mark.parametrize("implementation", runnable(OP))
def test_absent_rows_are_not_read_and_their_slots_get_zero_gradients(implementation, poisoned):
    routing = routing_of("absent", 63, E, 2)
    present, inputs = int(routing.offsets_E1[-1]), _inputs(routing, 33)
    found = []
    for poison in (0.0, float("nan")):
        inputs["y"][present:] = poison
        found.append(results(_run(implementation, routing), inputs, torch.float32))
        gradient = found[-1].pop("gradient of y")
        found[-1]["gradient of present y"] = gradient[:present]
        assert (found[-1]["gradient of weight"][routing.expert_TK >= E] == 0).all()
    for name, expected in found[0].items():
        assert torch.equal(found[1][name], expected), name
    assert torch.equal(found[1]["output 0"][0], inputs["residual"][0] + inputs["shared"][0])


@pytest.mark.parametrize("implementation", runnable(OP))
def test_extras_of_other_dtypes_get_gradients_of_theirs(implementation):
    routing = routing_of("random", 9, E, 2)
    inputs = _inputs(routing, 8)
    y, residual = inputs["y"].half().requires_grad_(), inputs["residual"].requires_grad_()
    shared = inputs["shared"].bfloat16().requires_grad_()
    out = _run(implementation, routing)(y, inputs["weight"], residual, shared)
    out.sum().backward()
    assert out.dtype == torch.float16
    for tensor in (y, residual, shared):
        assert tensor.grad.dtype == tensor.dtype
    assert torch.equal(residual.grad, torch.ones(9, 8))


@pytest.mark.parametrize("implementation", runnable(OP))
def test_one_tensor_as_residual_and_shared_gets_both_gradients(implementation):
    routing = routing_of("random", 9, E, 2)
    inputs = _inputs(routing, 8)
    extra = inputs["residual"].requires_grad_()
    _run(implementation, routing)(inputs["y"], inputs["weight"], extra, extra).sum().backward()
    assert torch.equal(extra.grad, torch.full((9, 8), 2.0))


@pytest.mark.parametrize("implementation", runnable(OP))
def test_gradients_of_residual_and_shared_do_not_share_memory_with_each_other(implementation):
    routing = routing_of("random", 9, E, 2)
    inputs = {name: t.requires_grad_() for name, t in _inputs(routing, 8).items()}
    _run(implementation, routing)(**inputs).backward(torch.randn(9, 8))
    expected = inputs["shared"].grad.clone()
    inputs["residual"].grad.zero_()
    assert torch.equal(inputs["shared"].grad, expected)


@pytest.mark.parametrize("implementation", runnable(OP))
def test_zero_tokens(implementation):
    routing = routing_of("random", 0, E, 2)
    inputs = {name: t.requires_grad_() for name, t in _inputs(routing, 8).items()}
    out = _run(implementation, routing)(**inputs)
    out.sum().backward()
    assert out.shape == inputs["residual"].grad.shape == (0, 8)
    assert inputs["y"].grad.shape == (0, 8)


@pytest.mark.parametrize("implementation", runnable(OP))
def test_strided_inputs_and_expanded_gradients(implementation):
    routing = routing_of("random", 9, E, 2)
    dense = _inputs(routing, 8)
    outcomes = []
    for strided in (False, True):
        leaves = {
            name: (t.T.contiguous().T if strided else t).detach().requires_grad_()
            for name, t in dense.items()
        }
        out = _run(implementation, routing)(**leaves)
        loss = out.sum() if strided else (out * torch.ones(9, 8)).sum()
        outcomes.append([out, *torch.autograd.grad(loss, list(leaves.values()))])
    for actual, expected in zip(outcomes[1], outcomes[0], strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP, DTYPES[1:]))
def test_16_bit_rows_are_summed_in_fp32_and_rounded_once(implementation, dtype):
    routing = routing_of("random", 63, E, 3)
    inputs = {name: t.to(dtype) for name, t in _inputs(routing, 33).items()}
    run = _run(implementation, routing)
    wide = run(**{name: t.float() for name, t in inputs.items()})
    assert torch.equal(run(**inputs), wide.to(dtype))


@pytest.mark.parametrize("implementation", fast(OP))
def test_slots_are_added_in_order(implementation):
    # 2^24 + 1 - 2^24 is 0 in fp32 when added from the left and 1 otherwise.
    routing, big = routing_of("random", 1, 3, 3), 2.0**24
    y_ND = torch.tensor([[big], [1.0], [-big]])[routing.order_N]
    run, weight = _run(implementation, routing), torch.ones(1, 3)
    assert run(y_ND, weight).item() == 0.0
    assert run(y_ND, weight, residual=torch.tensor([[1.0]])).item() == 1.0


@pytest.mark.parametrize(("implementation", "dtype"), cases(OP))
def test_two_runs_are_bitwise_equal(implementation, dtype):
    routing = routing_of("random", 63, E, 2)
    inputs = {name: t.to(dtype) for name, t in _inputs(routing, 33).items()}
    first, second = (results(_run(implementation, routing), inputs, dtype) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("implementation", fast(OP))
def test_compiles(implementation):
    routing = routing_of("absent", 9, E, 2)

    def run(y, weight, residual, shared):
        changed = routing._replace(weight_TK=weight)
        return combine(y, changed, residual_TD=residual, shared_TD=shared)

    with forced(OP, implementation):
        assert_compiles(run, _inputs(routing, 8), truth=_stock(routing))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"y_ND": torch.randn(5, 8)}, r"y has shape \(5, 8\), expected \(6, any\)"),
        ({"y_ND": torch.ones(6, 8).int()}, "y has dtype torch.int32"),
        ({"residual_TD": torch.randn(3, 7)}, r"residual has shape \(3, 7\), expected \(3, 8\)"),
        ({"residual_TD": torch.ones(3, 8).long()}, "residual has dtype torch.int64"),
        ({"shared_TD": torch.randn(6, 8)}, r"shared has shape \(6, 8\)"),
        ({"shared_TD": torch.randn(3, 8, device="meta")}, "shared on meta"),
    ],
)
def test_errors_name_the_argument(arguments, message):
    valid = {"y_ND": torch.randn(6, 8), "routing": routing_of("random", 3, E, 2)}
    with pytest.raises(ShapeError, match=message):
        combine(**{**valid, **arguments})


def test_a_routing_that_does_not_fit_together_is_named():
    routing = routing_of("random", 3, E, 2)._replace(position_N=torch.arange(5))
    with pytest.raises(ShapeError, match=r"routing.position has shape \(5,\), expected \(6\)"):
        combine(torch.randn(6, 8), routing)
