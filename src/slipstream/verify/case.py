"""What there is to verify about an op: calls with inputs, the eager code, the truth, and promises.

A ``Suite`` is everything about one op; its cases are calls with random inputs, its promises are
statements that are exact (a tie goes to the lower index, a row stays untouched). Suites live in
``cases/``, one module per op.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, Literal

import torch

from slipstream.errors import ConfigError
from slipstream.ops import dispatch
from slipstream.verify import cases
from slipstream.verify.budget import Results

Scale = Literal["small", "normal", "large"]
"""How big inputs get: for Triton's interpreter, for a CPU, for a GPU."""

TOKENS = {"small": 9, "normal": 63, "large": 63}
"""Tokens of most cases of the MoE ops; the interpreter takes a second for a hundred programs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kind of call of an op."""

    name: str
    """Sizes, then the hazard: ``T63-D64-one-takes-all``."""
    inputs: Callable[[torch.Generator], Results]
    """Draws tensors on the CPU; the floating-point ones are cast to the dtype under test."""
    call: Callable[..., Any]
    """The public function; takes the inputs by name, returns a tensor, a tuple or a mapping."""
    eager: Callable[..., Any]
    """The same in plain PyTorch in the dtype of its inputs; in fp64 it is the truth."""
    fp32: frozenset[str] = frozenset()
    """Inputs that stay fp32 whatever the dtype under test (fp64 for the truth)."""
    wanted: frozenset[str] | None = None
    """Inputs whose gradients are compared; None: every floating-point one."""
    pool: int = 1
    """Draws judged together at first: the error of a few numbers is luck."""
    own_units: bool = False
    """Each tensor's own dtype is its rounding unit: for 16-bit input and exact fp32 results."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """A statement about an op that holds exactly."""

    name: str
    """In a few words: ``threshold inf is plain top-k``."""
    holds: Callable[[torch.device, torch.dtype], str | None]
    """Runs the op; None, or what was found instead. The implementation is already forced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Everything to verify about one op."""

    op: str
    """Name in dispatch."""
    cases: Callable[[Scale], list[Case]]
    """The first one also goes through the compiler, a CUDA graph and other memory layouts."""
    groups: tuple[str, ...] = ()
    """Other names of ``--only`` that include this op."""
    promises: tuple[Promise, ...] = ()
    """What must hold exactly."""
    exempt: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """(implementation, check) to the reason why that check cannot apply to it."""
    products: tuple[str, ...] = ()
    """Implementations whose Triton kernels multiply matrices: not in bf16 under the interpreter."""


def suites() -> dict[str, Suite]:
    """All suites by op."""
    names = sorted(module.name for module in iter_modules(cases.__path__))
    found = [import_module(f"{cases.__name__}.{name}").SUITE for name in names]
    return {suite.op: suite for suite in found}


def select(only: list[str]) -> list[str]:
    """The ops that ``only`` names, themselves or by group; all that dispatch knows for nothing.

    Raises ConfigError.
    """
    known, have = dispatch.ops(), suites()
    groups = {group for suite in have.values() for group in suite.groups}
    wrong = [name for name in only if name not in known and name not in groups]
    if wrong:
        allowed = ", ".join([*sorted(groups), *known])
        raise ConfigError(f"--only {wrong[0]}: no such op or group; there are {allowed}")
    if not only:
        return known
    return [op for op in known if op in only or _groups(have, op) & set(only)]


def _groups(have: dict[str, Suite], op: str) -> set[str]:
    return set(have[op].groups) if op in have else set()
