"""AdamW over the parameters of a model, with exact clipping and the non-finite guard.

The weights themselves are the fp32 masters; modules cast them where they are used. Nothing here
waits for the device: the norm and the decision to skip stay tensors.
"""

from dataclasses import dataclass

import torch
from torch import nn

from slipstream import ops
from slipstream.ops import AdamWOptions
from slipstream.train.config import OptimConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a step did, as tensors on the device."""

    grad_norm: torch.Tensor
    """fp32 scalar: norm of all gradients before clipping."""
    skipped: torch.Tensor
    """bool scalar: the gradient or the loss was not finite, so nothing was changed."""


class AdamW:
    """Two groups: tensors of two or more dimensions are decayed, vectors are not."""

    def __init__(self, model: nn.Module, config: OptimConfig) -> None:
        self.config = config
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        device = next(iter(self.params.values())).device
        self.state = {
            name: {
                "exp_avg": torch.zeros_like(p, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(p, dtype=torch.float32),
                "step": torch.zeros((), dtype=torch.float32, device=device),
            }
            for name, p in self.params.items()
        }

    @torch.no_grad()
    def step(self, lr: float, healthy: torch.Tensor) -> Update:
        """Clip, update, and leave everything untouched where a gradient or ``healthy`` is bad."""
        grads = {name: p.grad for name, p in self.params.items()}
        present = [grad for grad in grads.values() if grad is not None]
        norm = torch.nn.utils.get_total_norm(present)
        skipped = ~(torch.isfinite(norm) & healthy)
        divisor = (norm / self.config.clip).clamp(min=1.0)
        for decayed in (True, False):
            names = [
                name
                for name, p in self.params.items()
                if (p.dim() >= 2) == decayed and grads[name] is not None
            ]
            self._update(names, lr, self.config.weight_decay * decayed, divisor, skipped)
        return Update(grad_norm=norm, skipped=skipped)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for param in self.params.values():
            param.grad = None

    def _update(
        self,
        names: list[str],
        lr: float,
        weight_decay: float,
        divisor: torch.Tensor,
        skipped: torch.Tensor,
    ) -> None:
        options = AdamWOptions(
            lr=lr,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            eps=self.config.eps,
            weight_decay=weight_decay,
        )
        ops.adamw(
            [self.params[n].data for n in names],
            [g for n in names if (g := self.params[n].grad) is not None],
            [self.state[n]["exp_avg"] for n in names],
            [self.state[n]["exp_avg_sq"] for n in names],
            [self.state[n]["step"] for n in names],
            options=options,
            grad_divisor=divisor,
            skip=skipped,
        )
