"""Tile configurations of the expert kernels: data, chosen by device, dtype and shape.

A file written by ``slipstream tune moe`` overrides the table; its path is in the environment
variable ``SLIPSTREAM_TUNED`` or ``~/.config/slipstream/tuned.json``.
"""

import functools
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.ops import triton_support

PRODUCTS = ("up", "down", "da", "dx", "dw13", "dw2")
"""The grouped products of the layer: two forward, four backward."""
ROW_PRODUCTS = ("up", "down", "da", "dx")
"""Those whose result has a row per token and expert."""
ENVIRONMENT = "SLIPSTREAM_TUNED"
TILE_ROWS = 128
"""Rows of an entry of the schedule; ``block_m`` of a product over rows divides it."""
INTERPRETER = 0
"""Stands for a compute capability where Triton interprets the kernels on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How one product is cut up and run."""

    block_m: int
    """Rows of the result: 128 where they are tokens, or 64, which halves what tails waste."""
    block_n: int
    """Columns of the result; ``up`` counts gate and up columns together."""
    block_k: int
    """Length of a step of the contraction."""
    num_warps: int
    num_stages: int
    """Depth of the pipeline of loads."""
    group: int = 8
    """Row blocks that run together over all columns, for the L2 cache."""
    flatten: bool = False
    """One loop over tiles and steps, so that loads cross the end of a tile; all but ``up``."""
    programs_per_sm: int = 1
    """Size of a persistent grid."""
    gather_before: bool = False
    """Copy gathered rows out before the product instead of gathering inside it; ``up`` and ``da``.

    ``dw13`` and ``dw2`` always do.
    """
    fuse: bool = False
    """``da`` alone, with ``gather_before``: the activation's backward in its epilogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A tile and the calls it is for: the first rule of a product that fits is used."""

    product: str
    capability: int
    """Major * 10 + minor, the least it is for."""
    max_rows_per_expert: float
    """Mean rows per expert up to which it is for."""
    tile: Tile
    dtype: str | None = None
    """``float32``, ``bfloat16`` or ``float16``; None: both 16-bit ones."""
    width: int | None = None
    """D it was measured for; None: any."""
    hidden: int | None = None
    """F it was measured for; None: any."""


_ALWAYS = float("inf")


def _rules(
    capability: int,
    dtype: str | None,
    rows: float = _ALWAYS,
    at: tuple[int | None, int | None] = (None, None),
    /,
    **tiles: Tile,
) -> list[Rule]:
    """Rules for up to ``rows`` rows per expert; ``at``: only for that D and F."""
    return [
        Rule(
            product=product,
            capability=capability,
            dtype=dtype,
            max_rows_per_expert=rows,
            width=at[0],
            hidden=at[1],
            tile=tile,
        )
        for product, tile in tiles.items()
    ]


def _for_all(tile: Tile) -> dict[str, Tile]:
    return dict.fromkeys(PRODUCTS, tile)


_HOPPER = Tile(block_m=128, block_n=256, block_k=64, num_warps=8, num_stages=4)
_HOPPER_DA = replace(_HOPPER, flatten=True, gather_before=True)
_AMPERE = Tile(block_m=128, block_n=128, block_k=32, num_warps=8, num_stages=3)
# A step of the contraction is a block of the sum: short ones round least.
_FULL_PRECISION = Tile(block_m=64, block_n=64, block_k=16, num_warps=4, num_stages=2)
_INTERPRETED = Tile(block_m=128, block_n=64, block_k=32, num_warps=4, num_stages=1)

TABLE: list[Rule] = [
    # Consumer Blackwell has the shared memory of Ada.
    *_rules(120, None, **_for_all(_AMPERE)),
    # The fused product is measured on Hopper only.
    *_rules(100, None, da=_HOPPER_DA),
    # A block of each expert's rows is copied first: where it has little more, that is not free.
    *_rules(90, None, 64, dw13=_HOPPER, dw2=_HOPPER),
    # Two kernels beat it by 5 % at 512 rows an expert, by 1.5 % where F is long.
    *_rules(90, None, 1024, da=_HOPPER_DA),
    *_rules(90, None, _ALWAYS, (4096, 14336), da=_HOPPER_DA),
    *_rules(
        90,
        None,
        _ALWAYS,
        (4096, 14336),
        dx=replace(_HOPPER, flatten=True, group=4),
        dw13=replace(_HOPPER, flatten=True, num_stages=3),
    ),
    *_rules(
        90,
        None,
        up=replace(_HOPPER, group=4),
        down=replace(_HOPPER, flatten=True),
        da=replace(_HOPPER_DA, num_stages=3, fuse=True),
        dx=replace(_HOPPER, flatten=True, num_stages=3, group=4),
        dw13=replace(_HOPPER, flatten=True),
        dw2=replace(_HOPPER, flatten=True),
    ),
    *_rules(80, None, **_for_all(_AMPERE)),
    *_rules(80, "float32", **_for_all(_FULL_PRECISION)),
    *_rules(INTERPRETER, None, **_for_all(_INTERPRETED)),
    *_rules(
        INTERPRETER,
        "float32",
        **_for_all(_INTERPRETED)
        | {
            "da": replace(_INTERPRETED, gather_before=True, fuse=True),
            "dw13": replace(_INTERPRETED, flatten=True),
        },
    ),
]
"""Highest capability first; fp32 multiplies in full precision and wants small tiles."""

_FORCED: dict[str, Tile] = {}


def lookup(
    product: str, device: torch.device, dtype: torch.dtype, num_rows: int, weight: torch.Tensor
) -> Tile:
    """The tile of ``product`` for ``num_rows`` rows over weights (E, D, F) or (E, F, D)."""
    return lookup_all((product,), device, dtype, num_rows, weight)[product]


def lookup_all(
    products: tuple[str, ...],
    device: torch.device,
    dtype: torch.dtype,
    num_rows: int,
    weight: torch.Tensor,
) -> dict[str, Tile]:
    """``lookup`` of several products."""
    experts, width, hidden = weight.shape
    bucket = 1 << max(0, num_rows // max(1, experts) - 1).bit_length()
    call = capability_of(device), _name(dtype), bucket, width, hidden
    return {
        product: _FORCED[product] if product in _FORCED else _find(product, *call)
        for product in products
    }


def capability_of(device: torch.device) -> int:
    """Major * 10 + minor of a CUDA device; ``INTERPRETER`` for a CPU."""
    if device.type != "cuda":
        return INTERPRETER
    return triton_support.capability(device)


@functools.cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _find(
    product: str, capability: int, dtype: str, rows_per_expert: int, width: int, hidden: int
) -> Tile:
    half = dtype in ("bfloat16", "float16")
    for rule in (*overrides(), *TABLE):
        if (
            rule.product == product
            and rule.capability <= capability
            and (rule.dtype == dtype or (rule.dtype is None and half))
            and rows_per_expert <= rule.max_rows_per_expert
            and rule.width in (None, width)
            and rule.hidden in (None, hidden)
        ):
            return rule.tile
    raise AssertionError(f"no tile for {product} on capability {capability} in {dtype}")


@contextmanager
def force(**tiles: Tile) -> Generator[None]:
    """Within the block, products use the given tiles; for tuning and tests."""
    before = dict(_FORCED)
    _FORCED.update(tiles)
    try:
        yield
    finally:
        _FORCED.clear()
        _FORCED.update(before)


def overrides_path() -> Path:
    """Where overriding configurations are read from, whether or not the file exists."""
    named = os.environ.get(ENVIRONMENT)
    return Path(named) if named else Path.home() / ".config" / "slipstream" / "tuned.json"


@functools.cache
def overrides() -> tuple[Rule, ...]:
    """The rules of the override file, read once. ConfigError for a file that is not one."""
    path = overrides_path()
    if not path.exists():
        if os.environ.get(ENVIRONMENT):
            raise ConfigError(f"{ENVIRONMENT} = {path}: no such file; unset it or tune again")
        return ()
    try:
        return tuple(_rule(entry) for entry in json.loads(path.read_text())["rules"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a file of tuned tiles ({error}); tune again") from None


def write(path: Path, rules: list[Rule]) -> None:
    """Write ``rules`` as an override file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rules": [asdict(rule) for rule in rules]}, indent=1) + "\n")


def _rule(entry: dict[str, Any]) -> Rule:
    if entry["product"] not in PRODUCTS:
        raise ValueError(f"product = {entry['product']!r}, expected one of {', '.join(PRODUCTS)}")
    known = {field.name for field in fields(Rule)}
    unknown = entry.keys() - known
    if unknown:
        raise ValueError(f"unknown field {min(unknown)!r}")
    tile = Tile(**entry["tile"])
    for name in ("block_m", "block_n", "block_k", "num_warps"):
        size = getattr(tile, name)
        if not isinstance(size, int) or size < 1 or size & (size - 1):
            raise ValueError(f"{name} = {size!r}, expected a power of two")
    if tile.fuse and (entry["product"] != "da" or not tile.gather_before):
        raise ValueError("fuse: only for da, and with gather_before")
    if entry["product"] in ROW_PRODUCTS and tile.block_m not in (TILE_ROWS // 2, TILE_ROWS):
        raise ValueError(f"block_m = {tile.block_m} of {entry['product']}, expected 64 or 128")
    values: dict[str, Any] = {**entry, "tile": tile}
    return Rule(**values)
