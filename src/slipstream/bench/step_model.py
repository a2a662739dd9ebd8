"""The model whose training steps are measured: a Hugging Face Qwen3-MoE in pure bf16, and tokens.

Its shape is that of a recipe's model section, by default OLMoE's with 8 layers. Weights, gradients
and moments are bf16, the same in every arm.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slipstream.errors import ConfigError, DependencyError
from slipstream.models.config import ModelConfig, MoEConfig
from slipstream.models.flops import size, train_flops_per_token
from slipstream.models.presets import preset
from slipstream.train.config import load_run_config

DEFAULT, DEFAULT_LAYERS = "olmoe-1b-7b", 8
SIZES = {
    "small": ModelConfig(
        vocab_size=4096,
        num_layers=4,
        d_model=512,
        num_heads=8,
        max_seq_len=512,
        moe=MoEConfig(num_experts=16, top_k=4, d_ff=256),
    ),
    "tiny": ModelConfig(
        vocab_size=128,
        num_layers=2,
        d_model=32,
        num_heads=2,
        max_seq_len=64,
        moe=MoEConfig(num_experts=4, top_k=2, d_ff=16),
    ),
}
"""Models for loss curves and for trying things out."""
SUCCESSORS, FREE = 4, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Shape of the model and of a step's batch."""

    name: str
    """Recipe or size it comes from."""
    config: ModelConfig
    """Shape only: norms, rotary embedding and routing are Qwen3-MoE's."""
    batch: int
    """B: sequences of a step."""
    seq_len: int
    """L: tokens of a sequence."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.seq_len

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward of a step, on active parameters."""
        return self.tokens * train_flops_per_token(self.config, self.seq_len)

    @property
    def num_params(self) -> int:
        """All parameters."""
        return size(self.config).total

    def row(self) -> dict[str, Any]:
        """As part of a measured row."""
        config, moe = self.config, moe_of(self.config)
        return {
            "model": self.name,
            "layers": config.num_layers,
            "width": config.d_model,
            "heads": config.num_heads,
            "hidden": moe.d_ff,
            "experts": moe.num_experts,
            "top_k": moe.top_k,
            "vocab_size": config.vocab_size,
            "params": self.num_params,
            "batch": self.batch,
            "seq_len": self.seq_len,
            "flops": self.flops,
        }


def step_model(source: str | None, *, layers: int | None, batch: int, seq_len: int) -> StepModel:
    """The model of a recipe (.toml), of ``SIZES``, or the default. Raises ConfigError."""
    if source is None:
        config = ModelConfig.model_validate(preset(DEFAULT) | {"num_layers": DEFAULT_LAYERS})
    elif source in SIZES:
        config = SIZES[source]
    elif source.endswith(".toml"):
        config = load_run_config(Path(source), []).model.plain()
    else:
        raise ConfigError(f"RECIPE {source}: expected a .toml recipe or one of {', '.join(SIZES)}")
    if config.moe is None or config.moe.first_dense or config.moe.every != 1:
        raise ConfigError(
            f"RECIPE {source}: every layer of the measured model has experts; give [model.moe] "
            "without first_dense and every"
        )
    changes: dict[str, Any] = {"max_seq_len": max(config.max_seq_len, seq_len), "qk_norm": "head"}
    if layers is not None:
        changes["num_layers"] = layers
    config = ModelConfig.model_validate(config.model_dump() | changes)
    return StepModel(name=source or DEFAULT, config=config, batch=batch, seq_len=seq_len)


def build(model: StepModel, device: torch.device, *, seed: int) -> nn.Module:
    """The stock model with ``torch.grouped_mm`` experts; equal seeds give equal weights."""
    try:
        transformers = import_module("transformers")
    except ImportError:
        raise DependencyError(
            "bench step needs transformers 5; pip install 'slipstream-train[hf]'"
        ) from None
    config, moe = model.config, moe_of(model.config)
    settings = transformers.Qwen3MoeConfig(
        hidden_size=config.d_model,
        moe_intermediate_size=moe.d_ff,
        intermediate_size=moe.d_ff * moe.top_k,
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.top_k,
        norm_topk_prob=True,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_width,
        vocab_size=config.vocab_size,
        max_position_embeddings=config.max_seq_len,
        tie_word_embeddings=False,
        use_cache=False,
        output_router_logits=False,
    )
    settings._attn_implementation = "sdpa"
    settings._experts_implementation = "grouped_mm"
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return transformers.Qwen3MoeForCausalLM(settings).train()
    finally:
        torch.set_default_dtype(before)


def random_tokens(model: StepModel, step: int, device: torch.device) -> torch.Tensor:
    """``(B, L)`` uniform tokens of one step: the same for every arm."""
    draw = torch.Generator(device).manual_seed(step)
    shape = (model.batch, model.seq_len)
    return torch.randint(model.config.vocab_size, shape, generator=draw, device=device)


def learnable_tokens(model: StepModel, steps: int, *, seed: int = 0) -> torch.Tensor:
    """``(steps, B, L)`` tokens on the CPU from a chain: a token has 4 likely successors.

    One token in ten is drawn freely, so that a model's loss comes down to about ln 4 and a bit.
    """
    vocab = model.config.vocab_size
    draw = torch.Generator().manual_seed(seed)
    table = torch.randint(vocab, (vocab, SUCCESSORS), generator=draw)
    rows = steps * model.batch
    tokens = torch.randint(vocab, (rows, model.seq_len), generator=draw)
    follows = torch.rand(rows, model.seq_len, generator=draw) >= FREE
    which = torch.randint(SUCCESSORS, (rows, model.seq_len), generator=draw)
    for place in range(1, model.seq_len):
        likely = table[tokens[:, place - 1], which[:, place]]
        tokens[:, place] = torch.where(follows[:, place], likely, tokens[:, place])
    return tokens.view(steps, model.batch, model.seq_len)


def moe_of(config: ModelConfig) -> MoEConfig:
    """The experts of a model that is known to have some."""
    assert config.moe is not None
    return config.moe
