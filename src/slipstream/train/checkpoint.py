"""Checkpoints through torch.distributed.checkpoint: in the background, atomic, last n and best.

A checkpoint is a folder ``step_00000100`` with the DCP files and ``meta.json``. It is written
under a hidden name and renamed when complete, so a folder that is there is whole; ``meta.json``
has the sizes of its files, so one that was cut later is found out.
"""

import json
import os
import re
import shutil
import warnings
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import CheckpointException

from slipstream.errors import CheckpointError
from slipstream.parallel import Ranks

META = "meta.json"
_NAME = re.compile(r"step_(\d{8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """What can be read without loading a tensor."""

    step: int
    """Optimizer steps done."""
    next_sample: int
    """Position in the data: the one integer of the sampler's state."""
    model: dict[str, Any]
    """The model's config."""
    world: int
    """Ranks that wrote it."""
    tokenizer_hash: str | None = None
    """Tokenizer of the training shards."""
    val_loss: float | None = None
    """Validation loss at this step, if it was evaluated."""
    files: dict[str, int] = field(default_factory=dict)
    """Sizes of the files in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint on disk."""

    path: Path
    """Its folder."""
    meta: Meta
    """Its description."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int, background: bool) -> None:
        self.folder, self.ranks = folder, ranks
        self.keep, self.background = keep, background
        self._pending: tuple[Future, Path, Meta] | None = None

    def save(self, state: dict[str, Any], meta: Meta) -> None:
        """Write ``state``; returns once it has been copied, or once on disk if not background."""
        self.wait()
        target = self.folder / f"step_{meta.step:08d}"
        hidden = self.folder / f".{target.name}.partial"
        if self.ranks.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(hidden, ignore_errors=True)
            shutil.rmtree(target, ignore_errors=True)
        self.ranks.barrier()
        _expect_one_process()
        future = dcp.async_save(
            state,
            checkpoint_id=hidden,
            process_group=self.ranks.control,
            no_dist=self.ranks.world == 1,
        )
        assert isinstance(future, Future)
        self._pending = (future, target, meta)
        if not self.background:
            self.wait()

    def poll(self) -> None:
        """Finish a background write that is done; never waits."""
        if self._pending is not None and self._pending[0].done() and self.ranks.world == 1:
            self.wait()

    def wait(self) -> None:
        """Wait for the write under way, make it visible and drop old checkpoints."""
        if self._pending is None:
            return
        future, target, meta = self._pending
        self._pending = None
        hidden = self.folder / f".{target.name}.partial"
        problem = _problem_of(future)
        problems = [text for text in self.ranks.gather(problem) if text]
        if problems:
            if self.ranks.is_first:
                shutil.rmtree(hidden, ignore_errors=True)
            raise CheckpointError(
                f"{target}: could not be written: {problems[0]}; the run's earlier checkpoints "
                "are untouched: free some space and continue with --resume"
            )
        if self.ranks.is_first:
            self._publish(hidden, target, meta)
        self.ranks.barrier()

    def _publish(self, hidden: Path, target: Path, meta: Meta) -> None:
        files = {p.name: p.stat().st_size for p in sorted(hidden.iterdir())}
        text = json.dumps(asdict(meta) | {"files": files}, indent=1)
        with open(hidden / META, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        hidden.rename(target)
        self._prune()

    def _prune(self) -> None:
        found = find(self.folder)
        best = best_of(found)
        for saved in found[: -self.keep]:
            if saved is not best:
                shutil.rmtree(saved.path)


def find(folder: Path) -> list[Saved]:
    """Complete checkpoints below ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    named = sorted(p for p in folder.iterdir() if _NAME.fullmatch(p.name))
    return [Saved(path=path, meta=read_meta(path)) for path in named]


def best_of(found: list[Saved]) -> Saved | None:
    """The evaluated checkpoint with the lowest validation loss."""
    losses = [(s.meta.val_loss, i) for i, s in enumerate(found) if s.meta.val_loss is not None]
    return found[min(losses)[1]] if losses else None


def choose(folder: Path, which: str) -> Saved:
    """The ``latest`` or ``best`` checkpoint; CheckpointError where there is none."""
    found = find(folder)
    if not found:
        raise CheckpointError(f"{folder}: holds no checkpoint; train first")
    if which == "latest":
        return found[-1]
    best = best_of(found)
    if best is None:
        raise CheckpointError(
            f"{folder}: no checkpoint was evaluated; use latest, or set eval.every"
        )
    return best


def read_meta(path: Path) -> Meta:
    """Description of a checkpoint whose files are all there in full, or CheckpointError."""
    try:
        meta = Meta(**json.loads((path / META).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"{path / META}: cannot be read ({error}); delete {path} to use an earlier checkpoint"
        ) from None
    for name, size in meta.files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(
                f"{file}: {state}, so the checkpoint is damaged; "
                f"delete {path} to use an earlier checkpoint"
            )
    return meta


def load(saved: Saved, state: dict[str, Any], ranks: Ranks | None = None) -> None:
    """Read a checkpoint into the tensors of ``state``, on any number of ranks."""
    alone = ranks is None or ranks.world == 1
    _expect_one_process()
    try:
        dcp.load(
            state,
            checkpoint_id=saved.path,
            process_group=None if ranks is None else ranks.control,
            no_dist=alone,
        )
    except (CheckpointException, RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[-1]
        raise CheckpointError(
            f"{saved.path}: cannot be loaded: {reason}; delete it to use an earlier checkpoint"
        ) from None


def check_model(saved: Saved, config: dict[str, Any]) -> None:
    """Raise unless the checkpoint was written by a model of this config."""
    for key in sorted({*config, *saved.meta.model}):
        here, there = config.get(key), saved.meta.model.get(key)
        if here != there:
            raise CheckpointError(
                f"{saved.path}: belongs to another model: model.{key} is {there!r} there and "
                f"{here!r} here; use the recipe of that run or another --run-dir"
            )


def _expect_one_process() -> None:
    # DCP warns that there is no process group each time, from its writer thread as well.
    warnings.filterwarnings("ignore", message=".*assuming the intent is to (save|load)")


def _problem_of(future: Future) -> str | None:
    # DCP wraps what went wrong in an exception that is not an Exception.
    error = future.exception()
    if error is None:
        return None
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """States of this rank's random generators."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore what ``rng_state`` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
