"""Measured costs on disk, one small JSON file for each device, versions and layer.

In ``$SLIPSTREAM_CACHE/recompute``, else ``$XDG_CACHE_HOME/slipstream/recompute``, else below
``~/.cache``. A file that cannot be read or written only costs a measurement.
"""

import dataclasses
import functools
import hashlib
import json
import os
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import torch

import slipstream
from slipstream.hw import describe
from slipstream.recompute.cost import Cost, LayerCosts, Link

FORMAT = 3
Kind = TypeVar("Kind", LayerCosts, Link)


def key(device: torch.device, kind: str, shapes: str) -> str:
    """Names the costs of a kind of layer on inputs of given shapes."""
    versions = [_version(package) for package in ("torch", "triton")]
    text = json.dumps([FORMAT, describe(device).name, *versions, _code(), kind, shapes])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read(name: str, kind: type[Kind]) -> Kind | None:
    """Costs measured before, if there are any."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        values = json.loads((folder() / f"{name}.json").read_text(encoding="utf-8"))
        if kind is LayerCosts:
            actions = {(part, action): _cost(found) for part, action, found in values["actions"]}
            values |= {"keep": _cost(values["keep"]), "actions": actions}
        return kind(**values)
    return None


def _cost(values: dict[str, Any]) -> Cost:
    return Cost(**(values | {"movable": tuple(values["movable"])}))


def write(name: str, costs: LayerCosts | Link) -> None:
    """Keep ``costs`` for the next run."""
    values = dataclasses.asdict(costs)
    if isinstance(costs, LayerCosts):
        values["actions"] = [[*place, cost] for place, cost in values["actions"].items()]
    with suppress(OSError):
        folder().mkdir(parents=True, exist_ok=True)
        part = folder() / f"{name}.{os.getpid()}.part"
        part.write_text(json.dumps(values), encoding="utf-8")
        part.replace(folder() / f"{name}.json")


def folder() -> Path:
    """Where costs are kept."""
    given = os.environ.get("SLIPSTREAM_CACHE")
    if given:
        return Path(given) / "recompute"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "slipstream" / "recompute"


@functools.cache
def _code() -> str:
    # What is measured: a version number stays while a checkout changes.
    root = Path(slipstream.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(p for part in ("nn", "ops") for p in (root / part).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None
