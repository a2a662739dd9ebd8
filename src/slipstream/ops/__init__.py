"""The ops: each validates once, asks ``dispatch`` for an implementation, runs under autograd."""

from slipstream.ops import dispatch, moe
from slipstream.ops.activation import activation
from slipstream.ops.activation_linear import activation_linear
from slipstream.ops.adamw import AdamWOptions, adamw
from slipstream.ops.grad_norm import grad_norm
from slipstream.ops.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_sums,
    token_losses,
)
from slipstream.ops.norm import activation_norm, norm
from slipstream.ops.norm_linear import norm_linear
from slipstream.ops.qk_norm_rope import qk_norm_rope
from slipstream.ops.qkv_rope import qkv_rope
from slipstream.ops.rope import RopeSpec, rope, rope_tables

__all__ = [
    "AdamWOptions",
    "RopeSpec",
    "activation",
    "activation_linear",
    "activation_norm",
    "adamw",
    "dispatch",
    "grad_norm",
    "linear_cross_entropy",
    "linear_cross_entropy_sums",
    "moe",
    "norm",
    "norm_linear",
    "qk_norm_rope",
    "qkv_rope",
    "rope",
    "rope_tables",
    "token_losses",
]
