"""The list of steps: in any budget, monotone, never far from the best choice there is."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.recompute.choose import choices, hull, peaks, steps
from slipstream.recompute.cost import Choice, LayerCosts, ModelCosts, peak_bytes
from slipstream.recompute.sites import Unit
from tests.recompute.costs import cost, model_costs, unit

PARTS = {"": ("keep", "offload"), "attention": ("keep", "a", "b"), "moe": ("keep", "c")}
NUMBERS = st.integers(0, 100)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[Unit], ModelCosts]:
    layers = {}
    for kind in ("one", "two"):
        kept = draw(st.integers(200, 400))
        grads = draw(NUMBERS)

        def less(kept: int = kept, grads: int = grads) -> tuple[int, float, int, int]:
            ms = 10 + draw(NUMBERS) / 7
            return kept - draw(NUMBERS), ms, draw(NUMBERS), grads

        actions = {place: cost(*less()) for place in
                   (("attention", "a"), ("attention", "b"), ("moe", "c"))}  # fmt: skip
        layers[kind] = LayerCosts(
            keep=cost(kept, 10.0, draw(NUMBERS), grads),
            actions=actions,
            offload=cost(draw(st.integers(0, 50)), 10 + draw(NUMBERS) / 7, 0, grads),
            offloaded_bytes=draw(st.integers(1, 200)),
        )
    kinds = draw(st.lists(st.sampled_from(("one", "two")), min_size=1, max_size=4))
    units = [unit(i, kind, PARTS) for i, kind in enumerate(kinds)]
    return units, model_costs(layers, draw(NUMBERS), draw(NUMBERS))


@given(problems())
@settings(max_examples=60, deadline=None)
def test_each_step_gives_up_more_and_costs_no_less(problem: tuple[list[Unit], ModelCosts]) -> None:
    units, costs = problem
    first, walk = steps(units, costs)
    current = [choice.cost for choice in first]
    rates = []
    for step in walk:
        before, after = current[step.unit], step.choice.cost
        assert after.kept_bytes < before.kept_bytes
        assert after.ms >= before.ms
        assert step.saved_bytes == before.kept_bytes - after.kept_bytes
        rates.append(step.ms / step.saved_bytes)
        current[step.unit] = after
    assert rates == sorted(rates)
    assert all(set(dict(c.actions).values()) <= {"keep"} for c in first)


@given(problems(), st.lists(st.integers(0, 3000), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_a_smaller_budget_never_has_a_larger_peak(
    problem: tuple[list[Unit], ModelCosts], budgets: list[int]
) -> None:
    units, costs = problem
    first, walk = steps(units, costs)
    line = peaks(costs, first, walk)
    chosen = {b: next((p for p in line if p <= b), None) for b in budgets}
    found = [chosen[b] for b in sorted(budgets) if chosen[b] is not None]
    assert found == sorted(found)
    assert all(p is None or p <= b for b, p in chosen.items())


@given(problems(), st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_at_most_one_step_from_the_best(
    problem: tuple[list[Unit], ModelCosts], share: float
) -> None:
    units, costs = problem
    units = units[:2]
    first, walk = steps(units, costs)
    kept = [sum(choice.cost.kept_bytes for choice in first)]
    spent = [0.0]
    for step in walk:
        kept.append(kept[-1] - step.saved_bytes)
        spent.append(spent[-1] + step.ms)
    budget = kept[-1] + share * (kept[0] - kept[-1])
    count = next(i for i, k in enumerate(kept) if k <= budget)
    lists = [choices(u, costs.layers[u.kind]) for u in units]
    start = sum(choice.cost.ms for choice in first)
    best = min(
        sum(c.cost.ms for c in combination) - start
        for combination in product(*lists)
        if sum(c.cost.kept_bytes for c in combination) <= budget
    )
    # Before the last step there was too little saved, at the best rate there is.
    last = walk[count - 1].ms if count else 0.0
    assert spent[count] - last <= best + 1e-6


def test_hull_leaves_out_what_a_mixture_beats() -> None:
    points = {"keep": (100, 0.0), "dear": (90, 5.0), "good": (60, 2.0), "last": (0, 20.0)}
    found = [Choice(actions=(("", n),), cost=cost(k, ms)) for n, (k, ms) in points.items()]
    assert [choice.actions[0][1] for choice in hull(found)] == ["keep", "good", "last"]


def test_peak_counts_what_is_there_at_once() -> None:
    costs = model_costs({}, static=1000, tail=40)
    layers = [cost(100, 1.0, 30, 7), cost(200, 1.0, 60, 9)]
    # Both kept, and the tail on top.
    assert peak_bytes(costs, layers, has_grads=False) == 1000 + 100 + 200 + 60 + 9
    layers = [cost(100, 1.0, 30, 700), cost(200, 1.0, 60, 900)]
    # The gradients of the second, then the first with its own.
    assert peak_bytes(costs, layers, has_grads=False) == 1000 + 900 + 100 + 30 + 700
    # Added to gradients that are there, only one is there at a time.
    assert peak_bytes(costs, layers, has_grads=True) == 1000 + 100 + 200 + 60 + 900


def test_earlier_layers_give_up_first() -> None:
    layer = LayerCosts(
        keep=cost(100, 1.0),
        actions={("attention", "a"): cost(40, 2.0), ("attention", "b"): cost(0, 4.0)},
        offload=None,
        offloaded_bytes=0,
    )
    units = [unit(i, "one", {"attention": ("keep", "a", "b")}) for i in range(3)]
    _, walk = steps(units, model_costs({"one": layer}))
    assert [step.unit for step in walk] == [0, 1, 2, 0, 1, 2]
    assert [dict(s.choice.actions)["attention"] for s in walk] == [*"aaabbb"]
