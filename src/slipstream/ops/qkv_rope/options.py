"""What ``qkv_rope`` computes, apart from its tensors."""

from dataclasses import dataclass

import torch

from slipstream.ops.rope.options import QKNormOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class QKVOptions:
    """How the features of a token are divided, and the norm."""

    heads: int
    """H, query heads."""
    kv_heads: int
    """G, key heads and value heads."""
    norm: QKNormOptions | None
    """That of every head of q and k; None: none."""

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Views (B, L, H, C), (B, L, G, C), (B, L, G, C) of ``qkv (B, L, (H + 2G) * C)``."""
        heads, turned = self.heads, self.heads + self.kv_heads
        batch, length, width = qkv.shape
        columns = turned + self.kv_heads
        rows = qkv.view(batch, length, columns, width // columns)
        return rows[:, :, :heads], rows[:, :, heads:turned], rows[:, :, turned:]
