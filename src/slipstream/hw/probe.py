"""What a device is and how much memory this process has used on it at most."""

import os
import platform
import resource
import sys
from dataclasses import dataclass

import torch

from slipstream.hw.specs import DeviceSpec, spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """A device as far as training cares."""

    name: str
    """Marketing name of a GPU, or the processor architecture."""
    memory_bytes: int | None
    """Device memory; None on a CPU."""
    capability: tuple[int, int] | None
    """Compute capability of an NVIDIA GPU."""
    spec: DeviceSpec | None
    """Published peaks, if the device is known."""


def describe(device: torch.device) -> DeviceInfo:
    """Look at ``device``."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return DeviceInfo(
            name=properties.name,
            memory_bytes=properties.total_memory,
            capability=torch.cuda.get_device_capability(device),
            spec=spec_of(properties.name),
        )
    cores = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads"
    name = f"{platform.machine()} CPU ({cores})"
    return DeviceInfo(name=name, memory_bytes=None, capability=None, spec=None)


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory allocated on a GPU since ``reset_peak_memory``, or this process's peak RSS."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak_memory(device: torch.device) -> None:
    """Start measuring the peak of a GPU again; a process's peak RSS cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
