"""Attention of a Hugging Face decoder: one projection, then norms of heads and RoPE as one op.

The attention itself stays the model's own implementation (SDPA, flash, flex, eager), called with
the arguments its class gives it; SDPA is told which of PyTorch's backends is fastest here.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slipstream import ops
from slipstream.integrations.hf_optimize_linear import can_join, joint_linear
from slipstream.integrations.hf_optimize_state import (
    KEY,
    action_of,
    ours,
    settings_if_plain,
)
from slipstream.nn.attention import backend_order
from slipstream.nn.saved import recomputed

ATTENTION_ACTIONS = ("keep", "reemit", "rope", "recompute", "full")
"""As of ``nn.Attention``; the layer around it makes the normed input again for all but keep."""
HALF = "_slipstream_half"


class AttentionSettings(NamedTuple):
    """What was read from an attention module."""

    heads: int
    kv_heads: int
    qk_norm: str
    """``none``, ``head`` (over each head) or ``full`` (over a whole projection)."""
    clip: bool
    """Whether ``config.clip_qkv`` applies to queries, keys and values."""
    cache_takes_call: bool
    """Whether the cache is told what the attention was called with."""
    arguments: tuple[tuple[str, str], ...]
    """Arguments of the attention implementation, and the attributes that hold them."""
    eager: Callable[..., Any]
    """The family's own eager implementation."""

    @property
    def joint(self) -> bool:
        """Whether nothing comes between the projections and the norms of heads or the rotation."""
        return self.qk_norm != "full" and not self.clip


@ours
def attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``(B, L, D)`` to ``(B, L, D)``, and the attention weights if the implementation has them."""
    action = action_of(self)
    call = _Call(self, position_embeddings, attention_mask, kwargs)
    linears = (self.q_proj, self.k_proj, self.v_proj)
    if call.norm is None or not can_join(linears):
        return call.attend(*call.heads_in_steps(linears, hidden_states))
    if action in ("keep", "reemit") or call.cache is not None:
        return call.attend(*call.heads(joint_linear(hidden_states, linears)))
    return _again(call, linears, hidden_states, action)


def _again(
    call: "_Call", linears: Any, x_BLD: torch.Tensor, action: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same as ``attend``, with some of its values made again in backward."""
    if action == "rope":
        qkv = joint_linear(x_BLD, linears)
        return recomputed(call.heads, lambda *heads: call.attend(*heads), qkv)

    def make(y_BLD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkv = joint_linear(y_BLD, linears)
        return qkv, *call.heads(qkv)

    def make_all(y_BLD: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = make(y_BLD)
        mixed, weights = call.mix(*made[1:])
        return (*made, mixed) if weights is None else (*made, mixed, weights)

    def use_all(*made: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        mixed, weights = (*made[4:], None)[:2]
        return call.finish(mixed), weights

    # Dropout would draw other numbers the second time.
    if action == "full" and not call.arguments.get("dropout"):
        return recomputed(make_all, use_all, x_BLD)
    return recomputed(make, lambda _, *heads: call.attend(*heads), x_BLD)


class _Call:
    """One call of an attention module. Heads are ``(B, L, heads, C)``."""

    def __init__(
        self,
        module: Any,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        kwargs: dict[str, Any],
    ) -> None:
        self.module, self.mask, self.kwargs = module, mask, kwargs
        self.settings: AttentionSettings = module.__dict__[KEY].settings
        old, new = kwargs.pop("past_key_values", None), kwargs.pop("cache", None)
        self.cache = old if new is None else new
        cos, sin = position_embeddings
        self.cos, self.sin, self.flat = _half(cos), _half(sin), cos.shape[0] > 1
        self.norm = _head_norm(module, self.settings)
        self.arguments = read_arguments(module, self.settings.arguments)

    def heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of one projection: normed, and turned by position."""
        shape, settings = qkv.shape[:2], self.settings
        if self.flat:
            qkv = qkv.flatten(0, 1)[None]
        q, k, v = ops.qkv_rope(
            qkv,
            self.cos,
            self.sin,
            heads=settings.heads,
            kv_heads=settings.kv_heads,
            **self.norm or {},
        )
        if self.flat:
            q, k, v = (t.view(*shape, *t.shape[2:]) for t in (q, k, v))
        return q, k, v

    def heads_in_steps(
        self, linears: tuple[nn.Module, ...], x_BLD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same from projections and norms that are modules of their own."""
        module, settings = self.module, self.settings
        q, k, v = (linear(x_BLD) for linear in linears)
        if settings.qk_norm == "full":
            q, k = module.q_norm(q), module.k_norm(k)
        limit = module.config.clip_qkv if settings.clip else None
        if limit is not None:
            q, k, v = (t.clamp(-limit, limit) for t in (q, k, v))
        q, k, v = (t.unflatten(-1, (-1, module.head_dim)) for t in (q, k, v))
        if settings.qk_norm == "head" and self.norm is None:
            q, k = module.q_norm(q), module.k_norm(k)
        if not self.flat:
            return *self._turn(q, k), v
        turned = self._turn(q.flatten(0, 1)[None], k.flatten(0, 1)[None])
        q, k = (t.view(*x_BLD.shape[:2], *t.shape[2:]) for t in turned)
        return q, k, v

    def _turn(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.norm:
            return ops.qk_norm_rope(q, k, self.cos, self.sin, **self.norm)
        return ops.rope(q, k, self.cos, self.sin)

    def mix(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the model's attention implementation makes of the heads, and its weights."""
        module = self.module
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.cache is not None:
            call = {"kwargs": self.kwargs} if self.settings.cache_takes_call else {}
            k, v = self.cache.update(k, v, module.layer_idx, **call)
        name = module.config._attn_implementation
        implementation = ALL_ATTENTION_FUNCTIONS.get_interface(name, self.settings.eager)
        with _backends(name, q):
            return implementation(module, q, k, v, self.mask, **self.arguments, **self.kwargs)

    def finish(self, mixed: torch.Tensor) -> torch.Tensor:
        """The output projection."""
        return self.module.o_proj(mixed.reshape(*mixed.shape[:2], -1).contiguous())

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output, and the attention weights or None."""
        mixed, weights = self.mix(q, k, v)
        return self.finish(mixed), weights


def read_arguments(self: Any, arguments: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """Arguments of the attention implementation, as the module has them now."""
    found = {name: read_path(self, path) for name, path in arguments}
    if not self.training and "dropout" in found:
        found["dropout"] = 0.0
    return found


def read_path(self: Any, path: str) -> Any:
    """The module's attribute, or its config's for ``config.<name>``; None where there is none."""
    owner, _, name = path.rpartition(".")
    return getattr(self.config if owner else self, name, None)


def _backends(name: str, q: torch.Tensor) -> AbstractContextManager[Any]:
    """The order of SDPA's backends for this device, unless the user has ruled some out."""
    if name != "sdpa" or not q.is_cuda:
        return nullcontext()
    cuda = torch.backends.cuda
    if not (
        cuda.flash_sdp_enabled()
        and cuda.mem_efficient_sdp_enabled()
        and cuda.math_sdp_enabled()
        and cuda.cudnn_sdp_enabled()
    ):
        return nullcontext()
    return sdpa_kernel(backend_order(q.device, q.dtype), set_priority=True)


def _head_norm(self: Any, settings: AttentionSettings) -> dict[str, Any] | None:
    """Norms of heads as arguments of the RoPE ops; None where they, or a clip, are steps apart."""
    if not settings.joint:
        return None
    if settings.qk_norm == "none":
        return {}
    q_norm, k_norm = (settings_if_plain(norm, "norm") for norm in (self.q_norm, self.k_norm))
    if q_norm is None or q_norm != k_norm:
        return None
    return {
        "q_weight_C": self.q_norm.weight,
        "k_weight_C": self.k_norm.weight,
        "eps": q_norm.eps,
        "cast": q_norm.cast,
        "offset": q_norm.offset,
    }


def _half(table: torch.Tensor) -> torch.Tensor:
    """The model's tables hold every pair twice; the ops take it once, without gaps.

    All layers are given the same tables, so the first one leaves the copy with them.
    """
    if torch.compiler.is_compiling():
        return table[..., : table.shape[-1] // 2].flatten(0, 1)
    half = getattr(table, HALF, None)
    if half is None:
        half = table[..., : table.shape[-1] // 2].flatten(0, 1).contiguous()
        setattr(table, HALF, half)
    return half
