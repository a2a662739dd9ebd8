"""The tokenizer files of a Hugging Face folder: carried as they are, never interpreted.

Special token ids for ``config.json`` are looked up in ``tokenizer.json``; without a tokenizer they
are written as null, since transformers would otherwise assume ids of its own.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import CheckpointError
from slipstream.models.folder import TOKENIZER_FILE
from slipstream.models.tensor_file import read_json

TOKENIZER_CONFIG = "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_KINDS = ("bos", "eos", "pad")


def read_tokenizer(folder: Path) -> tuple[str | None, dict[str, Any] | None]:
    """``tokenizer.json`` as text and ``tokenizer_config.json``, None where a file is missing."""
    path, config_path = folder / TOKENIZER_FILE, folder / TOKENIZER_CONFIG
    if not path.is_file():
        return None, None
    config = read_json(config_path) if config_path.is_file() else None
    template = folder / _TEMPLATE
    if config is not None and template.is_file():
        config = {**config, "chat_template": template.read_text(encoding="utf-8")}
    return path.read_text(encoding="utf-8"), config


def tokenizer_files(tokenizer_json: str | None, config: Mapping[str, Any] | None) -> dict[str, str]:
    """Text files by name that make ``AutoTokenizer`` load the tokenizer."""
    if tokenizer_json is None:
        return {}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} if config is None else config
    return {TOKENIZER_FILE: tokenizer_json, TOKENIZER_CONFIG: json.dumps(config, indent=2) + "\n"}


def special_ids(
    tokenizer_json: str | None, config: Mapping[str, Any] | None
) -> dict[str, int | None]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` for ``config.json``."""
    ids = {} if tokenizer_json is None else _ids(tokenizer_json)
    tokens = {kind: (config or {}).get(f"{kind}_token") for kind in _KINDS}
    return {f"{kind}_token_id": ids.get(_content(token)) for kind, token in tokens.items()}


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


def _ids(tokenizer_json: str) -> dict[str | None, int]:
    try:
        parts = json.loads(tokenizer_json)
        vocab = parts["model"]["vocab"]
        # Unigram models list (piece, score) pairs, the others map a piece to its id.
        pieces = vocab if isinstance(vocab, dict) else {v[0]: i for i, v in enumerate(vocab)}
        return {**pieces, **{t["content"]: t["id"] for t in parts.get("added_tokens", ())}}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{TOKENIZER_FILE}: not a tokenizer ({error!r})") from None
