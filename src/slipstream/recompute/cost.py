"""What keeping or giving up activations costs, as numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One pass through a layer, forward and backward."""

    kept_bytes: int
    """What stays between forward and backward."""
    ms: float
    """Time of forward and backward."""
    forward_ms: float
    """Time of forward."""
    forward_bytes: int
    """Most memory above the start during forward, what is kept included."""
    backward_bytes: int
    """Most memory above the start of forward during backward, kept and gradients included."""
    grad_bytes: int
    """Gradients of the weights."""
    largest_grad_bytes: int
    """The largest of them."""
    movable: tuple[int, ...] = ()
    """Of what is kept, the sizes of what offload would move, from small to large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """A kind of layer under each action of each of its sites, all others keeping everything."""

    keep: Cost
    """Everything kept."""
    actions: dict[tuple[str, str], Cost]
    """By (part, action), but for ``offload``."""

    def saved_bytes(self, cost: Cost) -> int:
        """What one action no longer keeps."""
        return self.keep.kept_bytes - cost.kept_bytes

    def paid_ms(self, cost: Cost) -> float:
        """What one action adds; giving something up is never faster but for noise."""
        return max(0.0, cost.ms - self.keep.ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """Copies between the device and the host while the device computes."""

    out_bytes_per_ms: float
    """To the host."""
    back_bytes_per_ms: float
    """From it."""
    slowdown_ms_per_byte: float
    """By how much a byte that leaves and comes back delays what is computed meanwhile."""


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
    link: Link | None = None
    """None: no layer offers to offload."""
    host_bytes: int = 0
    """The host's memory that offload may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A layer under one set of actions."""

    actions: tuple[tuple[str, str], ...]
    """(part, action) of each site."""
    cost: Cost
    """What it comes to, wherever the kept tensors are."""
    moved: tuple[int, ...] = ()
    """Of what is kept, the sizes of what waits on the host, in the order in which it leaves."""

    @property
    def moved_bytes(self) -> int:
        """All of it."""
        return sum(self.moved)
