"""The hidden folder beside ``--out`` in which a prepared set grows, and its move into place.

It remembers the inputs it belongs to, so a rerun with the same inputs finds its finished pieces and
any other starts afresh. A lock keeps two runs apart.
"""

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import IO

from slipstream.data.manifest import MANIFEST, is_prepared
from slipstream.data.parts import ResumableError
from slipstream.data.pieces import piece_path
from slipstream.errors import ConfigError, DataError

INPUTS = "inputs.json"


class Workspace:
    """``.NAME.partial`` beside the target folder ``NAME``; use as a context manager.

    ``inputs`` identifies what is being prepared. Leaving with an error removes the folder, unless
    finished pieces can help the next run.
    """

    def __init__(self, target: Path, inputs: dict[str, object]) -> None:
        self.target = target.resolve()
        self.folder = self.target.with_name(f".{self.target.name}.partial")
        self.pieces = self.folder / "pieces"
        self.result = self.folder / "result"
        self.tokenizer = self.folder / "tokenizer"
        self.resumed = False
        self._inputs = json.dumps(inputs, indent=2) + "\n"
        self._lock: IO[str] | None = None

    def __enter__(self) -> "Workspace":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self.folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise DataError(
                f"--out {self.target}: another slipstream prepare is writing it; wait for it"
            ) from None
        try:
            self._find_earlier_work()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        assert self._lock is not None
        finished = self.finished()
        keep = kind is not None and finished and not _is_final(kind)
        if keep:
            self._drop_unfinished()
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()

    def has_piece(self, index: int) -> bool:
        """Whether this piece was finished, now or by an earlier run."""
        return piece_path(self.pieces, index).exists()

    def finished(self) -> int:
        """How many pieces are finished."""
        return sum(1 for _ in self.pieces.glob("*.npz"))

    def start_result(self) -> Path:
        """The empty folder in which the prepared set is put together."""
        shutil.rmtree(self.result, ignore_errors=True)
        self.result.mkdir()
        return self.result

    def publish(self) -> None:
        """Move the result to the target, which appears, or is replaced, as a whole."""
        (self.result / INPUTS).write_text(self._inputs, encoding="utf-8")
        old = self.folder / "replaced"
        if self.target.exists():
            os.rename(self.target, old)
        try:
            os.rename(self.result, self.target)
        except BaseException:
            if old.exists():
                os.rename(old, self.target)
            raise

    def _find_earlier_work(self) -> None:
        memo = self.folder / INPUTS
        self.resumed = memo.is_file() and memo.read_text(encoding="utf-8") == self._inputs
        if not self.resumed:
            for path in (self.pieces, self.tokenizer):
                shutil.rmtree(path, ignore_errors=True)
        self._drop_unfinished()
        self.pieces.mkdir(exist_ok=True)
        self.tokenizer.mkdir(exist_ok=True)
        memo.write_text(self._inputs, encoding="utf-8")

    def _drop_unfinished(self) -> None:
        shutil.rmtree(self.result, ignore_errors=True)
        for path in self.pieces.glob("*.tmp"):
            path.unlink(missing_ok=True)


def check_target(target: Path, inputs: dict[str, object], overwrite: bool) -> bool:
    """Whether ``target`` already holds these very inputs, prepared.

    DataError if it holds anything else that may not be replaced.
    """
    if not target.exists() and not target.is_symlink():
        return False
    if not target.is_dir():
        raise DataError(f"--out {target}: is a file; name a folder")
    if not any(target.iterdir()):
        return False
    if not is_prepared(target):
        raise DataError(
            f"--out {target}: not empty, and holds no {MANIFEST} of ours; name a new folder"
        )
    memo = target / INPUTS
    same = (
        memo.is_file() and memo.read_text(encoding="utf-8") == json.dumps(inputs, indent=2) + "\n"
    )
    if same or overwrite:
        return same and not overwrite
    raise DataError(
        f"--out {target}: holds a set prepared from other sources or options; name a new folder, "
        "or replace it with --overwrite"
    )


def _is_final(kind: type[BaseException]) -> bool:
    """Errors that the same command would meet again, so finished pieces are of no use."""
    return issubclass(kind, (DataError, ConfigError)) and not issubclass(kind, ResumableError)
