"""Mixtral: experts in every layer, their weights always normalised."""

from slipstream.models.hf.family import Family, MoEFamily
from slipstream.models.hf.weights import ExpertNames

MIXTRAL = Family(
    name="mixtral",
    architecture="MixtralForCausalLM",
    qk_norm="none",
    attention_bias=False,
    window="always",
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "initializer_range": 0.02,
    },
    moe=MoEFamily(
        fields={
            "num_experts": "num_local_experts",
            "top_k": "num_experts_per_tok",
            "d_ff": "intermediate_size",
        },
        fixed={"normalize": True},
        names=ExpertNames(blocks=("block_sparse_moe", "mlp"), gate="w1", up="w3", down="w2"),
    ),
)
