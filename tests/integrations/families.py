"""Every experts module of the installed transformers, and tiny models of well-known families."""

import importlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
import transformers.models
from torch import nn

E, K, D, F = 5, 2, 16, 12

CONFIG = {
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_hidden_act": "relu2",
    "mlp_gate_softcap": 2.0,
    "mlp_up_softcap": 2.0,
    "moe_latent_size": None,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 0.5,
    "rms_norm_eps": 1e-6,
    "post_norm_eps": 1e-6,
}


class Config(SimpleNamespace):
    """Answers what an experts module asks of its config, by the meaning of the name."""

    def __getattr__(self, name: str):
        if name in CONFIG:
            return CONFIG[name]
        if "experts" in name:
            return E
        if "intermediate" in name:
            return F
        if "hidden" in name:
            return D
        raise AttributeError(name)


def experts_classes() -> dict[str, type[nn.Module]]:
    """The classes that take experts implementations, by name."""
    root = Path(transformers.models.__path__[0])
    found = {}
    for file in sorted(root.glob("*/modeling_*.py")):
        if "@use_experts_implementation" not in file.read_text():
            continue
        module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
        for name, member in vars(module).items():
            defined_here = inspect.isclass(member) and member.__module__ == module.__name__
            if defined_here and hasattr(member, "_apply_gate"):
                found[name] = member
    return found


def tiny_experts(kind: type[nn.Module]) -> nn.Module:
    """An experts module with random weights and biases, run eagerly until told otherwise."""
    module = kind(Config(_experts_implementation="eager"))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


TINY = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
GLM = {
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 0,
}
QWEN = {"num_experts": 8, "moe_intermediate_size": 24}
MODELS = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "dots1": GLM,
    "glm4_moe": GLM,
    "gpt_oss": {
        "num_local_experts": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "granitemoe": {"num_local_experts": 8},
    "minimax_m2": {"num_local_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "olmoe": {"num_experts": 8},
    "phimoe": {"num_local_experts": 8},
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 24},
    "qwen3_moe": QWEN,
}


def tiny_model(family: str, **changes) -> nn.Module:
    """A model of random weights, large enough for its experts to matter in the logits."""
    config = transformers.AutoConfig.for_model(family, **{**TINY, **MODELS[family], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and "embed" not in name:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    """Token ids without the special ones."""
    return torch.randint(3, TINY["vocab_size"], (rows, length))
