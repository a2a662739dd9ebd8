"""Load balancing that sheds the weakest slots, against a slow and readable version of its rules."""

from fractions import Fraction

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream.ops.moe import route
from slipstream.ops.moe.route.balance import rank_within, rebalance
from tests.ops.implementations import forced


@pytest.fixture(autouse=True)
def _reference():
    with forced("moe_route", "reference"):
        yield


SMALL = settings(max_examples=60, deadline=None)
THRESHOLDS = [0.5, 1.0, 1.25, 1.5, 2.0, 1.1]


def _exact(threshold: float) -> Fraction:
    return Fraction(torch.tensor(threshold, dtype=torch.float32).item())


def _capacity(threshold: float, slots: int, num_experts: int) -> int:
    return max(1, int(_exact(threshold) * slots / num_experts))


def _slow_rebalance(select, score, expert, load, threshold, depth):
    """Lists in, list out; every rule of the module docstring is one block here."""
    num_tokens, num_experts, top_k = len(score), len(load), len(expert[0])
    expert = [list(row) for row in expert]
    slots = [(t, k) for t in range(num_tokens) for k in range(top_k)]
    capacity = _capacity(threshold, len(slots), num_experts)
    hot = [Fraction(x) > _exact(threshold) * sum(map(Fraction, load)) / num_experts for x in load]
    room, shed = [], []
    for e in range(num_experts):
        mine = [slot for slot in slots if expert[slot[0]][slot[1]] == e]
        room.append(max(0, capacity - len(mine)))
        strongest_first = sorted(mine, key=lambda slot: (-score[slot[0]][e], slot))
        shed += strongest_first[capacity:] if hot[e] else []
    chosen = [set(row) for row in expert]
    for _ in range(depth):
        proposals = [[] for _ in range(num_experts)]
        for t in range(num_tokens):
            candidates = [
                e
                for e in range(num_experts)
                if e not in chosen[t] and room[e] > 0 and select[t][e] > -float("inf")
            ]
            best_first = sorted(candidates, key=lambda e: (-select[t][e], e))
            mine = sorted(slot for slot in shed if slot[0] == t)
            for slot, e in zip(mine, best_first, strict=False):
                proposals[e].append(slot)
        for e, slots_of_e in enumerate(proposals):
            strongest_first = sorted(slots_of_e, key=lambda slot: (-score[slot[0]][e], slot))
            for t, k in strongest_first[: room[e]]:
                expert[t][k] = e
                chosen[t].add(e)
                shed.remove((t, k))
            room[e] -= min(room[e], len(slots_of_e))
    return expert


def _case(seed: int, tokens: int, num_experts: int, top_k: int, levels: int):
    """Scores with few levels, so that ties are common, and their plain top-k."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    size = (tokens, num_experts)
    score_TE = (torch.randint(0, levels, size, generator=generator) + 1) / levels
    skew_E = torch.randint(0, 2 * levels, (num_experts,), generator=generator) / levels
    select_TE = score_TE + skew_E
    expert_TK = select_TE.sort(dim=1, descending=True, stable=True)[1][:, :top_k]
    load_E = torch.randint(0, 9, (num_experts,), generator=generator).float()
    return score_TE, select_TE, expert_TK, load_E


@SMALL
@given(
    seed=st.integers(0, 2**16),
    tokens=st.sampled_from([1, 2, 5, 17, 40]),
    num_experts=st.integers(1, 8),
    threshold=st.sampled_from(THRESHOLDS),
    levels=st.sampled_from([2, 4, 1024]),
    depth=st.integers(0, 5),
    data=st.data(),
)
def test_matches_the_slow_version(seed, tokens, num_experts, threshold, levels, depth, data):
    top_k = data.draw(st.integers(1, num_experts))
    score_TE, select_TE, expert_TK, load_E = _case(seed, tokens, num_experts, top_k, levels)
    if data.draw(st.booleans()):
        # Some experts are not allowed for some tokens, as group limits do.
        forbidden = (
            torch.rand(
                select_TE.shape,
                generator=torch.Generator(torch.get_default_device()).manual_seed(seed),
            )
            < 0.3
        )
        forbidden = forbidden.scatter(1, expert_TK, False)
        select_TE = select_TE.masked_fill(forbidden, -torch.inf)
    if data.draw(st.booleans()):
        load_E = torch.zeros(num_experts).index_add_(
            0, expert_TK.flatten(), torch.ones(expert_TK.numel())
        )
    limit = _exact(threshold) * sum(Fraction(x) for x in load_E.tolist()) / num_experts
    # A load within rounding of the limit may count as hot or not.
    assume(all(abs(Fraction(x) - limit) > Fraction(1, 10**4) for x in load_E.tolist()))
    actual = rebalance(select_TE, score_TE, expert_TK, load_E, torch.tensor(threshold), depth)
    slow = [t.tolist() for t in (select_TE, score_TE, expert_TK, load_E)]
    assert actual.tolist() == _slow_rebalance(*slow, threshold, depth)


def _balanced(seed, tokens, num_experts, top_k, threshold, depth):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    logits_TE = torch.randn(tokens, num_experts, generator=generator)
    logits_TE += 2 * torch.randn(num_experts, generator=generator)
    plain = route(logits_TE, top_k=top_k)
    load_E = plain.demand_E
    moved = route(logits_TE, top_k=top_k, load_E=load_E, threshold=threshold, depth=depth)
    hot_E = load_E > threshold * load_E.double().mean()
    return logits_TE, plain, moved, hot_E


CASE = {
    "seed": st.integers(0, 2**16),
    "tokens": st.sampled_from([1, 2, 17, 63]),
    "num_experts": st.integers(2, 9),
    "threshold": st.sampled_from(THRESHOLDS),
}


@SMALL
@given(**CASE, depth=st.integers(0, 6), data=st.data())
def test_nothing_is_dropped_and_nobody_else_overflows(
    seed, tokens, num_experts, threshold, depth, data
):
    top_k = data.draw(st.integers(1, num_experts))
    logits_TE, plain, moved, hot_E = _balanced(seed, tokens, num_experts, top_k, threshold, depth)
    assert all(len(set(row)) == top_k for row in moved.expert_TK.tolist())
    assert moved.counts_E.sum() == tokens * top_k
    capacity = _capacity(threshold, tokens * top_k, num_experts)
    cool = ~hot_E
    assert (moved.counts_E[cool] <= plain.demand_E[cool].clamp(min=capacity)).all()
    assert (moved.counts_E[hot_E] <= plain.demand_E[hot_E].clamp(min=capacity)).all()
    changed = moved.expert_TK != plain.expert_TK
    assert hot_E[plain.expert_TK[changed]].all()
    assert moved.rerouted == changed.sum()
    assert torch.equal(moved.demand_E, plain.demand_E)
    score_TE = logits_TE.softmax(-1)
    assert torch.equal(moved.weight_TK, score_TE.gather(1, moved.expert_TK))


@SMALL
@given(**CASE, data=st.data())
def test_a_hot_expert_keeps_its_strongest_slots(seed, tokens, num_experts, threshold, data):
    top_k = data.draw(st.integers(1, num_experts))
    logits_TE, plain, moved, hot_E = _balanced(seed, tokens, num_experts, top_k, threshold, 4)
    capacity = _capacity(threshold, tokens * top_k, num_experts)
    score_TE = logits_TE.softmax(-1)
    for e in hot_E.nonzero().flatten().tolist():
        slots = (plain.expert_TK == e).nonzero().tolist()
        strongest = sorted(slots, key=lambda slot: (-score_TE[slot[0], e].item(), slot))
        assert all(moved.expert_TK[t, k] == e for t, k in strongest[:capacity])


@SMALL
@given(**CASE, data=st.data())
def test_a_slot_stays_on_a_full_hot_expert_only_if_no_expert_would_take_it(
    seed, tokens, num_experts, threshold, data
):
    top_k = data.draw(st.integers(1, num_experts))
    # Every round fills an expert or places one more slot of each token that can move at all.
    depth = num_experts + top_k
    _, plain, moved, hot_E = _balanced(seed, tokens, num_experts, top_k, threshold, depth)
    capacity = _capacity(threshold, tokens * top_k, num_experts)
    has_room = plain.counts_E.clamp(max=capacity) < capacity
    arrived = torch.zeros(num_experts, dtype=torch.int64)
    changed = moved.expert_TK != plain.expert_TK
    arrived.index_add_(
        0, moved.expert_TK[changed], torch.ones(int(changed.sum()), dtype=torch.int64)
    )
    has_room &= plain.counts_E + arrived < capacity
    for e in (hot_E & (moved.counts_E > capacity)).nonzero().flatten().tolist():
        slots = (plain.expert_TK == e).nonzero().tolist()
        kept = [t for t, k in slots if moved.expert_TK[t, k] == e]
        over = len(kept) - capacity
        stuck = [
            t
            for t in kept
            if not any(
                has_room[f]
                and f not in {*moved.expert_TK[t].tolist(), *plain.expert_TK[t].tolist()}
                for f in range(num_experts)
            )
        ]
        assert len(stuck) >= over


@SMALL
@given(**CASE)
def test_with_one_slot_per_token_and_room_elsewhere_no_hot_expert_overflows(
    seed, tokens, num_experts, threshold
):
    _, plain, moved, hot_E = _balanced(seed, tokens, num_experts, 1, threshold, num_experts)
    capacity = _capacity(threshold, tokens, num_experts)
    room = (capacity - plain.counts_E).clamp(min=0).sum()
    to_shed = (plain.counts_E - capacity).clamp(min=0)[hot_E].sum()
    assume(room >= to_shed)
    assert (moved.counts_E[hot_E] <= capacity).all()
    assert moved.rerouted == to_shed


def test_an_overloaded_expert_is_brought_to_capacity():
    logits_TE = torch.randn(64, 8)
    logits_TE[:, 2] += 10
    moved = route(logits_TE, top_k=1, load_E=torch.eye(8)[2], threshold=2.0, depth=8)
    assert route(logits_TE, top_k=1).counts_E[2] == 64
    assert moved.counts_E[2] == 16
    assert moved.counts_E.max() == 16
    assert moved.rerouted == 48


@pytest.mark.parametrize(
    ("load_E", "threshold"),
    [
        (torch.tensor([50.0, 1, 1, 1, 1, 1, 1, 1]), float("inf")),
        (torch.ones(8), 1.0),
        (torch.zeros(8), 2.0),
        (torch.zeros(8), float("inf")),
    ],
    ids=["inf", "even-load", "no-load", "no-load-inf"],
)
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_nothing_hot_is_bitwise_plain_top_k(score, load_E, threshold):
    logits_TE = torch.randn(63, 8)
    logits_TE[:, 0] += 2
    options = {"top_k": 3, "score": score, "normalize": True, "aux": "batch"}
    plain = route(logits_TE, **options)
    load_E = load_E.to(logits_TE.device)
    moved = route(logits_TE, **options, load_E=load_E, threshold=threshold)
    for field, expected in plain._asdict().items():
        if expected is not None:
            assert torch.equal(getattr(moved, field), expected), field


def test_two_runs_are_bitwise_equal():
    logits_TE = torch.randint(0, 2, (63, 8)).float()
    load_E = torch.tensor([90.0, 50, 1, 1, 1, 1, 1, 1])
    runs = [route(logits_TE, top_k=2, load_E=load_E, threshold=1.0) for _ in range(2)]
    assert runs[0].rerouted > 0
    for field, first in runs[0]._asdict().items():
        assert first is None or torch.equal(first, getattr(runs[1], field)), field


def test_integer_loads_and_tensor_thresholds_are_welcome():
    logits_TE = torch.randn(32, 4)
    logits_TE[:, 1] += 5
    load_E = torch.tensor([1, 90, 1, 1])
    moved = route(logits_TE, top_k=1, load_E=load_E, threshold=torch.tensor(1.0))
    floating = route(logits_TE, top_k=1, load_E=load_E.float(), threshold=1.0)
    assert moved.rerouted > 0
    assert torch.equal(moved.expert_TK, floating.expert_TK)


def test_gradients_reach_the_weights_of_the_experts_used():
    logits_TE = torch.randn(8, 4, dtype=torch.float64)
    logits_TE[:, 0] += 2
    load_E = torch.tensor([9.0, 1, 1, 1], dtype=torch.float64)

    def run(logits_TE):
        return route(logits_TE, top_k=2, normalize=True, load_E=load_E, threshold=1.0).weight_TK

    assert route(logits_TE, top_k=2, load_E=load_E, threshold=1.0).rerouted > 0
    assert torch.autograd.gradcheck(run, logits_TE.requires_grad_())


@SMALL
@given(
    seed=st.integers(0, 2**16),
    slots=st.integers(0, 60),
    groups=st.integers(1, 6),
    top=st.booleans(),
)
def test_rank_within_counts_the_stronger_slots_of_the_group(seed, slots, groups, top):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    group_TK = torch.randint(0, groups, (slots, 1), generator=generator)
    levels = 3 if top else 1000
    strength_TK = torch.randint(0, levels, (slots, 1), generator=generator).float()
    ranks = rank_within(group_TK, strength_TK, groups).flatten().tolist()
    group, strength = group_TK.flatten().tolist(), strength_TK.flatten().tolist()
    for i, rank in enumerate(ranks):
        before = [
            j
            for j in range(slots)
            if group[j] == group[i] and (-strength[j], j) < (-strength[i], i)
        ]
        assert rank == len(before)
