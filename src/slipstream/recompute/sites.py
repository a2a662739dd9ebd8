"""Where a model can trade memory for time.

A site is any module with ``recompute`` (its action) and ``recompute_actions`` (those it knows, the
first keeps everything). A unit is what is measured at once: the layer a site belongs to.
"""

import hashlib
import json
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from slipstream.errors import ConfigError
from slipstream.nn.site import OFFLOAD, knows
from slipstream.nn.site import Site as SiteModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A module whose kept activations can be chosen."""

    name: str
    """Its name in the model."""
    part: str
    """Its name in its unit; empty for the unit itself."""
    actions: tuple[str, ...]
    """What it can do, the first keeps everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A layer, measured by itself."""

    name: str
    """Its name in the model."""
    sites: tuple[Site, ...]
    """The sites in it."""
    kind: str
    """Units of one kind cost the same: equal types, settings, shapes and sites."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def find_units(model: nn.Module) -> list[Unit]:
    """The layers of ``model`` that hold sites, in order; ConfigError if there are none."""
    grouped: dict[str, list[Site]] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        actions = getattr(module, "recompute_actions", None)
        if isinstance(actions, tuple) and isinstance(getattr(module, "recompute", None), str):
            if _in_graph(module, model):
                actions = tuple(action for action in actions if action != OFFLOAD)
            unit = _unit_of(name, modules)
            part = name[len(unit) :].removeprefix(".")
            grouped.setdefault(unit, []).append(Site(name=name, part=part, actions=actions))
    if not grouped:
        raise ConfigError(
            f"recompute: {type(model).__name__} has no module with recompute_actions; use a "
            "slipstream model, or slipstream.optimize on a Hugging Face one"
        )
    return [
        Unit(name=unit, sites=tuple(sites), kind=_kind(modules[unit], sites))
        for unit, sites in grouped.items()
    ]


def _in_graph(module: nn.Module, model: nn.Module) -> bool:
    """Whether the compiler sees all of a module, so that it cannot offload."""
    whole = model._compiled_call_impl is not None
    # Layers of ours offload around what is compiled.
    return whole or (module._compiled_call_impl is not None and not isinstance(module, SiteModule))


def set_actions(model: nn.Module, actions: Mapping[str, str]) -> None:
    """Give the sites named their actions; ConfigError for one that does not exist."""
    modules = dict(model.named_modules())
    for name, action in actions.items():
        offered = getattr(modules.get(name), "recompute_actions", None)
        if offered is None:
            raise ConfigError(
                f"recompute: the model has no site {name!r}; the plan is of another model"
            )
        if not knows(action, offered):
            raise ConfigError(f"recompute: {name} cannot {action!r}, use {', '.join(offered)}")
    for name, action in actions.items():
        modules[name].recompute = action  # type: ignore[assignment]


@contextmanager
def acting(model: nn.Module, actions: Mapping[str, str]) -> Generator[None]:
    """The sites named have these actions within the block."""
    before = {name: str(model.get_submodule(name).recompute) for name in actions}
    set_actions(model, actions)
    try:
        yield
    finally:
        set_actions(model, before)


def keeping(units: Iterable[Unit]) -> dict[str, str]:
    """Every site keeps everything."""
    return {site.name: site.actions[0] for unit in units for site in unit.sites}


def _unit_of(name: str, modules: Mapping[str, nn.Module]) -> str:
    # The entry of the outermost list of modules it lies in; or the outermost site around it.
    parts = name.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]
    for outer, inner in pairwise(prefixes):
        if isinstance(modules[outer], nn.ModuleList):
            return inner
    return next(p for p in prefixes if hasattr(modules[p], "recompute_actions"))


def _kind(module: nn.Module, sites: list[Site]) -> str:
    described = [
        [name, type(part).__name__, _settings(part)] for name, part in module.named_modules()
    ]
    shapes = [
        [name, list(p.shape), str(p.dtype), str(p.grad_dtype), p.requires_grad]
        for name, p in module.named_parameters()
    ]
    offered = [[site.part, *site.actions] for site in sites]
    text = json.dumps([described, shapes, offered])
    return f"{type(module).__name__}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    # What a module was built with, as far as it is plain values. A layer's own number changes
    # nothing about its cost.
    ignored = {"recompute", "layer_idx"}
    return sorted(
        (key, value)
        for key, value in vars(module).items()
        if isinstance(value, (bool, int, float, str))
        and key not in ignored
        and not key.startswith("_")
    )


def describe(tree: Any) -> str:
    """Shapes and dtypes of the tensors in ``tree``."""
    leaves = tree_leaves(tree)
    return json.dumps(
        [
            [list(leaf.shape), str(leaf.dtype), leaf.requires_grad]
            for leaf in leaves
            if isinstance(leaf, torch.Tensor)
        ]
    )
