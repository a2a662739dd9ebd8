"""Checkpoints through torch.distributed.checkpoint: in the background, atomic, last n and best.

A checkpoint is a folder ``step_00000100`` with the DCP files and ``meta.json``. It is written
under a hidden name and renamed when complete, and hidden again before it is deleted, so a folder
that is there is whole. ``meta.json`` has size and CRC-32 of every file: one cut later is found when
a run is opened, one that changed when it is loaded.
"""

import json
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt
from torch.distributed.checkpoint import CheckpointException

from slipstream.config import Config, validate
from slipstream.errors import CheckpointError, ConfigError
from slipstream.parallel import Ranks

META = "meta.json"
_NAME = re.compile(r"step_(\d{8,})")
_BLOCK_BYTES = 1 << 20


class Meta(Config):
    """What can be read without loading a tensor."""

    model_config = ConfigDict(strict=True)

    step: NonNegativeInt
    """Optimizer steps done."""
    next_sample: NonNegativeInt
    """Position in the data: the one integer of the sampler's state."""
    model: dict[str, Any]
    """The model's config."""
    world: PositiveInt
    """Ranks that wrote it."""
    tokenizer_hash: str | None = None
    """Tokenizer of the training shards."""
    val_loss: FiniteFloat | None = None
    """Validation loss at this step, if it was evaluated."""
    num_tokens: NonNegativeInt | None = None
    """Training tokens of the data; None here and below: written by an older version."""
    data_hash: str | None = None
    """Hash of the training tokens, if the data has one."""
    seq_len: PositiveInt | None = None
    """Tokens of a sample."""
    seed: int | None = None
    """Seed of the order of the data."""
    files: dict[str, NonNegativeInt] = Field(default_factory=dict)
    """Sizes of the files in bytes."""
    checksums: dict[str, str] = Field(default_factory=dict)
    """CRC-32 of the files, eight hex digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint on disk."""

    path: Path
    """Its folder."""
    meta: Meta
    """Its description."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A write under way."""

    done: "Future[dict[str, str]]"
    """Resolves to the checksums of the files this rank wrote."""
    target: Path
    """Name once complete."""
    meta: Meta
    """Its description, files not yet listed."""

    @property
    def hidden(self) -> Path:
        """Name until then."""
        return self.target.with_name(f".{self.target.name}.partial")


class Checkpoints:
    """The checkpoints of one run; every rank makes one, at the same time."""

    def __init__(self, folder: Path, ranks: Ranks, *, keep: int, background: bool) -> None:
        self.folder, self.ranks = folder, ranks
        self.keep, self.background = keep, background
        self._pending: _Write | None = None
        # The writer threads talk while training votes and gathers: on one group the two would
        # meet in another order on every rank.
        self._group: Any = dist.new_group(backend="gloo") if ranks.world > 1 else None

    def save(self, state: dict[str, Any], meta: Meta) -> None:
        """Write ``state``; returns once it has been copied, or once on disk if not background."""
        self.wait()
        target = self.folder / f"step_{meta.step:08d}"
        hidden = target.with_name(f".{target.name}.partial")
        problem = self._on_first(lambda: _make_empty(hidden))
        if problem is not None:
            raise _not_written(target, problem)
        _expect_one_process()
        written = dcp.async_save(
            state, checkpoint_id=hidden, process_group=self._group, no_dist=self.ranks.world == 1
        )
        assert isinstance(written, Future)
        done = _then_checksums(written, hidden, self.ranks.rank)
        self._pending = _Write(done=done, target=target, meta=meta)
        if not self.background:
            self.wait()

    def is_written(self) -> bool:
        """Whether a background write waits to be made visible and is done on this rank."""
        return self._pending is not None and self._pending.done.done()

    def poll(self, all_written: bool) -> None:
        """Make a background write visible once every rank's ``is_written`` was true.

        Never waits for a disk, and ranks meet only if ``all_written``, which must be the same on
        all of them.
        """
        if all_written:
            self.wait()

    def wait(self) -> None:
        """Wait for the write under way, make it visible and drop old checkpoints."""
        if self._pending is None:
            return
        write, self._pending = self._pending, None
        problem = _problem_of(write.done)
        reports = self.ranks.gather((problem, {} if problem else write.done.result()))
        problem = next((text for text, _ in reports if text), None)
        if problem is None:
            checksums = {name: crc for _, sums in reports for name, crc in sums.items()}
            problem = self._on_first(lambda: self._publish(write, checksums))
        if problem is not None:
            if self.ranks.is_first:
                shutil.rmtree(write.hidden, ignore_errors=True)
            raise _not_written(write.target, problem)

    def _publish(self, write: _Write, checksums: dict[str, str]) -> None:
        files = {p.name: p.stat().st_size for p in sorted(write.hidden.iterdir())}
        meta = write.meta.model_copy(update={"files": files, "checksums": checksums})
        with open(write.hidden / META, "w", encoding="utf-8") as stream:
            stream.write(json.dumps(meta.model_dump(), indent=1))
            stream.flush()
            os.fsync(stream.fileno())
        _sync(write.hidden)
        # A run that starts over at an earlier step meets the checkpoint it once wrote here.
        replaced = _hide(write.target) if write.target.exists() else None
        write.hidden.rename(write.target)
        _sync(self.folder)
        if replaced is not None:
            shutil.rmtree(replaced, ignore_errors=True)
        self._prune()

    def _prune(self) -> None:
        # A damaged one is not ours to judge here: it neither counts nor goes.
        whole = []
        for path in _folders(self.folder):
            try:
                whole.append(Saved(path=path, meta=read_meta(path)))
            except CheckpointError:
                continue
        best = best_of(whole)
        for saved in whole[: -self.keep]:
            if saved is best:
                continue
            try:
                hidden = _hide(saved.path)
            except OSError as error:
                warnings.warn(f"{saved.path}: cannot be removed: {error}", stacklevel=2)
            else:
                shutil.rmtree(hidden, ignore_errors=True)

    def _on_first(self, action: Callable[[], None]) -> str | None:
        # Where rank 0 alone fails, the others must hear of it instead of waiting for it.
        problem = None
        if self.ranks.is_first:
            try:
                action()
            except OSError as error:
                problem = str(error)
        return self.ranks.from_first(problem)


def find(folder: Path) -> list[Saved]:
    """Checkpoints below ``folder``, oldest first; CheckpointError if one of them is damaged."""
    return [Saved(path=path, meta=read_meta(path)) for path in _folders(folder)]


def latest(folder: Path) -> Saved | None:
    """The newest checkpoint; older ones are not looked at. CheckpointError if it is damaged."""
    paths = _folders(folder)
    return Saved(path=paths[-1], meta=read_meta(paths[-1])) if paths else None


def best_of(found: list[Saved]) -> Saved | None:
    """The evaluated checkpoint with the lowest validation loss."""
    losses = [(s.meta.val_loss, i) for i, s in enumerate(found) if s.meta.val_loss is not None]
    return found[min(losses)[1]] if losses else None


def choose(folder: Path, which: str) -> Saved:
    """The ``latest`` or ``best`` checkpoint; CheckpointError where there is none."""
    newest = latest(folder)
    if newest is None:
        raise CheckpointError(f"{folder}: holds no checkpoint; train first")
    if which == "latest":
        return newest
    best = best_of(find(folder))
    if best is None:
        raise CheckpointError(
            f"{folder}: no checkpoint was evaluated; use latest, or set eval.every"
        )
    return best


def read_meta(path: Path) -> Meta:
    """Description of a checkpoint whose files are all there in full, or CheckpointError."""
    way_out = _way_out(path)
    try:
        values = json.loads((path / META).read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("not a JSON object")
        meta = validate(Meta, values, str(path / META))
    except ConfigError as error:
        raise CheckpointError(f"{error}; {way_out}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / META}: cannot be read ({error}); {way_out}") from None
    for name, size in meta.files.items():
        file = path / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise CheckpointError(f"{file}: {state}, so the checkpoint is damaged; {way_out}")
    return meta


def verify(saved: Saved, ranks: Ranks | None = None) -> None:
    """Compare every file with its checksum, ranks sharing the files; CheckpointError on all."""
    rank, world = (0, 1) if ranks is None else (ranks.rank, ranks.world)
    problem = None
    for name in sorted(saved.meta.checksums)[rank::world]:
        try:
            intact = _checksum(saved.path / name) == saved.meta.checksums[name]
            state = None if intact else "is not what was written (its CRC-32 differs)"
        except OSError as error:
            state = f"cannot be read ({error.strerror})"
        if state is not None:
            problem = f"{saved.path / name}: {state}, so the checkpoint is damaged"
            break
    problems = [problem] if ranks is None else ranks.gather(problem)
    for text in problems:
        if text is not None:
            raise CheckpointError(f"{text}; {_way_out(saved.path)}")


def load(saved: Saved, state: dict[str, Any], ranks: Ranks | None = None) -> None:
    """Verify a checkpoint and read it into the tensors of ``state``, on any number of ranks."""
    verify(saved, ranks)
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


def check_data(
    saved: Saved, *, num_tokens: int, data_hash: str | None, seq_len: int, seed: int
) -> list[str]:
    """One line for each thing that decides which tokens come next and differs from then.

    What an older checkpoint or raw shards do not say is not compared.
    """
    meta = saved.meta
    pairs = [
        ("training tokens", meta.num_tokens, num_tokens),
        ("hash of the training tokens", meta.data_hash, data_hash),
        ("data.seq_len", meta.seq_len, seq_len),
        ("train.seed", meta.seed, seed),
    ]
    return [
        f"{name}: {there} -> {here}"
        for name, there, here in pairs
        if there is not None and here is not None and there != here
    ]


def has_rng(saved: Saved, rank: int, device: torch.device) -> bool:
    """Whether the checkpoint has every random state that ``rng_state`` of a rank has.

    One written on a CPU has none of a GPU: load it without ``rng`` and let random states start
    anew. Raises CheckpointError.
    """
    try:
        stored = dcp.FileSystemReader(saved.path).read_metadata().state_dict_metadata
    except Exception as error:
        # Unpickling a damaged file can raise anything.
        raise CheckpointError(
            f"{saved.path / '.metadata'}: cannot be read ({error}); {_way_out(saved.path)}"
        ) from None
    kinds = ("cpu", "cuda") if device.type == "cuda" else ("cpu",)
    return all(f"rng.rank{rank}.{kind}" in stored for kind in kinds)


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


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    named = [(match, path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted((int(match[1]), path) for match, path in named)]


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)


def _hide(path: Path) -> Path:
    # Deleting takes many calls; a kill between them must not leave half a checkpoint in sight.
    hidden = path.with_name(f".{path.name}.deleted.partial")
    shutil.rmtree(hidden, ignore_errors=True)
    return path.rename(hidden)


def _sync(folder: Path) -> None:
    # A rename survives a power cut only once its folder is on disk.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _then_checksums(written: Future, folder: Path, rank: int) -> "Future[dict[str, str]]":
    # In the writer thread, so training goes on: half a second per GiB on one core, from the page
    # cache. Each rank sums its own files, and so nobody reads what others wrote.
    done: Future[dict[str, str]] = Future()

    def finish(_: Future) -> None:
        try:
            written.result()
            done.set_result({p.name: _checksum(p) for p in _written_by(folder, rank)})
        except BaseException as error:
            # Whatever it was, whoever waits must get it: they would wait forever.
            done.set_exception(error)

    written.add_done_callback(finish)
    return done


def _written_by(folder: Path, rank: int) -> list[Path]:
    # DCP names the files of rank 3 __3_0.distcp and so on; rank 0 writes .metadata as well.
    return [
        path
        for path in sorted(folder.iterdir())
        if path.name.startswith(f"__{rank}_") or (rank == 0 and not path.name.startswith("__"))
    ]


def _checksum(path: Path) -> str:
    crc = 0
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


def _way_out(path: Path) -> str:
    return f"delete {path} to use an earlier checkpoint"


def _not_written(target: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{target}: could not be written: {problem}; the run's earlier checkpoints "
        "are untouched: free some space and continue with --resume"
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
