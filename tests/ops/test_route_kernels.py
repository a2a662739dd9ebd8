"""The routing kernels against the reference; without a GPU, in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from slipstream.ops import dispatch
from slipstream.ops.moe import Routing, route
from slipstream.ops.moe.route import launch
from slipstream.ops.triton_support import refusal
from tests.budget import assert_budget
from tests.ops.compiling import assert_compiles
from tests.ops.implementations import draws

DECISIONS = ("expert_TK", "offsets_E1", "order_N", "position_N", "demand_E", "rerouted")


@pytest.fixture(autouse=True)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every test here must have run the kernels."""
    device = "cuda" if "gpu" in request.keywords else None
    if refused := refusal(torch.empty(0, device=device)):
        pytest.skip(refused.reason)
    dispatch.reset_counts()
    yield
    assert dispatch.counts()["moe_route", "triton"] > 0


def _reference(*args, **options) -> Routing:
    with dispatch.force(moe_route="reference"):
        return route(*args, **options)


def _floats(routing: Routing) -> tuple[torch.Tensor, ...]:
    return routing.weight_TK, routing.aux_loss, routing.z_loss


def _assert_same_decisions(actual: Routing, expected: Routing) -> None:
    for name in DECISIONS:
        a, b = getattr(actual, name), getattr(expected, name)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        assert torch.equal(a, b), name


def _schedule_of(counts: list[int]) -> tuple[list, list]:
    """Tiles and experts in the order of ``Routing.schedule``, by Python's sort."""
    experts = sorted(range(len(counts)), key=lambda e: (-counts[e], e))
    first = [sum(counts[:e]) for e in range(len(counts))]
    tiles = [[e, first[e] + i] for e in experts for i in range(0, counts[e], 128)]
    return tiles, [[e, counts[e]] for e in experts]


def _assert_schedule(routing: Routing) -> None:
    counts, rows = routing.counts_E.tolist(), len(routing.order_N)
    tiles, experts = _schedule_of(counts)
    assert routing.schedule is not None
    room = rows // 128 + min(len(counts), rows)
    assert routing.schedule.shape == (1 + room + len(counts), 2)
    schedule = routing.schedule.tolist()
    assert schedule[0] == [len(tiles), 0]
    assert schedule[1 : 1 + len(tiles)] == tiles
    assert schedule[1 + room :] == experts


CASES = {
    "plain": (63, 8, 3, {}),
    "two-tokens": (2, 6, 2, {}),
    "one-expert": (5, 1, 1, {"normalize": True}),
    "all-experts": (9, 7, 7, {"normalize": True}),
    "no-loss": (65, 8, 2, {"aux": "none"}),
    "normalised": (70, 9, 5, {"normalize": True, "scale": 2.5}),
    "sigmoid": (63, 8, 3, {"score": "sigmoid", "normalize": True, "bias": True}),
    "groups": (40, 12, 3, {"num_groups": 4, "top_groups": 2, "bias": True}),
    "groups-of-1": (9, 5, 2, {"num_groups": 5, "top_groups": 3}),
    "sigmoid-groups": (
        33, 20, 4,
        {"score": "sigmoid", "num_groups": 5, "top_groups": 3, "group_top": 1, "scale": 0.5},
    ),
    "sequences": (2 * 70, 5, 2, {"aux": "sequence", "num_sequences": 2}),
    "sigmoid-sequences": (
        6, 6, 2, {"aux": "sequence", "num_sequences": 6, "score": "sigmoid", "normalize": True}
    ),
    "global": (63, 8, 2, {"aux": "global"}),
    "many-experts": (2, 35, 33, {"normalize": True}),
}  # fmt: skip


def _case(name: str):
    tokens, experts, top_k, options = CASES[name]
    options = {"top_k": top_k, "aux": "batch", **options}
    tensors = {"logits_TE": torch.randn(tokens, experts)}
    if options.pop("bias", False):
        options["bias_E"] = torch.randn(experts) / 5
    if options["aux"] == "global":
        options["share_E"] = torch.rand(experts).softmax(0)
    return tensors, options


@pytest.mark.parametrize("name", CASES)
def test_like_the_reference(name):
    (tensors, options), seen = _case(name), []
    fields = [0, 2] if options["aux"] == "none" else [0, 1, 2]
    # Losses are single numbers.
    inputs = draws(lambda: {"logits_TE": torch.randn_like(tensors["logits_TE"])})
    inputs[0] = tensors

    def run(**tensors):
        seen.append(route(**tensors, **options))
        return tuple(_floats(seen[-1])[i] for i in fields)

    assert_budget(
        run,
        lambda **tensors: tuple(_floats(_reference(**tensors, **options))[i] for i in fields),
        inputs,
        torch.float32,
    )
    for drawn, routing in zip(inputs, seen, strict=True):
        _assert_same_decisions(routing, _reference(**drawn, **options))
        _assert_schedule(routing)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_logits(dtype):
    logits_TE = torch.randn(63, 8).to(dtype)
    options = {"top_k": 3, "aux": "batch", "normalize": True}
    actual = route(logits_TE, **options)
    _assert_same_decisions(actual, _reference(logits_TE, **options))
    assert [t.dtype for t in _floats(actual)] == [torch.float32] * 3
    assert_budget(
        lambda logits_TE: _floats(route(logits_TE, **options)),
        lambda logits_TE: _floats(_reference(logits_TE, **options)),
        draws(lambda: {"logits_TE": torch.randn(63, 8)}),
        dtype,
    )


@pytest.mark.parametrize("given", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_gradients_of_some_outputs_alone(given):
    options = {"top_k": 2, "aux": "batch", "normalize": True}
    inputs = draws(lambda: {"logits_TE": torch.randn(21, 6)})

    def some(run):
        return lambda logits_TE: tuple(_floats(run(logits_TE, **options))[i] for i in given)

    assert_budget(some(route), some(_reference), inputs, torch.float32)


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    tokens=st.sampled_from([0, 1, 2, 7, 40]),
    num_experts=st.integers(1, 9),
    data=st.data(),
    seed=st.integers(0, 2**16),
)
def test_maps_are_consistent(tokens, num_experts, data, seed):
    top_k = data.draw(st.integers(1, num_experts))
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    # Few distinct values, so that ties are common.
    logits_TE = torch.randint(0, 3, (tokens, num_experts), generator=generator).float()
    routing = route(logits_TE, top_k=top_k)
    rows, flat_N = tokens * top_k, routing.expert_TK.flatten().tolist()
    assert routing.order_N.sort()[0].tolist() == list(range(rows))
    assert routing.position_N[routing.order_N].tolist() == list(range(rows))
    assert routing.order_N.tolist() == sorted(range(rows), key=lambda slot: (flat_N[slot], slot))
    assert routing.counts_E.tolist() == [flat_N.count(e) for e in range(num_experts)]
    assert routing.demand_E.tolist() == routing.counts_E.tolist()
    assert all(len(set(row)) == top_k for row in routing.expert_TK.tolist())
    _assert_schedule(routing)


@pytest.mark.parametrize("tile", [(1, 1, 1), (8, 4, 16), (1024, 1024, 4096)], ids=str)
def test_tiles_change_nothing(tile, monkeypatch):
    options = {"top_k": 3, "normalize": True, "aux": "sequence", "num_sequences": 2}
    logits_TE = torch.randn(14, 4)
    expected = route(logits_TE, **options)
    for name, size in zip(("SLOTS", "TOKENS", "ELEMENTS"), tile, strict=True):
        monkeypatch.setattr(launch, f"TILE_{name}", size)
    actual = route(logits_TE, **options)
    _assert_same_decisions(actual, expected)
    torch.testing.assert_close(actual.weight_TK, expected.weight_TK)


def test_more_tiles_than_a_chunk_of_the_prefix(monkeypatch):
    monkeypatch.setattr(launch, "PREFIX_CHUNK", 4)
    monkeypatch.setattr(launch, "TILE_TOKENS", 2)
    options = {"top_k": 2, "aux": "sequence", "num_sequences": 2}
    logits_TE = torch.randn(42, 5)
    actual, expected = route(logits_TE, **options), _reference(logits_TE, **options)
    _assert_same_decisions(actual, expected)
    torch.testing.assert_close(_floats(actual), _floats(expected))


def test_schedule_of_a_load_with_ties_and_an_expert_of_several_tiles():
    logits_TE = torch.zeros(300, 5)
    logits_TE[:290, 3] = 9.0  # 290 tokens at expert 3, 5 each at experts 1 and 4, none elsewhere
    logits_TE[290:295, 1] = logits_TE[295:, 4] = 9.0
    routing = route(logits_TE, top_k=1)
    assert routing.schedule is not None
    assert routing.schedule[:6].tolist() == [[5, 0], [3, 5], [3, 133], [3, 261], [1, 0], [4, 295]]
    _assert_schedule(routing)


def test_ties_go_to_the_lower_index():
    assert torch.equal(route(torch.zeros(3, 40), top_k=4).expert_TK, torch.arange(4).expand(3, 4))
    logits_TE = torch.tensor([[0.0, -0.0, 0.0, -0.0]])
    assert route(logits_TE, top_k=4).expert_TK.tolist() == [[0, 1, 2, 3]]
    # Scores of 0 and of -0 (a bias can make one) tie as well.
    bias_E = torch.tensor([-0.0, 0.0, -0.0, 0.0])
    routing = route(torch.full((1, 4), -200.0), top_k=4, score="sigmoid", bias_E=bias_E)
    assert routing.expert_TK.tolist() == [[0, 1, 2, 3]]


def test_negative_selection_scores_are_ordered():
    bias_E = torch.tensor([-3.0, -1.0, -2.0, -4.0])
    routing = route(torch.zeros(1, 4), top_k=4, bias_E=bias_E)
    assert routing.expert_TK.tolist() == [[1, 2, 0, 3]]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
def test_experts_stay_in_range_whatever_the_logits(bad, score):
    logits_TE = torch.randn(8, 6)
    logits_TE[2] = bad
    logits_TE[5, 3] = bad
    routing = route(logits_TE, top_k=3, score=score, num_groups=3, top_groups=2, check_values=False)
    assert all(len(set(row)) == 3 and min(row) >= 0 and max(row) < 6
               for row in routing.expert_TK.tolist())  # fmt: skip
    assert routing.order_N.sort()[0].tolist() == list(range(24))
    others = [t for t in range(8) if t not in (2, 5)]
    plain = route(logits_TE[others], top_k=3, score=score, num_groups=3, top_groups=2)
    assert torch.equal(routing.expert_TK[others], plain.expert_TK)


def test_nothing_is_left_unwritten(poisoned):
    logits_TE = torch.randn(63, 8, requires_grad=True)
    routing = route(logits_TE, top_k=3, aux="batch")
    _assert_same_decisions(routing, _reference(logits_TE, top_k=3, aux="batch"))
    sum(t.sum() for t in _floats(routing)).backward()
    assert logits_TE.grad.isfinite().all()


def test_zero_tokens():
    logits_TE = torch.randn(0, 4, requires_grad=True)
    routing = route(logits_TE, top_k=2, aux="batch")
    sum(t.sum() for t in _floats(routing)).backward()
    assert routing.offsets_E1.tolist() == [0] * 5
    assert (routing.aux_loss.item(), routing.z_loss.item()) == (0, 0)
    assert logits_TE.grad.shape == (0, 4)
    _assert_schedule(routing)


def test_strided_logits_and_gradients():
    wide_ET = torch.randn(8, 63)
    actual, expected = route(wide_ET.T, top_k=2), route(wide_ET.T.contiguous(), top_k=2)
    _assert_same_decisions(actual, expected)
    logits_TE = wide_ET.T.clone().requires_grad_()
    route(logits_TE, top_k=2).weight_TK.sum().backward()  # an expanded gradient
    expected_TE = wide_ET.T.clone().requires_grad_()
    _reference(expected_TE, top_k=2).weight_TK.sum().backward()
    torch.testing.assert_close(logits_TE.grad, expected_TE.grad)


def test_runs_are_bitwise_equal():
    logits_TE = torch.randn(63, 8, requires_grad=True)
    grads = []
    for _ in range(2):
        routing = route(logits_TE, top_k=3, normalize=True, aux="batch")
        grads.append(torch.autograd.grad(sum(t.sum() for t in _floats(routing)), logits_TE)[0])
    assert torch.equal(*grads)


def test_compiles():
    options = {"top_k": 2, "score": "sigmoid", "normalize": True, "aux": "batch"}
    groups = {"num_groups": 2, "top_groups": 1, "bias_E": torch.rand(8)}
    assert_compiles(
        lambda logits_TE: _floats(route(logits_TE, **options, **groups)),
        {"logits_TE": torch.randn(9, 8)},
    )


def test_compiled_decisions_are_the_same():
    torch._dynamo.reset()
    logits_TE = torch.randn(9, 8)
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    actual = compiled(logits_TE, top_k=2, aux="global", share_E=torch.full((8,), 1 / 8))
    _assert_same_decisions(actual, route(logits_TE, top_k=2))
    _assert_schedule(actual)


@pytest.mark.gpu
def test_no_synchronisation_and_a_cuda_graph_replays():
    logits_TE = torch.randn(4096, 64, device="cuda", requires_grad=True)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        routing = route(logits_TE, top_k=8, normalize=True, aux="batch", scale=2.0)
        loss = sum(t.sum() for t in _floats(routing))
        return routing.order_N, torch.autograd.grad(loss, logits_TE)[0]

    expected = step()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
