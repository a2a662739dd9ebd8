"""A model family as data, and its ``config.json`` both ways.

Every ModelConfig and MoEConfig field is written under a key, fixed by the family, or a training
setting that does not change what the model computes; whatever else differs from its default is
refused, so a field added later is refused until a family says where it goes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from pydantic import BaseModel

from slipstream.config import validate
from slipstream.errors import ConfigError
from slipstream.models.config import ModelConfig
from slipstream.models.hf.rope import max_seq_len, read_rope, write_rope
from slipstream.models.hf.weights import ExpertNames

COMMON = {
    "vocab_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "num_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""ModelConfig field to key, the same in every family."""
SPECIAL = {
    "num_kv_heads",
    "head_dim",
    "d_ff",
    "max_seq_len",
    "activation",
    "attention_bias",
    "attention_out_bias",
    "rope",
    "moe",
}
"""ModelConfig fields that take more than a copy."""
MOE_SPECIAL = {"every", "first_dense"}
MOE_TRAINING = {"bias_update_rate", "aux_loss", "aux_scope", "z_loss", "balance", "group_top"}
"""MoEConfig fields without effect on a trained model (group_top: without group limits)."""
ACTIVATIONS = {"silu": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh"}
_ACTIVATION_ALIASES = {"swish": "silu", "gelu_new": "gelu_pytorch_tanh"}
_REQUIRED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "max_position_embeddings"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEFamily:
    """The Mixture-of-Experts part of a family."""

    fields: Mapping[str, str]
    """MoEConfig field to key."""
    names: ExpertNames
    """Tensor names."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """MoEConfig fields the family does not vary."""
    dense_layers: bool = False
    """Whether some layers may be dense (``mlp_only_layers``, ``decoder_sparse_step``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a family of models has in its config and what it leaves out."""

    name: str
    """``model_type``."""
    architecture: str
    """Class name in transformers."""
    defaults: Mapping[str, Any]
    """What transformers takes for a key that a config leaves out."""
    qk_norm: Literal["none", "head", "full"]
    """The family's normalisation of queries and keys."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """ModelConfig field to key, beyond ``COMMON``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Keys some versions write to the key that is read here."""
    attention_bias: bool = True
    """Whether the config has a switch for biases (of all four projections)."""
    head_dim: Literal["free", "free, d_model divisible", "derived"] = "free"
    """Whether a head may be wider or narrower than d_model / num_heads."""
    window: Literal["never", "always", "switch"] = "never"
    """Whether the model reads ``sliding_window``, only with ``use_sliding_window``, or not."""
    moe: MoEFamily | None = None
    """Its experts, if it has any."""

    def read(self, raw: Mapping[str, Any], source: str) -> ModelConfig:
        """``config.json`` to a ModelConfig; ConfigError names the key that has no counterpart."""
        for key in _REQUIRED:
            if not isinstance(raw.get(key), int) or raw[key] < 1:
                raise ConfigError(f"{source}: {key} = {raw.get(key)!r}, expected a whole number")
        merged = {**self.defaults, **raw}
        raw = {key: value for key, value in merged.items() if value is not None}
        for alias, key in self.aliases.items():
            if alias in raw:
                raw.setdefault(key, raw[alias])
        self._reject(raw, source)
        heads = raw["num_attention_heads"]
        rope = read_rope(raw, self.defaults["rope_theta"], source)
        values = {ours: raw[key] for ours, key in {**COMMON, **self.fields}.items() if key in raw}
        values |= {
            "num_kv_heads": raw.get("num_key_value_heads", heads),
            "head_dim": raw.get("head_dim", raw["hidden_size"] // heads),
            "d_ff": raw["intermediate_size"],
            "max_seq_len": max_seq_len(raw, rope),
            "activation": _activation(raw["hidden_act"], source),
            "attention_bias": bool(self.attention_bias and raw.get("attention_bias")),
            "attention_out_bias": bool(self.attention_bias and raw.get("attention_bias")),
            "qk_norm": self.qk_norm,
            "rope": rope,
            "moe": self._read_moe(raw, source),
        }
        config = validate(ModelConfig, values, source)
        self.check(config)
        return config

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """A checked ModelConfig to the values of ``config.json``."""
        self.check(config)
        by_activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        values = {key: getattr(config, ours) for ours, key in {**COMMON, **self.fields}.items()}
        values |= {
            "num_key_value_heads": config.kv_heads,
            "intermediate_size": config.d_ff,
            "hidden_act": by_activation[config.activation],
        }
        if self.attention_bias:
            values["attention_bias"] = config.attention_bias
        if self.head_dim != "derived":
            values["head_dim"] = config.head_width
        if self.window == "switch":
            values["use_sliding_window"] = False
        if self.window != "never":
            values["sliding_window"] = None
        return values | write_rope(config) | self._write_moe(config)

    def check(self, config: ModelConfig) -> None:
        """ConfigError naming the first field that this family cannot express."""
        written = {*COMMON, *self.fields, *SPECIAL}
        self._check_fields(config, written, {"qk_norm": self.qk_norm}, "model")
        self._check_heads(config)
        if config.activation not in ACTIVATIONS.values():
            self._refuse("model.activation", config.activation, " or ".join(ACTIVATIONS.values()))
        if config.attention_bias != config.attention_out_bias:
            self._refuse("model.attention_out_bias", config.attention_out_bias, "attention_bias")
        if config.attention_bias and not self.attention_bias:
            self._refuse("model.attention_bias", True, False)
        if config.moe is not None:
            self._check_moe(config)
        elif self.moe is not None:
            self._refuse("model.moe", None, "experts")

    def _check_moe(self, config: ModelConfig) -> None:
        if self.moe is None:
            self._refuse("model.moe", "set", "no experts")
        written = {*self.moe.fields, *MOE_SPECIAL, *MOE_TRAINING}
        self._check_fields(config.moe, written, self.moe.fixed, "model.moe")
        dense = _dense_layers(config)
        if dense and not self.moe.dense_layers:
            self._refuse(
                "model.moe.every or first_dense", f"dense layers {dense}", "no dense layer"
            )

    def _check_heads(self, config: ModelConfig) -> None:
        if self.head_dim == "derived" and config.head_width * config.num_heads != config.d_model:
            self._refuse("model.head_dim", config.head_width, "d_model / num_heads")
        if self.head_dim == "free, d_model divisible" and config.d_model % config.num_heads:
            self._refuse("model.d_model", config.d_model, "a multiple of num_heads")

    def _check_fields(
        self, section: BaseModel | None, written: set[str], fixed: Mapping[str, Any], prefix: str
    ) -> None:
        assert section is not None
        for name, info in type(section).model_fields.items():
            if name in written:
                continue
            only = fixed[name] if name in fixed else info.get_default()
            value = getattr(section, name)
            if value != only:
                self._refuse(f"{prefix}.{name}", value, only)

    def _refuse(self, name: str, value: object, only: object) -> NoReturn:
        raise ConfigError(f"{name} = {value!r} cannot be written as {self.name}, only {only!r} can")

    def _reject(self, raw: Mapping[str, Any], source: str) -> None:
        if raw.get("quantization_config"):
            raise ConfigError(f"{source}: quantization_config is set; take the unquantised model")
        if raw.get("partial_rotary_factor", 1.0) != 1.0:
            raise ConfigError(f"{source}: partial_rotary_factor is not supported")
        if self._slides(raw):
            raise ConfigError(
                f"{source}: sliding_window = {raw.get('sliding_window')} is used by this model and "
                "not supported; attention here reaches back to the start"
            )

    def _slides(self, raw: Mapping[str, Any]) -> bool:
        if self.window == "never":
            return False
        kinds = raw.get("layer_types")
        if kinds is not None:
            return any(kind != "full_attention" for kind in kinds)
        window, length = raw.get("sliding_window"), raw["max_position_embeddings"]
        on = self.window == "always" or raw.get("use_sliding_window", False)
        some = raw.get("max_window_layers", 0) < raw["num_hidden_layers"]
        return bool(on and some and window is not None and window < length)

    def _read_moe(self, raw: Mapping[str, Any], source: str) -> dict[str, Any] | None:
        if self.moe is None:
            return None
        missing = [key for key in self.moe.fields.values() if key not in raw]
        if missing:
            raise ConfigError(f"{source}: {missing[0]} is missing; copy the file again")
        values = {ours: raw[key] for ours, key in self.moe.fields.items()} | dict(self.moe.fixed)
        return values | (_read_sparse(raw, source) if self.moe.dense_layers else {})

    def _write_moe(self, config: ModelConfig) -> dict[str, Any]:
        if self.moe is None:
            return {}
        values = {key: getattr(config.moe, ours) for ours, key in self.moe.fields.items()}
        if self.moe.dense_layers:
            values |= {"decoder_sparse_step": 1, "mlp_only_layers": _dense_layers(config)}
        return values


def _activation(name: str, source: str) -> str:
    known = _ACTIVATION_ALIASES.get(name, name)
    if known not in ACTIVATIONS:
        allowed = ", ".join(ACTIVATIONS)
        raise ConfigError(f"{source}: hidden_act = {name!r} is not supported; one of {allowed}")
    return ACTIVATIONS[known]


def _dense_layers(config: ModelConfig) -> list[int]:
    return [layer for layer in range(config.num_layers) if not config.is_moe(layer)]


def _read_sparse(raw: Mapping[str, Any], source: str) -> dict[str, int]:
    # Which layers have experts, then the (first, period) that says the same.
    step, dense = raw["decoder_sparse_step"], set(raw.get("mlp_only_layers", ()))
    if not isinstance(step, int) or step < 1:
        raise ConfigError(f"{source}: decoder_sparse_step = {step!r}, expected 1 or more")
    layers = range(raw["num_hidden_layers"])
    sparse = [i for i in layers if i not in dense and (i + 1) % step == 0]
    if not sparse:
        return {"first_dense": len(layers), "every": 1}
    every = sparse[1] - sparse[0] if len(sparse) > 1 else len(layers)
    if sparse != list(range(sparse[0], len(layers), every)):
        raise ConfigError(
            f"{source}: decoder_sparse_step = {step} with mlp_only_layers = {sorted(dense)} puts "
            f"experts in layers {sparse}; only every n-th layer after the first is supported"
        )
    return {"first_dense": sparse[0], "every": every}
