import gzip
import itertools
import json
import shutil

import numpy as np
import pytest

from slipstream.data import ByteTokenizer, assemble, has_split, manifest, open_shards
from slipstream.data import shards as shards_module
from slipstream.errors import DataError


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(assemble, "SHARD_TOKENS", 1000)


@pytest.fixture
def prepared(small_shards, corpus, prepare):
    return prepare(corpus, val_fraction=0.2)


def texts_of(folder, split):
    shards = open_shards(folder, split)
    bounds = [*shards.document_starts.tolist(), shards.num_tokens]
    spans = [shards.read(a, b - a) for a, b in itertools.pairwise(bounds)]
    assert all(span[-1] == 256 for span in spans)
    return [ByteTokenizer().decode(span[:-1].tolist()) for span in spans]


def test_every_document_comes_back_whole(prepared, corpus):
    expected = [path.read_text(encoding="utf-8") for path in corpus.glob("sub/*.md")]
    expected += [json.loads(line)["text"] for line in (corpus / "rows.jsonl").open()]
    expected.append(gzip.decompress((corpus / "more.txt.gz").read_bytes()).decode())
    train, val = texts_of(prepared, "train"), texts_of(prepared, "val")
    assert sorted(train + val) == sorted(expected)
    assert 3 <= len(val) <= 20


def test_reads_span_shards(prepared):
    shards = open_shards(prepared, "train")
    assert shards.num_tokens > 5000
    whole = shards.read(0, shards.num_tokens)
    files = sorted(prepared.glob("train-*.bin"))
    assert np.array_equal(whole, np.concatenate([np.fromfile(f, "<u2") for f in files]))
    for start, count in [(0, 1), (999, 2), (500, 3000), (1000, 1000), (shards.num_tokens, 0)]:
        part = shards.read(start, count)
        assert part.dtype == np.int64
        assert np.array_equal(part, whole[start : start + count])
    for start, count in [(-1, 1), (shards.num_tokens, 1), (0, shards.num_tokens + 1)]:
        with pytest.raises(IndexError):
            shards.read(start, count)


def test_what_a_set_says_about_itself(prepared):
    shards = open_shards(prepared, "train")
    assert shards.vocab_size == 257
    assert shards.tokenizer_hash == ByteTokenizer().hash
    text_bytes = int((shards.read(0, shards.num_tokens) != 256).sum())
    assert shards.bytes_per_token == pytest.approx(text_bytes / shards.num_tokens, rel=1e-12)
    entry = manifest.load_manifest(prepared).splits["train"]
    assert sum(shard.documents for shard in entry.shards) == entry.documents
    shards.require_tokenizer(ByteTokenizer().hash)
    with pytest.raises(DataError, match=r"data\.path = .*another tokenizer"):
        shards.require_tokenizer("0" * 64)


@pytest.mark.parametrize("verify", ["auto", "full"])
@pytest.mark.parametrize("name", ["train-00002.bin", "train-documents.int64", "tokenizer.json"])
def test_one_flipped_bit_is_found(prepared, name, verify):
    data = bytearray((prepared / name).read_bytes())
    data[len(data) // 2] ^= 1
    (prepared / name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name}: .*prepare again|{name}: .*Tokenizer.save"):
        open_shards(prepared, "train", verify)


def test_a_large_set_is_checked_by_sampled_blocks(prepared, monkeypatch):
    monkeypatch.setattr(shards_module, "AUTO_HASH_BYTES", 1)
    monkeypatch.setattr(shards_module, "full_hash", None)
    open_shards(prepared, "train", "auto")
    path = prepared / "train-00000.bin"
    path.write_bytes(b"\x01" + path.read_bytes()[1:])
    with pytest.raises(DataError, match=r"train-00000\.bin: corrupt"):
        open_shards(prepared, "train", "auto")


@pytest.mark.parametrize("verify", ["auto", "full", "size"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_missing_bytes_are_found(prepared, damage, verify):
    path = prepared / "val-00000.bin"
    if damage == "remove":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-2])
    open_shards(prepared, "train", verify)
    with pytest.raises(DataError, match=r"val-00000\.bin: (missing|\d+ bytes, not \d+); run"):
        open_shards(prepared, "val", verify)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m.update(version=2), "layout version 2, this is 1"),
        (lambda m: m.pop("dtype"), "damaged at dtype"),
        (lambda m: m["splits"]["train"]["shards"][0].update(tokens="x"), "damaged at splits"),
        (lambda m: m.clear(), "cannot be read"),
    ],
    ids=["version", "missing key", "wrong type", "empty"],
)
def test_a_damaged_manifest_is_named(prepared, change, says):
    path = prepared / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))
    with pytest.raises(DataError, match=rf"manifest\.json: {says}.*prepare again"):
        open_shards(prepared, "train")


def test_a_truncated_manifest_is_named(prepared):
    path = prepared / "manifest.json"
    path.write_text(path.read_text()[:100])
    with pytest.raises(DataError, match=r"manifest\.json: cannot be read.*prepare again"):
        open_shards(prepared, "train")


def test_splits_that_do_not_exist(corpus, prepare):
    folder = prepare(corpus, val_fraction=0)
    assert has_split(folder, "train")
    assert not has_split(folder, "val")
    with pytest.raises(DataError, match=r"no val split; prepare .*--val-fraction"):
        open_shards(folder, "val")


def test_paths_that_hold_nothing(tmp_path):
    with pytest.raises(DataError, match=r"data\.path is not set"):
        open_shards("", "train")
    with pytest.raises(DataError, match="nowhere: does not exist; make it with slipstream prepare"):
        open_shards(tmp_path / "nowhere", "train")
    with pytest.raises(DataError, match=r"neither manifest\.json nor \.bin"):
        open_shards(tmp_path, "train")


def test_a_moved_folder_still_opens(prepared, tmp_path):
    shutil.move(prepared, tmp_path / "elsewhere")
    assert open_shards(tmp_path / "elsewhere", "train", "full").num_tokens > 5000


def llmc(path, tokens, magic, version, dtype, ntok=None):
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if ntok is None else ntok
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())
    return path


@pytest.mark.parametrize(
    ("magic", "version", "dtype", "top"),
    [(20240520, 1, "<u2", 65535), (20240801, 7, "<u4", 128_000)],
    ids=["gpt2-uint16", "llama3-uint32"],
)
def test_llmc_files(tmp_path, magic, version, dtype, top):
    tokens = np.array([5, 0, top, 7, 9])
    llmc(tmp_path / "x_train_000001.bin", tokens, magic, version, dtype)
    llmc(tmp_path / "x_train_000002.bin", tokens + 1 - (tokens == top), magic, version, dtype)
    llmc(tmp_path / "x_val_000000.bin", tokens[:3], magic, version, dtype)
    train = open_shards(tmp_path, "train")
    assert train.read(3, 4).tolist() == [7, 9, 6, 1]
    assert open_shards(tmp_path, "val").read(0, 3).tolist() == [5, 0, top]
    assert (train.vocab_size, train.tokenizer_hash, train.bytes_per_token) == (None, None, None)
    assert len(train.document_starts) == 0
    train.require_tokenizer("anything")


def test_nanogpt_files(raw_shards, tmp_path):
    raw_shards(np.array([1, 2, 65535]), "train.bin")
    path = raw_shards(np.array([4, 5]), "val.bin")
    assert open_shards(tmp_path, "train").read(0, 3).tolist() == [1, 2, 65535]
    assert open_shards(path, "val").read(0, 2).tolist() == [4, 5]
    assert not has_split(path, "train")


@pytest.mark.parametrize(
    ("write", "says"),
    [
        (lambda p: llmc(p, np.arange(9), 20240520, 1, "<u2", ntok=10), "says 10 tokens = 1044"),
        (lambda p: llmc(p, np.arange(9), 20240520, 1, "<u2", ntok=8), "says 8 tokens"),
        (lambda p: llmc(p, np.arange(9), 20240801, 2, "<u4"), "header version 2, supported is 7"),
        (lambda p: p.write_bytes(np.array([20240520, 1, 5], "<i4").tobytes()), "1024-byte header"),
        (lambda p: p.write_bytes(b""), "empty"),
        (lambda p: p.write_bytes(b"abc"), "3 bytes is no whole number"),
    ],
    ids=["short", "long", "version", "header", "empty", "odd"],
)
def test_damaged_bin_files_are_named(tmp_path, write, says):
    write(tmp_path / "train_1.bin")
    with pytest.raises(DataError, match=rf"train_1\.bin: .*{says}"):
        open_shards(tmp_path, "train")
