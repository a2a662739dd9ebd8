import gzip
import json
import sys
import types
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from slipstream.data import ByteTokenizer, open_shards, streams
from slipstream.data.cutting import FRAGMENT_BYTES, cut_point, fragments
from slipstream.data.sources import kind_of, resolve


def texts(folder):
    shards = open_shards(folder, "train")
    text = ByteTokenizer().decode(shards.read(0, shards.num_tokens).tolist())
    return text.split("<|endoftext|>")[:-1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", "text"),
        ("a.md.gz", "text"),
        ("A.RST.ZST", "text"),
        ("a.py", "text"),
        ("a.jsonl.zst", "jsonl"),
        ("a.parquet", "parquet"),
        ("a.json", None),
        ("a.gz", None),
        ("txt", None),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_folders_are_read_in_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.md", "a/.hidden.txt", ".git/c.txt", "c.jpeg", "a/empty.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if "empty" in name else "x")
    assert [source.name for source in resolve([str(tmp_path)])] == ["b.txt", "a/z.md"]


def test_equal_names_of_two_sources_are_told_apart(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.txt").write_text(folder)
    sources = resolve([str(tmp_path / "a"), str(tmp_path / "b")])
    assert [source.name for source in sources] == ["x.txt", "x.txt#2"]


def compress(codec, data):
    if codec == "gz":
        return gzip.compress(data[:100]) + gzip.compress(data[100:])
    if codec == "zst":
        frame = zstandard.ZstdCompressor().compress
        return frame(data[:100]) + frame(data[100:])
    return data


@pytest.mark.parametrize("codec", ["", "gz", "zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_every_codec_gives_the_same_text(tmp_path, prepare, words, codec, kind):
    expected = [words(700_000, 1), words(20, 2), words(3000, 3)]
    if kind == "txt":
        expected = expected[:1]
        data = expected[0].encode()
    else:
        data = "\r\n\n".join(json.dumps({"text": text}) for text in expected).encode()
    path = tmp_path / f"a.{kind}{'.' * bool(codec)}{codec}"
    path.write_bytes(compress(codec, data))
    assert texts(prepare(path, val_fraction=0)) == expected


def test_a_byte_order_mark_is_not_text(tmp_path, prepare):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "hi"}')
    sources = (tmp_path / "a.txt", tmp_path / "b.jsonl")
    assert texts(prepare(*sources, val_fraction=0)) == ["hello", "hi"]


def test_parquet(tmp_path, prepare):
    expected = [f"row {i} \u4e16" for i in range(1000)]
    table = pa.table({"id": range(1000), "body": expected})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=300)
    folder = prepare(tmp_path / "a.parquet", text_field="body", val_fraction=0)
    assert texts(folder) == expected


def test_large_strings_of_parquet(tmp_path, prepare):
    table = pa.table({"text": pa.array(["a", "b"], pa.large_string())})
    pq.write_table(table, tmp_path / "a.parquet")
    assert texts(prepare(tmp_path / "a.parquet", val_fraction=0)) == ["a", "b"]


def test_the_standard_library_is_real_text(prepare):
    sources = resolve(["stdlib"])
    names = {source.name for source in sources}
    assert {"stdlib/argparse.py", "stdlib/json/decoder.py"} <= names
    assert not any("/test/" in name or "site-packages" in name for name in names)
    assert sum(source.size for source in sources) > 8_000_000
    folder = prepare("stdlib", max_bytes=3_000_000, val_fraction=0)
    assert texts(folder)[0] == Path(sources[0].path).read_text(encoding="utf-8")


def test_files_of_the_library_in_other_encodings(tmp_path, monkeypatch, cli):
    (tmp_path / "lib").mkdir()
    latin = "# -*- coding: latin-1 -*-\nname = 'caf\u00e9'\n"
    (tmp_path / "lib/a.py").write_bytes(latin.encode("latin-1"))
    (tmp_path / "lib/b.py").write_bytes(b"name = '\xff'\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    result = cli("stdlib", "--out", tmp_path / "set", "--tokenizer", "byte")
    assert result.code == 0
    assert "note: 1 files of the standard library are not text; skipped" in result.out
    assert texts(tmp_path / "set") == [latin]


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for the datasets package that records how it was called."""
    module = types.ModuleType("datasets")
    module.calls = []
    module.rows = [{"text": f"row {i}", "n": i} for i in range(5)]

    def load_dataset(*args, **options):
        module.calls.append((args, options))
        for row in module.rows:
            if isinstance(row, Exception):
                raise row
            yield row

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return module


@pytest.mark.parametrize(
    ("spec", "args", "split"),
    [
        ("hf:owner/name", ("owner/name",), "train"),
        ("hf:owner/name:test", ("owner/name",), "test"),
        ("hf:name:config:test[:5]", None, None),
        ("hf:name:config-v1:validation", ("name", "config-v1"), "validation"),
    ],
)
def test_hugging_face_data_sets(hub, cli, tmp_path, spec, args, split):
    result = cli(spec, "--out", tmp_path / "set", "--tokenizer", "byte", "--val-fraction", 0)
    if args is None:
        assert result.code == 2
        assert "write hf:NAME" in result.err
        return
    assert result.code == 0, result.err
    assert hub.calls == [(args, {"split": split, "streaming": True})]
    assert texts(tmp_path / "set") == [f"row {i}" for i in range(5)]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"body": "x"}, "no field 'text'; its fields are body; name one with --text-field"),
        ({"text": 5}, "field 'text' of row 5 is a int"),
        ({"text": None}, "row 5 has no text (null)"),
        (ConnectionError("no route"), "cannot be read from the hub (ConnectionError: no route)"),
    ],
)
def test_bad_hugging_face_rows(hub, cli, tmp_path, row, says):
    hub.rows.append(row)
    result = cli("hf:a/b", "--out", tmp_path / "set", "--tokenizer", "byte")
    assert result.code == 2
    assert f"hf:a/b:train: {says}" in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "limit", "cut"),
    [
        (b"aaaa\nbb\ncc\n\ndd", 12, 8),
        (b"aaaa\n\n\n\n b", 8, 8),
        (b"aaaaaa bbb ccc", 12, 10),
        (b"aaaaaaaaaaaa", 8, 8),
        ("\u4e16\u754c\u4e16\u754c".encode(), 8, 6),
        (b"a\r\nb\r\nc\r\nd\r\ne", 12, 12),
    ],
    ids=["visible", "newlines", "space", "none", "utf8", "crlf"],
)
def test_cut_points(text, limit, cut):
    assert cut_point(text, limit) == cut


@pytest.mark.parametrize("chunk", [1000, 77_777, 1 << 20])
def test_cuts_do_not_depend_on_the_size_of_reads(words, chunk):
    data = words(1_500_000).encode()
    found = list(fragments(data[i : i + chunk] for i in range(0, len(data), chunk)))
    assert found == list(fragments([data]))
    assert b"".join(piece for _, piece, _ in found) == data
    assert max(len(piece) for _, piece, _ in found) <= FRAGMENT_BYTES
    assert [last for _, _, last in found] == [False] * (len(found) - 1) + [True]


def test_gzip_that_was_cut_is_an_error_at_any_place(tmp_path):
    whole = gzip.compress(b"hello world\n" * 1000)
    for size in (len(whole) - 1, len(whole) - 8, len(whole) // 2, 5):
        path = tmp_path / "a.txt.gz"
        path.write_bytes(whole[:size])
        with pytest.raises(streams.DataError, match=r"a\.txt\.gz: corrupt or truncated gzip"):
            list(streams.ByteStream(str(path)))
