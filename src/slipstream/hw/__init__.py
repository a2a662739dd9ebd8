"""Devices: known peaks with their sources, and what this machine has."""

from slipstream.hw.probe import DeviceInfo, describe, peak_memory_bytes, reset_peak_memory
from slipstream.hw.specs import DeviceSpec, spec_of

__all__ = [
    "DeviceInfo",
    "DeviceSpec",
    "describe",
    "peak_memory_bytes",
    "reset_peak_memory",
    "spec_of",
]
