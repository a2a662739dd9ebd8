"""Which implementation serves a call of an op, why not a faster one, and how often each ran.

An op registers its implementations fastest first; the last one can serve every call. An
implementation may refuse a call with a reason, and with a remedy where the user can do something
about it: then the first such refusal is warned about, once.
"""

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import HardwareError


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why an implementation cannot serve a call."""

    reason: str
    """What is in the way."""
    remedy: str | None = None
    """What the user can do; None where nothing can be done on this device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """One way to run an op."""

    name: str
    """``triton``, ``grouped_mm``, ``reference``, ..."""
    run: Callable[..., Any]
    """Takes the op's arguments."""
    refuse: Callable[..., Refusal | None]
    """Takes the op's arguments; None means it can serve them."""


@dataclass(slots=True, kw_only=True)
class Op:
    """A registered op: its implementations, fastest first, and a small call to try them with."""

    example: Callable[[torch.device, torch.dtype], tuple[tuple[Any, ...], dict[str, Any]]]
    """(device, dtype) to the arguments of a small valid call; ``env`` and tests use it."""
    implementations: list[Implementation]
    """In order of preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What an op uses for a call and what it passed over."""

    op: str
    used: str
    passed_over: tuple[tuple[str, Refusal], ...]


def _serves_all(*_: Any, **__: Any) -> None:
    return None


_OPS: dict[str, Op] = {}
_COUNTS: dict[tuple[str, str], int] = {}
_FORCED: dict[str, str] = {}
_WARNED: set[tuple[str, str, str]] = set()


def register(
    op: str,
    *implementations: tuple[str, Callable[..., Any], Callable[..., Refusal | None] | None],
    example: Callable[[torch.device, torch.dtype], tuple[tuple[Any, ...], dict[str, Any]]],
) -> None:
    """Register ``op`` with (name, run, refuse) triples, fastest first; refuse None: serves all."""
    built = [Implementation(name=n, run=f, refuse=r or _serves_all) for n, f, r in implementations]
    _OPS[op] = Op(example=example, implementations=built)


def call(op: str, *args: Any, **kwargs: Any) -> Any:
    """Run ``op`` through the first implementation that does not refuse the call."""
    forced = _FORCED.get(op)
    refused = []
    for implementation in _OPS[op].implementations:
        if forced is not None and implementation.name != forced:
            continue
        refusal = implementation.refuse(*args, **kwargs)
        if refusal is None:
            _count(op, implementation.name)
            return implementation.run(*args, **kwargs)
        refused.append(f"{implementation.name}: {refusal.reason}")
        _warn_once(op, implementation.name, refusal.reason, refusal.remedy)
    forcing = "" if forced is None else f" (forced: {forced})"
    raise HardwareError(f"{op}: no implementation serves this call{forcing}; {'; '.join(refused)}")


def _count(op: str, name: str) -> None:
    # Under torch.compile this runs while tracing: a compiled graph counts once, not per call.
    _COUNTS[op, name] = _COUNTS.get((op, name), 0) + 1


def _warn_once(op: str, name: str, reason: str, remedy: str | None) -> None:
    key = (op, name, reason)
    if remedy is None or key in _WARNED:
        return
    _WARNED.add(key)
    warnings.warn(f"{op}: {name} is not used: {reason}; {remedy}", RuntimeWarning, stacklevel=4)


# What torch.compiler.assume_constant_result sets; calling it would import the whole compiler, a
# second and a half at every start.
for _function in (_count, _warn_once):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def counts() -> dict[tuple[str, str], int]:
    """Calls served since the last ``reset_counts``, by (op, implementation)."""
    return dict(_COUNTS)


def reset_counts() -> None:
    """Set every counter to zero."""
    _COUNTS.clear()


def ops() -> list[str]:
    """Names of the registered ops."""
    return sorted(_OPS)


def implementations(op: str) -> list[str]:
    """Names of the implementations of ``op``, fastest first."""
    return [implementation.name for implementation in _OPS[op].implementations]


def example(op: str, device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    """Arguments of a small valid call of ``op``."""
    return _OPS[op].example(device, dtype)


def explain(op: str, device: torch.device, dtype: torch.dtype) -> Choice:
    """Which implementation a typical call on ``device`` in ``dtype`` gets, and why not others."""
    args, kwargs = example(op, device, dtype)
    passed_over = []
    for implementation in _OPS[op].implementations:
        refusal = implementation.refuse(*args, **kwargs)
        if refusal is None:
            return Choice(op=op, used=implementation.name, passed_over=tuple(passed_over))
        passed_over.append((implementation.name, refusal))
    raise HardwareError(f"{op}: no implementation serves {dtype} on {device}")


@contextmanager
def force(**chosen: str) -> Generator[None]:
    """Within the block, ``op="implementation"`` serves every call of that op or raises.

    Raises HardwareError at once for a name that does not exist. Not seen by graphs compiled before.
    """
    for op, name in chosen.items():
        if op not in _OPS or name not in implementations(op):
            known = implementations(op) if op in _OPS else ops()
            raise HardwareError(f"force: {op}={name} does not exist; there are {', '.join(known)}")
    before = dict(_FORCED)
    _FORCED.update(chosen)
    try:
        yield
    finally:
        _FORCED.clear()
        _FORCED.update(before)
