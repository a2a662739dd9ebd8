"""Name the first place a non-finite value shows up in a step that was skipped."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.data import Batch
from slipstream.models import Transformer
from slipstream.train.step import split, to_device

KINDS = ("weights", "output", "gradient", "elsewhere")
"""In the order in which a fault spreads: a bad gradient reaches every rank, its cause does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BadPlace:
    """Where a rank first sees a value that is not finite."""

    kind: str
    """One of ``KINDS``."""
    name: str
    """Parameter or module."""

    def __str__(self) -> str:
        return f"{self.kind} of {self.name}" if self.name else "loss"


def earliest(places: list[BadPlace]) -> BadPlace:
    """The place nearest the cause among those the ranks found."""
    return min(places, key=lambda place: KINDS.index(place.kind))


def first_bad_place(
    model: Transformer, batch: Batch, micro_batch: int, device: torch.device
) -> BadPlace:
    """Weights first, then module outputs of a fresh forward pass in order, then gradients.

    Gradients must still be those of the skipped step. The expert load that the forward pass counts
    is dropped again.
    """
    for name, param in model.named_parameters():
        if not torch.isfinite(param).all():
            return BadPlace(kind="weights", name=name)
    try:
        for micro in split(batch, micro_batch):
            found = _first_bad_output(model, micro, device)
            if found is not None:
                return BadPlace(kind="output", name=found)
    finally:
        for moe in model.moe_layers().values():
            moe.forget_step()
    # Backward runs from the last layer to the first.
    for name, param in reversed(list(model.named_parameters())):
        if param.grad is not None and not torch.isfinite(param.grad).all():
            return BadPlace(kind="gradient", name=name)
    return BadPlace(kind="elsewhere", name="")


def _first_bad_output(model: Transformer, micro: Batch, device: torch.device) -> str | None:
    bad: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            if any(not torch.isfinite(t).all() for t in _tensors(output)):
                bad.append(name)

        return hook

    handles = [
        module.register_forward_hook(watch(name or "the model"))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            model(*to_device(micro, device))
    finally:
        for handle in handles:
            handle.remove()
    return bad[0] if bad else None


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
