"""What keeping or giving up activations costs, as numbers; and the peak that follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One pass through a layer, forward and backward."""

    kept_bytes: int
    """What stays between forward and backward."""
    ms: float
    """Time of forward and backward."""
    forward_bytes: int
    """Most memory above the start during forward, what is kept included."""
    backward_bytes: int
    """Most memory above the start of forward during backward, kept and gradients included."""
    grad_bytes: int
    """Gradients of the weights."""
    largest_grad_bytes: int
    """The largest of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """A kind of layer under each action of each of its sites, all others keeping everything."""

    keep: Cost
    """Everything kept."""
    actions: dict[tuple[str, str], Cost]
    """By (part, action), but for ``offload``."""
    offload: Cost | None
    """Offload, where offered, with every other site at its last action."""
    offloaded_bytes: int
    """What that offload had to move."""

    def saved_bytes(self, cost: Cost) -> int:
        """What one action no longer keeps."""
        return self.keep.kept_bytes - cost.kept_bytes

    def paid_ms(self, cost: Cost) -> float:
        """What one action adds; giving something up is never faster but for noise."""
        return max(0.0, cost.ms - self.keep.ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCosts:
    """A model around its layers."""

    layers: dict[str, LayerCosts]
    """By kind."""
    tail: Cost
    """Everything behind the last layer, the loss above all."""
    rest_grad_bytes: int
    """Gradients of weights before the first layer."""
    static_bytes: int
    """Weights, optimizer state, and gradients that have their memory already."""
    has_grads: bool
    """Whether gradients have their memory already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layer under one set of actions."""

    actions: tuple[tuple[str, str], ...]
    """(part, action) of each site."""
    cost: Cost
    """What it comes to."""


def peak_bytes(costs: ModelCosts, layers: Sequence[Cost], *, has_grads: bool) -> int:
    """Most memory of a pass, given each layer's cost in order.

    Forward adds up what is kept; backward, from the last layer to the first, lets go of it and,
    unless gradients have their memory already, adds theirs.
    """
    now = peak = costs.static_bytes
    for cost in (*layers, costs.tail):
        peak = max(peak, now + cost.forward_bytes)
        now += cost.kept_bytes
    for cost in (costs.tail, *reversed(layers)):
        now -= cost.kept_bytes
        # A gradient that is added to another does not stay.
        spared = cost.grad_bytes - cost.largest_grad_bytes if has_grads else 0
        peak = max(peak, now + cost.backward_bytes - spared)
        now += 0 if has_grads else cost.grad_bytes
    return max(peak, now + (0 if has_grads else costs.rest_grad_bytes))
