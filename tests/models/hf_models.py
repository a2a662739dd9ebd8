"""Tiny random Hugging Face models, one per family and rope variant, and what compares them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from slipstream.models import Transformer
from slipstream.models.hf import FAMILIES
from slipstream.models.hf.weights import weight_map

VOCAB, LENGTH = 61, 17
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "long_factor": [1.5, 3.0],
    "short_factor": [1.0, 1.25],
    "original_max_position_embeddings": 16,
}


def _llama(**values: Any) -> LlamaConfig:
    return LlamaConfig(**COMMON | values)


def _rope(table: dict[str, Any], **values: Any) -> Callable[[], LlamaConfig]:
    return lambda: _llama(rope_parameters={"rope_theta": 500.0, **table}, **values)


CASES: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama-biases-tied-gelu": lambda: _llama(
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True, hidden_act="gelu"
    ),
    "llama-head8-gelutanh": lambda: _llama(head_dim=8, hidden_act="gelu_pytorch_tanh"),
    "llama-rope-llama3": _rope(LLAMA3),
    "llama-rope-yarn": _rope(YARN, head_dim=16),
    "llama-rope-yarn-mscale": _rope(
        {**YARN, "mscale": 1.3, "mscale_all_dim": 0.7, "beta_fast": 8.0}, head_dim=16
    ),
    "llama-rope-linear": _rope({"rope_type": "linear", "factor": 3.0}),
    "llama-rope-dynamic": _rope(
        {"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=11
    ),
    "llama-rope-longrope": _rope(LONG),
    "qwen3": lambda: Qwen3Config(**COMMON | {"head_dim": 10}),
    "qwen3-tied-window-unused": lambda: Qwen3Config(
        **COMMON | {"head_dim": 4, "tie_word_embeddings": True, "sliding_window": 8}
    ),
    "mixtral": lambda: MixtralConfig(**COMMON | EXPERTS, num_local_experts=5),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **COMMON | EXPERTS, head_dim=6, num_experts=5, moe_intermediate_size=9, norm_topk_prob=True
    ),
    "qwen3_moe-dense-first": lambda: Qwen3MoeConfig(
        **COMMON | EXPERTS, num_experts=4, moe_intermediate_size=9, mlp_only_layers=[0]
    ),
    "qwen3_moe-every-2": lambda: Qwen3MoeConfig(
        **COMMON | EXPERTS, num_experts=4, moe_intermediate_size=9, decoder_sparse_step=2
    ),
    "olmoe": lambda: OlmoeConfig(**COMMON | EXPERTS, num_experts=5),
    "olmoe-clip-normalised": lambda: OlmoeConfig(
        **COMMON | EXPERTS, num_experts=5, clip_qkv=0.8, norm_topk_prob=True
    ),
}


def build(case: str, seed: int = 0) -> Any:
    """A model of the case whose every parameter, norms and biases too, is random."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CASES[case](), **EAGER)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                nn.init.normal_(parameter, std=0.3)
    return model.eval()


def save(case: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Build the model, save it as transformers does, return it."""
    model = build(case).to(dtype)
    model.save_pretrained(folder)
    return model


def tokens(batch: int = 2, length: int = LENGTH) -> torch.Tensor:
    """Token ids, always the same."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCAB, (batch, length), generator=generator)


def in_our_names(model: Transformer, family: str, theirs: dict[str, Any]) -> Iterator[Any]:
    """(our name, tensor) from Hugging Face tensors by name, joined through the weight map."""
    moe = FAMILIES[family].moe
    for weight in weight_map(model.config, moe.names if moe else None):
        layout = next(la for la in weight.layouts if all(piece.name in theirs for piece in la))
        flat = torch.cat([theirs[piece.name].flatten() for piece in layout])
        yield weight.name, flat.view_as(model.state_dict()[weight.name])


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    assert actual.shape == expected.shape
    return ((actual - expected).abs().max() / expected.abs().max()).item()
