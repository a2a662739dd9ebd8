"""Plans that no walk takes: within the budget, worth it, the same each time, monotone."""

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.recompute import refine
from slipstream.recompute.choose import plans
from slipstream.recompute.cost import LayerCosts, ModelCosts
from slipstream.recompute.refine import Search
from slipstream.recompute.sites import Unit
from slipstream.recompute.timeline import outcome
from tests.recompute.costs import GIB, cost, model_costs, unit
from tests.recompute.test_choose import problems


def measured_layers(count: int) -> tuple[list[Unit], LayerCosts]:
    """In half GiBs and ms about what an MoE layer costs on an H200."""
    attention = ("keep", "rope", "recompute")
    parts = {"": ("keep", "offload"), "attention": attention, "moe": ("keep", "experts")}

    def less(gib: float, ms: float):
        kept = int((9 - gib) * GIB)
        return cost(kept, 108 + ms, 6 * GIB, forward_ms=36.0, grain=GIB // 2)

    layer = LayerCosts(
        keep=less(0, 0),
        actions={
            ("attention", "rope"): less(1.5, 1.1),
            ("attention", "recompute"): less(3, 9.3),
            ("moe", "experts"): less(4.5, 17.5),
        },
    )
    return [unit(i, "one", parts) for i in range(count)], layer


def test_a_mixture_of_steps_is_found_that_no_walk_takes() -> None:
    units, layer = measured_layers(5)
    costs = model_costs({"one": layer}, bytes_per_ms=GIB / 19.5, slowdown=0.2 / GIB)
    line = plans(units, costs)
    first, last = line[0].outcome, line[-1].outcome
    search = Search(units, costs, line)
    gains = []
    for share in (0.3, 0.5, 0.6, 0.8):
        limit = first.peak_bytes - share * (first.peak_bytes - last.peak_bytes)
        found = search.best(limit)
        walked = next(state for state in line if state.outcome.peak_bytes <= limit)
        assert found is not None
        assert found.outcome.peak_bytes <= limit
        assert found.outcome == outcome(costs, found.choices)
        assert found.choices[-1].moved_bytes == 0
        gains.append(1 - (found.outcome.ms - first.ms) / (walked.outcome.ms - first.ms))
        assert found == Search(units, costs, line).best(limit)
    assert min(gains) >= 0
    assert max(gains) > 0.1


@given(problems(), st.lists(st.floats(0, 1.2), min_size=2, max_size=5))
@settings(max_examples=25, deadline=None)
def test_a_smaller_budget_never_has_the_larger_peak(
    problem: tuple[list[Unit], ModelCosts], shares: list[float]
) -> None:
    units, costs = problem
    line = plans(units, costs)
    high, low = (line[i].outcome.peak_bytes for i in (0, -1))
    search = Search(units, costs, line)
    found = []
    with patch.object(refine, "TRIES", 60):
        for share in sorted(shares):
            limit = low - 1 + share * (high - low + 2)
            state = search.best(limit)
            assert (state is None) == (limit < low)
            if state is not None:
                assert state.outcome.peak_bytes <= limit
                walked = next(s for s in line if s.outcome.peak_bytes <= limit)
                assert state.outcome.ms <= walked.outcome.ms
                found.append(state.outcome.peak_bytes)
                again = search.best(limit, below=state.outcome.peak_bytes)
                assert again is None or again.outcome.peak_bytes < state.outcome.peak_bytes
    assert found == sorted(found)


def test_where_all_fits_nothing_is_given_up() -> None:
    units, layer = measured_layers(4)
    costs = model_costs({"one": layer})
    line = plans(units, costs)
    search = Search(units, costs, line)
    assert search.best(line[0].outcome.peak_bytes) == line[0]
    assert search.best(line[-1].outcome.peak_bytes) == line[-1]
    assert search.best(line[-1].outcome.peak_bytes - 1) is None
    alone = Search(units, costs, line[:1])
    assert alone.best(line[0].outcome.peak_bytes) == line[0]
    assert alone.best(line[0].outcome.peak_bytes - 1) is None
