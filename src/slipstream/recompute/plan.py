"""Decides what each layer keeps for backward, so that a step fits a budget and loses least time.

Costs are measured on this device, the peak is predicted from them, one pass of the chosen plan
corrects the prediction. Routing, statistics of norms and of attention are kept in every plan.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.nn.site import OFFLOAD, timed_offload
from slipstream.recompute.choose import State, least, plans
from slipstream.recompute.cost import ModelCosts
from slipstream.recompute.measure import measure, probe, uncompiled
from slipstream.recompute.meter import Meter, differentiable
from slipstream.recompute.refine import Search
from slipstream.recompute.sites import (
    Unit,
    acting,
    find_units,
    keeping,
    set_actions,
    unwrapped,
)
from slipstream.recompute.timeline import peak_bytes

GIB = 1 << 30
CHEAP = ("reemit", "norm")
"""Actions that cost next to nothing: what the mode ``selective`` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a plan does at one site."""

    layer: str
    """Name of the layer."""
    site: str
    """Name of the site in it."""
    action: str
    """What it does."""
    gib_saved: float
    """Activation memory it no longer keeps."""
    ms_paid: float
    """What that adds to a forward and backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An action for every site."""

    actions: dict[str, str]
    """By name of the site; ``offload`` with its times, see ``nn.offload``."""
    rows: tuple[Row, ...] = ()
    """Sites that give something up, in order; empty where nothing was measured."""
    budget_gib: float | None = None
    """What was asked for."""
    predicted_gib: float | None = None
    """Peak of a forward and backward pass under this plan, static memory included."""
    unconstrained_gib: float | None = None
    """The same with everything kept."""
    minimum_gib: float | None = None
    """The smallest budget that can be met."""
    ms_paid: float = 0.0
    """What the plan adds to a forward and backward pass."""


class Costs(Protocol):
    """Where a plan's numbers come from."""

    def measure(self, units: Sequence[Unit]) -> ModelCosts:
        """Costs of the layers and of what is around them."""
        ...

    def probe(self, actions: Mapping[str, str], *, plain: bool) -> int | None:
        """Peak in bytes of a pass under ``actions``, gradients apart; None: cannot be measured.

        ``plain``: compiled layers run as they are, which is quicker once and not as close.
        """
        ...


class Measured:
    """Costs of a model on a sample, measured on the device it is on."""

    def __init__(
        self, model: nn.Module, run: Callable[[], torch.Tensor], extra_bytes: int = 0
    ) -> None:
        self.model, self.run, self.extra_bytes = model, run, extra_bytes
        self.meter = Meter(next(model.parameters()).device)

    def measure(self, units: Sequence[Unit]) -> ModelCosts:
        """Measure a layer of each kind."""
        found = measure(self.model, units, self.run, self.meter)
        return replace(found, static_bytes=found.static_bytes + self.extra_bytes)

    def probe(self, actions: Mapping[str, str], *, plain: bool) -> int | None:
        """Run once."""
        if not self.meter.on_gpu:
            return None
        units = find_units(self.model)
        if not plain:
            _allow_variants(units, actions)
        as_is = uncompiled(self.model, units) if plain else nullcontext()
        with acting(self.model, actions), as_is:
            return probe(self.model, self.run, self.meter) + self.extra_bytes


def plan(
    model: nn.Module,
    sample: Mapping[str, Any] | Sequence[Any],
    budget_gib: float,
    *,
    extra_gib: float = 0.0,
    accumulate: bool = False,
    offload: bool = True,
    loss: Callable[[Any], torch.Tensor] | None = None,
    costs: Costs | None = None,
) -> Plan:
    """Choose what each layer of ``model`` keeps, so that a step stays within ``budget_gib``.

    ``sample``: the arguments of one training call, by name or in order, of a micro-batch's size.
    ``budget_gib``: GiB of device memory at the peak of a forward and backward pass; what is
    allocated now counts, so build the optimizer first, or give the memory still to come as
    ``extra_gib``. ``accumulate``: a step adds up the gradients of several such calls.
    ``offload``: whether layers may move activations to the host.
    ``loss`` turns the output of the model into what backward starts from (None: its ``loss``, or
    the sum of all that is differentiable). ``costs``: other numbers than measured ones.
    The model is as before afterwards. Of two budgets the smaller never has the larger peak.
    Raises ConfigError for a budget that cannot be met, naming the smallest that can.
    """
    _check_gib("budget_gib", budget_gib, above=True)
    _check_gib("extra_gib", extra_gib, above=False)
    if not isinstance(offload, bool):
        raise ConfigError(f"recompute: offload = {offload!r}, expected True or False")
    model = unwrapped(model)
    units = find_units(model)
    source = costs
    if source is None:
        run = _runner(model, sample, loss or _loss)
        source = Measured(model, run, int(extra_gib * GIB))
    alone = found = source.measure(units)
    if not offload:
        found = replace(found, link=None)
    if accumulate and not found.has_grads:
        found = _with_grads(units, found)
    states = plans(units, found)
    fits = _Fit(units, alone, found, states, source)
    state, shift = fits.search(budget_gib)
    return _plan(units, found, states, state, shift, budget_gib)


def fixed(model: nn.Module, mode: str) -> Plan:
    """The plans that need no measuring: ``none``, ``selective`` and ``full``.

    Raises ConfigError for another mode, and for a model without sites.
    """
    units = find_units(unwrapped(model))
    actions = keeping(units)
    if mode not in ("none", "selective", "full"):
        raise ConfigError(f"recompute: mode = {mode!r}, expected none, selective or full")
    for site in (site for unit in units for site in unit.sites):
        known = [action for action in site.actions if action != OFFLOAD]
        if mode == "full":
            actions[site.name] = known[-1]
        elif mode == "selective":
            actions[site.name] = next((a for a in known if a in CHEAP), known[0])
    return Plan(actions=actions)


def apply(model: nn.Module, plan: Plan) -> None:
    """Have every site of ``model`` do what ``plan`` says, from the next forward pass on.

    Layers may be compiled before or after. Raises ConfigError for a plan of another model.
    """
    model = unwrapped(model)
    units = find_units(model)
    set_actions(model, keeping(units) | plan.actions)
    _allow_variants(units, plan.actions)


def _with_grads(units: Sequence[Unit], costs: ModelCosts) -> ModelCosts:
    """From the second pass on the gradients of the first are there."""
    grads = [costs.layers[unit.kind].keep.grad_bytes for unit in units]
    whole = sum(grads) + costs.tail.grad_bytes + costs.rest_grad_bytes
    return replace(costs, static_bytes=costs.static_bytes + whole, has_grads=True)


class _Fit:
    """Finds the plan for a budget, with the help of measured peaks."""

    def __init__(
        self,
        units: Sequence[Unit],
        alone: ModelCosts,
        costs: ModelCosts,
        states: list[State],
        source: Costs,
    ) -> None:
        """``alone``: costs of a single pass, as it is measured."""
        self.units, self.alone = units, alone
        self.states, self.source = states, source
        self.least = least(units, costs)
        self.plans = Search(units, costs, states)

    def search(self, budget_gib: float) -> tuple[State, int]:
        """The state, and the bytes by which its peak exceeds the predicted one.

        Where to begin depends on one measurement that is the same for every budget; from there on
        the first plan that fits is taken. So less budget never means a larger peak.
        """
        shift = self._shift(self._reference(budget_gib), plain=True)
        if shift is None:
            found = self.plans.best(budget_gib * GIB)
            if found is None:
                raise self._too_small(budget_gib, 0)
            return found, 0
        state = None
        while True:
            state = self._next(budget_gib, shift, state)
            here = self._shift(state, plain=False)
            assert here is not None
            if state.outcome.peak_bytes + here <= budget_gib * GIB:
                return state, here
            shift = here

    def _reference(self, budget_gib: float) -> State:
        # Without offload, whose host memory takes seconds to pin, if that can be enough.
        enough = self.least.outcome.peak_bytes <= budget_gib * GIB
        return self.least if enough else self.states[-1]

    def _next(self, budget_gib: float, shift: int, tried: State | None) -> State:
        """The plan to try, after one whose peak was too large."""
        below = math.inf if tried is None else tried.outcome.peak_bytes
        found = self.plans.best(budget_gib * GIB - shift, below)
        if found is not None:
            return found
        # The shift is that of another plan: only the last one's own tells that none fits.
        if self.states[-1].outcome.peak_bytes < below:
            return self.states[-1]
        raise self._too_small(budget_gib, shift)

    def _shift(self, state: State, *, plain: bool) -> int | None:
        measured = self.source.probe(_actions(self.units, state), plain=plain)
        if measured is None:
            return None
        times = state.outcome.leave, state.outcome.back
        return measured - peak_bytes(self.alone, state.choices, *times, has_grads=False)

    def _too_small(self, budget_gib: float, shift: int) -> ConfigError:
        # Rounded up, so that the number in the message is one that works.
        least = math.ceil(1000 * (self.states[-1].outcome.peak_bytes + shift) / GIB) / 1000
        return ConfigError(
            f"recompute.budget_gib = {budget_gib:g}, the least this model and batch can do with "
            f"is {least:.3f}; raise it, or use smaller micro-batches"
        )


def _plan(
    units: Sequence[Unit],
    costs: ModelCosts,
    states: Sequence[State],
    state: State,
    shift: int,
    budget_gib: float,
) -> Plan:
    first, last = (states[i].outcome.peak_bytes for i in (0, -1))
    paid = state.outcome.ms - states[0].outcome.ms
    return Plan(
        actions=_actions(units, state),
        rows=tuple(_rows(units, state, costs, paid)),
        budget_gib=budget_gib,
        predicted_gib=(state.outcome.peak_bytes + shift) / GIB,
        unconstrained_gib=(first + shift) / GIB,
        minimum_gib=(last + shift) / GIB,
        ms_paid=paid,
    )


def _rows(units: Sequence[Unit], state: State, costs: ModelCosts, paid_ms: float) -> list[Row]:
    """What each site does; layers that offload share what is not paid for making things again."""
    found: list[tuple[str, str, str, int, float]] = []
    moving: list[tuple[str, str, int]] = []
    for unit, choice in zip(units, state.choices, strict=True):
        layer = costs.layers[unit.kind]
        for part, action in choice.actions:
            cost = layer.actions.get((part, action))
            if cost is not None:
                found.append(
                    (unit.name, part, action, layer.saved_bytes(cost), layer.paid_ms(cost))
                )
            elif action == OFFLOAD:
                moving.append((unit.name, part, choice.moved_bytes))
    rest = paid_ms - sum(ms for *_, ms in found)
    moved = sum(size for *_, size in moving)
    found += [(name, part, OFFLOAD, size, rest * size / moved) for name, part, size in moving]
    found.sort(key=lambda row: [unit.name for unit in units].index(row[0]))
    return [
        Row(layer=layer, site=site, action=action, gib_saved=saved / GIB, ms_paid=ms)
        for layer, site, action, saved, ms in found
    ]


def _actions(units: Sequence[Unit], state: State) -> dict[str, str]:
    """By site; an offload with its times."""
    found = {}
    times = zip(units, state.choices, state.outcome.leave, state.outcome.back, strict=True)
    for i, (unit, choice, leave, back) in enumerate(times):
        names = {site.part: site.name for site in unit.sites}
        for part, action in choice.actions:
            if action == OFFLOAD:
                action = timed_offload([end - i for end in leave], back - i)
            found[names[part]] = action
    return found


def _allow_variants(units: Sequence[Unit], actions: Mapping[str, str]) -> None:
    # Layers of one model share a limit of compiled variants: two for each set of actions, in
    # training and in evaluation, and as many for the first layer, which has no residual.
    sets = {
        (unit.kind, *(actions.get(site.name, site.actions[0]) for site in unit.sites))
        for unit in units
    }
    limits = torch._dynamo.config
    limits.recompile_limit = max(limits.recompile_limit, 8 + 4 * len(sets))


def _runner(
    model: nn.Module,
    sample: Mapping[str, Any] | Sequence[Any],
    loss: Callable[[Any], torch.Tensor],
) -> Callable[[], torch.Tensor]:
    if isinstance(sample, str | torch.Tensor) or not isinstance(sample, Mapping | Sequence):
        raise ConfigError(
            f"recompute: sample is a {type(sample).__name__}, expected the arguments of one "
            "training call as a dict or a tuple"
        )

    def run() -> torch.Tensor:
        value = loss(model(**sample) if isinstance(sample, Mapping) else model(*sample))
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            found = tuple(value.shape) if isinstance(value, torch.Tensor) else value
            raise ConfigError(
                f"recompute: the loss on the sample is {found!r}, expected one number for backward "
                "to start from; train some weight, or return a scalar tensor from loss="
            )
        return value

    return run


def _check_gib(name: str, value: float, *, above: bool) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value > 0 if above else 0 <= value < math.inf):
        allowed = "a number above 0" if above else "a finite number of at least 0"
        raise ConfigError(f"recompute.{name} = {value!r}, expected {allowed}, in GiB")


def _loss(output: Any) -> torch.Tensor:
    given = getattr(output, "loss", None)
    if isinstance(given, torch.Tensor):
        return given
    parts = differentiable(output)
    if not parts:
        raise ConfigError(
            "recompute: the model's output on the sample has nothing to differentiate; give "
            "targets with the sample, or loss="
        )
    return torch.stack([part.float().sum() for part in parts]).sum()
