"""Peak and time of a pass, given what each layer does; when what is offloaded leaves and returns.

Copies run one after another beside the layers. Earlier layers have more time, so blocks may queue.
What is left of the copies when backward begins is waited for: there memory is scarcest. A block
starts to come back at the beginning of some layer's backward, the last that is early enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from slipstream.recompute.cost import Choice, ModelCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A pass of the model."""

    peak_bytes: int
    """Most memory in use."""
    ms: float
    """Its time."""
    leave: tuple[tuple[int, ...], ...]
    """For each layer and each size it moves, at the end of which layer that has left; the number of
    layers: when backward begins."""
    back: tuple[int, ...]
    """For each layer, at the beginning of which layer's backward that starts to come back."""


def outcome(costs: ModelCosts, layers: Sequence[Choice]) -> Outcome:
    """What comes of the layers' choices, in order."""
    leave, late = _leave(costs, layers)
    back, later = _back(costs, layers)
    ms = costs.tail.ms + late + later + sum(layer.cost.ms for layer in layers)
    if costs.link is not None:
        ms += costs.link.slowdown_ms_per_byte * sum(layer.moved_bytes for layer in layers)
    return Outcome(
        peak_bytes=peak_bytes(costs, layers, leave, back, has_grads=costs.has_grads),
        ms=ms,
        leave=leave,
        back=back,
    )


def peak_bytes(
    costs: ModelCosts,
    layers: Sequence[Choice],
    leave: Sequence[Sequence[int]],
    back: Sequence[int],
    *,
    has_grads: bool,
) -> int:
    """Most memory of a pass; ``leave`` and ``back`` as in ``Outcome``.

    Forward adds up what is kept; backward, from the last layer to the first, lets go of it and,
    unless gradients have their memory already, adds theirs.
    """
    gone, due = [0] * (len(layers) + 1), [0] * len(layers)
    for i, layer in enumerate(layers):
        for size, end in zip(layer.moved, leave[i], strict=True):
            gone[end] += size
        due[back[i]] += layer.moved_bytes
    now = peak = costs.static_bytes
    for i, layer in enumerate(layers):
        peak = max(peak, now + layer.cost.forward_bytes)
        now += layer.cost.kept_bytes - gone[i]
    peak = max(peak, now + costs.tail.forward_bytes)
    for i in range(len(layers), -1, -1):
        cost = layers[i].cost if i < len(layers) else costs.tail
        now += due[i] - cost.kept_bytes if i < len(layers) else 0
        # A gradient that is added to another does not stay.
        spared = cost.grad_bytes - cost.largest_grad_bytes if has_grads else 0
        peak = max(peak, now + cost.backward_bytes - spared)
        now += 0 if has_grads else cost.grad_bytes
        now -= gone[i] if i == len(layers) else 0
    return max(peak, now + (0 if has_grads else costs.rest_grad_bytes))


def _leave(
    costs: ModelCosts, layers: Sequence[Choice]
) -> tuple[tuple[tuple[int, ...], ...], float]:
    """At which ends, and for how long the start of backward has to wait."""
    ends = list(accumulate(layer.cost.forward_ms for layer in layers))
    leave, free, j = [], 0.0, 0
    for i, layer in enumerate(layers):
        free, j = max(free, ends[i]), max(j, i + 1)
        left = []
        for size in layer.moved:
            free += 0.0 if costs.link is None else size / costs.link.out_bytes_per_ms
            while j < len(ends) and ends[j] < free:
                j += 1
            left.append(j)
        leave.append(tuple(left))
    late = max(0.0, free - ends[-1] - costs.tail.ms) if any(leave) else 0.0
    return tuple(leave), late


def _back(costs: ModelCosts, layers: Sequence[Choice]) -> tuple[tuple[int, ...], float]:
    """At which beginnings, and for how long backward has to wait in all."""
    last = len(layers) - 1
    starts, now = [0.0] * len(layers), 0.0
    for i in range(last, -1, -1):
        starts[i] = now
        now += layers[i].cost.ms - layers[i].cost.forward_ms
    back, took, j, latest = list(range(len(layers))), [0.0] * len(layers), 0, now
    for i, layer in enumerate(layers):
        if costs.link is None or not layer.moved_bytes:
            continue
        took[i] = layer.moved_bytes / costs.link.back_bytes_per_ms
        latest = min(latest, starts[i]) - took[i]
        j = max(j, min(i + 1, last))
        # Back when the last layer begins, it would be there at the peak.
        while j < last - 1 and starts[j] > latest:
            j += 1
        back[i] = j
    return tuple(back), _waits(starts, took, back)


def _waits(starts: Sequence[float], took: Sequence[float], back: Sequence[int]) -> float:
    """Blocks come in the order of backward, none before its layer named in ``back`` begins."""
    free = late = 0.0
    there: dict[int, float] = {}
    due = [(j, i) for i, j in enumerate(back) if took[i]]
    for i in range(len(starts) - 1, -1, -1):
        now = starts[i] + late
        while due and due[-1][0] >= i:
            block = due.pop()[1]
            free = there[block] = max(free, now) + took[block]
        late += max(0.0, there.get(i, 0.0) - now)
    return late
