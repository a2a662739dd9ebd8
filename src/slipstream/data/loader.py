"""Batches for training, built and pinned by a thread ahead of the step that needs them.

Global samples are numbered once for all ranks: a step takes ``samples_per_step`` of them and rank r
takes the r-th block. The whole state of a loader is the number of its next sample.
"""

import functools
import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.data.sampler import Sampler
from slipstream.data.shards import ShardSet
from slipstream.errors import ConfigError, DataError

IGNORED = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples as contiguous CPU tensors, allocated for this batch only."""

    tokens_BL: torch.Tensor
    """Inputs, int64."""
    targets_BL: torch.Tensor
    """Next tokens, int64; -100 where the next token belongs to another document (if masked)."""
    document_BL: torch.Tensor | None
    """Document number within the row from 0, int32; None unless masked."""


def build_batch(
    shards: ShardSet,
    sampler: Sampler,
    sample_numbers: Sequence[int],
    mask_documents: bool,
    pin_memory: bool = False,
) -> Batch:
    """The batch of these global samples, one per row.

    DataError if documents are to be masked and the shards do not know them (raw .bin files).
    """
    starts = [sampler.start(number) for number in sample_numbers]
    return _batch_at(shards, starts, sampler.seq_len, mask_documents, pin_memory)


class Loader:
    """Endless iterator over this rank's batches, built ``prefetch`` steps ahead by a thread.

    Raises ConfigError if ``samples_per_step`` does not divide by ``world``. An error while building
    a batch is raised by ``next``. Close it, or use it as a context manager.
    """

    def __init__(
        self,
        shards: ShardSet,
        sampler: Sampler,
        *,
        samples_per_step: int,
        rank: int,
        world: int,
        first_sample: int,
        mask_documents: bool,
        prefetch: int,
        pin_memory: bool,
    ) -> None:
        if samples_per_step < world or samples_per_step % world:
            raise ConfigError(
                f"train.tokens_per_step makes {samples_per_step} samples of data.seq_len = "
                f"{sampler.seq_len} per step, which {world} ranks cannot share equally; make it a "
                f"multiple of {world * sampler.seq_len}"
            )
        _require_documents(shards, mask_documents)
        self._shards, self._sampler = shards, sampler
        self._samples_per_step, self._rank, self._world = samples_per_step, rank, world
        self._mask_documents, self._pin_memory = mask_documents, pin_memory
        self._next_sample = first_sample
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=prefetch)
        self._stop = threading.Event()
        # A new thread starts on device 0: pinning there would open a context on it from every rank.
        device = torch.cuda.current_device() if pin_memory and torch.cuda.is_available() else None
        self._thread = threading.Thread(
            target=self._fill, args=(first_sample, device), name="slipstream-loader", daemon=True
        )
        self._thread.start()

    @property
    def next_sample(self) -> int:
        """First global sample of the next batch that ``next`` will hand out."""
        return self._next_sample

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._stop.is_set():
            raise RuntimeError("next() on a closed Loader")
        item = self._ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        self._next_sample += self._samples_per_step
        return item

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the thread and wait for it; safe to call twice."""
        self._stop.set()
        while self._thread.is_alive():
            self._drain()
            self._thread.join(timeout=0.05)
        self._drain()

    def _drain(self) -> None:
        try:
            while True:
                self._ready.get_nowait()
        except queue.Empty:
            return

    def _fill(self, first: int, device: int | None) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            while not self._stop.is_set():
                self._ready.put(self._build(first))
                first += self._samples_per_step
        except BaseException as error:
            self._ready.put(error)

    def _build(self, first: int) -> Batch:
        share = self._samples_per_step // self._world
        begin = first + self._rank * share
        numbers = range(begin, begin + share)
        return build_batch(
            self._shards, self._sampler, numbers, self._mask_documents, self._pin_memory
        )


def sequential_batches(
    shards: ShardSet,
    seq_len: int,
    batch_size: int,
    max_samples: int | None,
    rank: int,
    world: int,
    mask_documents: bool,
    pin_memory: bool = False,
) -> Iterator[Batch]:
    """This rank's part of the windows in order, for evaluation; the last batch may be short.

    Ranks get contiguous blocks whose sizes differ by at most one, so a rank may get no batch at
    all. DataError if the data is shorter than one window.
    """
    sampler = Sampler(shards.num_tokens, seq_len, seed=0, shuffle=False)
    _require_documents(shards, mask_documents)
    total = sampler.num_windows if max_samples is None else min(max_samples, sampler.num_windows)
    mine = range(total * rank // world, total * (rank + 1) // world)
    groups = (mine[i : i + batch_size] for i in range(0, len(mine), batch_size))
    return (build_batch(shards, sampler, group, mask_documents, pin_memory) for group in groups)


def _batch_at(
    shards: ShardSet, starts: list[int], seq_len: int, mask_documents: bool, pin_memory: bool
) -> Batch:
    _require_documents(shards, mask_documents)
    shape = (len(starts), seq_len)
    empty = functools.partial(torch.empty, shape, device="cpu", pin_memory=pin_memory)
    tokens_BL, targets_BL = empty(dtype=torch.int64), empty(dtype=torch.int64)
    document_BL = None
    if mask_documents:
        document_BL = empty(dtype=torch.int32)
    for row, start in enumerate(starts):
        window = shards.read(start, seq_len + 1)
        tokens_BL.numpy()[row] = window[:-1]
        targets_BL.numpy()[row] = window[1:]
        if document_BL is not None:
            cuts = _cuts(shards.document_starts, start, seq_len)
            targets_BL.numpy()[row, cuts - 1] = IGNORED
            document_BL.numpy()[row] = np.searchsorted(cuts, np.arange(seq_len), side="right")
    return Batch(tokens_BL=tokens_BL, targets_BL=targets_BL, document_BL=document_BL)


def _cuts(document_starts: np.ndarray, start: int, seq_len: int) -> np.ndarray:
    """Positions 1 to ``seq_len`` of the window at which a new document begins."""
    first, last = np.searchsorted(document_starts, [start, start + seq_len], side="right")
    return np.asarray(document_starts[first:last]) - start


def _require_documents(shards: ShardSet, mask_documents: bool) -> None:
    if mask_documents and not shards.has_documents:
        raise DataError(
            f"data.mask_documents = true: {shards.path} holds raw .bin files, which do not say "
            "where documents begin; set it to false or use slipstream prepare"
        )
