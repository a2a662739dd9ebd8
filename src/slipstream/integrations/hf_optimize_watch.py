"""What becomes of an optimized model whose parts are put in place anew: resized, pruned, wrapped.

Parts of a model that run our code are remembered with the modules around them. A forward of the
model that finds another module in such a place has it looked at as ``optimize`` would, so that the
new one runs our code too where it can; what cannot is named in one warning.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import nn

from slipstream.integrations.hf_optimize_state import own_forward, runs, state_of

WATCH = "_slipstream_watch"
Replace = Callable[[nn.Module, frozenset[str]], str | None]
"""Replaces one module; the reason if it is of a kind of ours and stays."""


class Edge(NamedTuple):
    """A place in the model."""

    parent: nn.Module
    name: str
    child: nn.Module
    """What was there when last looked at."""
    runs: bool
    """Whether that ran our forward itself, not in a wrapper."""


class Watch(NamedTuple):
    """What a watched model carries."""

    skip: frozenset[str]
    """Kinds left as they are."""
    edges: tuple[Edge, ...]
    """Every place on the way to a replaced module."""


def watch(model: nn.Module, skip: frozenset[str], hook: Callable[..., None]) -> None:
    """Remember the replaced modules in ``model``; ``hook`` runs before each of its forwards."""
    model.__dict__[WATCH] = Watch(skip, tuple(_edges(model)))
    if hook not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(hook)


def unwatch(model: nn.Module, hook: Callable[..., None]) -> None:
    """Undo ``watch``."""
    if model.__dict__.pop(WATCH, None) is not None:
        for key in [key for key, value in model._forward_pre_hooks.items() if value is hook]:
            del model._forward_pre_hooks[key]


def skipped(model: nn.Module) -> frozenset[str]:
    """Kinds to leave as they are in a model that is watched."""
    found: Watch | None = model.__dict__.get(WATCH)
    return frozenset() if found is None else found.skip


def changed(edge: Edge) -> bool:
    """Whether another module, or another forward, is in the place."""
    if edge.parent._modules.get(edge.name) is not edge.child:
        return True
    if not edge.runs:
        return False
    state = state_of(edge.child)
    return state is None or not runs(edge.child, state)


def follow(model: nn.Module, replace: Replace, hook: Callable[..., None]) -> None:
    """See to what changed since ``watch``; a RuntimeWarning names what of it stays."""
    found: Watch = model.__dict__[WATCH]
    edges = [edge for edge in found.edges if changed(edge)]
    if not edges:
        return
    names = {module: name for name, module in model.named_modules()}
    kept: dict[tuple[str, str], list[str]] = {}
    for edge in edges:
        for name, module, reason in _see(edge, names, found.skip, replace):
            places = kept.setdefault((type(module).__name__, reason), [])
            if name not in places:
                places.append(name)
    if kept:
        parts = "; ".join(f"{places[0]} ({kind}): {why}" for (kind, why), places in kept.items())
        warnings.warn(
            f"optimize: parts of the model were changed after slipstream.optimize and run without "
            f"its ops, or its fusion with their neighbours: {parts}",
            RuntimeWarning,
            stacklevel=2,
        )
    watch(model, found.skip, hook)


def _see(
    edge: Edge, names: dict[nn.Module, str], skip: frozenset[str], replace: Replace
) -> Iterator[tuple[str, nn.Module, str]]:
    """Replace what is in the place now; name, module and reason of what stays."""
    module, old = edge.parent._modules.get(edge.name), state_of(edge.child)
    if module is None or module not in names:
        return
    if module is edge.child:
        yield names[module], module, "another forward was put around its own or in its place"
        return
    reasons = {p: replace(p, skip) for p in module.modules() if state_of(p) is None}
    yield from ((names[part], part, reason) for part, reason in reasons.items() if reason)
    if old is None or any(_is(part, old.kind) for part in module.modules()):
        _hand_over(edge.child, module)
    elif reasons.get(module) is None:
        yield names[module], module, f"it is not recognised as the {old.kind} that was there"


def _is(module: nn.Module, kind: str) -> bool:
    state = state_of(module)
    return state is not None and state.kind == kind


def _hand_over(old: nn.Module, new: nn.Module) -> None:
    """What backward keeps is a choice made for the place."""
    before, now = old.__dict__, new.__dict__
    if before.get("recompute_actions") == now.get("recompute_actions") is not None:
        now["recompute"] = before["recompute"]


def _edges(model: nn.Module) -> Iterator[Edge]:
    def walk(parent: nn.Module) -> tuple[list[Edge], bool]:
        found, any_ours = [], False
        for name, child in parent._modules.items():
            if child is None:
                continue
            below, ours = walk(child)
            state = state_of(child)
            if ours or state is not None:
                plain = state is not None and own_forward(child) and runs(child, state)
                found += [Edge(parent, name, child, plain), *below]
                any_ours = True
        return found, any_ours

    yield from walk(model)[0]
