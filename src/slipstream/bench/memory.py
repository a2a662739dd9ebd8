"""What a layer keeps for its backward, and the most it holds at once. CUDA only."""

from dataclasses import dataclass

import torch

from slipstream.bench.moe_peers import Layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes above weights, inputs and the gradient that comes in."""

    saved_bytes: int
    """Held between forward and backward: the layer's input counts, its output does not."""
    peak_bytes: int
    """Most at any time of forward and backward, gradients included."""


def measure_memory(layer: Layer, dout_TD: torch.Tensor) -> Memory:
    """Run forward and backward once, warm, and look at the allocator."""
    device = dout_TD.device
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    out_TD = layer.forward()
    held = torch.cuda.memory_allocated(device) - before
    grads = torch.autograd.grad(out_TD, list(layer.leaves.values()), dout_TD)
    peak = torch.cuda.max_memory_allocated(device) - before
    x_TD = layer.leaves["x"]
    del grads
    saved = held - out_TD.nbytes + x_TD.nbytes
    return Memory(saved_bytes=saved, peak_bytes=peak)
