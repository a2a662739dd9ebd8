"""Forward and backward of the measured Hugging Face model as one CUDA graph.

Transformers asks the device whether positions are packed before it makes a causal mask, and a graph
cannot wait for the answer. An attention function it makes no mask for, which is SDPA otherwise, is
not asked about: SDPA is causal by itself then, as it is without a graph.
"""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.attention import sdpa_kernel

from slipstream.bench.ops_case import Missing
from slipstream.nn.attention import backend_order
from slipstream.train.graph import CudaRecorder, GraphedPasses

MASKLESS = "slipstream_sdpa_causal"


class ModelGraph:
    """Records ``model``, a causal language model, when its loss is first asked for."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        if device.type != "cuda":
            raise Missing("a CUDA graph needs a CUDA device")
        make_maskless(model)
        self.model, self.device = model, device
        self.recorder = CudaRecorder(device)
        self.passes = GraphedPasses(model, self._run, self.recorder, accumulate=False)

    def loss(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Mean next-token loss; the gradients are there as well."""
        self.passes.load((tokens_BL,))
        return self.passes.run(first=True).clone()

    def attention(self) -> AbstractContextManager[Any]:
        """The backends the model tries under SDPA's own name."""
        return sdpa_kernel(backend_order(self.device, torch.bfloat16), set_priority=True)

    def _run(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        loss = self.model(input_ids=tokens_BL, labels=tokens_BL).loss
        loss.backward()
        return loss.detach()


def make_maskless(model: Any) -> None:
    """Have a transformers model call SDPA without a mask; right where nothing is padded."""
    sdpa = import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    import_module("transformers").AttentionInterface.register(MASKLESS, sdpa)
    model.config._attn_implementation = MASKLESS
