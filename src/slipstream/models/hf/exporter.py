"""A model to a Hugging Face folder, without transformers.

Experts are written one by one, the layout that every reader knows: transformers 4 and 5, vLLM.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import ConfigError
from slipstream.models.folder import new_folder, write_texts
from slipstream.models.hf.family import Family
from slipstream.models.hf.registry import FAMILIES, family_of
from slipstream.models.hf.tokenizer import special_ids, tokenizer_files
from slipstream.models.hf.weights import Piece, weight_map
from slipstream.models.tensor_file import INDEX_FILE, WEIGHTS_FILE, Entry, write_tensors
from slipstream.models.transformer import Transformer

MAX_SHARD_BYTES = 5 * 10**9


def export_folder(
    model: Transformer,
    out_dir: Path,
    tokenizer_json: str | None = None,
    family: str | None = None,
    dtype: torch.dtype | None = None,
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
) -> str:
    """Write ``model`` so that ``AutoModelForCausalLM.from_pretrained(out_dir)`` loads it.

    ``family``: a ``model_type``, None for the one the config belongs to. ``dtype``: None keeps
    that of the weights. Beyond ``max_shard_bytes`` the weights are split and indexed. Returns the
    family. Raises ConfigError naming a field the family cannot express, CheckpointError for a
    target that holds something.
    """
    chosen = _family(model, family)
    values = chosen.write(model.config)
    entries = list(_entries(model, chosen, dtype))
    ids = special_ids(tokenizer_json, tokenizer_config)
    stored = str(dtype or model.embed.weight.dtype).removeprefix("torch.")
    head = {"architectures": [chosen.architecture], "model_type": chosen.name}
    config = {**head, **values, **ids, "torch_dtype": stored, "use_cache": True}
    generation = {key: value for key, value in ids.items() if value is not None}
    texts = {
        "config.json": _json(config),
        "generation_config.json": _json({"_from_model_config": True, **generation}),
        **tokenizer_files(tokenizer_json, tokenizer_config),
    }
    with new_folder(out_dir, overwrite=overwrite) as partial:
        _write_shards(partial, entries, max_shard_bytes)
        write_texts(partial, texts)
    return chosen.name


def _family(model: Transformer, name: str | None) -> Family:
    if name is None:
        name = family_of(model.config)
    if name not in FAMILIES:
        raise ConfigError(f"family = {name!r} is not one of {', '.join(FAMILIES)}")
    return FAMILIES[name]


def _entries(model: Transformer, family: Family, dtype: torch.dtype | None) -> Iterator[Entry]:
    state = model.state_dict()
    for weight in weight_map(model.config, family.moe.names if family.moe else None):
        flat, start = state[weight.name].reshape(-1), 0
        for piece in weight.layouts[0]:
            end = start + torch.Size(piece.shape).numel()
            yield _entry(piece, flat[start:end], dtype or flat.dtype)
            start = end


def _entry(piece: Piece, values: torch.Tensor, dtype: torch.dtype) -> Entry:
    return Entry(name=piece.name, shape=piece.shape, dtype=dtype, pieces=lambda: (values,))


def _write_shards(folder: Path, entries: list[Entry], max_bytes: int) -> None:
    shards = _split(entries, max_bytes)
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS_FILE, shards[0])
        return
    where = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / file, shard)
        where |= {entry.name: file for entry in shard}
    total = {"total_size": sum(entry.num_bytes for entry in entries)}
    write_texts(folder, {INDEX_FILE: _json({"metadata": total, "weight_map": where})})


def _split(entries: list[Entry], max_bytes: int) -> list[list[Entry]]:
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.num_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.num_bytes
    return shards


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2) + "\n"
