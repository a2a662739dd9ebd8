"""What SOURCE means: files, folders, ``stdlib`` and ``hf:NAME[:SPLIT]``, as an ordered list.

Names of documents are relative to their source, so the same text gives the same shards wherever it
lies. Hidden files, and files in folders whose type is unknown, are passed over.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from slipstream.errors import DataError

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
CODECS = (".gz", ".zst")
TYPES = ".txt .md .rst .py .jsonl (each also .gz or .zst) and .parquet"
Kind = Literal["text", "jsonl", "parquet", "python", "hf"]
# Tests of CPython hold files that are broken on purpose.
_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file, or one Hugging Face data set."""

    name: str
    """Identity of its documents, relative to what the user named."""
    path: str
    """Where it is; ``hf:NAME[:CONFIG]:SPLIT`` for a data set."""
    kind: Kind
    """How it is read."""
    size: int = 0
    """Bytes on disk, 0 if unknown."""
    modified_ns: int = 0
    """Time of the last change."""
    named: bool = False
    """The user named this very file, so it must hold text."""


def resolve(specs: Sequence[str]) -> list[Source]:
    """Every file behind the SOURCE arguments, in order.

    DataError for one that is missing, empty, of unknown type, or holds nothing to read.
    """
    if not specs:
        raise DataError("SOURCE: none given; name files, folders, stdlib or hf:NAME")
    found = [source for spec in specs for source in _resolve(spec)]
    seen: dict[str, int] = {}
    for index, source in enumerate(found):
        seen[source.name] = count = seen.get(source.name, 0) + 1
        if count > 1:
            found[index] = replace(source, name=f"{source.name}#{count}")
    return found


def kind_of(name: str) -> Kind | None:
    """How a file of this name is read, None if it is not."""
    stem, suffix = os.path.splitext(name.lower())
    if suffix == ".parquet":
        return "parquet"
    if suffix in CODECS:
        suffix = os.path.splitext(stem)[1]
    if suffix == ".jsonl":
        return "jsonl"
    return "text" if suffix in TEXT_SUFFIXES else None


def _resolve(spec: str) -> list[Source]:
    if spec == "stdlib":
        return _stdlib()
    if spec.startswith("hf:"):
        return [_hugging_face(spec)]
    path = Path(spec)
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise DataError(f"SOURCE {spec}: no such file or folder; check the path")
    kind = kind_of(path.name)
    if kind is None:
        raise DataError(f"SOURCE {spec}: unknown type; types read are {TYPES}")
    if not path.is_file():
        raise DataError(f"SOURCE {spec}: not a regular file; types read are {TYPES}")
    if path.stat().st_size == 0:
        raise DataError(f"SOURCE {spec}: empty; leave it out or put text into it")
    return [_file(path, path.name, kind, named=True)]


def _file(path: Path, name: str, kind: Kind, named: bool = False) -> Source:
    stat = path.stat()
    return Source(
        name=name,
        path=str(path),
        kind=kind,
        size=stat.st_size,
        modified_ns=stat.st_mtime_ns,
        named=named,
    )


def _folder(root: Path) -> list[Source]:
    found = []
    for path in _walk(root, skip=set()):
        kind = kind_of(path.name)
        if kind is not None and path.stat().st_size:
            found.append(_file(path, path.relative_to(root).as_posix(), kind))
    if not found:
        raise DataError(f"SOURCE {root}: no non-empty file to read in it; types read are {TYPES}")
    return found


def _stdlib() -> list[Source]:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in _walk(root, skip=_NOT_SOURCE) if path.suffix == ".py")
    found = [
        _file(path, f"stdlib/{path.relative_to(root).as_posix()}", "python")
        for path in files
        if path.stat().st_size
    ]
    if not found:
        raise DataError(
            f"SOURCE stdlib: {root} holds no Python source (Python {sys.version.split()[0]}); "
            "name files or folders of text instead"
        )
    return found


def _walk(root: Path, skip: set[str]) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in skip and not name.startswith(".")
        )
        for name in sorted(files):
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _hugging_face(spec: str) -> Source:
    parts = spec.removeprefix("hf:").split(":")
    if not 1 <= len(parts) <= 3 or not all(parts):
        raise DataError(f"SOURCE {spec}: write hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    name, split = parts[0], parts[-1] if len(parts) > 1 else "train"
    config = parts[1:-1]
    return Source(name=spec, path=":".join(["hf", name, *config, split]), kind="hf", named=True)
