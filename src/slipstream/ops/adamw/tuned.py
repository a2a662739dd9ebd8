"""Block sizes of the AdamW kernel: data, by compute capability and bytes moved per element."""

from dataclasses import dataclass

import torch

from slipstream.ops.adamw.kernels import UNIT

INTERPRETER = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """How a launch is cut up."""

    block: int
    """Elements of a program."""
    num_warps: int


TABLE: list[tuple[int, bool, Config]] = [
    # H200: 98 to 100 % of the rate of a copy, 4 % more than blocks of 2048 to 4096.
    (80, False, Config(block=1024, num_warps=4)),
    (80, True, Config(block=2 * UNIT.value, num_warps=8)),
    # A program costs the interpreter a hundredth of a second, however much it does.
    (INTERPRETER, False, Config(block=1 << 14, num_warps=4)),
    (INTERPRETER, True, Config(block=UNIT.value, num_warps=4)),
]
"""(least capability, stochastic, config), highest capability first."""

_FORCED: list[Config] = []


def lookup(device: torch.device, stochastic: bool) -> Config:
    """The config for a device; stochastic rounding takes whole units of its random numbers."""
    if _FORCED:
        return _FORCED[-1]
    capability = INTERPRETER
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
    return next(c for least, kind, c in TABLE if least <= capability and kind == stochastic)
