"""Parameters and FLOPs of a config, counted on what a token really uses.

Experts a token does not visit cost nothing, so MFU uses active parameters. A multiply-add is two
FLOPs; backward costs twice the forward; causal attention is counted at half its square.
"""

from dataclasses import dataclass

from slipstream.models.config import ModelConfig
from slipstream.ops.activation import is_gated


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Weights of a model."""

    total: int
    """All parameters."""
    active: int
    """Parameters a token uses; the input embedding is a look-up and counts only when tied."""


def size(config: ModelConfig) -> Size:
    """Count the parameters of ``config``."""
    total = active = 0
    for layer in range(config.num_layers):
        common = _attention(config) + _norms(config)
        layer_total, layer_active = _feed_forward(config, layer)
        total += common + layer_total
        active += common + layer_active
    final = config.d_model * (2 if config.norm_bias else 1)
    embedding = config.vocab_size * config.d_model
    tables = embedding if config.tie_embeddings else 2 * embedding
    return Size(total=total + final + tables, active=active + final + embedding)


def train_flops_per_token(config: ModelConfig, seq_len: int) -> float:
    """FLOPs of forward and backward for one token of a sequence of ``seq_len``."""
    attention = config.num_layers * config.num_heads * config.head_width * seq_len
    return 6.0 * size(config).active + 6.0 * attention


def _attention(config: ModelConfig) -> int:
    heads, kv, width = config.num_heads, config.kv_heads, config.head_width
    count = (heads + 2 * kv) * width * config.d_model + heads * width * config.d_model
    if config.attention_bias:
        count += (heads + 2 * kv) * width
    if config.attention_out_bias:
        count += config.d_model
    return count + {"none": 0, "head": 2 * width, "full": (heads + kv) * width}[config.qk_norm]


def _norms(config: ModelConfig) -> int:
    return 2 * config.d_model * (2 if config.norm_bias else 1)


def _mlp(config: ModelConfig, hidden: int, bias: bool) -> int:
    products = 3 if is_gated(config.activation) else 2
    biases = (products - 1) * hidden + config.d_model if bias else 0
    return products * hidden * config.d_model + biases


def _feed_forward(config: ModelConfig, layer: int) -> tuple[int, int]:
    moe = config.moe
    if moe is None or not config.is_moe(layer):
        dense = _mlp(config, config.d_ff, config.mlp_bias)
        return dense, dense
    expert = _mlp(config, moe.d_ff, False)
    common = moe.num_experts * config.d_model
    if moe.shared_d_ff:
        common += _mlp(config, moe.shared_d_ff, False)
    return common + moe.num_experts * expert, common + moe.top_k * expert
