"""Small models, their gradients, and what they keep."""

from typing import Any

import torch
from torch import nn

from slipstream.models import Transformer
from slipstream.models.config import ModelConfig
from slipstream.nn.saved import Scope
from slipstream.recompute.meter import kept_bytes

VOCAB, LENGTH, BATCH = 61, 24, 2
MOE: dict[str, Any] = {
    "num_experts": 4,
    "top_k": 2,
    "d_ff": 24,
    "shared_d_ff": 40,
    "aux_loss": 0.01,
    "z_loss": 0.001,
    # So low that slots are moved in every step.
    "balance": {"threshold": 1.05, "ramp": 1},
}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"d_ff": 96},
    "moe": {"moe": MOE, "qk_norm": "head"},
    "biased": {
        "d_ff": 96,
        "qk_norm": "full",
        "clip_qkv": 1.0,
        "norm": "layer",
        "norm_bias": True,
        "mlp_bias": True,
        "attention_bias": True,
    },
}


def build(shape: str, num_layers: int = 2, dtype: torch.dtype = torch.float32) -> Transformer:
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCAB,
        "num_layers": num_layers,
        "d_model": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "max_seq_len": LENGTH,
    }
    model = Transformer(ModelConfig.model_validate(config | SHAPES[shape])).train()
    model.compute_dtype = dtype
    for block in model.moe_layers().values():
        # As after some steps with one hot expert.
        block.steps.fill_(5)
        block.smoothed_E.copy_(torch.tensor([60.0, 12.0, 12.0, 12.0]))
    return model


def sample(seed: int = 1, batch: int = BATCH) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (batch, LENGTH), generator=generator)
    return tokens, tokens.roll(-1, 1)


def objective(model: Transformer, seed: int = 1) -> torch.Tensor:
    output = model(*sample(seed))
    return output.loss[0] + output.router_loss


def after_two_passes(model: Transformer) -> dict[str, torch.Tensor]:
    """Gradients added up over two micro-batches, and the buffers: loads counted, balance state."""
    model.zero_grad(set_to_none=True)
    for seed in (1, 2):
        objective(model, seed).backward()
    grads = {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters()}
    return grads | {n: b.clone() for n, b in model.named_buffers()}


def act(model: nn.Module, kind: str, action: str) -> None:
    for module in model.modules():
        if type(module).__name__ == kind:
            module.recompute = action


def kept(model: Transformer) -> int:
    with Scope() as scope:
        objective(model)
    return kept_bytes(scope, [*model.parameters(), *model.buffers()])
