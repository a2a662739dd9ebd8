"""Invented costs: a model of layers whose numbers are exact, so that plans are arithmetic."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from slipstream.nn.site import offload_times
from slipstream.recompute.choose import choices, offloaded
from slipstream.recompute.cost import Choice, Cost, LayerCosts, Link, ModelCosts
from slipstream.recompute.sites import Site, Unit
from slipstream.recompute.timeline import peak_bytes

GIB = 1 << 30


def cost(
    kept: int,
    ms: float,
    work: int = 0,
    grads: int = 0,
    forward_ms: float = 0.0,
    *,
    stays: int = 0,
    grain: int = 1,
) -> Cost:
    """``stays``: of what is kept, what offload does not move; the rest is moved by ``grain``."""
    return Cost(
        kept_bytes=kept,
        ms=ms,
        forward_ms=forward_ms,
        forward_bytes=kept + work // 2,
        backward_bytes=kept + work + grads,
        grad_bytes=grads,
        largest_grad_bytes=grads,
        movable=(grain,) * ((kept - stays) // grain),
    )


def unit(index: int, kind: str, parts: Mapping[str, Sequence[str]]) -> Unit:
    name = f"layers.{index}"
    sites = tuple(
        Site(name=f"{name}.{part}" if part else name, part=part, actions=tuple(actions))
        for part, actions in parts.items()
    )
    return Unit(name=name, sites=sites, kind=kind)


def model_costs(
    layers: dict[str, LayerCosts],
    static: int = 0,
    tail: int = 0,
    *,
    bytes_per_ms: float | None = None,
    slowdown: float = 0.0,
) -> ModelCosts:
    """``bytes_per_ms``: of the link in either direction; None: no layer offers to offload."""
    link = None
    if bytes_per_ms is not None:
        link = Link(
            out_bytes_per_ms=bytes_per_ms,
            back_bytes_per_ms=bytes_per_ms,
            slowdown_ms_per_byte=slowdown,
        )
    return ModelCosts(
        layers=layers,
        tail=cost(tail, 0.0),
        rest_grad_bytes=0,
        static_bytes=static,
        has_grads=False,
        link=link,
        host_bytes=1 << 50,
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
        layers, leave, back = [], [], []
        for i, unit in enumerate(self.units):
            choice, times = _choice(unit, self.found.layers[unit.kind], actions)
            layers.append(choice)
            leave.append([min(i + age, len(self.units)) for age in _ages(choice, times[0])])
            back.append(min(i + times[1], len(self.units) - 1))
        off = self.off_by if isinstance(self.off_by, int) else self.off_by(actions)
        return peak_bytes(self.found, layers, leave, back, has_grads=False) + off


def _ages(choice: Choice, leave: tuple[int, ...]) -> list[int]:
    """For each tensor, from small to large."""
    missing = len(choice.moved) - len(leave)
    return [leave[0]] * missing + list(leave) if missing >= 0 else list(leave[-missing:])


def _choice(
    unit: Unit, costs: LayerCosts, actions: Mapping[str, str]
) -> tuple[Choice, tuple[tuple[int, ...], int]]:
    wanted = {site.part: actions[site.name] for site in unit.sites}
    times = {part: offload_times(action) for part, action in wanted.items()}
    moves = next((found for found in times.values() if found is not None), None)
    plain = {part: "keep" if times[part] else action for part, action in wanted.items()}
    choice = next(c for c in choices(unit, costs) if dict(c.actions) == plain)
    return (choice, ((1,), 1)) if moves is None else (offloaded(unit, choice), moves)
