"""Causal load balancing: slow lists, the serial rule it converges to, and causality itself."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream.errors import ShapeError
from slipstream.ops.moe import route
from slipstream.ops.moe.route.balance import rebalance
from tests.ops.implementations import forced


@pytest.fixture(autouse=True)
def _reference():
    with forced("moe_route", "reference"):
        yield


SMALL = settings(max_examples=60, deadline=None)
CASE = {
    "seed": st.integers(0, 2**16),
    "tokens": st.sampled_from([1, 2, 5, 17, 40]),
    "num_experts": st.integers(2, 9),
    "threshold": st.sampled_from([0.5, 1.0, 1.25, 1.5, 2.0]),
}


def _case(seed: int, tokens: int, num_experts: int, top_k: int, levels: int = 5):
    """Scores with ties and a skew, their plain top-k, and the load they make."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    select_TE = torch.randint(0, levels, (tokens, num_experts), generator=generator) / levels
    select_TE += torch.randint(0, levels, (num_experts,), generator=generator) / 3
    plain_TK = select_TE.sort(dim=1, descending=True, stable=True)[1][:, :top_k]
    load_E = plain_TK.flatten().bincount(minlength=num_experts).float()
    return select_TE, plain_TK, load_E


def _capacity(threshold: float, slots: int, num_experts: int) -> int:
    return min(max(1, int(threshold * slots / num_experts)), slots)


def _moved(select_TE, plain_TK, load_E, threshold: float, depth: int) -> torch.Tensor:
    limit = torch.tensor(threshold)
    return rebalance(select_TE, select_TE, plain_TK, load_E, limit, depth, "causal")


def _slow(select, plain, capacity: int, depth: int) -> list[list[int]]:
    """Deferred acceptance in lists: experts prefer earlier tokens, tokens their best expert."""
    num_experts, top_k = len(select[0]), len(plain[0])
    now = [list(row) for row in plain]
    for last in [False] * depth + [True]:
        for e in range(num_experts):
            held = [(t, k) for t, row in enumerate(now) for k, f in enumerate(row) if f == e]
            for t, k in held[capacity:]:
                now[t][k] = -1
        if last:
            break
        before = [
            sum(row.count(e) for row in now[:t])
            for t in range(len(now))
            for e in range(num_experts)
        ]
        for t, row in enumerate(now):
            fits = [
                e
                for e in range(num_experts)
                if e not in plain[t]
                and e not in row
                and before[t * num_experts + e] < capacity
                and select[t][e] > -float("inf")
            ]
            best_first = iter(sorted(fits, key=lambda e, t=t: (-select[t][e], e)))
            for k in range(top_k):
                if row[k] == -1:
                    row[k] = next(best_first, -1)
    return [
        [p if e == -1 else e for e, p in zip(*rows, strict=True)]
        for rows in zip(now, plain, strict=True)
    ]


@SMALL
@given(**CASE, depth=st.integers(0, 5), data=st.data())
def test_matches_the_slow_version(seed, tokens, num_experts, threshold, depth, data):
    top_k = data.draw(st.integers(1, num_experts))
    select_TE, plain_TK, load_E = _case(seed, tokens, num_experts, top_k)
    if data.draw(st.booleans()):
        # Some experts are not allowed for some tokens, as group limits do.
        forbidden = (select_TE * 7 % 1 < 0.4).scatter(1, plain_TK, False)
        select_TE = select_TE.masked_fill(forbidden, -torch.inf)
    moved = _moved(select_TE, plain_TK, load_E, threshold, depth)
    hot = (load_E.double() > threshold * load_E.double().mean()).any()
    capacity = _capacity(threshold, plain_TK.numel(), num_experts)
    slow = _slow(select_TE.tolist(), plain_TK.tolist(), capacity, depth)
    assert moved.tolist() == (slow if hot else plain_TK.tolist())


@settings(max_examples=120, deadline=None)
@given(**CASE, depth=st.integers(1, 6), data=st.data())
def test_later_tokens_never_change_earlier_ones(seed, tokens, num_experts, threshold, depth, data):
    top_k = data.draw(st.integers(1, num_experts))
    first = data.draw(st.integers(0, tokens))
    logits_TE = torch.randn(tokens, num_experts) * 2 + torch.arange(num_experts) / 2
    load_E = torch.arange(num_experts).float() ** 2
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    changed_TE = logits_TE.clone()
    changed_TE[first:] = 5 * torch.randn(tokens - first, num_experts, generator=generator)
    options = {"top_k": top_k, "load_E": load_E, "threshold": threshold, "depth": depth}
    before, after = (route(x, **options, mode="causal") for x in (logits_TE, changed_TE))
    assert torch.equal(before.expert_TK[:first], after.expert_TK[:first])
    assert torch.equal(before.weight_TK[:first], after.weight_TK[:first])


def test_the_weight_mode_is_not_causal():
    """The property above is one of the mode, not of every balanced routing."""
    logits_TE = torch.zeros(4, 4)
    logits_TE[:, 0] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    changed_TE = logits_TE.clone()
    changed_TE[3, 0] = -9
    options = {"top_k": 1, "load_E": torch.eye(4)[0], "threshold": 2.0}
    for mode, same in (("weight", False), ("causal", True)):
        runs = [route(x, **options, mode=mode).expert_TK[:3] for x in (logits_TE, changed_TE)]
        assert torch.equal(*runs) is same, mode


@SMALL
@given(**CASE, data=st.data())
def test_enough_rounds_give_the_serial_rule(seed, tokens, num_experts, threshold, data):
    """One token after another keeps what has room and takes its best open experts for the rest."""
    top_k = data.draw(st.integers(1, num_experts))
    select_TE, plain_TK, load_E = _case(seed, tokens, num_experts, top_k, levels=100)
    assume((load_E.double() > threshold * load_E.double().mean()).any())
    capacity = _capacity(threshold, plain_TK.numel(), num_experts)
    count, serial = [0] * num_experts, []
    for select, plain in zip(select_TE.tolist(), plain_TK.tolist(), strict=True):
        kept = [e for e in plain if count[e] < capacity]
        fits = [e for e in range(num_experts) if e not in plain and count[e] < capacity]
        best_first = sorted(fits, key=lambda e, s=select: (-s[e], e))
        taken = kept + best_first[: top_k - len(kept)]
        assume(len(taken) == top_k)  # else some slot has nowhere to go
        for e in taken:
            count[e] += 1
        serial.append(sorted(taken))
    moved = _moved(select_TE, plain_TK, load_E, threshold, depth=60)
    assert [sorted(row) for row in moved.tolist()] == serial
    assert max(count) <= capacity


@SMALL
@given(**CASE, depth=st.integers(0, 6), data=st.data())
def test_nothing_is_dropped_and_only_stuck_slots_overflow(
    seed, tokens, num_experts, threshold, depth, data
):
    top_k = data.draw(st.integers(1, num_experts))
    select_TE, plain_TK, load_E = _case(seed, tokens, num_experts, top_k)
    moved = _moved(select_TE, plain_TK, load_E, threshold, depth)
    assert all(len(set(row)) == top_k for row in moved.tolist())
    hot_E = load_E.double() > threshold * load_E.double().mean()
    if not hot_E.any():
        assert torch.equal(moved, plain_TK)
        return
    capacity = _capacity(threshold, plain_TK.numel(), num_experts)
    for e in range(num_experts):
        came = ((moved == e) & (plain_TK != e)).sum()
        stayed = ((moved == e) & (plain_TK == e)).sum()
        assert came <= capacity
        if came + stayed > capacity:  # a slot that nobody took is at its own expert again
            assert stayed > capacity - came


def test_the_latest_tokens_move():
    logits_TE = torch.zeros(8, 4)
    logits_TE[:, 1] = torch.arange(8.0, 0.0, -1.0) + 1
    logits_TE[:, 3] = 0.5
    options = {"top_k": 1, "load_E": torch.eye(4)[1], "threshold": 1.5, "depth": 4}
    moved = route(logits_TE, **options, mode="causal")
    assert moved.expert_TK.flatten().tolist() == [1, 1, 1, 3, 3, 3, 0, 0]
    assert moved.rerouted == 5
    # Seen from its end, the strongest slots would be the same ones: turn the strength around.
    logits_TE[:, 1] = torch.arange(1.0, 9.0) + 1
    assert route(logits_TE, **options, mode="causal").expert_TK[:3].tolist() == [[1], [1], [1]]
    assert route(logits_TE, **options, mode="weight").expert_TK[5:].tolist() == [[1], [1], [1]]


@pytest.mark.parametrize("threshold", [float("inf"), 2.0])
def test_nothing_hot_is_bitwise_plain_top_k(threshold):
    logits_TE = torch.randn(63, 8)
    logits_TE[:, 0] += 2
    load_E = torch.ones(8) if threshold == 2.0 else torch.eye(8)[0]
    plain = route(logits_TE, top_k=3, normalize=True)
    moved = route(
        logits_TE, top_k=3, normalize=True, load_E=load_E, threshold=threshold, mode="causal"
    )
    for field, expected in plain._asdict().items():
        if expected is not None:
            assert torch.equal(getattr(moved, field), expected), field


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"mode": "latest"}, "route: mode = 'latest'"),
        ({"depth": -1}, "route: depth = -1"),
        ({"threshold": 0.0, "load_E": torch.ones(4)}, "route: threshold = 0.0"),
        ({"threshold": float("nan"), "load_E": torch.ones(4)}, "route: threshold = nan"),
    ],
    ids=["mode", "depth", "zero", "nan"],
)
def test_a_wrong_setting_is_refused(wrong, message):
    with pytest.raises(ShapeError, match=message):
        route(torch.randn(4, 4, device="cpu"), top_k=1, **wrong)
