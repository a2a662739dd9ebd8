"""Kernels compiled before they are needed, all at once: a layer's first call takes seconds less.

Triton compiles a kernel when it is first launched, one after the other. An op names what it and
its backward run; the first of its launches that needs a kernel not yet compiled has them all run
dry, on tensors without memory and in a thread of its own, and all kernels that asks for compiled
in threads. A launch waits for its own kernel only. Triton itself is left to ``launching``.
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

MAX_THREADS = 8


class Call(NamedTuple):
    """A launch that a dry run came by."""

    key: tuple[Any, ...]
    """What tells its kernel from others."""
    kernel: Any
    args: tuple[Any, ...]
    constants: dict[str, Any]


class _Local(threading.local):
    plan: "_Expecting | None" = None
    """What the op that runs in this thread has to say about its launches."""
    calls: list[Call] | None = None
    """Launches so far, in a thread that runs dry."""


local = _Local()
_PENDING: dict[tuple[Any, ...], Future[Any]] = {}


class _Expecting:
    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args

    def __enter__(self) -> None:
        local.plan = self

    def __exit__(self, *_: object) -> None:
        local.plan = None


def expecting(function: Callable[..., object], *args: Any) -> AbstractContextManager[object, None]:
    """The context of an op whose launches, with those of its backward, ``function(*args)`` makes.

    ``function`` looks at no values: it gets its tensors without memory, on the meta device.
    """
    return nullcontext() if torch.compiler.is_compiling() else _Expecting(function, args)


def prepare(known: Iterable[Any], compile: Callable[[Call], Any]) -> None:
    """Start to compile what this thread's op expects to launch; what is ``known`` is left out.

    Not while a graph is recorded, where loading a kernel is an error, nor for a single processor.
    """
    plan, local.plan = local.plan, None
    processors = os.cpu_count() or 1
    if plan is None or processors == 1 or torch.cuda.is_current_stream_capturing():
        return
    device, args = torch.cuda.current_device(), _without_memory(plan.args)
    pool = ThreadPoolExecutor(min(MAX_THREADS, processors), "compile")
    try:
        calls = pool.submit(_run_dry, plan.function, args, device).result()
        for call in calls:
            if call.key not in known and call.key not in _PENDING:
                _PENDING[call.key] = pool.submit(_compile, compile, call, device)
    except Exception as error:  # whatever it is, Triton compiles when it launches
        _warn(f"what {plan.function.__module__} launches could not be compiled ahead", error)
    pool.shutdown(wait=False)


def settle() -> None:
    """Wait until nothing is compiled any more: before a graph is recorded, which loading breaks."""
    wait(list(_PENDING.values()))


def wait_for(key: tuple[Any, ...]) -> None:
    """Wait until what ``prepare`` started for ``key`` is done; it may have failed."""
    future = _PENDING.get(key)
    if future is None:
        return
    try:
        future.result()
    except Exception as error:  # the launch compiles again and raises what it must
        _warn("a kernel could not be compiled ahead", error)
    _PENDING.pop(key, None)


def _run_dry(function: Callable[..., object], args: tuple[Any, ...], device: int) -> list[Call]:
    # In a thread of its own no mode of the caller's sees what is done here.
    local.calls = calls = []
    try:
        _on(device, function, *args)
    finally:
        local.calls = None
    return calls


def _compile(compile: Callable[[Call], Any], call: Call, device: int) -> None:
    _on(device, compile, call)
    _PENDING.pop(call.key, None)  # one that failed is left for its launch


def _on(device: int, function: Callable[..., Any], *args: Any) -> Any:
    with torch.cuda.device(device):
        return function(*args)


def _without_memory(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_without_memory, value))
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def _warn(what: str, error: Exception) -> None:
    text = f"{what}, it is when launched: {type(error).__name__}: {error}"
    warnings.warn(text, RuntimeWarning, stacklevel=2)
