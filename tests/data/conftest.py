"""Small real inputs, and the command line run in this process."""

import gzip
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from slipstream.cli import main
from slipstream.data import PrepareRequest, prepare_shards


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def cli(monkeypatch, capsys) -> Callable[..., Outcome]:
    """``slipstream prepare ARGS`` in this process: exit code, stdout, stderr."""

    def run(*args: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["slipstream", "prepare", *map(str, args)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return Outcome(code, out, err)

    return run


@pytest.fixture
def words() -> Callable[[int, int], str]:
    """Reproducible text of about ``size`` characters with line breaks and non-ASCII letters."""

    def make(size: int, seed: int = 0) -> str:
        rng = random.Random(seed)
        vocabulary = ["the", "quick", "brown", "fox", "na\u00efve", "\u4e16\u754c", "1234", "x=y;"]
        text = ""
        while len(text) < size:
            line = " ".join(rng.choice(vocabulary) for _ in range(rng.randint(1, 12)))
            text += line + rng.choice([".\n", "\n", "\n\n", "\t"])
        return text

    return make


@pytest.fixture
def corpus(tmp_path, words) -> Path:
    """A folder of documents: text, gzip, JSON lines and a subfolder."""
    root = tmp_path / "corpus"
    (root / "sub").mkdir(parents=True)
    for index in range(6):
        (root / "sub" / f"{index}.md").write_text(words(3000, index), encoding="utf-8")
    rows = [json.dumps({"text": words(700, 100 + i), "n": i}) for i in range(40)]
    (root / "rows.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    (root / "more.txt.gz").write_bytes(gzip.compress(words(9000, 7).encode()))
    (root / "ignored.bin").write_bytes(b"\xff\xfe")
    (root / "empty.txt").write_bytes(b"")
    return root


@pytest.fixture
def prepare(tmp_path) -> Callable[..., Path]:
    """Prepare sources (byte tokenizer, one worker, unless told otherwise) and give the folder."""

    def run(*sources: object, out: str = "out", progress=None, **options: object) -> Path:
        settings = {"tokenizer": "byte", "workers": 1, **options}
        request = PrepareRequest(sources=tuple(map(str, sources)), out=tmp_path / out, **settings)
        prepare_shards(request, progress)
        return tmp_path / out

    return run


@pytest.fixture
def raw_shards(tmp_path) -> Callable[[np.ndarray], Path]:
    """A nanoGPT file of the given tokens."""

    def write(tokens: np.ndarray, name: str = "train.bin") -> Path:
        path = tmp_path / name
        tokens.astype("<u2").tofile(path)
        return path

    return write


@pytest.fixture
def shared_data() -> Path:
    root = Path(__file__).parents[2]
    folder = Path(os.environ.get("SLIPSTREAM_SHARED", root / "../shared")) / "data"
    if not (folder / "python_docs.jsonl.gz").exists():
        pytest.skip(f"no real text at {folder} (set SLIPSTREAM_SHARED)")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture
def read_folder() -> Callable[[Path], dict[str, bytes]]:
    return contents
