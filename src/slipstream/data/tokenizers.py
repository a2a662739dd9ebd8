"""Text to token ids and back: raw bytes, or any Hugging Face ``tokenizer.json``.

Text is only text: the spelling of a special token inside a document is encoded as plain characters,
and no token is added in front. The token that ends documents is the one that
``tokenizer_config.json`` beside the file declares, else a known end token of the vocabulary.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from slipstream.data.bpe import parse_vocab, train_bpe
from slipstream.data.optional import require
from slipstream.data.tokenizer_file import (
    END_OF_TEXT,
    KNOWN_END_TOKENS,
    byte_tokenizer_json,
    content_hash,
    declared_end_token,
    find_end_token,
    is_byte_tokenizer,
    read_tokenizer,
    write_tokenizer,
)
from slipstream.errors import ConfigError, DataError, DependencyError

Kind = Literal["byte", "huggingface"]


class Tokenizer(Protocol):
    """What every tokenizer can do."""

    @property
    def kind(self) -> Kind:
        """How ``tokenizer.json`` is read."""
        ...

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        ...

    @property
    def eot_id(self) -> int | None:
        """Id that ends a document, None if the vocabulary has no known one."""
        ...

    @property
    def hash(self) -> str:
        """SHA-256 (hex) over the canonical ``tokenizer.json`` and the end token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, nothing added."""
        ...

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """``encode`` of each text."""
        ...

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """``encode`` of each text as an array of unsigned ids, the fast way for much text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        ...

    def to_json(self) -> str:
        """A Hugging Face ``tokenizer.json`` that encodes identically."""
        ...

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ``load_tokenizer``."""
        ...


class ByteTokenizer:
    """Ids 0 to 255 are the UTF-8 bytes of the text, 256 ends a document."""

    kind: Kind = "byte"
    vocab_size: int = 257
    eot_id: int | None = 256

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) over the canonical ``tokenizer.json`` and the end token."""
        return content_hash(byte_tokenizer_json(), END_OF_TEXT)

    def encode(self, text: str) -> list[int]:
        """The UTF-8 bytes of ``text``."""
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """``encode`` of each text."""
        return [self.encode(text) for text in texts]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """``encode`` of each text as uint8 arrays."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD, ValueError above 256."""
        end = END_OF_TEXT.encode()
        pieces = (end if token == self.eot_id else bytes([token]) for token in ids)
        return b"".join(pieces).decode(errors="replace")

    def to_json(self) -> str:
        """A byte-level BPE without merges, whose ids are the byte values."""
        return _to_text(byte_tokenizer_json())

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ``load_tokenizer``."""
        write_tokenizer(Path(folder), self.to_json(), END_OF_TEXT)


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` (its JSON as ``parts``) run by the ``tokenizers`` library."""

    kind: Kind = "huggingface"

    def __init__(self, parts: Mapping[str, Any], end_token: str | None = None) -> None:
        library = require("tokenizers", "a tokenizer.json")
        self._parts = {**parts, "truncation": None, "padding": None}
        self._tokenizer: Any = library.Tokenizer.from_str(json.dumps(self._parts))
        self._tokenizer.encode_special_tokens = True
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.end_token = end_token or find_end_token(vocab)
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        self.eot_id: int | None = vocab.get(self.end_token)

    @cached_property
    def hash(self) -> str:
        """SHA-256 (hex) over the canonical ``tokenizer.json`` and the end token."""
        return content_hash(self._parts, self.end_token)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``, nothing added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """``encode`` of each text."""
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_arrays(self, texts: list[str]) -> list[np.ndarray]:
        """``encode`` of each text as uint32 arrays."""
        return [np.array(ids, dtype=np.uint32) for ids in self.encode_batch(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def to_json(self) -> str:
        """The ``tokenizer.json`` it was made of, without truncation and padding."""
        return _to_text(self._parts)

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` for ``load_tokenizer``."""
        write_tokenizer(Path(folder), self.to_json(), self.end_token)


def load_tokenizer(path: str | Path, eot: str | None = None) -> Tokenizer:
    """The tokenizer of a ``tokenizer.json`` or of the folder it is in.

    ``eot`` names the token that ends documents. DataError for a file that is missing or unreadable
    and for an ``eot`` that is not in the vocabulary.
    """
    file, parts = read_tokenizer(Path(path))
    if is_byte_tokenizer(parts):
        return _byte_tokenizer(eot)
    end_token = eot or declared_end_token(file.parent)
    try:
        tokenizer = HuggingFaceTokenizer(parts, end_token)
    except DependencyError:
        raise
    # The library raises plain Exception for a file it cannot use.
    except Exception as error:
        raise DataError(f"{file}: the tokenizers library rejects it: {error}") from None
    if eot and tokenizer.eot_id is None:
        raise DataError(f"--eot {eot}: not a token of {file}; name one of its tokens")
    return tokenizer


def file_hash(path: str | Path) -> str:
    """``Tokenizer.hash`` of a saved tokenizer, without loading its library."""
    file, parts = read_tokenizer(Path(path))
    if is_byte_tokenizer(parts):
        return ByteTokenizer().hash
    added = {token["content"]: token["id"] for token in parts.get("added_tokens") or ()}
    vocab = parts["model"].get("vocab")
    names = vocab if isinstance(vocab, dict) else {entry[0]: 0 for entry in vocab or ()}
    end_token = declared_end_token(file.parent) or find_end_token({**names, **added})
    return content_hash(parts, end_token)


def make_tokenizer(
    spec: str, sample: Callable[[], Iterator[str]] | None = None, eot: str | None = None
) -> Tokenizer:
    """The tokenizer that ``--tokenizer`` names: ``byte``, ``train:VOCAB`` or a path.

    ``sample`` gives the text to train on. ConfigError for a bad VOCAB, DataError for a bad file.
    """
    if spec == "byte":
        return _byte_tokenizer(eot)
    if not spec.startswith("train:"):
        return load_tokenizer(spec, eot)
    vocab_size = parse_vocab(spec)
    if eot not in (None, END_OF_TEXT):
        raise ConfigError(f"--eot {eot}: a tokenizer trained here ends text with {END_OF_TEXT}")
    if sample is None:
        raise ConfigError(f"--tokenizer {spec}: there is no text to train on")
    return HuggingFaceTokenizer(json.loads(train_bpe(vocab_size, sample(), END_OF_TEXT)))


def require_eot(tokenizer: Tokenizer, spec: str) -> int:
    """Id of the end token; DataError if the tokenizer has no known one."""
    if tokenizer.eot_id is None:
        known = " ".join(KNOWN_END_TOKENS[:4])
        raise DataError(
            f"--tokenizer {spec}: has none of the known end-of-text tokens ({known}); name the one "
            "that ends a document with --eot TOKEN"
        )
    return tokenizer.eot_id


def _byte_tokenizer(eot: str | None) -> ByteTokenizer:
    if eot not in (None, END_OF_TEXT):
        raise ConfigError(f"--eot {eot}: the byte tokenizer ends text with {END_OF_TEXT}")
    return ByteTokenizer()


def _to_text(parts: Mapping[str, Any]) -> str:
    return json.dumps(parts, indent=2, ensure_ascii=False) + "\n"
