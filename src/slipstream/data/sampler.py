"""Which tokens make up global sample number n: a pure function, no state to save.

The text is one line of tokens cut into windows of ``seq_len + 1`` (neighbours share one token). An
epoch visits the windows in an order given by a keyed Feistel permutation of window numbers, and
moves the grid of windows by an amount drawn per epoch. Only integer arithmetic of fixed width is
used, so the order is the same on every platform and version, and for any number of ranks.
"""

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from slipstream.errors import DataError

ROUNDS = 8
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sampler:
    """Sample number to start token; see the module docstring.

    Raises DataError if fewer than ``seq_len + 1`` tokens exist.
    """

    num_tokens: int
    """Tokens of the shard set."""
    seq_len: int
    """Tokens of a sample that get a loss."""
    seed: int
    """Selects the order."""
    shuffle: bool
    """False: windows in order, the grid starts at token 0."""

    def __post_init__(self) -> None:
        if self.num_tokens < self.seq_len + 1:
            raise DataError(
                f"data.seq_len = {self.seq_len} needs at least {self.seq_len + 1} tokens, the data "
                f"has {self.num_tokens}; lower data.seq_len or prepare more text"
            )

    @property
    def num_windows(self) -> int:
        """Samples per epoch; a shuffled epoch leaves room to move the grid by a window."""
        whole = (self.num_tokens - 1) // self.seq_len
        movable = (self.num_tokens - self.seq_len) // self.seq_len
        return max(1, movable) if self.shuffle else whole

    def start(self, sample_number: int) -> int:
        """First token of the window of ``seq_len + 1`` tokens of this global sample."""
        if sample_number < 0:
            raise ValueError(f"sample_number = {sample_number}: samples are numbered from 0")
        windows = self.num_windows
        epoch, index = divmod(sample_number, windows)
        if not self.shuffle:
            return index * self.seq_len
        keys = epoch_keys(self.seed, epoch)
        room = min(self.seq_len - 1, self.num_tokens - 1 - windows * self.seq_len)
        shift = keys[ROUNDS] % (room + 1)
        return shift + permute(index, windows, keys) * self.seq_len


@lru_cache(maxsize=16)
def epoch_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """``ROUNDS`` round keys and one more for the shift, all 64-bit, of an epoch."""
    text = f"slipstream sampler {seed} {epoch}".encode()
    digests = (hashlib.blake2b(text, digest_size=8, salt=bytes([i])) for i in range(ROUNDS + 1))
    return tuple(int.from_bytes(digest.digest(), "little") for digest in digests)


def permute(index: int, size: int, keys: tuple[int, ...]) -> int:
    """Where a keyed pseudo-random permutation of ``range(size)`` sends ``index``.

    A Feistel network permutes the next power of two; walking its cycle until the value falls below
    ``size`` (fewer than two steps on average) restricts it to the range.
    """
    bits = max(2, (size - 1).bit_length())
    value = _feistel(index, bits, keys)
    while value >= size:
        value = _feistel(value, bits, keys)
    return value


def _feistel(value: int, bits: int, keys: tuple[int, ...]) -> int:
    low_bits = bits // 2
    high_bits = bits - low_bits
    high, low = value >> low_bits, value & ((1 << low_bits) - 1)
    for key in keys[:ROUNDS]:
        high, low = low, high ^ (_mix(low, key) >> (64 - high_bits))
        high_bits, low_bits = low_bits, high_bits
    return high << low_bits | low


def _mix(value: int, key: int) -> int:
    mixed = (value ^ key) * 0xFF51AFD7ED558CCD & _MASK
    mixed = (mixed ^ mixed >> 33) * 0xC4CEB9FE1A85EC53 & _MASK
    return mixed ^ mixed >> 29
