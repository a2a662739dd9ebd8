"""Between two plans of the list: others, in order, found again, and worth their place."""

from itertools import pairwise

from slipstream.recompute.choose import plans
from slipstream.recompute.cost import LayerCosts
from slipstream.recompute.refine import between
from slipstream.recompute.sites import Unit
from slipstream.recompute.timeline import outcome
from tests.recompute.costs import GIB, cost, model_costs, unit
from tests.recompute.test_choose import moe_layers


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


def test_a_gap_is_filled_with_what_is_better_than_its_lower_end() -> None:
    units, layer = measured_layers(5)
    costs = model_costs({"one": layer}, bytes_per_ms=GIB / 19.5, slowdown=0.2 / GIB)
    gaps = pairwise(plans(units, costs))
    above, below = max(gaps, key=lambda gap: gap[1].outcome.ms - gap[0].outcome.ms)
    found = between(units, costs, above, below)
    assert len(found) >= 1
    for before, after in pairwise([above, *found, below]):
        assert before.outcome.peak_bytes > after.outcome.peak_bytes
        assert before.outcome.ms <= after.outcome.ms
    assert below.outcome.ms - found[-1].outcome.ms > 5.0
    assert all(state.outcome == outcome(costs, state.choices) for state in found)
    assert all(state.choices[-1].moved_bytes == 0 for state in found)
    assert found == between(units, costs, above, below)


def test_no_gap_has_nothing_in_it() -> None:
    units, layer = moe_layers(4)
    costs = model_costs({"one": layer})
    first = plans(units, costs)[0]
    assert between(units, costs, first, first) == []
