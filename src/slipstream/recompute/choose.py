"""What layers may do together, from keeping everything to the least, cheapest first.

Within a layer what counts are the corners of the lower convex hull of (bytes kept, ms). A walk
takes next the step of any layer that lowers the peak at the least ms per byte: one that frees
memory where there is enough comes last. Offload takes whole layers, the earliest first, with all
they keep by then; where in a walk it begins is tried out. Of all states met, those that no other
beats in peak and time are the plans: one list for all budgets, a smaller one goes further along.
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from slipstream.nn.site import OFFLOAD
from slipstream.recompute.cost import Choice, Cost, LayerCosts, ModelCosts
from slipstream.recompute.sites import Unit
from slipstream.recompute.timeline import Outcome, outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What every layer does."""

    levels: tuple[int, ...]
    """By layer, which corner of its hull."""
    choices: tuple[Choice, ...]
    """By layer."""
    outcome: Outcome
    """What it comes to."""


def choices(unit: Unit, costs: LayerCosts) -> list[Choice]:
    """Every combination of a layer's actions, offload apart; sites are independent."""
    lists = [
        [(site.part, action) for action in site.actions if action != OFFLOAD] for site in unit.sites
    ]
    return [Choice(actions=chosen, cost=_sum(chosen, costs)) for chosen in product(*lists)]


def hull(found: Sequence[Choice]) -> list[Choice]:
    """From the first, which keeps everything, to the least, along the lower convex hull."""
    line = [found[0]]
    for choice in sorted(found[1:], key=lambda c: (c.cost.ms, c.cost.kept_bytes)):
        if choice.cost.kept_bytes >= line[-1].cost.kept_bytes:
            continue
        while len(line) > 1 and _slope(line[-2], line[-1]) >= _slope(line[-1], choice):
            line.pop()
        line.append(choice)
    return line


def offloaded(unit: Unit, choice: Choice) -> Choice:
    """The same, with what it keeps on the host; itself where the layer cannot or nothing is."""
    mover = next((site.part for site in unit.sites if OFFLOAD in site.actions), None)
    if mover is None or not choice.cost.movable:
        return choice
    actions = tuple((p, OFFLOAD if p == mover else action) for p, action in choice.actions)
    return replace(choice, actions=actions, moved=choice.cost.movable)


def plans(units: Sequence[Unit], costs: ModelCosts) -> list[State]:
    """From all layers keeping everything to the least they can keep: ever less peak, more time.

    Offload costs next to nothing until copies take longer than what they hide behind. Begun early
    it uses that up for what is cheap to make again, begun late it is not used at most budgets.
    """
    space = Space(units, costs)
    rates = {_slope(a, b) for line in space.corners for a, b in pairwise(line)}
    met = [state for rate in sorted({0.0, *rates}) for state in _Walk(space).run(rate)]
    start = space.start()
    line = front(start, met)
    between = [less for above, state in pairwise(line) for less in space.undo(above, state)]
    return front(start, [*line, *between])


def least(units: Sequence[Unit], costs: ModelCosts) -> State:
    """All layers recompute what they can, none offloads."""
    space = Space(units, costs)
    return space.state([(len(line) - 1, line[-1]) for line in space.corners])


class Space:
    """The states of a model, and the ways from one to another."""

    def __init__(self, units: Sequence[Unit], costs: ModelCosts) -> None:
        self.units, self.costs = units, costs
        hulls = {u.kind: hull(choices(u, costs.layers[u.kind])) for u in units}
        self.corners = [hulls[unit.kind] for unit in units]

    def start(self) -> State:
        """Everything kept."""
        return self.state([(0, line[0]) for line in self.corners])

    def state(self, layers: Sequence[tuple[int, Choice]]) -> State:
        """Of each layer's level and choice."""
        chosen = tuple(choice for _, choice in layers)
        return State(
            levels=tuple(level for level, _ in layers),
            choices=chosen,
            outcome=outcome(self.costs, chosen),
        )

    def change(self, state: State, i: int, level: int, *, moved: bool) -> State:
        """Another level of layer ``i``, with what it keeps on the host or here."""
        layers = list(zip(state.levels, state.choices, strict=True))
        layers[i] = level, self.choice(i, level, moved=moved)
        return self.state(layers)

    def choice(self, i: int, level: int, *, moved: bool) -> Choice:
        """Layer ``i`` at ``level``, with what it keeps on the host, if it has any, or here."""
        here = self.corners[i][level]
        return offloaded(self.units[i], here) if moved else here

    def offload(self, state: State, i: int, level: int) -> State | None:
        """Layer ``i`` offloads what it keeps at ``level``; None where it cannot."""
        if not self.may_offload(i):
            return None
        found = self.change(state, i, level, moved=True)
        return found if found.choices[i].moved_bytes and self.has_room(found) else None

    def may_offload(self, i: int) -> bool:
        """Whether layer ``i`` may: the last one's are needed before they could have left."""
        return self.costs.link is not None and i < len(self.units) - 1

    def undo(self, above: State, state: State) -> Iterator[State]:
        """``state`` with less and less given up, as long as the peak is less than ``above``'s."""
        while True:
            # Of equal layers the last: its activations are kept the shortest.
            last = {
                (unit.kind, state.levels[i], bool(state.choices[i].moved_bytes)): i
                for i, unit in enumerate(self.units)
            }
            found = [
                self.change(state, i, level - 1, moved=moved)
                for (_, level, moved), i in last.items()
                if level
            ]
            peak = above.outcome.peak_bytes
            fitting = [s for s in found if s.outcome.peak_bytes < peak and self.has_room(s)]
            if not fitting:
                return
            state = min(fitting, key=lambda s: s.outcome.ms)
            yield state

    def has_room(self, state: State) -> bool:
        """Whether the host has room for all that is moved."""
        return sum(choice.moved_bytes for choice in state.choices) <= self.costs.host_bytes


class _Walk:
    def __init__(self, space: Space) -> None:
        self.space, self.now = space, space.start()
        self.states = [self.now]
        self.next_offload: tuple[int, tuple[float, State] | None] | None = None

    def run(self, price: float) -> list[State]:
        """The walk that offloads nothing before steps that cost less than ``price`` per byte."""
        corners = self.space.corners
        # Of equal layers the first first: its activations are kept the longest.
        heap = [(_slope(*line[:2]), 1, i, -1) for i, line in enumerate(corners) if line[1:]]
        heapq.heapify(heap)
        deferred: list[tuple[int, int]] = []
        while heap:
            rate, level, i, seen = heap[0]
            if price <= rate and self._offload_next(rate):
                continue
            heapq.heappop(heap)
            # What it is worth depends on all others; looked at again where they have changed.
            if level > self.now.levels[i] and seen != len(self.states):
                real = self._rate(self._at(i, level))
                if real is not None:
                    heapq.heappush(heap, (real, level, i, len(self.states)))
                    continue
                deferred.append((i, level))
            elif level > self.now.levels[i]:
                self._take(self._at(i, level))
            if level + 1 < len(corners[i]):
                slope = _slope(corners[i][level], corners[i][level + 1])
                heapq.heappush(heap, (slope, level + 1, i, -1))
        self._finish(deferred)
        return self.states

    def _finish(self, deferred: Iterable[tuple[int, int]]) -> None:
        while self._offload_next(float("inf")):
            pass
        for i, level in deferred:
            if level > self.now.levels[i]:
                self._take(self._at(i, level))
        for i, line in enumerate(self.space.corners):
            state = self.space.offload(self.now, i, len(line) - 1)
            if state is not None:
                self._take(state)

    def _offload_next(self, rate: float) -> bool:
        """Offload the first layer that does not yet, if that costs at most ``rate`` per byte."""
        if self.next_offload is None or self.next_offload[0] != len(self.states):
            self.next_offload = len(self.states), self._best_offload()
        best = self.next_offload[1]
        if best is None or best[0] > rate:
            return False
        self._take(best[1])
        return True

    def _best_offload(self) -> tuple[float, State] | None:
        """The cheapest per byte: at what it does now, or first making more of it again."""
        space, now = self.space, self.now
        here = (i for i, choice in enumerate(now.choices) if not choice.moved_bytes)
        with_some = (i for i in here if space.choice(i, now.levels[i], moved=True).moved_bytes)
        i = next(with_some, None)
        if i is None:
            return None
        found = [space.offload(now, i, j) for j in range(now.levels[i], len(space.corners[i]))]
        rated = [(self._rate(state), state) for state in found if state is not None]
        able = [(rate, state) for rate, state in rated if rate is not None]
        return min(able, key=lambda pair: pair[0], default=None)

    def _at(self, i: int, level: int) -> State:
        moved = bool(self.now.choices[i].moved_bytes)
        return self.space.change(self.now, i, level, moved=moved)

    def _rate(self, state: State) -> float | None:
        """What it costs per byte of the peak; None: it is not lowered."""
        saved = self.now.outcome.peak_bytes - state.outcome.peak_bytes
        return max(0.0, state.outcome.ms - self.now.outcome.ms) / saved if saved > 0 else None

    def _take(self, state: State) -> None:
        self.now = state
        self.states.append(state)


def front(start: State, met: Iterable[State]) -> list[State]:
    """``start``, and of the others those that none beats in both peak and time."""
    line = [start]
    for state in sorted(met, key=lambda s: (s.outcome.ms, s.outcome.peak_bytes)):
        if state.outcome.peak_bytes < line[-1].outcome.peak_bytes:
            line.append(state)
    return line


def _slope(before: Choice, after: Choice) -> float:
    return (after.cost.ms - before.cost.ms) / (before.cost.kept_bytes - after.cost.kept_bytes)


def _sum(chosen: Sequence[tuple[str, str]], costs: LayerCosts) -> Cost:
    keep = costs.keep
    kept, ms = keep.kept_bytes, keep.ms
    # Sites run one after another, so the working memory is that of the greediest.
    forward, backward = keep.forward_bytes - kept, keep.backward_bytes - kept
    movable = Counter(keep.movable)
    for entry in chosen:
        cost = costs.actions.get(entry)
        if cost is None:  # it keeps everything
            continue
        kept += cost.kept_bytes - keep.kept_bytes
        ms += costs.paid_ms(cost)
        movable.update(cost.movable)
        movable.subtract(keep.movable)
        forward = max(forward, cost.forward_bytes - cost.kept_bytes)
        backward = max(backward, cost.backward_bytes - cost.kept_bytes)
    kept = max(kept, 0)
    return replace(
        keep,
        kept_bytes=kept,
        ms=ms,
        forward_bytes=kept + forward,
        backward_bytes=kept + backward,
        movable=tuple(sorted(movable.elements())),
    )
