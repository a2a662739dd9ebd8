"""The folder of a run: resolved config, metrics, events, checkpoints, tokenizer, and its lock."""

import errno
import fcntl
import os
import shutil
import socket
import tempfile
import tomllib
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.config import to_toml
from slipstream.config.load import read_toml
from slipstream.data.manifest import is_prepared
from slipstream.errors import CheckpointError, ConfigError
from slipstream.train import checkpoint
from slipstream.train.config import RunConfig

LOCK = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class RunFolder:
    """Paths of a run and the rules for using a folder that already has one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metrics = path / "config.toml", path / "metrics.jsonl"
        self.checkpoints, self.tokenizer = path / "checkpoints", path / "tokenizer.json"
        self._lock: int | None = None
        self._made: list[Path] = []

    def is_used(self) -> bool:
        """Whether a run has been started here."""
        return self.config.exists() or self.metrics.exists() or self.checkpoints.exists()

    def check(self, *, resume: bool, data: str | None = None) -> None:
        """ConfigError if this folder cannot take the run; writes nothing.

        ``data``: folder of the training data, if it is known, which must not be this one.
        """
        try:
            self._check_place(data)
            if self.is_used() and not resume:
                raise ConfigError(
                    f"--run-dir {self.path}: already holds a run; continue it with --resume or "
                    "give another folder"
                )
            self._check_writable()
        except OSError as error:
            place = error.filename if isinstance(error.filename, str) else self.path
            raise ConfigError(
                f"--run-dir {self.path}: cannot be used: {place}: {error.strerror or error}; "
                "give another folder"
            ) from None

    def _check_place(self, data: str | None) -> None:
        if self.path.is_symlink() and not self.path.exists():
            raise ConfigError(f"--run-dir {self.path}: is a link to nothing; give a folder")
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(f"--run-dir {self.path}: is a file; give a folder")
        above = _nearest(self.path)
        if not above.is_dir():
            raise ConfigError(f"--run-dir {self.path}: {above} is a file; give another folder")
        real = Path(os.path.realpath(self.path))
        if data is not None and real == Path(os.path.realpath(data)):
            raise ConfigError(f"--run-dir {self.path}: is data.path; give another folder")
        for folder in (real, *real.parents):
            if is_prepared(folder):
                raise ConfigError(
                    f"--run-dir {self.path}: is in {folder}, which slipstream prepare made; "
                    "give another folder"
                )

    def _check_writable(self) -> None:
        for folder in (_nearest(self.path), self.checkpoints):
            if folder.exists():
                # Nameless from the start where the file system can do that, gone at once elsewhere.
                with tempfile.TemporaryFile(dir=folder):
                    pass
        if self.metrics.exists() and not os.access(self.metrics, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.metrics))

    def latest(self) -> checkpoint.Saved | None:
        """The newest checkpoint; CheckpointError if it is damaged."""
        return checkpoint.latest(self.checkpoints)

    def changed_since(self, config: RunConfig) -> list[str]:
        """Settings that differ from those the run was last started with."""
        if not self.config.exists():
            return []
        try:
            before = _flat(read_toml(self.config))
        except ConfigError as error:
            raise ConfigError(
                f"{error}; it is only compared with the recipe: delete it to go on"
            ) from None
        now = _flat(tomllib.loads(to_toml(config)))
        keys = sorted(before.keys() | now.keys())
        return [
            f"{key}: {before.get(key, 'unset')} -> {now.get(key, 'unset')}"
            for key in keys
            if before.get(key) != now.get(key)
        ]

    def start(self, config: RunConfig, tokenizer_file: Path | None) -> None:
        """Create the folder and write what the run was started with; CheckpointError."""
        self._make()
        for leftover in self.checkpoints.glob(".*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        if tokenizer_file is not None:
            replace_file(self.tokenizer, tokenizer_file.read_bytes())
        replace_file(self.config, to_toml(config).encode())

    def lock(self) -> None:
        """Keep other processes out until ``unlock`` or the end of this one; ConfigError if taken.

        Creates the folder; ``unlock`` removes it again if it stayed empty.
        """
        self._make()
        self._lock = _take(self.path)

    def unlock(self) -> None:
        """Let others in; does nothing without a lock."""
        if self._lock is None:
            return
        with suppress(OSError):
            (self.path / LOCK).unlink()
        os.close(self._lock)
        self._lock = None
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def _make(self) -> None:
        missing = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(self.path, error) from None
        self._made = self._made or missing


def replace_file(path: Path, data: bytes) -> None:
    """Write a file whole; if that fails, CheckpointError and what was there before is there."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise write_error(path, error) from None


def write_error(path: Path, error: OSError) -> CheckpointError:
    """What to raise where a file of a run cannot be written."""
    return CheckpointError(
        f"{path}: cannot be written: {error.strerror or error}; make room or change the "
        "permissions and continue with --resume, or give another --run-dir"
    )


def _nearest(path: Path) -> Path:
    # The deepest part of the path that is there.
    whole = path.absolute()
    return next(p for p in (whole, *whole.parents) if p.exists())


def _take(folder: Path) -> int | None:
    file = folder / LOCK
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise write_error(file, error) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 100, 0).decode("utf-8", "replace").strip() or "unknown"
            os.close(handle)
            raise ConfigError(
                f"another process is training in {folder} ({holder}); stop it or give another "
                "--run-dir"
            ) from None
        except OSError as error:
            os.close(handle)
            if error.errno not in _NO_LOCKS:
                raise write_error(file, error) from None
            warnings.warn(
                f"{folder}: its file system has no locks ({error.strerror}); make sure that no "
                "other process trains there",
                stacklevel=3,
            )
            return None
        # Its owner may have removed the file between our open and our lock: then it locks nothing.
        if file.exists() and os.path.samestat(os.fstat(handle), os.stat(file)):
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            return handle
        os.close(handle)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = prefix + key
        flat.update(_flat(value, name + ".") if isinstance(value, dict) else {name: value})
    return flat
