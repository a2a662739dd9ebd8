import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers.models import WordLevel

from slipstream.data import ByteTokenizer, load_tokenizer, make_tokenizer
from slipstream.data.tokenizers import HuggingFaceTokenizer, file_hash, require_eot
from slipstream.errors import ConfigError, DataError, DependencyError

SAMPLE = ["the cat sat on the mat. The cat's hat! na\u00efve caf\u00e9 1234\n\tif x == y:\n" * 50]
texts = st.text(max_size=200)


@pytest.fixture(scope="module")
def bpe():
    return make_tokenizer("train:400", lambda: iter(SAMPLE))


@given(text=texts)
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_arrays([text])[0].tolist() == ids


@settings(deadline=None)
@given(text=texts)
def test_bpe_round_trips(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.encode_batch([text, "x"])[0] == ids
    assert bpe.encode_arrays([text])[0].tolist() == ids


@given(text=texts)
def test_byte_json_encodes_identically_in_the_tokenizers_library(text):
    library = Library.from_str(ByteTokenizer().to_json())
    library.encode_special_tokens = True
    encoding = library.encode(text)
    assert encoding.ids == ByteTokenizer().encode(text)
    assert library.decode(encoding.ids, skip_special_tokens=False) == text


def test_byte_vocabulary():
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eot_id) == (257, 256)
    assert Library.from_str(tokenizer.to_json()).token_to_id("<|endoftext|>") == 256
    assert tokenizer.decode([104, 105, 256, 255]) == "hi<|endoftext|>\ufffd"


def test_special_tokens_in_text_are_plain_text(bpe):
    for tokenizer in (bpe, ByteTokenizer()):
        ids = tokenizer.encode("a<|endoftext|>b")
        assert tokenizer.eot_id not in ids
        assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_bpe_learns_merges_within_its_vocabulary(bpe):
    assert 257 < bpe.vocab_size <= 400
    assert bpe.eot_id == 0
    assert len(bpe.encode(SAMPLE[0])) < len(SAMPLE[0].encode()) / 2


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_save_and_load(tmp_path, bpe, kind):
    tokenizer = ByteTokenizer() if kind == "byte" else bpe
    tokenizer.save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert type(loaded) is type(tokenizer)
        assert loaded.hash == tokenizer.hash == file_hash(path)
        assert (loaded.eot_id, loaded.vocab_size) == (tokenizer.eot_id, tokenizer.vocab_size)
        assert loaded.encode("the cat's") == tokenizer.encode("the cat's")


def test_a_byte_file_written_again_by_the_library_is_recognised(tmp_path):
    Library.from_str(ByteTokenizer().to_json()).save(str(tmp_path / "tokenizer.json"))
    assert isinstance(load_tokenizer(tmp_path), ByteTokenizer)
    assert file_hash(tmp_path) == ByteTokenizer().hash


def test_truncation_and_padding_of_a_file_are_off(tmp_path, bpe):
    library = Library.from_str(bpe.to_json())
    library.enable_truncation(4)
    library.enable_padding(length=50)
    library.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode(SAMPLE[0]) == bpe.encode(SAMPLE[0])
    assert loaded.hash == bpe.hash


def word_file(folder, *words):
    vocab = {word: index for index, word in enumerate(("[UNK]", *words))}
    Library(WordLevel(vocab, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("end", ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>"])
def test_known_end_tokens(tmp_path, end):
    assert load_tokenizer(word_file(tmp_path, "a", "b", end)).eot_id == 3


def test_a_chosen_end_token_is_part_of_identity_and_is_saved(tmp_path):
    path = word_file(tmp_path, "a", "STOP", "</s>")
    plain, chosen = load_tokenizer(path), load_tokenizer(path, eot="STOP")
    assert (plain.eot_id, chosen.eot_id) == (3, 2)
    assert plain.hash != chosen.hash
    folder = tmp_path / "saved"
    folder.mkdir()
    chosen.save(folder)
    loaded = load_tokenizer(folder)
    assert (loaded.eot_id, loaded.hash, file_hash(folder)) == (2, chosen.hash, chosen.hash)


@pytest.mark.parametrize("entry", ["STOP", {"content": "STOP", "lstrip": False}])
def test_the_end_token_that_a_model_folder_declares(tmp_path, entry):
    word_file(tmp_path, "a", "STOP", "</s>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": entry}))
    assert load_tokenizer(tmp_path).eot_id == 2


def test_no_end_token_says_how_to_name_one(tmp_path):
    path = word_file(tmp_path, "a", "b")
    with pytest.raises(DataError, match=r"--tokenizer .*end-of-text.*--eot TOKEN"):
        require_eot(load_tokenizer(path), str(path))
    with pytest.raises(DataError, match="--eot nothing: not a token of"):
        load_tokenizer(path, eot="nothing")
    for spec in ("byte", "train:300"):
        with pytest.raises(ConfigError, match="--eot </s>"):
            make_tokenizer(spec, lambda: iter(SAMPLE), eot="</s>")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a readable tokenizer.json"),
        ("[]", "no model"),
        ('{"model": {"type": "Nonsense"}}', "library rejects it"),
    ],
)
def test_unreadable_files_are_named(tmp_path, text, says):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"tokenizer\.json: .*{says}"):
        load_tokenizer(path)
    with pytest.raises(DataError, match="no such tokenizer; give byte, train:VOCAB or"):
        load_tokenizer(tmp_path / "missing.json")


@pytest.mark.parametrize("spec", ["train:256", "train:x", "train:", "train:-5"])
def test_vocab_must_hold_all_bytes_and_the_end(spec):
    with pytest.raises(ConfigError, match=f"--tokenizer {spec}: VOCAB must be"):
        make_tokenizer(spec, lambda: iter(SAMPLE))


def test_a_missing_library_says_how_to_install_it(monkeypatch, bpe):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(
        DependencyError, match=r"tokenizers .*pip install 'slipstream-train\[data\]'"
    ):
        HuggingFaceTokenizer(json.loads(bpe.to_json()))


def test_workers_need_neither_torch_nor_the_libraries():
    code = (
        "import sys, slipstream.data.workers\n"
        "heavy = {'torch', 'tokenizers', 'pyarrow', 'zstandard', 'datasets'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
