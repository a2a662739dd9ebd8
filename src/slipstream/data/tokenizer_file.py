"""Read, write and compare ``tokenizer.json`` files without the ``tokenizers`` library."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import DataError

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
KNOWN_END_TOKENS = (
    END_OF_TEXT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)


def read_tokenizer(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file and its JSON, ``path`` being the file or its folder; DataError if unreadable."""
    file = path / TOKENIZER_FILE if path.is_dir() else path
    if not file.is_file():
        raise DataError(
            f"{file}: no such tokenizer; give byte, train:VOCAB or the path of a tokenizer.json"
        )
    try:
        parts = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: not a readable tokenizer.json ({error}); {_EXPORT}") from None
    if not isinstance(parts, dict) or not isinstance(parts.get("model"), dict):
        raise DataError(f"{file}: not a Hugging Face tokenizer.json (no model); {_EXPORT}")
    return file, parts


_EXPORT = "save it again with tokenizers' Tokenizer.save"


def declared_end_token(folder: Path) -> str | None:
    """``eos_token`` of ``tokenizer_config.json``, None without that file or entry."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        return None
    try:
        token = json.loads(file.read_text(encoding="utf-8")).get("eos_token")
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{file}: not readable JSON ({error}); fix or remove it") from None
    return token.get("content") if isinstance(token, dict) else token


def find_end_token(vocab: Mapping[str, int]) -> str | None:
    """The first known end token of a vocabulary."""
    return next((token for token in KNOWN_END_TOKENS if token in vocab), None)


def write_tokenizer(folder: Path, text: str, end_token: str | None) -> None:
    """Write ``tokenizer.json``, and beside it the end token as Transformers reads it."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end_token}
    config_text = json.dumps(config, indent=2) + "\n"
    (folder / CONFIG_FILE).write_text(config_text, encoding="utf-8")
    # Last and at once: a folder with a tokenizer.json is complete.
    temporary = folder / f"{TOKENIZER_FILE}.tmp"
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, folder / TOKENIZER_FILE)


def content_hash(parts: Mapping[str, Any], end_token: str | None) -> str:
    """SHA-256 (hex) over sorted JSON and the end token, whatever the layout of the file."""
    plain = {**parts, "truncation": None, "padding": None}
    text = json.dumps([plain, end_token], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE files write for each byte value.

    Printable Latin-1 bytes stand for themselves, the others are numbered from U+0100 (GPT-2).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(0x100 + others.index(b)) for b in range(256)]


def byte_vocab() -> dict[str, int]:
    """The vocabulary of the byte tokenizer: 256 bytes by value, then the end token."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    return vocab | {END_OF_TEXT: 256}


def byte_tokenizer_json() -> dict[str, Any]:
    """A byte-level BPE without merges, whose ids are the byte values."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    end = {
        "id": 256,
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_vocab(), "merges": []},
    }


def is_byte_tokenizer(parts: Mapping[str, Any]) -> bool:
    """Whether a ``tokenizer.json`` is the byte tokenizer, rewritten by a library or not."""
    model = parts["model"]
    pre_tokenizer = parts.get("pre_tokenizer") or {}
    plain = not parts.get("normalizer") and pre_tokenizer.get("type") == "ByteLevel"
    no_prefix = not pre_tokenizer.get("add_prefix_space")
    bytes_only = model.get("merges") == [] and model.get("vocab") == byte_vocab()
    return plain and no_prefix and bytes_only
