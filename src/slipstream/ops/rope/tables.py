"""Inverse frequencies of rotary embeddings under the scaling variants in use, and their tables.

Each variant follows its publication; ``attention_factor`` multiplies cos and sin (yarn, longrope).
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

RopeScaling = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Everything the tables depend on."""

    head_dim: int
    """Rotated width C of a head; even."""
    theta: float = 10000.0
    """Base of the geometric series of wavelengths."""
    scaling: RopeScaling = "none"
    """How positions beyond the original context are mapped."""
    factor: float = 1.0
    """Extension factor of the context."""
    original_len: int = 8192
    """Context length the model was first trained at."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original_len / this are divided by factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original_len / this are kept."""
    beta_fast: float = 32.0
    """yarn: rotations over original_len above which a dimension is kept."""
    beta_slow: float = 1.0
    """yarn: rotations over original_len below which a dimension is divided by factor."""
    attention_factor: float | None = None
    """Multiplier of cos and sin; None: the variant's own formula."""
    long_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency beyond original_len."""
    short_factor: tuple[float, ...] = ()
    """longrope: divisor of each frequency up to original_len."""


def inverse_frequencies(spec: RopeSpec, length: int) -> tuple[torch.Tensor, float]:
    """``(C/2,)`` fp32 inverse frequencies for sequences of ``length`` and the attention factor."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    inv = 1.0 / spec.theta**exponents
    if spec.scaling == "linear":
        inv = inv / spec.factor
    elif spec.scaling == "dynamic":
        inv = 1.0 / _dynamic_theta(spec, length) ** exponents
    elif spec.scaling == "llama3":
        inv = _llama3(spec, inv)
    elif spec.scaling == "yarn":
        inv = _yarn(spec, inv)
    elif spec.scaling == "longrope":
        chosen = spec.long_factor if length > spec.original_len else spec.short_factor
        inv = inv / torch.tensor(chosen, dtype=torch.float32)
    return inv, _attention_factor(spec)


def rope_tables(
    spec: RopeSpec, length: int, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin for positions 0 to length - 1: two ``(L, C/2)`` fp32 tensors."""
    inv, factor = inverse_frequencies(spec, length)
    angles = torch.outer(torch.arange(length, dtype=torch.float32), inv)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return cos.to(device), sin.to(device)


def _dynamic_theta(spec: RopeSpec, length: int) -> float:
    # NTK-aware interpolation: the base grows with the sequence once it passes the original length.
    seen = max(length, spec.original_len)
    growth = spec.factor * seen / spec.original_len - (spec.factor - 1)
    return spec.theta * growth ** (spec.head_dim / (spec.head_dim - 2))


def _llama3(spec: RopeSpec, inv: torch.Tensor) -> torch.Tensor:
    wavelength = 2 * math.pi / inv
    low = spec.original_len / spec.low_freq_factor
    high = spec.original_len / spec.high_freq_factor
    blend = (spec.original_len / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    mixed = (1 - blend) * inv / spec.factor + blend * inv
    scaled = torch.where(wavelength > low, inv / spec.factor, inv)
    return torch.where((wavelength <= low) & (wavelength >= high), mixed, scaled)


def _yarn(spec: RopeSpec, inv: torch.Tensor) -> torch.Tensor:
    # The dimension at which a wave turns `rotations` times within the original length.
    def dimension(rotations: float) -> float:
        return (
            spec.head_dim
            * math.log(spec.original_len / (rotations * 2 * math.pi))
            / (2 * math.log(spec.theta))
        )

    low = max(math.floor(dimension(spec.beta_fast)), 0)
    high = min(math.ceil(dimension(spec.beta_slow)), spec.head_dim - 1)
    ramp = (torch.arange(spec.head_dim // 2) - low).float() / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return inv / spec.factor * (1 - keep) + inv * keep


def _attention_factor(spec: RopeSpec) -> float:
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.factor <= 1.0:
        return 1.0
    if spec.scaling == "yarn":
        return 0.1 * math.log(spec.factor) + 1.0
    if spec.scaling == "longrope":
        return math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_len))
    return 1.0
