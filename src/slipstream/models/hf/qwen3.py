"""Qwen3, dense: queries and keys are normalised per head."""

from slipstream.models.hf.family import Family

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    qk_norm="head",
    window="switch",
    defaults={
        "hidden_act": "silu",
        "head_dim": 128,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)
