"""One decoder ``Transformer`` for many families, its sizes, and conversion from and to HF."""

from slipstream.models.config import BalanceConfig, ModelConfig, MoEConfig, RopeConfig
from slipstream.models.flops import Size, size, train_flops_per_token
from slipstream.models.transformer import ModelOutput, Transformer

__all__ = [
    "BalanceConfig",
    "MoEConfig",
    "ModelConfig",
    "ModelOutput",
    "RopeConfig",
    "Size",
    "Transformer",
    "size",
    "train_flops_per_token",
]
