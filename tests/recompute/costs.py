"""Invented costs: a model of layers whose numbers are exact, so that plans are arithmetic."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.recompute.choose import choices
from slipstream.recompute.cost import Cost, LayerCosts, ModelCosts, peak_bytes
from slipstream.recompute.sites import Site, Unit

GIB = 1 << 30


def cost(kept: int, ms: float, work: int = 0, grads: int = 0) -> Cost:
    return Cost(
        kept_bytes=kept,
        ms=ms,
        forward_bytes=kept + work // 2,
        backward_bytes=kept + work + grads,
        grad_bytes=grads,
        largest_grad_bytes=grads,
    )


def unit(index: int, kind: str, parts: Mapping[str, Sequence[str]]) -> Unit:
    name = f"layers.{index}"
    sites = tuple(
        Site(name=f"{name}.{part}" if part else name, part=part, actions=tuple(actions))
        for part, actions in parts.items()
    )
    return Unit(name=name, sites=sites, kind=kind)


def model_costs(layers: dict[str, LayerCosts], static: int = 0, tail: int = 0) -> ModelCosts:
    return ModelCosts(
        layers=layers,
        tail=cost(tail, 0.0),
        rest_grad_bytes=0,
        static_bytes=static,
        has_grads=False,
    )


@dataclass
class Invented:
    """Stands in for measuring; remembers what was tried."""

    found: ModelCosts
    units: Sequence[Unit]
    off_by: int | Callable[[Mapping[str, str]], int] | None = None
    """Measured less predicted peak; None: it cannot be measured."""
    tried: list[Mapping[str, str]] = field(default_factory=list)

    def measure(self, units: Sequence[Unit]) -> ModelCosts:
        return self.found

    def probe(self, actions: Mapping[str, str], *, plain: bool) -> int | None:
        self.tried.append(actions)
        if self.off_by is None:
            return None
        layers = []
        for unit in self.units:
            wanted = {site.part: actions[site.name] for site in unit.sites}
            found = choices(unit, self.found.layers[unit.kind])
            layers.append(next(c.cost for c in found if dict(c.actions) == wanted))
        off = self.off_by if isinstance(self.off_by, int) else self.off_by(actions)
        return peak_bytes(self.found, layers, has_grads=False) + off
