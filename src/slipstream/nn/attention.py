"""Causal grouped-query self-attention: one qkv product, optional qk-norm, RoPE, PyTorch's SDPA."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream import ops
from slipstream.nn.linear import Linear
from slipstream.nn.norm import Norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Positions:
    """What every layer shares about the tokens of a batch."""

    cos_LC: torch.Tensor
    """RoPE table (L, R)."""
    sin_LC: torch.Tensor
    """RoPE table (L, R)."""
    mask_BLL: torch.Tensor | None
    """True where a query may look, (B, 1, L, L); None: plain causal."""


def document_mask(document_BL: torch.Tensor) -> torch.Tensor:
    """Causal mask (B, 1, L, L) that keeps attention inside each document of a packed sample."""
    same = document_BL[:, :, None] == document_BL[:, None, :]
    return same.tril()[:, None]


def backend_order(device: torch.device, dtype: torch.dtype) -> list[SDPBackend]:
    """Attention backends to try, fastest first; PyTorch takes the first that can serve a call.

    On Hopper and later cuDNN's kernel beats the bundled flash kernel; before, flash leads.
    """
    flash, efficient, math = (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.MATH,
    )
    if device.type != "cuda" or dtype == torch.float32:
        return [flash, efficient, math]
    if torch.cuda.get_device_capability(device) >= (9, 0):
        return [SDPBackend.CUDNN_ATTENTION, flash, efficient, math]
    return [flash, SDPBackend.CUDNN_ATTENTION, efficient, math]


class Attention(nn.Module):
    """H query heads over G key/value heads of width C; ``wqkv ((H + 2G) * C, D)`` in that order."""

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: Literal["none", "head", "full"] = "none",
        norm_eps: float = 1e-6,
        norm_cast: str = "llama",
        clip_qkv: float | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.qk_norm, self.clip_qkv = qk_norm, clip_qkv
        self.wqkv = Linear(dim, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)
        self.wo = Linear(num_heads * head_dim, dim, bias=out_bias)
        if qk_norm != "none":
            widths = (1, 1) if qk_norm == "head" else (num_heads, num_kv_heads)
            self.q_norm = Norm(widths[0] * head_dim, eps=norm_eps, cast=norm_cast)
            self.k_norm = Norm(widths[1] * head_dim, eps=norm_eps, cast=norm_cast)

    def forward(self, x_BLD: torch.Tensor, positions: Positions) -> torch.Tensor:
        """``(B, L, D)`` to ``(B, L, D)``."""
        q, k, v = self._project(x_BLD)
        q, k = ops.rope(q, k, positions.cos_LC, positions.sin_LC)
        mask = positions.mask_BLL
        with sdpa_kernel(backend_order(x_BLD.device, x_BLD.dtype), set_priority=True):
            out_BHLC = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=self.heads != self.kv_heads,
            )
        return self.wo(out_BHLC.transpose(1, 2).flatten(2))

    def _project(self, x_BLD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        qkv = self.wqkv(x_BLD)
        if self.qk_norm != "full":
            q, k, v = (
                self._clip(qkv)
                .unflatten(-1, (-1, self.head_dim))
                .split([self.heads, self.kv_heads, self.kv_heads], dim=2)
            )
            return (self.q_norm(q), self.k_norm(k), v) if self.qk_norm == "head" else (q, k, v)
        q, k, v = qkv.split(widths, dim=-1)
        normed = self._clip(self.q_norm(q)), self._clip(self.k_norm(k)), self._clip(v)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)) for t in normed)
        return q, k, v

    def _clip(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.clip_qkv is None else x.clamp(-self.clip_qkv, self.clip_qkv)

    def reset_parameters(self, std: float, out_std: float) -> None:
        """Normal weights; ``out_std`` for the projection into the residual stream."""
        self.wqkv.reset_parameters(std)
        self.wo.reset_parameters(out_std)
        if self.qk_norm != "none":
            self.q_norm.reset_parameters()
            self.k_norm.reset_parameters()
