"""The peers of the ops beside Slipstream: eager code, the compiler, PyTorch's own op, Liger."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from slipstream import __version__
from slipstream.bench.environment import version
from slipstream.bench.ops_case import Function, Missing
from slipstream.bench.peer_names import chosen_names

PEERS = (
    "slipstream", "slipstream-keep", "eager", "compiled", "torch", "liger", "liger-fp32"
)  # fmt: skip
"""``-keep`` is the op that re-emits, with what it writes again kept; ``liger-fp32`` sums in fp32.
"""


def select(names: str) -> list[str]:
    """Peers of a comma-separated list; ``all``, and ``-name`` takes one away. ConfigError."""
    return chosen_names(names, PEERS)


def peer_version(name: str) -> str | None:
    """Version of what does the work."""
    if name.startswith("slipstream"):
        return __version__
    return version("liger-kernel") if name.startswith("liger") else torch.__version__


def usual(
    ours: Function, plain: Function, **others: Callable[[], Function]
) -> dict[str, Callable[[], Function]]:
    """The peers every op has, then ``others``; an underscore in a name is a dash."""
    return {
        "slipstream": lambda: ours,
        "eager": lambda: plain,
        "compiled": lambda: torch.compile(plain, fullgraph=True, dynamic=False),
        **{name.replace("_", "-"): make for name, make in others.items()},
    }


def liger(function: str) -> Any:
    """A function of ``liger_kernel.transformers.functional``. Raises Missing."""
    if find_spec("liger_kernel") is None:
        raise Missing("liger_kernel is not installed")
    if not torch.cuda.is_available():
        raise Missing("its kernels need a CUDA device")
    found = getattr(import_module("liger_kernel.transformers.functional"), function, None)
    if found is None:
        raise Missing(f"liger_kernel {version('liger-kernel')} has no {function}")
    return found
