"""The plan for a budget: the best of the walks' list and of a short annealing around the budget.

The walks take good next steps, each as large as a layer's tensors. Which mixture of steps loses
least is a knapsack in which the layers' places count as well; annealing finds good ones. It runs in
cells of equal width on the scale of peaks, from fixed seeds, so that what lies in a cell does not
depend on the budget. The plan is the fastest in the budget's cell and the two below it that the
budget allows; so of two budgets the smaller never has the larger peak.
"""

import math
import random
from collections.abc import Iterator, Sequence

from slipstream.recompute.choose import Space, State
from slipstream.recompute.cost import ModelCosts
from slipstream.recompute.sites import Unit

CELLS = 48
"""Between the peaks of keeping everything and of keeping the least."""
LOOK = 3
"""Cells that are searched for a budget."""
TARGETS, TRIES = 2, 1500
"""Peaks to aim at in a cell, and states to look at for each."""
PRICE, HEAT = 6.0, 0.3
"""Of a byte above the target, over the mean price; and at first, of the most a layer can pay."""


class Search:
    """The plans of a model, by budget."""

    def __init__(self, units: Sequence[Unit], costs: ModelCosts, states: Sequence[State]) -> None:
        """``states``: from keeping everything to the least, ever less peak."""
        self.space, self.states = Space(units, costs), states
        high, low = states[0].outcome, states[-1].outcome
        self.top, self.width = high.peak_bytes, (high.peak_bytes - low.peak_bytes) / CELLS
        self.range_ms = low.ms - high.ms
        self.cells: dict[int, list[State]] = {}

    def best(self, limit: float, below: float = math.inf) -> State | None:
        """The fastest plan with a peak of at most ``limit`` and less than ``below``; None: no plan.

        Of those in the first cell that has one, and in the next ones.
        """

        def able(states: Sequence[State]) -> list[State]:
            return [s for s in states if _peak(s) <= limit and _peak(s) < below]

        known = able(self.states)
        if not known or known[0] is self.states[0] or self.width <= 0:
            return next(iter(known), None)
        # One cell higher, as boundaries are rounded.
        index = max(0, int((self.top - min(limit, self.top)) / self.width) - 1)
        while not able(self._cell(index)):
            index += 1
        near = able([state for i in range(LOOK) for state in self._cell(index + i)])
        return min(near, key=lambda s: (s.outcome.ms, -_peak(s)))

    def _cell(self, index: int) -> list[State]:
        """Plans whose peaks lie in a cell; the first one begins at that of keeping everything."""
        if index not in self.cells:
            high, low = (self.top - (index + i) * self.width for i in (0, 1))
            known = [state for state in self.states if low < _peak(state) <= high]
            start = next((state for state in self.states if _peak(state) <= low), self.states[-1])
            draw = random.Random(index)
            met = [
                state
                for i in range(TARGETS if index < CELLS else 0)
                for state in self._anneal(start, high - i * self.width / TARGETS, draw)
                if low < _peak(state) <= high
            ]
            self.cells[index] = known + met
        return self.cells[index]

    def _anneal(self, start: State, limit: float, draw: random.Random) -> Iterator[State]:
        """Every state accepted on the way to the least time with a peak of at most ``limit``."""
        if self.range_ms <= 0:
            return
        rate = PRICE * self.range_ms / (CELLS * self.width)

        def energy(state: State) -> float:
            return state.outcome.ms + rate * max(0.0, _peak(state) - limit)

        now, hottest = start, HEAT * self.range_ms / len(start.choices)
        for i in range(TRIES):
            heat = hottest * (1 - i / TRIES)
            new = self._neighbour(now, draw)
            more = energy(new) - energy(now)
            if more <= 0 or draw.random() < math.exp(-more / heat):
                now = new
                yield now

    def _neighbour(self, state: State, draw: random.Random) -> State:
        """One or two layers do a little more or less, or move what they keep, or do not."""
        space = self.space
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


def _peak(state: State) -> int:
    return state.outcome.peak_bytes
