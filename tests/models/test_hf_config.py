"""``config.json`` both ways: dialects, what is refused, and that no field is forgotten."""

from typing import Any

import pytest
from transformers import AutoConfig

from slipstream.errors import ConfigError
from slipstream.models import ModelConfig, MoEConfig, RopeConfig
from slipstream.models.hf import FAMILIES, family_of
from slipstream.models.hf.family import COMMON, MOE_SPECIAL, MOE_TRAINING, SPECIAL
from slipstream.models.hf.rope import KEYS
from slipstream.ops import rope_tables

BASE = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "num_key_value_heads": 2,
}


def read(family: str, **values: Any) -> ModelConfig:
    experts = EXPERTS if FAMILIES[family].moe else {}
    return FAMILIES[family].read(BASE | experts | values, "config.json")


def moe(**values: Any) -> dict[str, Any]:
    return {"moe": {"num_experts": 4, "top_k": 2, "d_ff": 8, **values}}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_written_or_refused(family: str) -> None:
    chosen = FAMILIES[family]
    written = {*COMMON, *chosen.fields, *SPECIAL}
    refused = {
        *("norm", "norm_bias", "norm_cast", "qk_norm", "logit_softcap"),
        *({"mlp_bias", "clip_qkv"} - written),
    }
    assert written | refused == set(ModelConfig.model_fields)
    assert not written & refused
    if chosen.moe is not None:
        kept = {*chosen.moe.fields, *MOE_SPECIAL, *MOE_TRAINING}
        off = {"shared_d_ff", "score", "scale", "num_groups", "top_groups", "expert_bias"}
        assert kept | off | set(chosen.moe.fixed) == set(MoEConfig.model_fields)


def test_every_rope_field_is_used_by_a_scaling_or_checked() -> None:
    used = {field for fields in KEYS.values() for field in fields}
    assert used | {"theta", "scaling", "fraction"} == set(RopeConfig.model_fields)


@pytest.mark.parametrize(
    ("values", "family"),
    [
        ({}, "llama"),
        ({"attention_bias": True, "attention_out_bias": True, "mlp_bias": True}, "llama"),
        ({"qk_norm": "head"}, "qwen3"),
        (moe(normalize=True), "mixtral"),
        ({"qk_norm": "head", **moe()}, "qwen3_moe"),
        ({"qk_norm": "head", **moe(every=2, first_dense=1)}, "qwen3_moe"),
        ({"qk_norm": "full", "clip_qkv": 8.0, **moe(aux_loss=0.01, z_loss=1e-3)}, "olmoe"),
    ],
)
def test_family_of(values: dict[str, Any], family: str) -> None:
    config = ModelConfig.model_validate(values)
    assert family_of(config) == family
    again = FAMILIES[family].read(FAMILIES[family].write(config), "config.json")
    for name in type(config).model_fields:
        if name not in {"moe", "head_dim", "num_kv_heads", "d_ff"}:
            assert getattr(again, name) == getattr(config, name), name
    assert (again.head_width, again.kv_heads) == (config.head_width, config.kv_heads)
    layers = range(config.num_layers)
    assert [again.is_moe(i) for i in layers] == [config.is_moe(i) for i in layers]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"norm": "layer"}, "model.norm = 'layer'"),
        ({"norm_bias": True}, "model.norm_bias = True"),
        ({"norm_cast": "fp32"}, "model.norm_cast = 'fp32'"),
        ({"activation": "relu2"}, "model.activation = 'relu2'"),
        ({"activation": "gelu"}, "model.activation = 'gelu'"),
        ({"attention_bias": True}, "model.attention_out_bias = False"),
        ({"logit_softcap": 30.0}, "model.logit_softcap = 30.0"),
        ({"clip_qkv": 8.0}, "model.clip_qkv = 8.0"),
        ({"qk_norm": "full"}, "model.qk_norm = 'full'"),
        ({"qk_norm": "head", "mlp_bias": True}, "model.mlp_bias = True"),
        ({"d_model": 30, "num_heads": 4, "head_dim": 8}, "model.d_model = 30"),
        ({"rope": {"fraction": 0.5}}, "model.rope.fraction = 0.5"),
        ({"rope": {"attention_factor": 2.0}}, "model.rope.attention_factor = 2.0"),
        (moe(), "model.moe.normalize = False"),
        (moe(normalize=True, first_dense=1), "model.moe.every or first_dense"),
        (moe(normalize=True, shared_d_ff=8), "model.moe.shared_d_ff = 8"),
        (moe(normalize=True, score="sigmoid"), "model.moe.score = 'sigmoid'"),
        (moe(normalize=True, scale=2.5), "model.moe.scale = 2.5"),
        (moe(normalize=True, expert_bias=True), "model.moe.expert_bias = True"),
        (moe(normalize=True, num_groups=2, top_groups=2), "model.moe.num_groups = 2"),
        ({"qk_norm": "full", "head_dim": 32, **moe()}, "model.head_dim = 32"),
        ({"attention_bias": True, "attention_out_bias": True, **moe(normalize=True)}, "_bias"),
    ],
)
def test_what_no_family_has_is_refused_by_name(values: dict[str, Any], named: str) -> None:
    config = ModelConfig.model_validate(values)
    with pytest.raises(ConfigError) as caught:
        FAMILIES[family_of(config)].write(config)
    assert named in str(caught.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_left_out_mean_what_they_mean_in_transformers(family: str) -> None:
    given = BASE | {"hidden_size": 128, "num_attention_heads": 32}
    del given["num_key_value_heads"]
    if (moe_part := FAMILIES[family].moe) is not None:
        given |= {moe_part.fields["num_experts"]: 4, "num_experts_per_tok": 2}
        given |= {"moe_intermediate_size": 8} if family == "qwen3_moe" else {}
    optional = family not in {"mixtral", "qwen3_moe"}
    cases = [given, given | {"num_key_value_heads": None}] if optional else [given]
    for values in cases:
        full = AutoConfig.for_model(family, **values).to_dict()
        expected = FAMILIES[family].read(full, "config.json")
        assert FAMILIES[family].read(values, "config.json") == expected


def test_a_family_refuses_a_config_of_another() -> None:
    with pytest.raises(ConfigError, match=r"model\.qk_norm = 'none' cannot be written as qwen3"):
        FAMILIES["qwen3"].write(ModelConfig())
    with pytest.raises(ConfigError, match=r"model\.moe = None cannot be written as mixtral"):
        FAMILIES["mixtral"].write(ModelConfig())
    with pytest.raises(ConfigError, match=r"model\.moe = 'set' cannot be written as llama"):
        FAMILIES["llama"].write(ModelConfig.model_validate(moe(normalize=True)))


@pytest.mark.parametrize(
    ("family", "values", "named"),
    [
        ("llama", {"hidden_size": None}, "hidden_size = None"),
        ("llama", {"num_hidden_layers": "3"}, "num_hidden_layers = '3'"),
        ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
        ("llama", {"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type = 'ntk'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "x": 1}}, "x = 1"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
            "truncate = False",
        ),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope.factor = 0.5"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("mixtral", {"sliding_window": 32}, "sliding_window = 32"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 2}, "sliding_window"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "sliding_window = 8"),
        ("qwen3_moe", {"mlp_only_layers": [0, 3]}, "in layers [1, 2]"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        ("mixtral", {"num_experts_per_tok": 9}, "top_k = 9"),
    ],
)
def test_a_config_that_is_not_spanned_is_refused_by_name(
    family: str, values: dict[str, Any], named: str
) -> None:
    if family == "qwen3" and "layer_types" not in values:
        values = {**values, "sliding_window": 16}
    with pytest.raises(ConfigError) as caught:
        read(family, **values)
    assert named in str(caught.value)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("mixtral", {"sliding_window": 64}),
        ("mixtral", {"sliding_window": None}),
        ("qwen3", {"sliding_window": 8}),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 4}),
        ("llama", {"sliding_window": 8}),
    ],
)
def test_a_window_that_is_never_used_is_fine(family: str, values: dict[str, Any]) -> None:
    assert read(family, **values).max_seq_len == 64


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"rope_theta": 500.0}, {"theta": 500.0}),
        ({"rope_parameters": {"rope_theta": 500.0}}, {"theta": 500.0}),
        ({}, {"theta": 10000.0}),
        (
            {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"theta": 500.0, "scaling": "linear", "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
            {"theta": 500.0, "scaling": "linear", "factor": 2.0},
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            {"scaling": "dynamic", "factor": 2.0, "original_len": 64},
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 16}},
            {"scaling": "yarn", "factor": 4.0, "original_len": 16},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            {"scaling": "yarn", "factor": 2.0, "original_len": 64},
        ),
    ],
)
def test_both_rope_dialects_are_read(values: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read("llama", **values).rope == RopeConfig.model_validate(expected)


def test_dynamic_rope_reaches_beyond_its_original_length() -> None:
    values = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    assert read("llama", **values).max_seq_len == 128


def test_rope_written_in_both_dialects_means_the_same() -> None:
    rope = RopeConfig(theta=500.0, scaling="yarn", factor=4.0, original_len=16)
    written = FAMILIES["llama"].write(ModelConfig(rope=rope, max_seq_len=64))
    old = {key: value for key, value in written.items() if key != "rope_parameters"}
    new = {k: v for k, v in written.items() if k not in {"rope_theta", "rope_scaling"}}
    for dialect in (old, new):
        config = FAMILIES["llama"].read(dialect, "config.json")
        assert config.rope == rope
        cos, sin = rope_tables(config.rope_spec(), 8)
        assert cos.shape == sin.shape == (8, 32)


@pytest.mark.parametrize(
    ("step", "dense", "expected"),
    [
        (1, [], [0, 1, 2, 3]),
        (2, [], [1, 3]),
        (3, [], [2]),
        (1, [0, 1], [2, 3]),
        (1, [0, 2], [1, 3]),
    ],
)
def test_sparse_layers(step: int, dense: list[int], expected: list[int]) -> None:
    config = read("qwen3_moe", decoder_sparse_step=step, mlp_only_layers=dense)
    assert [layer for layer in range(4) if config.is_moe(layer)] == expected
    again = FAMILIES["qwen3_moe"].read(FAMILIES["qwen3_moe"].write(config), "config.json")
    assert again == config


@pytest.mark.parametrize(("step", "dense"), [(1, [0, 1, 2, 3]), (5, []), (2, [1, 3])])
def test_a_moe_model_without_a_sparse_layer_is_refused(step: int, dense: list[int]) -> None:
    with pytest.raises(ConfigError, match="leaves no MoE layer of num_layers = 4"):
        read("qwen3_moe", decoder_sparse_step=step, mlp_only_layers=dense)
