"""Causal grouped-query self-attention: one qkv product, optional qk-norm, RoPE, PyTorch's SDPA."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from slipstream import ops
from slipstream.nn.linear import Linear
from slipstream.nn.norm import Norm, Normed
from slipstream.nn.saved import recomputed
from slipstream.nn.site import Site


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


class Attention(Site):
    """H query heads over G key/value heads of width C; ``wqkv ((H + 2G) * C, D)`` in that order.

    ``recompute``: what backward keeps. keep: the normed input, qkv, q, k and the output; reemit:
    all but the normed input; rope: not q and k either; recompute: the output alone; full: nothing.
    """

    recompute_actions = ("keep", "reemit", "rope", "recompute", "full")

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
        self.norm_eps, self.norm_cast = norm_eps, norm_cast
        self.wqkv = Linear(dim, (num_heads + 2 * num_kv_heads) * head_dim, bias=bias)
        self.wo = Linear(num_heads * head_dim, dim, bias=out_bias)
        if qk_norm != "none":
            widths = (1, 1) if qk_norm == "head" else (num_heads, num_kv_heads)
            self.q_norm = Norm(widths[0] * head_dim, eps=norm_eps, cast=norm_cast)
            self.k_norm = Norm(widths[1] * head_dim, eps=norm_eps, cast=norm_cast)

    def forward(self, x_BLD: Normed, positions: Positions) -> torch.Tensor:
        """The normed residual stream ``(B, L, D)`` to ``(B, L, D)``."""
        action = self.recompute

        def make(y_BLD: torch.Tensor) -> tuple[torch.Tensor, ...]:
            qkv = self.wqkv(y_BLD)
            q, k, v = self._heads(qkv, positions)
            if action == "recompute":
                return qkv, q, k, v
            return qkv, q, k, v, self._attend(q, k, v, positions)

        if action == "full":
            return x_BLD.recomputed(make, lambda *made: self._out(made[-1]))
        if action == "recompute":
            return x_BLD.recomputed(
                make, lambda _, q, k, v: self._out(self._attend(q, k, v, positions))
            )
        qkv = self.wqkv(x_BLD.read()) if action == "keep" else x_BLD.linear(self.wqkv)
        if action == "rope":
            return recomputed(
                lambda qkv: self._heads(qkv, positions),
                lambda q, k, v: self._out(self._attend(q, k, v, positions)),
                qkv,
            )
        return self._out(self._attend(*self._heads(qkv, positions), positions))

    def _heads(
        self, qkv: torch.Tensor, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries (B, L, H, C), keys and values (B, L, G, C): normed, clipped and turned."""
        if self.qk_norm == "full" or self.clip_qkv is not None:
            q, k, v = self._project(qkv)
            return *ops.rope(q, k, positions.cos_LC, positions.sin_LC), v
        normed = self.qk_norm == "head"
        return ops.qkv_rope(
            qkv,
            positions.cos_LC,
            positions.sin_LC,
            heads=self.heads,
            kv_heads=self.kv_heads,
            q_weight_C=self.q_norm.weight if normed else None,
            k_weight_C=self.k_norm.weight if normed else None,
            eps=self.norm_eps,
            cast=self.norm_cast,
        )

    def _project(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
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

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: Positions
    ) -> torch.Tensor:
        mask = positions.mask_BLL
        with sdpa_kernel(backend_order(q.device, q.dtype), set_priority=True):
            return F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=self.heads != self.kv_heads,
            )

    def _out(self, out_BHLC: torch.Tensor) -> torch.Tensor:
        return self.wo(out_BHLC.transpose(1, 2).flatten(2))

    def _clip(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.clip_qkv is None else x.clamp(-self.clip_qkv, self.clip_qkv)

    def reset_parameters(self, std: float, out_std: float) -> None:
        """Normal weights; ``out_std`` for the projection into the residual stream."""
        self.wqkv.reset_parameters(std)
        self.wo.reset_parameters(out_std)
        if self.qk_norm != "none":
            self.q_norm.reset_parameters()
            self.k_norm.reset_parameters()
