"""The balance kernels against the reference: the same experts bit for bit, and what they write."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.ops.moe import route
from slipstream.ops.moe.route import RouteOptions
from slipstream.ops.moe.route.balance import rebalance
from slipstream.ops.moe.route.reference import _selection
from tests.ops.implementations import forced, runnable

if "triton" not in runnable("moe_route"):
    pytest.skip("needs a GPU or Triton's interpreter", allow_module_level=True)
import triton
import triton.language as tl

from slipstream.ops.moe.route import balance_launch, kernels
from slipstream.ops.moe.route.balance_launch import rebalance_in_place, state_size
from slipstream.ops.moe.route.launch import tiling

MODES = ["weight", "causal"]


class Case(NamedTuple):
    logits_TE: torch.Tensor
    bias_E: torch.Tensor | None
    load_E: torch.Tensor
    threshold: torch.Tensor
    options: RouteOptions


class Outcome(NamedTuple):
    expert_TK: torch.Tensor
    weight_TK: torch.Tensor
    count_EJ: torch.Tensor
    plain_EJ: torch.Tensor
    rerouted: int


def _options(**values) -> RouteOptions:
    defaults = {
        "top_k": 2,
        "score": "softmax",
        "num_groups": 1,
        "top_groups": 1,
        "group_top": 2,
        "normalize": True,
        "scale": 1.5,
        "aux": "none",
        "num_sequences": 1,
        "depth": 4,
    }
    return RouteOptions(**(defaults | values))


@triton.jit
def _scores_kernel(
    logits_ptr, stats_ptr, score_ptr, T, E: tl.constexpr, SCORE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    t, e = tl.arange(0, BLOCK_T).to(tl.int64), tl.arange(0, BLOCK_E)
    logits_TE = kernels.load_logits(logits_ptr, t, e, t < T, E)
    largest_T = tl.load(stats_ptr + t, mask=t < T, other=0.0)
    total_T = tl.load(stats_ptr + T + t, mask=t < T, other=1.0)
    score_TE = kernels.scores_of(logits_TE, largest_T[:, None], total_T[:, None], SCORE)
    mask = (t < T)[:, None] & (e < E)[None, :]
    tl.store(score_ptr + t[:, None] * E + e[None, :], score_TE, mask=mask)


def _scores(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Every score as the kernels see it, and what they derive it from."""
    tokens, experts = case.logits_TE.shape
    score_TE = torch.empty(tokens, experts)
    largest_T1 = case.logits_TE.amax(1, keepdim=True)
    stats_2T = torch.stack((largest_T1[:, 0], (case.logits_TE - largest_T1).exp().sum(1)))
    block_t, block_e = triton.next_power_of_2(tokens), triton.next_power_of_2(experts)
    _scores_kernel[(1,)](
        case.logits_TE, stats_2T, score_TE, tokens,
        E=experts, SCORE=case.options.score, BLOCK_T=block_t, BLOCK_E=block_e,
    )  # fmt: skip
    return score_TE, stats_2T


def _counts(expert_TK: torch.Tensor, num_experts: int, tile_T: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(num_experts, int(tile_T.max()) + 1, dtype=torch.int32)
    place = (expert_TK, tile_T[:, None].expand_as(expert_TK))
    return counts.index_put(place, torch.ones_like(expert_TK).int(), accumulate=True)


def _check(case: Case) -> Outcome:
    """Run the kernels on plain top-k and hold everything they write to the reference."""
    options = case.options
    tokens, experts = case.logits_TE.shape
    score_TE, stats_2T = _scores(case)
    select_TE = _selection(score_TE, case.bias_E, options)
    plain_TK = select_TE.sort(dim=1, descending=True, stable=True)[1][:, : options.top_k]
    expected_TK = rebalance(
        select_TE, score_TE, plain_TK, case.load_E, case.threshold, options.depth, options.mode
    )
    tiles = tiling(tokens, options.top_k, options.num_sequences)
    within_T = torch.arange(tokens) % tiles.length
    tile_T = torch.arange(tokens) // tiles.length * tiles.per_sequence
    tile_T += within_T // tiles.tile_tokens
    untouched = Outcome(
        expert_TK=plain_TK.contiguous(),
        weight_TK=torch.full(plain_TK.shape, -1.0),
        count_EJ=_counts(plain_TK, experts, tile_T),
        plain_EJ=torch.full((experts, tiles.count), -7, dtype=torch.int32),
        rerouted=0,
    )
    expert_TK, weight_TK, count_EJ, plain_EJ = (x.clone() for x in untouched[:4])
    state = torch.zeros(state_size(options.depth), dtype=torch.int64)
    state[1] = case.load_E.double().max() > case.threshold * case.load_E.double().mean()
    rebalance_in_place(
        case.logits_TE, stats_2T, case.bias_E, expert_TK, weight_TK, count_EJ, plain_EJ,
        case.load_E, case.threshold, options, state,
        tile_tokens=tiles.tile_tokens, length=tiles.length,
    )  # fmt: skip
    assert torch.equal(expert_TK, expected_TK)
    moved_TK = expected_TK != plain_TK
    assert state[0] == moved_TK.sum()
    assert torch.equal(count_EJ, _counts(expected_TK, experts, tile_T))
    if moved_TK.any():
        assert torch.equal(plain_EJ, untouched.count_EJ)
    moved_T = moved_TK.any(1)
    used_TK = score_TE.gather(1, expected_TK)
    used_TK = used_TK / used_TK.sum(1, keepdim=True) if options.normalize else used_TK
    torch.testing.assert_close(weight_TK[moved_T], (used_TK * options.scale)[moved_T])
    assert torch.equal(weight_TK[~moved_T], untouched.weight_TK[~moved_T])
    return Outcome(expert_TK, weight_TK, count_EJ, plain_EJ, int(state[0]))


def _random_case(seed: int, tokens: int, num_experts: int, levels: int, **values) -> Case:
    """Logits with few levels, so that ties are common, and the load that they make."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    logits_TE = torch.randint(0, levels, (tokens, num_experts), generator=generator) / levels * 3
    logits_TE += torch.randint(0, 3, (num_experts,), generator=generator)
    bias_E = torch.randint(-2, 3, (num_experts,), generator=generator) / 4 if seed % 2 else None
    options = _options(**values)
    load_E = torch.randint(0, 9, (num_experts,), generator=generator).float()
    threshold = torch.tensor([0.5, 1.0, 1.25, 1.5, 2.0][seed % 5])
    return Case(logits_TE, bias_E, load_E, threshold, options)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    length=st.sampled_from([1, 5, 17, 40]),
    num_experts=st.integers(1, 12),
    levels=st.sampled_from([2, 4, 1000]),
    data=st.data(),
)
def test_experts_are_bitwise_those_of_the_reference(mode, seed, length, num_experts, levels, data):
    groups = [g for g in range(1, num_experts + 1) if num_experts % g == 0]
    num_groups = data.draw(st.sampled_from(groups))
    top_groups = data.draw(st.integers(1, num_groups))
    sequences = data.draw(st.sampled_from([1, 2]))
    reachable = num_experts // num_groups * top_groups
    case = _random_case(
        seed,
        length * sequences,
        num_experts,
        levels,
        top_k=data.draw(st.integers(1, reachable)),
        score=data.draw(st.sampled_from(["softmax", "sigmoid"])),
        num_groups=num_groups,
        top_groups=top_groups,
        num_sequences=sequences,
        normalize=data.draw(st.booleans()),
        depth=data.draw(st.integers(0, 3)),
        mode=mode,
    )
    _check(case)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k"),
    [(65, 40, 3), (33, 8, 8), (70, 1, 1), (1, 64, 3)],
    ids=lambda n: str(n),
)
def test_odd_shapes(mode, tokens, num_experts, top_k):
    _check(_random_case(3, tokens, num_experts, 1000, top_k=top_k, depth=2, mode=mode))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "levels"),
    [(2100, 8, 2, 1000), (2100, 4, 1, 1)],
    ids=lambda n: str(n),
)
def test_more_than_a_program_holds_at_a_time(monkeypatch, mode, tokens, num_experts, top_k, levels):
    monkeypatch.setattr(balance_launch, "TILE_ELEMENTS", 2048)
    monkeypatch.setattr(balance_launch, "TILE_SLOTS", 256)
    case = _random_case(4, tokens, num_experts, levels, top_k=top_k, depth=4, mode=mode)
    load_E = case.load_E.clone()
    load_E[case.logits_TE.sum(0).argmax()] = 50
    outcome = _check(case._replace(load_E=load_E, threshold=torch.tensor(1.0)))
    assert outcome.rerouted > tokens // 8


@pytest.mark.parametrize("mode", MODES)
def test_equal_strength_goes_to_the_earlier_slot(mode):
    """All keys agree in every digit of the strength: the slot decides, over all its digits."""
    logits_TE = torch.zeros(90, 8)
    logits_TE[:, 5] = 1
    case = Case(logits_TE, None, torch.eye(8)[5], torch.tensor(2.0), _options(top_k=1, mode=mode))
    outcome = _check(case)
    assert (outcome.expert_TK[:22] == 5).all()
    assert outcome.rerouted == 90 - 22


@pytest.mark.parametrize("mode", MODES)
def test_one_expert_takes_all(mode):
    logits_TE = torch.randn(100, 4)
    logits_TE[:, 2] += 50
    options = _options(top_k=1, depth=8, mode=mode)
    outcome = _check(Case(logits_TE, None, torch.eye(4)[2], torch.tensor(1.0), options))
    assert outcome.count_EJ.sum(1).tolist() == [25, 25, 25, 25]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("load_E", "threshold"),
    [(torch.eye(8)[1], float("inf")), (torch.ones(8), 1.0), (torch.zeros(8), 2.0)],
    ids=["inf", "even-load", "no-load"],
)
def test_nothing_hot_writes_nothing(mode, load_E, threshold):
    logits_TE = torch.randn(63, 8)
    logits_TE[:, 0] += 2
    load_E = load_E.to(logits_TE.device)
    case = Case(logits_TE, None, load_E, torch.tensor(threshold), _options(mode=mode))
    outcome = _check(case)
    assert outcome.rerouted == 0
    assert (outcome.plain_EJ == -7).all()
    with forced("moe_route", "triton"):
        plain = route(logits_TE, top_k=2)
        routed = route(logits_TE, top_k=2, load_E=load_E, threshold=threshold, mode=mode)
    for field, expected in plain._asdict().items():
        if field != "schedule":
            assert torch.equal(getattr(routed, field), expected), field
    tiles = int(plain.schedule[0, 0])
    assert torch.equal(routed.schedule[: tiles + 1], plain.schedule[: tiles + 1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("aux", ["batch", "sequence"])
def test_a_whole_routing_follows_the_moved_slots(mode, aux):
    logits_TE = torch.randn(96, 8)
    logits_TE[:, :2] += 3
    options = {
        "top_k": 2, "normalize": True, "aux": aux, "num_sequences": 3, "depth": 6, "mode": mode,
        "load_E": torch.eye(8)[0] + torch.eye(8)[1], "threshold": 1.25,
    }  # fmt: skip
    runs = {}
    for name in ("triton", "reference"):
        with forced("moe_route", name):
            runs[name] = route(logits_TE, **options)
    kernel, expected = runs["triton"], runs["reference"]
    assert expected.rerouted > 60
    for field in ("expert_TK", "offsets_E1", "order_N", "position_N", "demand_E", "rerouted"):
        assert torch.equal(getattr(kernel, field), getattr(expected, field)), field
    torch.testing.assert_close(kernel.weight_TK, expected.weight_TK)
    torch.testing.assert_close(kernel.aux_loss, expected.aux_loss)
    assert kernel.counts_E.max() <= int(1.25 * 96 * 2 / 8)


@pytest.mark.parametrize("mode", MODES)
def test_two_runs_are_bitwise_equal(mode):
    case = _random_case(1, 30, 8, 3, mode=mode)
    first, second = _check(case), _check(case)
    assert first.rerouted > 0
    for a, b in zip(first[:4], second[:4], strict=True):
        assert torch.equal(a, b)
