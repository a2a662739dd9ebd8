"""OLMoE: queries and keys are normalised over all heads together, then clipped."""

from slipstream.models.hf.family import Family, MoEFamily
from slipstream.models.hf.weights import ExpertNames

OLMOE = Family(
    name="olmoe",
    architecture="OlmoeForCausalLM",
    aliases={"num_local_experts": "num_experts"},
    qk_norm="full",
    fields={"clip_qkv": "clip_qkv"},
    head_dim="derived",
    window="always",
    defaults={
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "norm_topk_prob": False,
    },
    moe=MoEFamily(
        fields={
            "num_experts": "num_experts",
            "top_k": "num_experts_per_tok",
            "d_ff": "intermediate_size",
            "normalize": "norm_topk_prob",
        },
        names=ExpertNames(blocks=("mlp",)),
    ),
)
