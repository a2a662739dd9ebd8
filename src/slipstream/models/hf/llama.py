"""Llama 2 and 3, and what shares their architecture."""

from slipstream.models.hf.family import Family

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    qk_norm="none",
    fields={"mlp_bias": "mlp_bias"},
    head_dim="free, d_model divisible",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
    },
)
