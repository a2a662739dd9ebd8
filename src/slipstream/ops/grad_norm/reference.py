"""The norm of the norms in plain PyTorch."""

import torch

from slipstream.ops.check import compute_dtype
from slipstream.ops.scattered import Grads, Scattered


@torch.no_grad()
def grad_norm_reference(grads: Grads) -> torch.Tensor:
    """fp32 scalar; fp64 for fp64 gradients."""
    tensors = []
    for grad in grads:
        tensors += grad.tensors if isinstance(grad, Scattered) else [grad]
    # Contiguous: PyTorch adds up strided tensors less accurately.
    wide = [tensor.to(compute_dtype(tensor)).contiguous() for tensor in tensors]
    return torch.nn.utils.get_total_norm(wide)
