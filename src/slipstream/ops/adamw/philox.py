"""The random bits of stochastic rounding in plain PyTorch: Philox4x32 of seed, step and element.

Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (2011). With 7 rounds it passes Crush.
"""

import torch

from slipstream.ops.scattered import Scattered

UNIT, QUARTER, ROUNDS = 4096, 1024, 7
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def noise(grad: torch.Tensor | Scattered, seed: int, step: torch.Tensor) -> torch.Tensor:
    """32 random bits per element of the bucket as int64; ``step`` is the one being taken."""
    place = torch.arange(grad.shape.numel(), device=grad.device)
    begin = torch.zeros_like(place)
    if isinstance(grad, Scattered):
        # Places count from the start of a piece, in units that begin there.
        for piece in grad.layout.pieces:
            begin[piece.start : piece.start + piece.size] = piece.start
        place = place - begin
    unit, rest = place // UNIT * UNIT, place % UNIT
    counter = begin + unit + rest % QUARTER
    words = philox(seed, counter & _WORD, counter >> 32, step.long().expand_as(counter))
    return torch.stack(words).gather(0, (rest // QUARTER)[None])[0]


def philox(seed: int, low: torch.Tensor, high: torch.Tensor, step: torch.Tensor) -> tuple:
    """Four words for each counter (low, high, step, 0)."""
    keys = [seed & _WORD, seed >> 32 & _WORD]
    c0, c1, c2, c3 = low, high, step, torch.zeros_like(low)
    for _ in range(ROUNDS):
        (high0, low0), (high1, low1) = _product(c0, 0), _product(c2, 1)
        c0, c1, c2, c3 = high1 ^ c1 ^ keys[0], low1, high0 ^ c3 ^ keys[1], low0
        keys = [(key + weyl) & _WORD for key, weyl in zip(keys, _WEYL, strict=True)]
    return c0, c1, c2, c3


def _product(word: torch.Tensor, which: int) -> tuple[torch.Tensor, torch.Tensor]:
    # The int64 product wraps; its bits are those of the unsigned one.
    product = word * _MULTIPLIERS[which]
    return product >> 32 & _WORD, product & _WORD


def rounded(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """fp32 ``x`` to bf16, up with the probability of what is cut off; ``noise``: 16 bits."""
    bits = x.float().view(torch.int32).long() + noise
    cut = (bits & 0xFFFF0000).to(torch.int64)
    signed = torch.where(cut >= 1 << 31, cut - (1 << 32), cut).to(torch.int32)
    return torch.where(x.isfinite(), signed.view(torch.float32), x).to(torch.bfloat16)
