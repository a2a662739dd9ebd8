"""Published peaks of devices; an unknown device has none, and then no MFU is printed.

A device is known by the whole name its driver reports: laptop and regional variants, MIG slices and
successors begin with the name of another device and have other peaks.
Dense rates (no sparsity) of the form factor named, from the vendor's data sheet in ``source``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """Nominal peaks of a device."""

    name: str
    """Name the driver reports."""
    bf16_flops: float
    """bf16 matrix products with fp32 accumulation, FLOP/s."""
    fp32_flops: float
    """fp32 outside the tensor cores, FLOP/s."""
    bytes_per_s: float
    """Device memory bandwidth, bytes/s."""
    source: str
    """Where the figures stand."""

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of ``bf16`` or ``fp32``."""
        return self.bf16_flops if dtype == "bf16" else self.fp32_flops


_PEAKS = [
    ("NVIDIA B200", 2250e12, 75e12, 8.0e12, "Blackwell B200 (HGX)"),
    ("NVIDIA H200 NVL", 835e12, 60e12, 4.8e12, "H200 NVL"),
    ("NVIDIA H200", 989e12, 67e12, 4.8e12, "H200 SXM"),
    ("NVIDIA GH200 480GB", 989e12, 67e12, 4.0e12, "GH200 (96 GB HBM3)"),
    ("NVIDIA GH200 120GB", 989e12, 67e12, 4.0e12, "GH200 (96 GB HBM3)"),
    ("NVIDIA H100 PCIe", 756e12, 51e12, 2.0e12, "H100 PCIe"),
    ("NVIDIA H100 NVL", 835e12, 60e12, 3.9e12, "H100 NVL"),
    ("NVIDIA H100 80GB HBM3", 989e12, 67e12, 3.35e12, "H100 SXM"),
    ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12, 2.039e12, "A100 80GB SXM"),
    ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12, 1.935e12, "A100 80GB PCIe"),
    ("NVIDIA A100-SXM4-40GB", 312e12, 19.5e12, 1.555e12, "A100 40GB SXM"),
    ("NVIDIA A100-PCIE-40GB", 312e12, 19.5e12, 1.555e12, "A100 40GB PCIe"),
    ("NVIDIA L40S", 362e12, 91.6e12, 0.864e12, "L40S"),
    ("NVIDIA L4", 121e12, 30.3e12, 0.3e12, "L4"),
    ("NVIDIA A10G", 70e12, 31.2e12, 0.6e12, "A10G"),
    ("NVIDIA GeForce RTX 4090", 165.2e12, 82.6e12, 1.008e12, "GeForce RTX 4090 (Ada)"),
    ("NVIDIA GeForce RTX 3090", 71e12, 35.6e12, 0.936e12, "GeForce RTX 3090 (GA102)"),
]
_SPECS = {
    name: DeviceSpec(
        name=name,
        bf16_flops=bf16,
        fp32_flops=fp32,
        bytes_per_s=bandwidth,
        source=f"NVIDIA {sheet} data sheet",
    )
    for name, bf16, fp32, bandwidth, sheet in _PEAKS
}


def spec_of(device_name: str) -> DeviceSpec | None:
    """The spec of the device with exactly this name, or None."""
    return _SPECS.get(device_name)
