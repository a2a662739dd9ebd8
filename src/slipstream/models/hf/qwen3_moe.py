"""Qwen3 with experts in all or some layers."""

from slipstream.models.hf.family import Family, MoEFamily
from slipstream.models.hf.weights import ExpertNames

QWEN3_MOE = Family(
    name="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    aliases={"num_local_experts": "num_experts"},
    qk_norm="head",
    window="switch",
    defaults={
        "hidden_act": "silu",
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "sliding_window": 4096,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
    },
    moe=MoEFamily(
        fields={
            "num_experts": "num_experts",
            "top_k": "num_experts_per_tok",
            "d_ff": "moe_intermediate_size",
            "normalize": "norm_topk_prob",
        },
        names=ExpertNames(blocks=("mlp",)),
        dense_layers=True,
    ),
)
