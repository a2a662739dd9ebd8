"""Plans between two neighbours of the list, where a budget lies in the gap between their peaks.

The list is made of good next steps, each as large as a layer's tensors. Which mixture of steps
fills a gap best is a knapsack; a short annealing from the neighbour below finds good ones. It
starts from the same seed, so what lies in a gap does not depend on the budget.
"""

import math
import random
from collections.abc import Iterator, Sequence

from slipstream.recompute.choose import Space, State, front
from slipstream.recompute.cost import ModelCosts
from slipstream.recompute.sites import Unit
from slipstream.recompute.timeline import Outcome

TARGETS, TRIES = 4, 1500
"""Peaks to aim at within the gap, and states to look at for each."""


def between(units: Sequence[Unit], costs: ModelCosts, above: State, below: State) -> list[State]:
    """States with peaks and times between those of two, none better than another in both."""
    high, low = above.outcome, below.outcome
    if low.ms <= high.ms or low.peak_bytes >= high.peak_bytes:
        return []
    space, draw = Space(units, costs), random.Random(0)
    width = high.peak_bytes - low.peak_bytes
    met = [
        state
        for i in range(TARGETS)
        for state in _anneal(space, below, low.peak_bytes + (i + 1) * width // TARGETS, high, draw)
        if low.peak_bytes < state.outcome.peak_bytes < high.peak_bytes
        and high.ms <= state.outcome.ms < low.ms
    ]
    return front(above, met)[1:]


def _anneal(
    space: Space, start: State, limit: int, high: Outcome, draw: random.Random
) -> Iterator[State]:
    """Every state accepted on the way to the least time with a peak of at most ``limit``."""
    paid = start.outcome.ms - high.ms
    # Above the limit a byte costs more than the gap's own rate.
    rate = 3 * paid / (high.peak_bytes - start.outcome.peak_bytes)

    def energy(state: State) -> float:
        return state.outcome.ms + rate * max(0, state.outcome.peak_bytes - limit)

    now = start
    for i in range(TRIES):
        heat = paid / 4 * (1 - i / TRIES)
        new = _neighbour(space, now, draw)
        more = energy(new) - energy(now)
        if more <= 0 or draw.random() < math.exp(-more / heat):
            now = new
            yield now


def _neighbour(space: Space, state: State, draw: random.Random) -> State:
    """One or two layers do a little more or less, or move what they keep, or do not."""
    for _ in range(draw.choice((1, 2))):
        i = draw.randrange(len(state.choices))
        level, moved = state.levels[i], bool(state.choices[i].moved_bytes)
        if draw.random() < 0.6:
            level = min(len(space.corners[i]) - 1, max(0, level + draw.choice((-1, 1))))
        else:
            moved = not moved
        new = space.offload(state, i, level) if moved else None
        if not moved:
            new = space.change(state, i, level, moved=False)
        state = state if new is None else new
    return state
