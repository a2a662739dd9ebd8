"""The plan for a budget: the best of the walks' list and of a short annealing around the budget.

The walks take good next steps, each as large as a layer's tensors. Which mixture of steps loses
least is a knapsack in which the layers' places count as well; annealing finds good ones. It runs in
cells of equal width on the scale of peaks, from fixed seeds, so that what lies in a cell does not
depend on the budget; kept is what is faster than the list at that peak. The plan is the fastest
that the budget allows in the first cell that has one and the two after it; so of two budgets the
smaller never has the larger peak.
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
        index = int((self.top - min(limit, self.top)) / self.width)
        if index and self.top - index * self.width < limit:  # boundaries are rounded
            index -= 1
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
                if low < _peak(state) <= high and self._is_gain(state)
            ]
            self.cells[index] = known + met
        return self.cells[index]

    def _is_gain(self, state: State) -> bool:
        """Whether it is faster than all of the list that need no more memory."""
        walked = next((x for x in self.states if _peak(x) <= _peak(state)), None)
        return walked is None or state.outcome.ms < walked.outcome.ms

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
        layers = list(zip(state.levels, state.choices, strict=True))
        for _ in range(draw.choice((1, 2))):
            i = draw.randrange(len(layers))
            level, moved = layers[i][0], bool(layers[i][1].moved)
            if draw.random() < 0.6:
                steps = len(self.space.corners[i]) - 1
                level = min(steps, max(0, level + draw.choice((-1, 1))))
            else:
                moved = not moved
            choice = self.space.choice(i, level, moved=moved)
            if not moved or (choice.moved and self.space.may_offload(i)):
                layers[i] = level, choice
        new = self.space.state(layers)
        return new if self.space.has_room(new) else state


def _peak(state: State) -> int:
    return state.outcome.peak_bytes
