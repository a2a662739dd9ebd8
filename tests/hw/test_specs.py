"""A device is known by its whole name; a name that only begins like one is unknown."""

import pytest

from slipstream.hw import spec_of

KNOWN = {
    "NVIDIA B200": (2250e12, 8.0e12),
    "NVIDIA H200": (989e12, 4.8e12),
    "NVIDIA H200 NVL": (835e12, 4.8e12),
    "NVIDIA GH200 480GB": (989e12, 4.0e12),
    "NVIDIA GH200 120GB": (989e12, 4.0e12),
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
    "NVIDIA H100 PCIe": (756e12, 2.0e12),
    "NVIDIA H100 NVL": (835e12, 3.9e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.039e12),
    "NVIDIA A100 80GB PCIe": (312e12, 1.935e12),
    "NVIDIA A100-SXM4-40GB": (312e12, 1.555e12),
    "NVIDIA A100-PCIE-40GB": (312e12, 1.555e12),
    "NVIDIA L40S": (362e12, 0.864e12),
    "NVIDIA L4": (121e12, 0.3e12),
    "NVIDIA A10G": (70e12, 0.6e12),
    "NVIDIA GeForce RTX 4090": (165.2e12, 1.008e12),
    "NVIDIA GeForce RTX 3090": (71e12, 0.936e12),
}
OTHERS = [
    "NVIDIA L40",
    "NVIDIA A10",
    "NVIDIA A100",
    "NVIDIA H100",
    "NVIDIA H20",
    "NVIDIA H800",
    "NVIDIA B200 NVL",
    "NVIDIA GH200 144G HBM3e",
    "NVIDIA H100 64GB HBM2",
    "NVIDIA GeForce RTX 4090 Laptop GPU",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 3090 Ti",
    "Tesla T4",
    "",
]


@pytest.mark.parametrize("name", KNOWN)
def test_a_known_device_has_its_peaks(name: str) -> None:
    spec = spec_of(name)
    assert spec is not None
    assert (spec.name, spec.peak_flops("bf16"), spec.bytes_per_s) == (name, *KNOWN[name])
    assert spec.peak_flops("fp32") < spec.peak_flops("bf16")
    assert spec.source.endswith("data sheet")


@pytest.mark.parametrize("name", OTHERS)
def test_another_device_has_none(name: str) -> None:
    assert spec_of(name) is None


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("suffix", [" MIG 1g.10gb", " MIG 3g.40gb", " D", " Laptop GPU", "0"])
def test_a_slice_or_a_variant_of_a_known_device_has_none(name: str, suffix: str) -> None:
    assert spec_of(name + suffix) is None
