"""Stand-ins for the compiler and the driver, between which Triton's own code binds and launches.

A kernel's handle is what Triton knows its specialisation by, so that a kernel that does not fit
its arguments shows as another handle.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.ops import ahead

launching = pytest.importorskip("slipstream.ops.launching")
compiler = pytest.importorskip("triton.compiler.compiler")
jit = pytest.importorskip("triton.runtime.jit")
driver = pytest.importorskip("triton.runtime").driver


def _signature(x_ptr, bias_ptr, rows, scale, WIDTH: "tl.constexpr", BLOCK: "tl.constexpr" = 4):  # noqa: F821
    """What the kernel takes."""


class Compiled(compiler.CompiledKernel):
    """Compiled from nothing: its handle is Triton's key."""

    def __init__(self, key: str, run: Any) -> None:
        self.module, self.function, self.packed_metadata, self._run = None, key, (4, 1, 0), run
        self.name, self.src = key, None

    def _init_handles(self) -> None:
        self.module = self.module or threading.get_ident()  # where it was loaded


class Kernel(jit.JITFunction):
    """A kernel that notes what reaches the driver, and how often Triton searched before a launch.

    ``compiling`` is called when it is compiled.
    """

    def __init__(self, function: Any = _signature, **options: Any) -> None:
        super().__init__(function, **options)
        self.driven: list[tuple[Any, ...]] = []
        self.searches, self.warmups = 0, 0
        self.compiling: Callable[[], None] = lambda: None

    def run(self, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        self.searches += not warmup
        self.warmups += warmup
        return super().run(*args, warmup=warmup, **kwargs)

    def _do_compile(self, key: str, _: Any, device: int, *rest: Any, **__: Any) -> Compiled:
        self.compiling()
        compiled = Compiled(f"{device}: {key}", lambda *args: self.driven.append(args))
        self.device_caches[device][0][key] = compiled
        return compiled


class Driver(threading.local):
    """The current device of each thread, at first 0, and a stream, which tests change."""

    device, stream = 0, 7

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream + device

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cuda", arch=90, warp_size=32)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """As ``torch.cuda.device``."""
        before, self.device = self.device, device
        yield
        self.device = before


def install(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Put the stand-ins in place, with nothing compiled yet."""
    active = Driver()
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: active.device)
    monkeypatch.setattr(launching, "interpreting", lambda: False)
    monkeypatch.setattr(launching, "_COMPILED", {})
    monkeypatch.setattr(ahead, "_PENDING", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device", active.on)
    return active


def aligned(size: int, dtype: torch.dtype = torch.float32, shift: int = 0) -> torch.Tensor:
    whole = torch.empty(size + 64, dtype=dtype)
    first = -whole.data_ptr() % 16 // whole.element_size()
    return whole[first + shift : first + shift + size]


def descriptor(dtype: torch.dtype, columns: int) -> Any:
    return launching.Descriptor(aligned(64, dtype).view(4, 16), [4, 16], [16, 1], [4, columns])
