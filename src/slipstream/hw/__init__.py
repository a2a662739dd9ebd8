"""Devices: known peaks with their sources, and what this machine has.

What asks this machine loads on first use: the table of peaks needs no torch.
"""

from importlib import import_module
from typing import Any

from slipstream.hw.specs import DeviceSpec, spec_of

_PROBES = ("DeviceInfo", "describe", "peak_memory_bytes", "reset_peak_memory")

__all__ = [
    "DeviceInfo",
    "DeviceSpec",
    "describe",
    "peak_memory_bytes",
    "reset_peak_memory",
    "spec_of",
]


def __getattr__(name: str) -> Any:
    if name not in _PROBES:
        raise AttributeError(f"module 'slipstream.hw' has no attribute {name!r}")
    return getattr(import_module("slipstream.hw.probe"), name)
