"""Modules over the ops: norms, attention, dense and expert feed-forward blocks, the loss."""

from slipstream.nn.attention import Attention
from slipstream.nn.linear import Linear
from slipstream.nn.loss import LossSums, TokenLoss
from slipstream.nn.mlp import MLP
from slipstream.nn.moe import MoE, MoEStats
from slipstream.nn.norm import Norm

__all__ = ["MLP", "Attention", "Linear", "LossSums", "MoE", "MoEStats", "Norm", "TokenLoss"]
