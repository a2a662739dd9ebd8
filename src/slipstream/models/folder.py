"""A model as a folder: ``config.toml`` (table ``[model]``), ``model.safetensors``, a tokenizer.

Tensor names are those of ``Transformer.state_dict``; dtypes are kept as given. A folder appears
whole or not at all: it is written beside its target and renamed.
"""

import os
import shutil
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

import tomli_w
import torch
from torch import nn

from slipstream.config import validate
from slipstream.config.load import read_toml
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.tensor_file import WEIGHTS_FILE, Entry, TensorFiles, write_tensors
from slipstream.models.transformer import Transformer

CONFIG_FILE = "config.toml"
TOKENIZER_FILE = "tokenizer.json"


def is_model_folder(path: Path) -> bool:
    """Whether ``path`` holds a Slipstream model (a run folder has no weights of its own)."""
    return (path / CONFIG_FILE).is_file() and (path / WEIGHTS_FILE).is_file()


def read_model_config(folder: Path) -> ModelConfig:
    """The ``[model]`` table of a model or run folder; CheckpointError or ConfigError."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; give a Slipstream model or run folder")
    values = read_toml(path).get("model")
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: no [model] table; give a Slipstream model or run folder")
    # A run's table also names the preset it began with; its values are all there.
    values = {key: value for key, value in values.items() if key != "preset"}
    return validate(ModelConfig, values, f"{path}: model")


def save_model_folder(
    model: nn.Module | Mapping[str, torch.Tensor],
    config: ModelConfig,
    folder: Path,
    tokenizer_json: str | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Write a model, or its state dict, as a model folder.

    Raises CheckpointError if ``folder`` holds something (``overwrite`` replaces a model) or if the
    tensors are not those of ``config``.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    check_tensors("the model", {n: tuple(t.shape) for n, t in state.items()}, state_shapes(config))
    entries = [
        Entry(name=n, shape=tuple(t.shape), dtype=t.dtype, pieces=lambda t=t: (t,))
        for n, t in state.items()
    ]
    write_model_folder(entries, config, folder, tokenizer_json, overwrite=overwrite)


def write_model_folder(
    entries: Iterable[Entry],
    config: ModelConfig,
    folder: Path,
    tokenizer_json: str | None,
    *,
    overwrite: bool,
    extra: Mapping[str, str] | None = None,
) -> None:
    """Write checked ``entries``; ``extra`` are further text files by name."""
    texts = {CONFIG_FILE: tomli_w.dumps({"model": config.model_dump(exclude_none=True)})}
    if tokenizer_json is not None:
        texts[TOKENIZER_FILE] = tokenizer_json
    with new_folder(folder, overwrite=overwrite) as partial:
        write_tensors(partial / WEIGHTS_FILE, entries)
        write_texts(partial, {**texts, **(extra or {})})


def load_model_folder(
    folder: Path, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> Transformer:
    """The model of a model folder, its parameters in ``dtype`` (None: as stored).

    Raises CheckpointError for a missing or damaged file and for tensors that do not match the
    config, by name.
    """
    config = read_model_config(folder)
    files = TensorFiles(folder)
    expected = state_shapes(config)
    found = {name: files.shape(name) for name in files.names()}
    check_tensors(str(folder / WEIGHTS_FILE), found, expected)
    model = _skeleton(config)
    parameters = dict(model.named_parameters())
    state = {}
    for name in expected:
        wanted = dtype if name in parameters else torch.float32
        state[name] = files.get(name).to(device, wanted or files.dtype(name), copy=True)
    model.load_state_dict(state, assign=True)
    _materialise_counters(model, torch.device(device))
    return model


def state_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the state dict of a model of ``config``."""
    return {name: tuple(t.shape) for name, t in _skeleton(config).state_dict().items()}


def parameter_names(config: ModelConfig) -> set[str]:
    """Names of the parameters: the state dict without balancing state."""
    return {name for name, _ in _skeleton(config).named_parameters()}


def check_tensors(
    source: str, found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]
) -> None:
    """CheckpointError naming the tensors that are missing, too many, or of another shape."""
    missing, extra = sorted(expected.keys() - found.keys()), sorted(found.keys() - expected.keys())
    problems = [f"{name} is missing" for name in missing]
    problems += [f"{name} is not part of the model" for name in extra]
    problems += [
        f"{name} is {list(found[name])}, expected {list(expected[name])}"
        for name in expected
        if name in found and found[name] != expected[name]
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(
            f"{source}: {'; '.join(problems[:3])}{more}; the weights belong to another config"
        )


@contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Generator[Path]:
    """A hidden folder beside ``target`` that takes its place when the block ends without error."""
    target = target.absolute()
    _check_target(target, overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        yield partial
        _replace(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write text files by name."""
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _check_target(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        content = list(target.iterdir())
        if not content:
            return
        # Only a flat folder with a config is a model; anything else is never deleted.
        names = {entry.name for entry in content}
        is_model = bool({CONFIG_FILE, "config.json"} & names)
        if not is_model or any(entry.is_dir() for entry in content):
            raise CheckpointError(f"{target}: exists and is no model folder; choose another --to")
        if not overwrite:
            raise CheckpointError(f"{target}: exists; give --overwrite or choose another --to")
    elif target.exists():
        raise CheckpointError(f"{target}: exists and is not a folder; choose another --to")


def _replace(partial: Path, target: Path) -> None:
    if not target.exists():
        partial.rename(target)
        return
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    target.rename(old)
    partial.rename(target)
    shutil.rmtree(old)


def _skeleton(config: ModelConfig) -> Transformer:
    with torch.device("meta"):
        return Transformer(config)


def _materialise_counters(model: nn.Module, device: torch.device) -> None:
    # Buffers that are not saved (load counters) start at zero.
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:
                module.register_buffer(name, torch.zeros_like(buffer, device=device), False)
