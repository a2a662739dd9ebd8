"""Every kind of bad input: one line naming what is wrong and the fix, exit code 2, nothing left."""

import errno
import fcntl
import gzip
import json
import resource
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from slipstream.data import pieces, workers
from slipstream.data.parts import MAX_LINE_BYTES

COMMAND = [sys.executable, "-m", "slipstream", "prepare"]
GOOD = b'{"text": "fine"}\n'
PACKED = zstandard.ZstdCompressor(write_checksum=True).compress(b"hello world\n" * 9999)


def parquet(table):
    def write(path):
        pq.write_table(pa.table(table), path)

    return write


def cut_parquet(path):
    parquet({"text": ["a", "b"]})(path)
    path.write_bytes(path.read_bytes()[:-10])


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


BAD_FILES = {
    "empty": ("a.txt", b"", "a.txt: empty"),
    "empty gzip": ("a.txt.gz", gzip.compress(b""), "a.txt.gz: holds no text"),
    "blank lines": ("a.jsonl", b"\n\n \n", "no text in any of them"),
    "type": ("a.pdf", b"x", "a.pdf: unknown type; types read are .txt"),
    "utf-8": ("a.txt", b"abc\xffdef", "a.txt: not UTF-8 at byte 3 (0xff); convert"),
    "utf-8 after mark": ("a.txt", b"\xef\xbb\xbfab\xff", "a.txt: not UTF-8 at byte 5 (0xff)"),
    "utf-8 far in": ("a.txt", b"line\n" * 400_000 + b"\xe4", "not UTF-8 at byte 2000000 (0xe4)"),
    "utf-8 packed": ("a.md.gz", gzip.compress(b"a\x80"), "a.md.gz: not UTF-8 at byte 1 (0x80)"),
    "utf-16": ("a.txt", "hi".encode("utf-16"), "a.txt: not UTF-8 at byte 0 (0xff)"),
    "utf-8 in json": ("a.jsonl", GOOD + b'{"text": "\xff"}', "a.jsonl:2: not UTF-8 at byte 27"),
    "surrogate": ("a.jsonl", b'{"text": "\\ud800"}', "a.jsonl:1: text: not UTF-8 at byte 0"),
    "json": ("a.jsonl", GOOD + b'{"text": \n', "a.jsonl:2: not valid JSON"),
    "json far in": ("a.jsonl", GOOD * 50_000 + b"{", "a.jsonl:50001: not valid JSON"),
    "json nested": ("a.jsonl", b"[" * 99_999 + b"\n", "a.jsonl:1: not valid JSON"),
    "json array": ("a.jsonl", b"[1]\n", "a.jsonl:1: a JSON list, not an object with 'text'"),
    "field": ("a.jsonl", b'{"body": "x"}\n', "a.jsonl:1: no field 'text'; its fields are body"),
    "null": ("a.jsonl", b'{"text": null}\n', "a.jsonl:1: field 'text' is NoneType, not text"),
    "number": ("a.jsonl", GOOD + b'{"text": 5}\n', "a.jsonl:2: field 'text' is int, not text"),
    "no gzip": ("a.txt.gz", b"plain text", "a.txt.gz: corrupt or truncated gzip"),
    "cut gzip": ("a.txt.gz", gzip.compress(b"hello" * 99)[:-9], "corrupt or truncated gzip"),
    "bad gzip": ("a.txt.gz", flipped(gzip.compress(b"hello" * 99), -6), "truncated gzip"),
    "no zstd": ("a.txt.zst", b"plain text", "a.txt.zst: corrupt zstandard data"),
    "cut zstd": ("a.jsonl.zst", PACKED[:-3], "a.jsonl.zst: truncated zstandard data"),
    "bad zstd": ("a.txt.zst", flipped(PACKED, -1), "a.txt.zst: corrupt zstandard data"),
    "no parquet": ("a.parquet", b"PAR1 no", "a.parquet: corrupt or truncated parquet"),
    "cut parquet": ("a.parquet", cut_parquet, "a.parquet: corrupt or truncated parquet"),
    "no column": ("a.parquet", parquet({"x": ["a"], "y": [1]}), "its columns are x, y; name one"),
    "column type": ("a.parquet", parquet({"text": [1]}), "column 'text' is int64, not text"),
    "null row": ("a.parquet", parquet({"text": ["a", None]}), "a.parquet: row 1 has no text"),
    "no rows": ("a.parquet", parquet({"text": pa.array([], pa.string())}), "holds no text"),
}


def check(result, folder, says):
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert says in result.err
    assert not (folder / "set").exists()
    assert not (folder / ".set.partial").exists()


@pytest.mark.parametrize(("name", "data", "says"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files(cli, tmp_path, name, data, says):
    path = tmp_path / name
    if callable(data):
        data(path)
    else:
        path.write_bytes(data)
    command = (path, "--out", tmp_path / "set", "--tokenizer", "byte", "--workers", 1)
    check(cli(*command), tmp_path, says)


def test_a_bad_file_found_by_a_worker_process(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    (tmp_path / "in").mkdir()
    for index in range(9):
        (tmp_path / f"in/{index}.txt").write_bytes(b"fine\n" * 300 if index != 7 else b"ab\xff")
    command = (tmp_path / "in", "--out", tmp_path / "set", "--tokenizer", "byte", "--workers", 2)
    check(cli(*command), tmp_path, "7.txt: not UTF-8 at byte 2 (0xff)")


def test_an_endless_line(cli, tmp_path):
    with (tmp_path / "a.jsonl").open("wb") as file:
        file.truncate(MAX_LINE_BYTES + (1 << 20))
    command = (tmp_path / "a.jsonl", "--out", tmp_path / "set", "--tokenizer", "byte")
    check(cli(*command), tmp_path, "a.jsonl:1: longer than 64 MiB")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"SOURCE": "missing.txt"}, "SOURCE missing.txt: no such file or folder"),
        ({"SOURCE": "empty"}, "no non-empty file to read in it"),
        ({"SOURCE": "/dev/null"}, "/dev/null: unknown type"),
        ({"SOURCE": "hf:"}, "SOURCE hf:: write hf:NAME"),
        ({"SOURCE": "hf:owner/name"}, "needs the package datasets"),
        ({"--tokenizer": "train:256"}, "--tokenizer train:256: VOCAB must be at least 257"),
        ({"--tokenizer": "train:many"}, "VOCAB must be a whole number"),
        ({"--tokenizer": "gpt2"}, "gpt2: no such tokenizer; give byte, train:VOCAB"),
        ({"--tokenizer": "bad.json"}, "bad.json: not a readable tokenizer.json"),
        ({"--tokenizer": "no_end.json"}, "has none of the known end-of-text tokens"),
        ({"--tokenizer": "no_end.json", "--eot": "X"}, "--eot X: not a token of"),
        ({"--eot": "</s>"}, "--eot </s>: the byte tokenizer ends text with"),
        ({"--val-fraction": "1"}, "--val-fraction 1.0: must be"),
        ({"--val-fraction": "-0.1"}, "--val-fraction -0.1: must be"),
        ({"--val-fraction": "nan"}, "--val-fraction nan: must be"),
        ({"--max-bytes": "0"}, "--max-bytes 0: must be"),
        ({"--workers": "0"}, "--workers 0: must be"),
        ({"--out": "good.txt"}, "--out good.txt: is a file; name a folder"),
        ({"--out": "full"}, "--out full: not empty, and holds no manifest.json"),
        ({"--out": "full", "--overwrite": None}, "--out full: not empty"),
        ({"--out": "good.txt/set"}, "set: Not a directory"),
    ],
    ids=lambda value: " ".join(f"{k} {v}" for k, v in value.items()) if type(value) is dict else "",
)
def test_bad_arguments(cli, tmp_path, monkeypatch, changes, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious").write_text("x")
    (tmp_path / "good.txt").write_text("fine")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "no_end.json").write_text(
        json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}})
    )
    values = {"SOURCE": "good.txt", "--out": "set", "--tokenizer": "byte"} | changes
    source = values.pop("SOURCE")
    options = [item for pair in values.items() for item in pair if item is not None]
    check(cli(source, *options), tmp_path, says)
    assert (tmp_path / "full/precious").read_text() == "x"
    assert (tmp_path / "good.txt").read_text() == "fine"


@pytest.mark.parametrize(
    ("package", "name", "tokenizer"),
    [
        ("tokenizers", "a.txt", "train:300"),
        ("zstandard", "a.txt.zst", "byte"),
        ("pyarrow", "a.parquet", "byte"),
    ],
)
def test_missing_packages(cli, tmp_path, monkeypatch, package, name, tokenizer):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    result = cli(tmp_path / name, "--out", tmp_path / "set", "--tokenizer", tokenizer)
    check(result, tmp_path, f"needs the package {package}")
    assert "pip install 'slipstream-train[data]'" in result.err


def test_two_runs_at_once(cli, tmp_path):
    (tmp_path / "a.txt").write_text("fine")
    (tmp_path / ".set.partial").mkdir()
    with (tmp_path / ".set.partial/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = cli(tmp_path / "a.txt", "--out", tmp_path / "set", "--tokenizer", "byte")
    assert result.code == 2
    assert "another slipstream prepare is writing it" in result.err
    assert (tmp_path / ".set.partial/lock").exists()


@pytest.mark.parametrize("stage", ["first piece", "third piece", "shards"])
def test_a_full_disk(cli, tmp_path, monkeypatch, words, stage):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4000)
    (tmp_path / "in").mkdir()
    for index in range(8):
        (tmp_path / f"in/{index}.txt").write_text(words(5000, index), encoding="utf-8")
    left = {"first piece": 0, "third piece": 2, "shards": 99}[stage]
    original = np.savez

    def savez(file, **arrays):
        nonlocal left
        left -= 1
        if left < 0:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        original(file, **arrays)

    def no_space(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    command = (tmp_path / "in", "--out", tmp_path / "set", "--tokenizer", "byte", "--workers", 1)
    with monkeypatch.context() as patch:
        patch.setattr(np, "savez", savez)
        if stage == "shards":
            patch.setattr("os.fsync", no_space)
        result = cli(*command)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "the disk is full" in result.err
    assert "free some space and run again" in result.err
    assert not (tmp_path / "set").exists()
    partial = tmp_path / ".set.partial"
    if stage == "first piece":
        assert not partial.exists()
    else:
        count = 2 if stage == "third piece" else 8
        assert f"{count} finished pieces are kept in {partial}" in result.err
        assert len(list(partial.glob("pieces/*"))) == count
        assert not (partial / "result").exists()
    assert cli(*command).code == 0


def test_a_limit_of_file_sizes_in_a_real_process(tmp_path, words):
    (tmp_path / "a.txt").write_text(words(500_000), encoding="utf-8")
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "slipstream",
            "prepare",
            "a.txt",
            "--out",
            "set",
            "--tokenizer",
            "byte",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "--out" in result.stderr
    assert "a file grew beyond the limit" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt"]


def test_a_worker_that_dies_is_reported(tmp_path, cli, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1000)
    original = workers._start

    def start(pool, job):
        connection = original(pool, job)
        pool[connection].kill()
        return connection

    monkeypatch.setattr(workers, "_start", start)
    (tmp_path / "a.jsonl").write_bytes(GOOD * 9999)
    command = (tmp_path / "a.jsonl", "--out", tmp_path / "set", "--tokenizer", "byte")
    check(cli(*command, "--workers", 2), tmp_path, "a worker process died (exit code -9)")
