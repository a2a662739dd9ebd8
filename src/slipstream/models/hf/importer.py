"""A Hugging Face folder to a Slipstream model folder, without transformers."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.folder import state_shapes, write_model_folder
from slipstream.models.hf.family import Family
from slipstream.models.hf.registry import FAMILIES
from slipstream.models.hf.tokenizer import read_tokenizer, tokenizer_files
from slipstream.models.hf.weights import Layout, Weight, weight_map
from slipstream.models.tensor_file import Entry, TensorFiles, read_json

CONFIG_FILE = "config.json"
_IGNORED = ("rotary_emb.inv_freq",)
"""Buffers old files carry; they follow from the config."""


def import_folder(hf_dir: Path, out_dir: Path, *, overwrite: bool = False) -> ModelConfig:
    """Convert ``hf_dir`` (config.json, safetensors, tokenizer) to a model folder at ``out_dir``.

    Values and dtypes are kept bit for bit. One tensor is in memory at a time. Raises ConfigError
    for a model that ModelConfig does not span, CheckpointError for missing or damaged files.
    """
    if not hf_dir.is_dir():
        raise CheckpointError(f"{hf_dir}: no such folder; give a Hugging Face model folder")
    source = str(hf_dir / CONFIG_FILE)
    raw = read_json(hf_dir / CONFIG_FILE)
    family = _family(raw.get("model_type"), source)
    config = family.read(raw, source)
    files = TensorFiles(hf_dir)
    entries = _entries(config, family, files)
    text, tokenizer_config = read_tokenizer(hf_dir)
    extra = tokenizer_files(text, tokenizer_config)
    write_model_folder(entries, config, out_dir, text, overwrite=overwrite, extra=extra)
    return config


def _family(model_type: Any, source: str) -> Family:
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        supported = ", ".join(FAMILIES)
        raise ConfigError(f"{source}: model_type = {model_type!r} is not one of {supported}")
    return FAMILIES[model_type]


def _entries(config: ModelConfig, family: Family, files: TensorFiles) -> list[Entry]:
    weights = weight_map(config, family.moe.names if family.moe else None)
    chosen = {weight.name: _choose(weight, files) for weight in weights}
    used = {piece.name for layout in chosen.values() for piece in layout}
    _check_extra(files, used, config.tie_embeddings)
    return [
        _weight_entry(name, shape, chosen[name], files) if name in chosen else _zeros(name, shape)
        for name, shape in state_shapes(config).items()
    ]


def _choose(weight: Weight, files: TensorFiles) -> Layout:
    # The layout that is there; with none complete, the one most of which is there is reported.
    names = files.names()
    found = [sum(piece.name in names for piece in layout) for layout in weight.layouts]
    shares = [count / len(layout) for count, layout in zip(found, weight.layouts, strict=True)]
    layout = weight.layouts[shares.index(max(shares))]
    for piece in layout:
        if piece.name not in names:
            raise CheckpointError(
                f"{files.folder}: tensor {piece.name} is missing; copy the model folder again"
            )
        shape = files.shape(piece.name)
        if shape != piece.shape:
            raise CheckpointError(
                f"{files.source(piece.name)}: {piece.name} is {list(shape)}, expected "
                f"{list(piece.shape)} from config.json"
            )
    return layout


def _check_extra(files: TensorFiles, used: set[str], tied: bool) -> None:
    extra = {name for name in files.names() - used if not name.endswith(_IGNORED)}
    pair = ("lm_head.weight", "model.embed_tokens.weight")
    if tied and pair[0] in extra:
        if not torch.equal(files.get(pair[0]), files.get(pair[1])):
            raise CheckpointError(
                f"{files.source(pair[0])}: {pair[0]} differs from {pair[1]} although config.json "
                "has tie_word_embeddings = true; set it to false to keep both"
            )
        extra.discard(pair[0])
    if extra:
        first = min(extra)
        raise CheckpointError(
            f"{files.source(first)}: {first} is not part of the model in config.json "
            f"({len(extra)} such tensors); is it the config of this model?"
        )


def _weight_entry(name: str, shape: Sequence[int], layout: Layout, files: TensorFiles) -> Entry:
    dtypes = [files.dtype(piece.name) for piece in layout]
    return Entry(
        name=name,
        shape=tuple(shape),
        dtype=reduce(torch.promote_types, dtypes),
        pieces=_reader(layout, files),
    )


def _reader(layout: Layout, files: TensorFiles) -> Callable[[], Iterable[torch.Tensor]]:
    return lambda: (files.get(piece.name) for piece in layout)


def _zeros(name: str, shape: Sequence[int]) -> Entry:
    # Balancing state, which a Hugging Face model does not have, starts at zero.
    zeros = torch.zeros(tuple(shape))
    return Entry(name=name, shape=tuple(shape), dtype=torch.float32, pieces=lambda: (zeros,))
