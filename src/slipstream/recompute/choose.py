"""The order in which activations are given up, cheapest first, and how far to go along it.

All plans are beginnings of one list of steps, so a smaller budget gives up the same and more: its
peak, predicted or measured, is never larger. Within a layer the steps are the corners of the lower
convex hull of (bytes kept, ms); merged over layers by ms per byte that is the best a list can do,
and at most the last step, one layer's, is more than needed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from slipstream.recompute.cost import Choice, Cost, LayerCosts, ModelCosts, peak_bytes
from slipstream.recompute.sites import OFFLOAD, Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One layer goes from one choice to its next."""

    unit: int
    """Which layer."""
    choice: Choice
    """What it does from then on."""
    saved_bytes: int
    """What that no longer keeps."""
    ms: float
    """What that costs."""


def choices(unit: Unit, costs: LayerCosts) -> list[Choice]:
    """Every combination of actions of a layer; sites are independent but for offload."""
    lists = [
        [(site.part, action) for action in site.actions if action != OFFLOAD] for site in unit.sites
    ]
    found = [Choice(actions=chosen, cost=_sum(chosen, costs)) for chosen in product(*lists)]
    movers = [site for site in unit.sites if OFFLOAD in site.actions]
    if costs.offload is None or not movers:
        return found
    moved = [
        Choice(
            actions=tuple(
                (part, OFFLOAD if part == movers[0].part else action)
                for part, action in choice.actions
            ),
            cost=_offloaded(choice.cost, unit, costs),
        )
        for choice in found
    ]
    return found + moved


def steps(units: Sequence[Unit], costs: ModelCosts) -> tuple[list[Choice], list[Step]]:
    """What every layer begins with, keeping all, and the steps from there, cheapest first."""
    corners = {u.kind: hull(choices(u, costs.layers[u.kind])) for u in units}
    found = []
    for i, unit in enumerate(units):
        line = corners[unit.kind]
        for j, (before, after) in enumerate(pairwise(line)):
            saved = before.cost.kept_bytes - after.cost.kept_bytes
            ms = after.cost.ms - before.cost.ms
            step = Step(unit=i, choice=after, saved_bytes=saved, ms=ms)
            # Of equal layers the first first: its activations are kept the longest.
            found.append((ms / saved, j, i, step))
    found.sort(key=lambda entry: entry[:3])
    return [corners[u.kind][0] for u in units], [entry[3] for entry in found]


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


def peaks(costs: ModelCosts, first: Sequence[Choice], walk: Sequence[Step]) -> list[int]:
    """The peak after none, one, two... of the steps."""
    current = list(first)

    def peak() -> int:
        layers = [choice.cost for choice in current]
        return peak_bytes(costs, layers, has_grads=costs.has_grads)

    found = [peak()]
    for step in walk:
        current[step.unit] = step.choice
        found.append(peak())
    return found


def _slope(before: Choice, after: Choice) -> float:
    return (after.cost.ms - before.cost.ms) / (before.cost.kept_bytes - after.cost.kept_bytes)


def _sum(chosen: Sequence[tuple[str, str]], costs: LayerCosts) -> Cost:
    keep = costs.keep
    kept, ms = keep.kept_bytes, keep.ms
    # Sites run one after another, so the working memory is that of the greediest.
    forward, backward = keep.forward_bytes - kept, keep.backward_bytes - kept
    for entry in chosen:
        cost = costs.actions.get(entry)
        if cost is None:  # it keeps everything
            continue
        kept += cost.kept_bytes - keep.kept_bytes
        ms += costs.paid_ms(cost)
        forward = max(forward, cost.forward_bytes - cost.kept_bytes)
        backward = max(backward, cost.backward_bytes - cost.kept_bytes)
    kept = max(kept, 0)
    return replace(
        keep, kept_bytes=kept, ms=ms, forward_bytes=kept + forward, backward_bytes=kept + backward
    )


def _offloaded(cost: Cost, unit: Unit, costs: LayerCosts) -> Cost:
    assert costs.offload is not None
    last = tuple((s.part, s.actions[-1]) for s in unit.sites if OFFLOAD not in s.actions)
    least = _sum(last, costs)
    scale = (cost.kept_bytes - costs.offload.kept_bytes) / max(1, costs.offloaded_bytes)
    moved = max(0, cost.kept_bytes - costs.offload.kept_bytes)
    return replace(
        cost,
        kept_bytes=min(cost.kept_bytes, costs.offload.kept_bytes),
        ms=cost.ms + max(0.0, costs.offload.ms - least.ms) * max(0.0, scale),
        # The copies end while the next layer runs, and begin while the one behind it does.
        forward_bytes=cost.forward_bytes + moved,
        backward_bytes=cost.backward_bytes + moved,
    )
