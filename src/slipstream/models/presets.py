"""Published shapes by name: values of ModelConfig, each from the model's own config.json.

Weights are not included; a preset trains from scratch. Values a preset leaves out are defaults.
"""

import copy
import difflib
from typing import Any

from slipstream.errors import ConfigError

_LLAMA3_ROPE = {
    "theta": 500000.0,
    "scaling": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_len": 8192,
}

PRESETS: dict[str, dict[str, Any]] = {
    "llama3-8b": {
        "vocab_size": 128256,
        "num_layers": 32,
        "d_model": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "d_ff": 14336,
        "max_seq_len": 8192,
        "norm_eps": 1e-5,
        "rope": {"theta": 500000.0},
    },
    "llama3.2-1b": {
        "vocab_size": 128256,
        "num_layers": 16,
        "d_model": 2048,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 64,
        "d_ff": 8192,
        "max_seq_len": 131072,
        "norm_eps": 1e-5,
        "rope": _LLAMA3_ROPE,
        "tie_embeddings": True,
    },
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "num_layers": 28,
        "d_model": 1024,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 3072,
        "max_seq_len": 40960,
        "norm_eps": 1e-6,
        "qk_norm": "head",
        "rope": {"theta": 1e6},
        "tie_embeddings": True,
    },
    "qwen3-8b": {
        "vocab_size": 151936,
        "num_layers": 36,
        "d_model": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "d_ff": 12288,
        "max_seq_len": 40960,
        "norm_eps": 1e-6,
        "qk_norm": "head",
        "rope": {"theta": 1e6},
    },
    "qwen3-30b-a3b": {
        "vocab_size": 151936,
        "num_layers": 48,
        "d_model": 2048,
        "num_heads": 32,
        "num_kv_heads": 4,
        "head_dim": 128,
        "d_ff": 6144,
        "max_seq_len": 40960,
        "norm_eps": 1e-6,
        "qk_norm": "head",
        "rope": {"theta": 1e6},
        "moe": {"num_experts": 128, "top_k": 8, "d_ff": 768, "normalize": True},
    },
    "mixtral-8x7b": {
        "vocab_size": 32000,
        "num_layers": 32,
        "d_model": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "d_ff": 14336,
        "max_seq_len": 32768,
        "norm_eps": 1e-5,
        "rope": {"theta": 1e6},
        "moe": {"num_experts": 8, "top_k": 2, "d_ff": 14336, "normalize": True},
    },
    "olmoe-1b-7b": {
        "vocab_size": 50304,
        "num_layers": 16,
        "d_model": 2048,
        "num_heads": 16,
        "num_kv_heads": 16,
        "d_ff": 1024,
        "max_seq_len": 4096,
        "norm_eps": 1e-5,
        "qk_norm": "full",
        "rope": {"theta": 10000.0},
        "moe": {"num_experts": 64, "top_k": 8, "d_ff": 1024},
    },
    "deepseek-moe-16b": {
        "vocab_size": 102400,
        "num_layers": 28,
        "d_model": 2048,
        "num_heads": 16,
        "num_kv_heads": 16,
        "d_ff": 10944,
        "max_seq_len": 4096,
        "norm_eps": 1e-6,
        "rope": {"theta": 10000.0},
        "moe": {
            "num_experts": 64,
            "top_k": 6,
            "d_ff": 1408,
            "shared_d_ff": 2 * 1408,
            "first_dense": 1,
        },
    },
}


def preset(name: Any) -> dict[str, Any]:
    """Values of ModelConfig for a published model; ConfigError names the nearest one."""
    if not isinstance(name, str) or name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"presets are {', '.join(PRESETS)}"
        raise ConfigError(f"preset {name!r} does not exist; {hint}")
    return copy.deepcopy(PRESETS[name])
