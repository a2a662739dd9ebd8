"""What is measured of an op: its inputs, the plain code, every peer's call, and its floor.

The floor is the least an op has to do: bytes it must read and write once, or the FLOPs of its
matrix products. Letters: T tokens, D width, F hidden, V vocabulary, b bytes per element.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.verify.budget import Results

Function = Callable[..., Any]
"""Takes the inputs of a case by name, returns a tensor or a tuple of them."""
VOCABULARY = 128256
SEQUENCE = 4096


class Missing(Exception):
    """A peer is not to be had here, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpShape:
    """Sizes of one measurement, before an op makes its own of them."""

    tokens: int
    """T."""
    width: int
    """D of an op on the residual stream, F of one inside an MLP."""
    vocabulary: int = VOCABULARY
    """V, for the loss."""

    @property
    def sequence(self) -> int:
        """L: tokens come as sequences of 4096 where they divide, else as one."""
        return self.tokens if self.tokens % SEQUENCE else SEQUENCE


def parse_shape(text: str) -> OpShape:
    """``T,D`` or ``T,D,V``. Raises ConfigError."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in (2, 3) or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ConfigError(f"--shape {text}: expected T,D or T,D,V, numbers above 0")
    tokens, width, *vocabulary = map(int, parts)
    return OpShape(tokens=tokens, width=width, vocabulary=(vocabulary or [VOCABULARY])[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Where the numbers of a case come from."""

    generator: torch.Generator
    dtype: torch.dtype

    def normal(
        self, *shape: int, std: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Normal numbers on the generator's device."""
        return torch.randn(
            shape,
            generator=self.generator,
            device=self.generator.device,
            dtype=dtype or self.dtype,
        ).mul_(std)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        """int64 in [0, high)."""
        device = self.generator.device
        return torch.randint(high, shape, generator=self.generator, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The least work of an op."""

    forward_bytes: int = 0
    """Read and written by the forward; 0: the op is not bound by memory."""
    backward_bytes: int = 0
    """Read and written by the backward."""
    forward_flops: float = 0.0
    """Of the forward's matrix products."""
    backward_flops: float = 0.0
    """Of the backward's."""
    parted: bool = True
    """Whether the two are apart; the forward of a loss may compute the gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reemission:
    """An op that writes a tensor again in its backward instead of keeping it."""

    peer: str
    """Peer that re-emits."""
    keeps: str
    """The same with the tensor kept."""
    written_bytes: int
    """Size of that tensor: the one write it costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpCase:
    """One op at one shape."""

    op: str
    """As given to ``--op``."""
    sizes: dict[str, int]
    """Every size by its letter."""
    inputs: Callable[[Draw], Results]
    """Draws the tensors; those in the drawn dtype get gradients unless ``wanted`` says which."""
    plain: Function
    """Eager PyTorch as model code has it, by input name: sets the error budget."""
    peers: dict[str, Callable[[], Function]]
    """What makes each peer's function; raises Missing where it is not to be had."""
    floor: Floor
    truth: Function | None = None
    """What runs in fp64, where that is not ``plain``."""
    wanted: frozenset[str] = frozenset()
    """Inputs that get gradients; empty for an op that changes its inputs."""
    changes: tuple[str, ...] = ()
    """Inputs an op without a backward changes: its results."""
    scalar: bool = False
    """The output is a loss: its gradient is 1."""
    own_units: bool = False
    """Each tensor's own dtype is its rounding unit: results in several dtypes."""
    reemission: Reemission | None = None

    @property
    def label(self) -> str:
        """``T8192-D4096``."""
        return "-".join(f"{letter}{size}" for letter, size in self.sizes.items())
