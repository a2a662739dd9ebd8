"""Rotary embeddings as ``config.json`` writes them, in the dialects of transformers 4 and 5.

Version 4 has ``rope_theta`` and ``rope_scaling`` at the top, version 5 one ``rope_parameters``.
"""

import math
from collections.abc import Mapping
from typing import Any

from slipstream.errors import ConfigError
from slipstream.models.config import ModelConfig, RopeConfig

ORIGINAL = "original_max_position_embeddings"
KEYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_len"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor", "original_len"),
    "longrope": ("factor", "long_factor", "short_factor", "attention_factor", "original_len"),
}
"""The RopeConfig fields that each scaling uses."""
_TYPES = {"default": "none", "su": "longrope"} | {name: name for name in KEYS if name != "none"}
_OPTIONAL = {"attention_factor", "beta_fast", "beta_slow", "original_len"}
_RENAMED = {"original_len": ORIGINAL}
_YARN_ONLY = ("mscale", "mscale_all_dim", "truncate")


def read_rope(raw: Mapping[str, Any], default_theta: float, source: str) -> dict[str, Any]:
    """``config.json`` to the values of RopeConfig; ConfigError for what it cannot express."""
    table = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind not in _TYPES:
        allowed = ", ".join(_TYPES)
        raise ConfigError(f"{source}: rope_type = {kind!r} is not supported; one of {allowed}")
    scaling = _TYPES[kind]
    values = {key: value for key, value in table.items() if value is not None}
    _check_keys(values, scaling, source)
    theta = values.get("rope_theta") or raw.get("rope_theta") or default_theta
    rope: dict[str, Any] = {"theta": theta, "scaling": scaling}
    for field in KEYS[scaling]:
        key = _RENAMED.get(field, field)
        if key in values:
            rope[field] = values[key]
    return rope | _derived(raw, values, scaling)


def _check_keys(values: Mapping[str, Any], scaling: str, source: str) -> None:
    known = {_RENAMED.get(field, field) for field in KEYS[scaling]}
    known |= {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    known |= set(_YARN_ONLY) if scaling == "yarn" else set()
    for key in sorted(values.keys() - known):
        raise ConfigError(
            f"{source}: rope parameter {key} = {values[key]!r} is not supported for {scaling}"
        )
    optional = _OPTIONAL | ({"factor"} if scaling in ("yarn", "longrope") else set())
    for field in KEYS[scaling]:
        if field not in optional and field not in values:
            raise ConfigError(f"{source}: rope parameter {field} is missing, {scaling} needs it")
    for key, only in (("partial_rotary_factor", 1.0), ("truncate", True)):
        if values.get(key, only) != only:
            raise ConfigError(f"{source}: {key} = {values[key]!r} is not supported, only {only}")


def _derived(raw: Mapping[str, Any], values: Mapping[str, Any], scaling: str) -> dict[str, Any]:
    # What transformers takes from the context length when the rope parameters leave it out.
    length = raw["max_position_embeddings"]
    if scaling == "dynamic":
        return {"original_len": length}
    if "original_len" not in KEYS[scaling]:
        return {}
    original = raw.get(ORIGINAL) or values.get(ORIGINAL) or length
    derived: dict[str, Any] = {"original_len": original}
    if scaling != "llama3" and "factor" not in values:
        derived["factor"] = length / original
    mscale, all_dim = values.get("mscale"), values.get("mscale_all_dim")
    if scaling == "yarn" and "attention_factor" not in values and mscale and all_dim:
        factor = values.get("factor", length / original)
        derived["attention_factor"] = _yarn_scale(factor, mscale) / _yarn_scale(factor, all_dim)
    return derived


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def max_seq_len(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> int:
    """Longest sequence: with dynamic scaling ``max_position_embeddings`` is the unscaled one."""
    length = raw["max_position_embeddings"]
    return int(length * rope["factor"]) if rope["scaling"] == "dynamic" else length


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """RopeConfig to the keys of ``config.json``, in both dialects."""
    rope = config.rope
    _check_expressible(rope)
    table: dict[str, Any] = {
        "rope_type": "default" if rope.scaling == "none" else rope.scaling,
        "rope_theta": rope.theta,
    }
    for field in KEYS[rope.scaling]:
        value = getattr(rope, field)
        if value is not None:
            table[_RENAMED.get(field, field)] = list(value) if isinstance(value, tuple) else value
    length = rope.original_len if rope.scaling == "dynamic" else config.max_seq_len
    return {
        "max_position_embeddings": length,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.scaling == "none" else table,
        "rope_parameters": table,
    }


def _check_expressible(rope: RopeConfig) -> None:
    if rope.fraction != 1.0:
        raise ConfigError(f"model.rope.fraction = {rope.fraction}: no Hugging Face family has it")
    if rope.attention_factor is not None and "attention_factor" not in KEYS[rope.scaling]:
        raise ConfigError(
            f"model.rope.attention_factor = {rope.attention_factor}: Hugging Face families ignore "
            f"it with scaling {rope.scaling!r}; unset it"
        )
