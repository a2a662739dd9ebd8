"""The ops: each validates once, asks ``dispatch`` for an implementation, runs under autograd."""

from slipstream.ops import dispatch, moe
from slipstream.ops.activation import activation
from slipstream.ops.adamw import AdamWOptions, adamw
from slipstream.ops.linear_cross_entropy import linear_cross_entropy, token_losses
from slipstream.ops.norm import norm
from slipstream.ops.rope import RopeSpec, rope, rope_tables

__all__ = [
    "AdamWOptions",
    "RopeSpec",
    "activation",
    "adamw",
    "dispatch",
    "linear_cross_entropy",
    "moe",
    "norm",
    "rope",
    "rope_tables",
    "token_losses",
]
