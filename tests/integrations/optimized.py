"""Tiny models whose every weight matters, run as they are or optimized."""

import torch
import transformers
from torch import nn

import slipstream
from tests.budget import Results
from tests.integrations.families import MODELS, TINY

DENSE = ("llama", "qwen3", "gemma", "gemma2", "gemma3_text")
MOE = ("mixtral", "qwen3_moe", "olmoe")
FAMILIES = (*DENSE, *MOE)


def model_of(family: str, **changes) -> nn.Module:
    """A model with weights so large, and norms so uneven, that each shows in the logits."""
    options = {**TINY, **MODELS.get(family, {}), **changes}
    config = transformers.AutoConfig.for_model(family, **options)
    experts = {"experts_implementation": "eager"} if family in MODELS else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **experts)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
        elif "embed" not in name:
            nn.init.normal_(parameter, std=0.2)
    return model.eval()


def parameters(model: nn.Module) -> Results:
    """Its parameters, by name."""
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def switch(model: nn.Module, optimized: bool) -> None:
    """Make it optimized, or what it was."""
    (slipstream.optimize if optimized else slipstream.restore)(model)


def loss_and_gradients(model: nn.Module, ids_BL: torch.Tensor, **call) -> list[torch.Tensor]:
    """Of one training step's forward and backward."""
    model.train().zero_grad()
    loss = model(ids_BL, labels=ids_BL, use_cache=False, **call).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
