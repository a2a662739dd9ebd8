"""The list of plans: in any budget, monotone, never far from the best choice there is."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise, product

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.recompute.choose import choices, hull, plans
from slipstream.recompute.cost import Choice, Cost, LayerCosts, ModelCosts
from slipstream.recompute.sites import Unit
from slipstream.recompute.timeline import outcome
from tests.recompute.costs import GIB, cost, model_costs, unit

PARTS = {"": ("keep", "offload"), "attention": ("keep", "a", "b"), "moe": ("keep", "c")}
NUMBERS = st.integers(0, 100)


@st.composite
def problems(draw: st.DrawFn, *, bare: bool = False) -> tuple[list[Unit], ModelCosts]:
    """``bare``: what is kept is all there is, and nothing can be moved."""

    def extra() -> int:
        return 0 if bare else draw(NUMBERS)

    layers = {}
    for kind in ("one", "two"):
        kept, grads, forward = draw(st.integers(200, 400)), extra(), draw(NUMBERS) / 10
        grain, stays = draw(st.sampled_from((1, 7, 50))), draw(st.integers(0, 50))
        place = partial(cost, grads=grads, forward_ms=forward, grain=grain, stays=stays)

        def less(kept: int = kept, place: Callable[..., Cost] = place):
            return place(kept - draw(NUMBERS), 20 + draw(NUMBERS) / 7, extra())

        places = (("attention", "a"), ("attention", "b"), ("moe", "c"))
        layers[kind] = LayerCosts(
            keep=place(kept, 20.0, extra()),
            actions={where: less() for where in places},
        )
    kinds = draw(st.lists(st.sampled_from(("one", "two")), min_size=1, max_size=4))
    units = [unit(i, kind, PARTS) for i, kind in enumerate(kinds)]
    rate = None if bare else draw(st.floats(1, 100))
    slowdown = draw(st.floats(0, 0.1))
    costs = model_costs(layers, draw(NUMBERS), extra(), bytes_per_ms=rate, slowdown=slowdown)
    return units, costs


@given(problems())
@settings(max_examples=60, deadline=None)
def test_each_plan_has_less_peak_and_takes_no_less_time(
    problem: tuple[list[Unit], ModelCosts],
) -> None:
    units, costs = problem
    line = plans(units, costs)
    assert all(set(dict(c.actions).values()) <= {"keep"} for c in line[0].choices)
    for before, after in pairwise(line):
        assert after.outcome.peak_bytes < before.outcome.peak_bytes
        assert after.outcome.ms >= before.outcome.ms
    assert all(state.outcome == outcome(costs, state.choices) for state in line)


@given(problems(), st.lists(st.integers(0, 3000), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_smaller_budget_never_has_a_larger_peak(
    problem: tuple[list[Unit], ModelCosts], budgets: list[int]
) -> None:
    line = [state.outcome.peak_bytes for state in plans(*problem)]
    chosen = {b: next((p for p in line if p <= b), None) for b in budgets}
    found = [chosen[b] for b in sorted(budgets) if chosen[b] is not None]
    assert found == sorted(found)
    assert all(p is None or p <= b for b, p in chosen.items())


@given(problems(bare=True), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_at_most_one_step_from_the_best(
    problem: tuple[list[Unit], ModelCosts], share: float
) -> None:
    units, costs = problem
    units = units[:2]
    line = plans(units, costs)
    high, low = (line[i].outcome.peak_bytes for i in (0, -1))
    budget = low + share * (high - low)
    chosen = next(state for state in line if state.outcome.peak_bytes <= budget)
    every = product(*[choices(u, costs.layers[u.kind]) for u in units])
    outcomes = [outcome(costs, combination) for combination in every]
    best = min(found.ms for found in outcomes if found.peak_bytes <= budget)
    steps = [
        after.cost.ms - before.cost.ms
        for u in units
        for before, after in pairwise(hull(choices(u, costs.layers[u.kind])))
    ]
    # Before the last step too little was saved, at the best rate there is.
    assert chosen.outcome.ms - max(steps, default=0.0) <= best + 1e-6


@given(problems())
@settings(max_examples=40, deadline=None)
def test_the_last_layer_never_offloads(
    problem: tuple[list[Unit], ModelCosts],
) -> None:
    for state in plans(*problem):
        moved = [choice.moved_bytes for choice in state.choices]
        assert moved[-1] == 0
        for choice in state.choices:
            actions = dict(choice.actions)
            assert (actions[""] == "offload") == bool(choice.moved_bytes)


def test_hull_leaves_out_what_a_mixture_beats() -> None:
    points = {"keep": (100, 0.0), "dear": (90, 5.0), "good": (60, 2.0), "last": (0, 20.0)}
    found = [Choice(actions=(("", n),), cost=cost(k, ms)) for n, (k, ms) in points.items()]
    assert [choice.actions[0][1] for choice in hull(found)] == ["keep", "good", "last"]


def test_earlier_layers_give_up_first() -> None:
    layer = LayerCosts(
        keep=cost(100, 1.0),
        actions={("attention", "a"): cost(40, 2.0), ("attention", "b"): cost(0, 4.0)},
    )
    units = [unit(i, "one", {"attention": ("keep", "a", "b")}) for i in range(3)]
    line = plans(units, model_costs({"one": layer}))
    found = ["".join(dict(c.actions)["attention"][0] for c in state.choices) for state in line]
    assert found == ["kkk", "akk", "aak", "aaa", "baa", "bba", "bbb"]


def moe_layers(count: int) -> tuple[list[Unit], LayerCosts]:
    """A quarter of what is kept is cheap to make again, half of it dear."""
    parts = {"": ("keep", "offload"), "attention": ("keep", "rope"), "moe": ("keep", "experts")}

    def less(gib: float, ms: float):
        return cost(int((8 - gib) * GIB), 100 + ms, forward_ms=40.0, grain=GIB)

    layer = LayerCosts(
        keep=less(0, 0),
        actions={("attention", "rope"): less(2, 1.0), ("moe", "experts"): less(4, 13.0)},
    )
    return [unit(i, "one", parts) for i in range(count)], layer


def test_what_is_cheap_is_made_again_and_what_is_left_is_moved() -> None:
    units, layer = moe_layers(8)
    costs = model_costs({"one": layer}, bytes_per_ms=GIB / 20, slowdown=0.1 / GIB)
    start, *line = plans(units, costs)
    budget = start.outcome.peak_bytes - 28 * GIB
    chosen = next(state for state in line if state.outcome.peak_bytes <= budget)
    actions = [dict(choice.actions) for choice in chosen.choices]
    # Eight times the cheap one frees 16 GiB; two layers' other 6 GiB take 120 ms each.
    assert {a["attention"] for a in actions} == {"rope"}
    assert [a[""] for a in actions] == ["offload"] * 2 + ["keep"] * 6
    assert {a["moe"] for a in actions} == {"keep"}
    assert chosen.outcome.ms - start.outcome.ms < 8 + 2 * 6 * 0.1 + 1e-6
    without = plans(units, model_costs({"one": layer}))
    dear = next(state for state in without if state.outcome.peak_bytes <= budget)
    assert dear.outcome.ms - start.outcome.ms > 8 + 2 * 13


def test_no_more_is_moved_than_the_host_has_room_for() -> None:
    units, layer = moe_layers(8)
    costs = model_costs({"one": layer}, bytes_per_ms=GIB / 20)
    few = plans(units, replace(costs, host_bytes=7 * GIB))
    assert max(sum(c.moved_bytes for c in state.choices) for state in few) <= 7 * GIB
    assert any(c.moved_bytes for state in few for c in state.choices)
    none = plans(units, replace(costs, host_bytes=0))
    assert not any(c.moved_bytes for state in none for c in state.choices)
