"""Between two plans of the list: others, in order, found again, and worth their place."""

from itertools import pairwise

from slipstream.recompute.choose import plans
from slipstream.recompute.refine import between
from slipstream.recompute.timeline import outcome
from tests.recompute.costs import GIB, model_costs
from tests.recompute.test_choose import moe_layers


def test_a_gap_is_filled_with_what_is_better_than_its_lower_end() -> None:
    units, layer = moe_layers(5)
    costs = model_costs({"one": layer}, bytes_per_ms=GIB / 20, slowdown=0.1 / GIB)
    gaps = pairwise(plans(units, costs))
    above, below = max(gaps, key=lambda gap: gap[1].outcome.ms - gap[0].outcome.ms)
    found = between(units, costs, above, below)
    assert len(found) >= 1
    for before, after in pairwise([above, *found, below]):
        assert before.outcome.peak_bytes > after.outcome.peak_bytes
        assert before.outcome.ms <= after.outcome.ms
    assert below.outcome.ms - found[-1].outcome.ms > 10.0
    assert all(state.outcome == outcome(costs, state.choices) for state in found)
    assert all(state.choices[-1].moved_bytes == 0 for state in found)
    assert found == between(units, costs, above, below)


def test_no_gap_has_nothing_in_it() -> None:
    units, layer = moe_layers(4)
    costs = model_costs({"one": layer})
    first = plans(units, costs)[0]
    assert between(units, costs, first, first) == []
