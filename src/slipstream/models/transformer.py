"""The decoder: pre-norm layers of attention and a dense or expert feed-forward block.

Between sublayers the residual add and the next norm are one op, so a layer takes and returns the
pair (branch, residual). Given targets, the forward pass returns sums of the loss and never the
logits.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.errors import ShapeError
from slipstream.models.config import ModelConfig, MoEConfig
from slipstream.nn import MLP, Attention, Linear, LossSums, MoE, Norm, TokenLoss
from slipstream.nn.attention import Positions, document_mask
from slipstream.nn.offload import around, concerns
from slipstream.nn.site import Site
from slipstream.ops import rope_tables


class ModelOutput(NamedTuple):
    """What a forward pass returns."""

    loss: LossSums | None
    """Sums over tokens, if targets were given."""
    router_loss: torch.Tensor
    """fp32 scalar, differentiable: weighted balance and z losses of all MoE layers, summed."""
    logits: torch.Tensor | None
    """(B, L, V) fp32, if no targets were given."""


class Layer(Site):
    """Attention and a feed-forward block, each behind a norm.

    ``recompute``: keep, or offload what the parts keep for backward to the host's memory.
    """

    recompute_actions = ("keep", "offload")

    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = _norm(config)
        self.attention = Attention(
            config.d_model,
            num_heads=config.num_heads,
            num_kv_heads=config.kv_heads,
            head_dim=config.head_width,
            bias=config.attention_bias,
            out_bias=config.attention_out_bias,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            norm_cast=config.norm_cast,
            clip_qkv=config.clip_qkv,
        )
        self.mlp_norm = _norm(config)
        has_experts = config.moe is not None and config.is_moe(index)
        self.moe = _moe(config, config.moe) if config.moe and has_experts else None
        self.mlp = None if has_experts else _mlp(config)
        self.aux_weight = config.moe.aux_loss if config.moe else 0.0
        self.z_weight = config.moe.z_loss if config.moe else 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Around the compiled graph too, which has no part in offloading."""
        if not concerns(self.recompute):
            return super().__call__(*args, **kwargs)
        return around(self, self.recompute, partial(super().__call__, *args, **kwargs))

    def forward(
        self, branch: torch.Tensor, residual: torch.Tensor | None, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(branch, residual) to (branch, residual, weighted router losses)."""
        normed = self.attention_norm.before(branch, residual)
        out = self.attention(normed, positions)
        normed = self.mlp_norm.before(out, normed.s)
        if self.mlp is not None:
            return self.mlp(normed), normed.s, out.new_zeros((), dtype=torch.float32)
        assert self.moe is not None
        out, routing = self.moe(normed)
        losses = self.aux_weight * routing.aux_loss + self.z_weight * routing.z_loss
        return out, normed.s, losses

    def reset_parameters(self, std: float, out_std: float) -> None:
        """Initial weights."""
        self.attention_norm.reset_parameters()
        self.mlp_norm.reset_parameters()
        self.attention.reset_parameters(std, out_std)
        for block in (self.moe, self.mlp):
            if block is not None:
                block.reset_parameters(std, out_std)


class Transformer(nn.Module):
    """A decoder-only language model of any family ``ModelConfig`` spans."""

    def __init__(
        self, config: ModelConfig, *, label_smoothing: float = 0.0, z_loss: float = 0.0
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_layers))
        self.norm = _norm(config)
        self.head = None if config.tie_embeddings else Linear(config.d_model, config.vocab_size)
        self.token_loss = TokenLoss(
            label_smoothing=label_smoothing, softcap=config.logit_softcap, z_loss=z_loss
        )
        self.compute_dtype: torch.dtype | None = None
        self._tables: dict[tuple[str, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}
        self._recorded: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.reset_parameters()

    def forward(
        self,
        tokens_BL: torch.Tensor,
        targets_BL: torch.Tensor | None = None,
        document_BL: torch.Tensor | None = None,
    ) -> ModelOutput:
        """Run the decoder.

        ``tokens_BL (B, L)`` int64; ``targets_BL`` the next tokens, -100 where they do not count;
        ``document_BL`` numbers the documents of packed samples, attention then stays inside each.
        Activations are in ``compute_dtype`` (None: that of the weights). Raises ShapeError.
        """
        hidden, router_loss = self.hidden(tokens_BL, document_BL)
        weight_VD = self.embed.weight if self.head is None else self.head.weight
        if targets_BL is not None:
            loss = self.token_loss(hidden, weight_VD, targets_BL)
            return ModelOutput(loss, router_loss, None)
        logits = F.linear(hidden, weight_VD.to(hidden.dtype)).float()
        cap = self.config.logit_softcap
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return ModelOutput(None, router_loss, logits)

    def hidden(
        self, tokens_BL: torch.Tensor, document_BL: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Normed output of the last layer ``(B, L, D)`` and the weighted router losses."""
        length = tokens_BL.shape[1]
        if length > self.config.max_seq_len:
            raise ShapeError(
                f"tokens are {length} long, model.max_seq_len is {self.config.max_seq_len}"
            )
        branch = self.embed(tokens_BL)
        branch = branch if self.compute_dtype is None else branch.to(self.compute_dtype)
        cos, sin = self._rope(length, tokens_BL.device)
        mask = None if document_BL is None else document_mask(document_BL)
        positions = Positions(cos_LC=cos, sin_LC=sin, mask_BLL=mask)
        residual, router_loss = None, branch.new_zeros((), dtype=torch.float32)
        for layer in self.layers:
            branch, residual, losses = layer(branch, residual, positions)
            router_loss = router_loss + losses
        assert residual is not None
        return self.norm.add(branch, residual)[0], router_loss

    def moe_layers(self) -> dict[str, MoE]:
        """The MoE blocks by name, in order."""
        return {name: m for name, m in self.named_modules() if isinstance(m, MoE)}

    def _rope(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        # Row t is the same in every table of its kind, so the longest one serves all lengths; one
        # table per length would be kept for every token that generate adds.
        kind = _table_kind(self.config, length)
        key = (kind, device)
        rows = len(self._tables[key][0]) if key in self._tables else 0
        if rows < length or (kind == "grown" and rows != length):
            self._tables[key] = rope_tables(self.config.rope_spec(), length, device)
        if _recording(device):
            # A longer sequence replaces the table, which every replay of this graph reads.
            self._recorded.append(self._tables[key])
        cos, sin = self._tables[key]
        return cos[:length], sin[:length]

    def reset_parameters(self) -> None:
        """Initial weights from the default random generator of each parameter's device."""
        std = self.config.init_std
        out_std = std / (2 * self.config.num_layers) ** 0.5
        nn.init.normal_(self.embed.weight, std=std)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.reset_parameters(std, out_std)
        self.norm.reset_parameters()
        if self.head is not None:
            self.head.reset_parameters(std)


def _recording(device: torch.device) -> bool:
    """Whether a CUDA graph records what is run now."""
    if device.type != "cuda" or torch.compiler.is_compiling():
        return False
    return torch.cuda.is_current_stream_capturing()


def _table_kind(config: ModelConfig, length: int) -> str:
    # Which frequencies a sequence of this length turns with: one set within the original context;
    # beyond it longrope has a second set, and dynamic one for each length.
    rope = config.rope
    if rope.scaling not in ("dynamic", "longrope") or length <= rope.original_len:
        return "original"
    return "extended" if rope.scaling == "longrope" else "grown"


def _norm(config: ModelConfig) -> Norm:
    return Norm(
        config.d_model,
        kind=config.norm,
        eps=config.norm_eps,
        bias=config.norm_bias,
        cast=config.norm_cast,
    )


def _mlp(config: ModelConfig) -> MLP:
    return MLP(config.d_model, config.d_ff, activation=config.activation, bias=config.mlp_bias)


def _moe(config: ModelConfig, moe: MoEConfig) -> MoE:
    return MoE(
        config.d_model,
        moe.d_ff,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        activation=config.activation,
        shared_hidden=moe.shared_d_ff,
        score=moe.score,
        normalize=moe.normalize,
        scale=moe.scale,
        num_groups=moe.num_groups,
        top_groups=moe.top_groups,
        group_top=moe.group_top,
        expert_bias=moe.expert_bias,
        bias_update_rate=moe.bias_update_rate,
        aux_scope=moe.aux_scope if moe.aux_loss else "none",
        threshold=moe.balance.threshold,
        window=moe.balance.window,
        ramp=moe.balance.ramp,
        depth=moe.balance.depth,
        mode=moe.balance.mode,
    )
