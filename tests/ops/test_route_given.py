import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError, ShapeError
from slipstream.ops import dispatch
from slipstream.ops.moe import Routing, route, routing_from
from slipstream.ops.triton_support import refusal
from tests.ops.compiling import assert_compiles

FIELDS = ("expert_TK", "offsets_E1", "order_N", "position_N", "demand_E", "rerouted")


@pytest.fixture(params=["triton", "reference"])
def implementation(request: pytest.FixtureRequest) -> str:
    if request.param == "triton" and (refused := refusal(torch.empty(0))):
        pytest.skip(refused.reason)
    return request.param


def _run(implementation: str, *args) -> Routing:
    with dispatch.force(moe_sort=implementation):
        return routing_from(*args)


def test_the_maps_of_route(implementation):
    expected = route(torch.randn(63, 6), top_k=3)
    actual = _run(implementation, expected.expert_TK, expected.weight_TK, 6)
    for name in FIELDS:
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert torch.equal(a, b), name
    assert torch.equal(actual.weight_TK, expected.weight_TK)
    assert (actual.aux_loss.item(), actual.z_loss.item()) == (0, 0)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tokens=st.sampled_from([0, 1, 7, 63]),
    top_k=st.integers(1, 5),
    num_experts=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_any_experts(implementation, tokens, top_k, num_experts, seed):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    # Repeated experts in a token are fine; an id of num_experts or more belongs to nobody.
    expert_TK = torch.randint(0, num_experts + 3, (tokens, top_k), generator=generator).int()
    routing = _run(implementation, expert_TK, torch.rand(tokens, top_k), num_experts)
    flat_N = expert_TK.flatten().tolist()
    bins = [min(e, num_experts) for e in flat_N]
    rows = len(flat_N)
    assert routing.expert_TK.flatten().tolist() == flat_N
    assert routing.order_N.tolist() == sorted(range(rows), key=lambda slot: (bins[slot], slot))
    assert routing.position_N[routing.order_N].tolist() == list(range(rows))
    counts = [bins.count(e) for e in range(num_experts)]
    assert routing.counts_E.tolist() == counts == routing.demand_E.tolist()
    assert routing.offsets_E1[-1].item() == sum(counts)


def test_a_schedule_that_leaves_out_absent_slots():
    if refused := refusal(torch.empty(0)):
        pytest.skip(refused.reason)
    expert_TK = torch.tensor([[1, 9, 9], [0, 1, 9]])
    routing = _run("triton", expert_TK, torch.rand(2, 3), 3)
    assert routing.schedule is not None
    assert routing.schedule.shape == (1 + 3 + 3, 2)  # 6 slots: room for a tile per expert
    assert routing.schedule[:3].tolist() == [[2, 0], [1, 1], [0, 0]]
    assert routing.schedule[4:].tolist() == [[1, 2], [0, 1], [2, 0]]


def test_weights_stay_differentiable_and_are_fp32(implementation):
    expert_TK, weight_TK = torch.tensor([[0, 1]]), torch.rand(1, 2).bfloat16().requires_grad_()
    routing = _run(implementation, expert_TK, weight_TK, 2)
    assert (routing.weight_TK.dtype, routing.expert_TK.dtype) == (torch.float32, torch.int64)
    routing.weight_TK.sum().backward()
    assert torch.equal(weight_TK.grad, torch.ones(1, 2, dtype=torch.bfloat16))


def test_maps_survive_poisoned_memory(implementation, poisoned):
    routing = _run(implementation, torch.randint(0, 9, (63, 2)), torch.rand(63, 2), 7)
    assert routing.order_N.sort()[0].tolist() == list(range(126))
    assert routing.position_N[routing.order_N].tolist() == list(range(126))


def test_compiles(implementation):
    expert_TK = torch.randint(0, 5, (9, 2))

    def run(weight_TK):
        routing = routing_from(expert_TK, weight_TK, 4)
        return routing.weight_TK.flatten()[routing.order_N]

    with dispatch.force(moe_sort=implementation):
        assert_compiles(run, {"weight_TK": torch.rand(9, 2)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"expert_TK": torch.zeros(6)}, r"expert has shape \(6,\)"),
        ({"expert_TK": torch.zeros(3, 2)}, "expert has dtype torch.float32"),
        ({"weight_TK": torch.ones(3, 3)}, r"weight has shape \(3, 3\)"),
        ({"weight_TK": torch.ones(3, 2).int()}, "weight has dtype torch.int32"),
        ({"weight_TK": torch.ones(3, 2, device="meta")}, "weight on meta"),
        ({"num_experts": 0}, "num_experts = 0, expected 1 or more"),
        (
            {"expert_TK": torch.zeros(3, 0).long(), "weight_TK": torch.ones(3, 0)},
            "expert has 0 slots per token, expected 1 or more",
        ),
    ],
    ids=str,
)
def test_errors_name_the_argument(arguments, message):
    given = {
        "expert_TK": torch.zeros(3, 2, dtype=torch.int64),
        "weight_TK": torch.ones(3, 2),
        "num_experts": 4,
    }
    with pytest.raises(ShapeError, match=message):
        routing_from(**{**given, **arguments})


def test_a_negative_expert_is_named():
    expert_TK = torch.tensor([[0, 1], [2, -3], [0, 0]], device="cpu")  # a GPU does not look
    with pytest.raises(ConfigError, match="expert holds -3"):
        routing_from(expert_TK, torch.ones(3, 2, device="cpu"), 4)


def test_a_device_side_check_names_the_argument(monkeypatch):
    # On the CPU always: on a GPU the assertion would end this process's use of it.
    monkeypatch.setenv("SLIPSTREAM_CHECK_VALUES", "1")
    torch._dynamo.reset()
    compiled = torch.compile(routing_from, fullgraph=True, backend="aot_eager")
    weight_TK = torch.rand(2, 1, device="cpu")
    good_TK, bad_TK = (torch.tensor([[1], [e]], device="cpu") for e in (0, -1))
    assert compiled(good_TK, weight_TK, 2).order_N.tolist() == [1, 0]
    with pytest.raises(RuntimeError, match="routing_from: expert holds negative values"):
        compiled(bad_TK, weight_TK, 2)
