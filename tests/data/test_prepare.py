import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from slipstream.data import ByteTokenizer, PrepareRequest, load_tokenizer, open_shards, pieces
from slipstream.data import prepare as prepare_module
from slipstream.data.assemble import choose_val
from slipstream.errors import DataError

RUN = """
    import os, signal, sys
    from pathlib import Path
    from slipstream.data import PrepareRequest, pieces, prepare_shards
    if __name__ == "__main__":
        pieces.PIECE_BYTES = 4000
        source, out, workers, tokenizer, stop_after = sys.argv[1:]
        done = 0
        def progress(read_bytes):
            global done
            done += 1
            if done == int(stop_after):
                os.kill(os.getpid(), signal.SIGKILL)
        request = PrepareRequest(
            sources=(source,), out=Path(out), tokenizer=tokenizer, workers=int(workers),
            val_fraction=0.2,
        )
        print(prepare_shards(request, progress), done)
"""


@pytest.fixture
def run_apart(tmp_path, corpus):
    """Prepare ``corpus`` in small pieces in another process; returns its exit code."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(RUN))

    def run(out, workers, tokenizer, stop_after=0):
        command = [sys.executable, script, corpus, tmp_path / out, workers, tokenizer, stop_after]
        result = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, check=False
        )
        assert result.returncode in (0, -signal.SIGKILL), result.stderr
        return result.returncode

    return run


@pytest.mark.parametrize("tokenizer", ["byte", "train:300"])
def test_workers_and_kills_do_not_change_a_byte(tmp_path, run_apart, read_folder, tokenizer):
    assert run_apart("one", 1, tokenizer) == 0
    expected = read_folder(tmp_path / "one")
    assert run_apart("two", 2, tokenizer) == 0
    assert read_folder(tmp_path / "two") == expected
    assert run_apart("stopped", 2, tokenizer, stop_after=3) == -signal.SIGKILL
    assert not (tmp_path / "stopped").exists()
    partial = tmp_path / ".stopped.partial"
    kept = {path.name: path.stat().st_ino for path in partial.glob("pieces/*.npz")}
    assert len(kept) >= 3
    assert run_apart("stopped", 1, tokenizer) == 0
    assert read_folder(tmp_path / "stopped") == expected
    assert not partial.exists()


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 4000)


def interrupt_after(count):
    seen = []

    def progress(read_bytes):
        seen.append(read_bytes)
        if len(seen) == count:
            raise KeyboardInterrupt

    return progress


def test_resuming_does_not_tokenise_finished_pieces_again(
    corpus, prepare, small_pieces, monkeypatch, tmp_path
):
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, progress=interrupt_after(4))
    finished = {path.name for path in (tmp_path / ".out.partial/pieces").iterdir()}
    assert len(finished) == 4
    written = []
    original = ByteTokenizer.encode_arrays
    monkeypatch.setattr(
        ByteTokenizer, "encode_arrays", lambda self, t: written.append(t) or original(self, t)
    )
    resumed = prepare(corpus)
    fresh_batches = len(written)
    written.clear()
    prepare(corpus, out="fresh")
    assert fresh_batches == len(written) - 4
    assert open_shards(resumed, "train").num_tokens > 0


def test_changed_inputs_start_afresh(corpus, prepare, small_pieces, read_folder):
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, progress=interrupt_after(4))
    (corpus / "sub" / "0.md").write_text("changed\n")
    assert read_folder(prepare(corpus)) == read_folder(prepare(corpus, out="fresh"))


def test_a_damaged_piece_is_removed_and_made_again(
    corpus, prepare, small_pieces, read_folder, tmp_path
):
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, progress=interrupt_after(4))
    piece = tmp_path / ".out.partial/pieces/00000001.npz"
    piece.write_bytes(piece.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"00000001\.npz: damaged .*run again"):
        prepare(corpus)
    assert read_folder(prepare(corpus)) == read_folder(prepare(corpus, out="fresh"))


def test_a_repeated_command_says_already_prepared(cli, corpus, tmp_path):
    command = (corpus, "--out", tmp_path / "set", "--tokenizer", "byte")
    first = cli(*command)
    assert (first.code, first.err) == (0, "")
    assert "47 documents" in first.out
    before = (tmp_path / "set/manifest.json").stat().st_mtime_ns
    again = cli(*command)
    assert again.code == 0
    assert "already prepared (47 documents" in again.out
    assert (tmp_path / "set/manifest.json").stat().st_mtime_ns == before


def test_a_damaged_set_of_the_same_inputs_is_made_again(cli, corpus, tmp_path):
    command = (corpus, "--out", tmp_path / "set", "--tokenizer", "byte")
    cli(*command)
    (tmp_path / "set/train-00000.bin").write_bytes(b"")
    assert "already" not in cli(*command).out
    assert open_shards(tmp_path / "set", "train", "full").num_tokens > 0


def test_overwrite_replaces_only_prepared_sets(cli, corpus, tmp_path):
    out = tmp_path / "set"
    command = (corpus, "--out", out, "--tokenizer", "byte")
    cli(*command)
    other = (*command, "--val-fraction", "0.5")
    refused = cli(*other)
    assert refused.code == 2
    assert "--overwrite" in refused.err
    assert cli(*other, "--overwrite").code == 0
    assert open_shards(out, "val").num_tokens > 10_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "set"]


def test_prepare_into_an_empty_folder_and_new_parents(corpus, prepare, tmp_path):
    (tmp_path / "empty").mkdir()
    assert open_shards(prepare(corpus, out="empty"), "train").num_tokens > 0
    assert open_shards(prepare(corpus, out="a/b/c"), "train").num_tokens > 0


@pytest.mark.parametrize("documents", [2, 3, 50])
@pytest.mark.parametrize("fraction", [1e-9, 0.3, 0.999999])
def test_neither_split_is_empty(tmp_path, prepare, documents, fraction):
    source = tmp_path / "rows.jsonl"
    source.write_text("\n".join(json.dumps({"text": f"row {i}"}) for i in range(documents)))
    folder = prepare(source, val_fraction=fraction)
    starts = [len(open_shards(folder, split).document_starts) for split in ("train", "val")]
    assert min(starts) >= 1
    assert sum(starts) == documents


def test_one_document_is_training_data_and_a_note_says_so(cli, tmp_path):
    (tmp_path / "one.txt").write_text("only\n")
    result = cli(tmp_path / "one.txt", "--out", tmp_path / "set", "--tokenizer", "byte")
    assert "1 documents, 6 tokens" in result.out
    assert "note: no validation split" in result.out


def test_the_share_of_validation_documents_is_close_to_what_was_asked():
    identities = np.random.default_rng(0).integers(0, 2**64, 20_000, dtype=np.uint64)
    rule = choose_val(iter(np.split(identities, 10)), 0.1)
    assert 0.09 < rule.is_val(identities).mean() < 0.11


def test_assignment_of_a_document_does_not_depend_on_its_neighbours(tmp_path, prepare):
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index}.txt").write_text(f"document {index}\n")

    def val_texts(out):
        shards = open_shards(prepare(folder, out=out, val_fraction=0.3), "val")
        return set(
            ByteTokenizer()
            .decode(shards.read(0, shards.num_tokens).tolist())
            .split("<|endoftext|>")
        )

    everything = val_texts("all")
    for index in range(0, 40, 2):
        (folder / f"{index}.txt").unlink()
    half = val_texts("half")
    assert half <= everything
    assert len(half) > 3


def test_text_longer_than_a_fragment_is_one_document(tmp_path, prepare, words):
    text = words(1_400_000)
    (tmp_path / "long.txt").write_text(text, encoding="utf-8", newline="")
    (tmp_path / "long.jsonl").write_text(json.dumps({"text": text}) + "\n")
    folders = [prepare(tmp_path / f"long.{kind}", out=kind) for kind in ("txt", "jsonl")]
    for folder in folders:
        shards = open_shards(folder, "train")
        assert shards.document_starts.tolist() == [0]
        tokens = shards.read(0, shards.num_tokens)
        assert ByteTokenizer().decode(tokens[:-1].tolist()) == text
        assert (tokens == 256).sum() == 1


def test_cutting_long_text_does_not_change_bpe_tokens(tmp_path, prepare, words):
    text = words(1_200_000)
    (tmp_path / "long.txt").write_text(text, encoding="utf-8", newline="")
    folder = prepare(tmp_path / "long.txt", tokenizer="train:350")
    shards = open_shards(folder, "train")
    tokenizer = load_tokenizer(folder)
    assert shards.vocab_size == tokenizer.vocab_size
    assert shards.read(0, shards.num_tokens - 1).tolist() == tokenizer.encode(text)


def test_vocabularies_above_65536_use_uint32(tmp_path, prepare):
    vocab = {f"w{i}": i for i in range(70_000)} | {"</s>": 70_000, "[UNK]": 70_001}
    library = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w69999 w1")
    folder = prepare(tmp_path / "a.txt", tokenizer=str(tmp_path / "tokenizer.json"))
    assert open_shards(folder, "train").read(0, 3).tolist() == [69_999, 1, 70_000]
    assert (folder / "train-00000.bin").stat().st_size == 12


def test_max_bytes_takes_a_deterministic_beginning(tmp_path, prepare, read_folder, words):
    text = words(50_000)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8", newline="")
    folder = prepare(tmp_path / "a.txt", max_bytes=20_000)
    shards = open_shards(folder, "train")
    decoded = ByteTokenizer().decode(shards.read(0, shards.num_tokens).tolist())
    assert decoded.endswith("<|endoftext|>")
    assert 10_000 < shards.num_tokens <= 20_001
    assert text.startswith(decoded.removesuffix("<|endoftext|>"))
    rows = [json.dumps({"text": "x" * 90}) for _ in range(100)]
    (tmp_path / "b.jsonl").write_text("\n".join(rows))
    limited = prepare(tmp_path / "b.jsonl", out="rows", max_bytes=1000, val_fraction=0)
    assert len(open_shards(limited, "train").document_starts) == 1000 // len(rows[0] + "\n")


def test_the_training_sample_is_bounded_and_spread(tmp_path, monkeypatch, words):
    monkeypatch.setattr(prepare_module, "SAMPLE_BYTES", 2 << 20)
    for index in range(20):
        (tmp_path / f"{index:02}.txt").write_text(f"<{index}>" + words(700_000, index))
    sources = prepare_module.resolve([str(tmp_path)])
    reader = prepare_module.Reader(sources, "text", None)
    sample = list(prepare_module.sample_text(reader))
    assert 1 << 20 < sum(len(text.encode()) for text in sample) <= 2 << 20
    assert sample == list(prepare_module.sample_text(reader))
    assert len({text[:4] for text in sample if text.startswith("<")}) >= 2


def test_interrupting_the_command_exits_130_and_keeps_finished_pieces(tmp_path, words):
    big = tmp_path / "big.txt"
    big.write_bytes(words(1_000_000).encode() * 120)
    command = [sys.executable, "-m", "slipstream", "prepare", str(big), "--out", "set"]
    command += ["--tokenizer", "byte", "--workers", "2"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    pieces_folder = tmp_path / ".set.partial/pieces"
    while process.poll() is None and not any(pieces_folder.glob("*.npz")):
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "interrupted; run the same command again to resume\n"
    assert not (tmp_path / "set").exists()
    assert any(pieces_folder.glob("*.npz"))
    assert not any(pieces_folder.glob("*.tmp"))


def test_by_default_workers_stay_below_1_gb(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"x" * 5_000_000)
    (tmp_path / "b.txt").write_bytes(b"x")

    def workers(name, cores, asked=None):
        monkeypatch.setattr(prepare_module, "_cores", lambda: cores)
        request = PrepareRequest(
            sources=(str(tmp_path / name),), out=tmp_path / "o", tokenizer="byte", workers=asked
        )
        reader = prepare_module.Reader(prepare_module.resolve(request.sources), "text", None)
        return prepare_module._workers(request, reader)

    assert [workers("a.txt", cores) for cores in (1, 3, 64)] == [1, 3, 8]
    assert workers("a.txt", 64, asked=20) == 20
    assert workers("b.txt", 64) == 1


def test_real_text(shared_data, prepare):
    folder = prepare(shared_data / "python_docs.jsonl.gz")
    train, val = (open_shards(folder, split) for split in ("train", "val"))
    assert len(train.document_starts) + len(val.document_starts) == 497
    assert train.num_tokens + val.num_tokens == 11_048_275 + 497
