"""Expert load of a step over all ranks, in the three numbers people watch."""

import math
from dataclasses import dataclass

import torch

from slipstream.models import Transformer
from slipstream.parallel import Ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class MoELoad:
    """Load over the MoE layers of a step."""

    max_over_mean: float
    """Busiest expert over the mean, worst layer; 1.0 is perfect."""
    entropy: float
    """Entropy of the load over its maximum, mean of the layers; 1.0 is perfect."""
    unused: int
    """Experts that got no token, summed over layers."""
    rerouted: float
    """Share of the slots that load balancing moved."""


def close_step(model: Transformer, ranks: Ranks, *, skipped: bool) -> MoELoad | None:
    """End the step of every MoE layer; a skipped step leaves their balancing state alone."""
    layers = list(model.moe_layers().values())
    if not layers:
        return None
    if skipped:
        for layer in layers:
            layer.forget_step()
        return None
    counters = torch.cat([layer.counters() for layer in layers])
    parts = ranks.sum(counters).split([layer.counters().numel() for layer in layers])
    stats = [layer.end_step(part) for layer, part in zip(layers, parts, strict=True)]
    load_SE = torch.stack([s.load_E for s in stats]).double()
    share_SE = load_SE / load_SE.sum(1, keepdim=True).clamp(min=1)
    entropy = torch.special.entr(share_SE).sum(1).mean() / math.log(max(2, share_SE.shape[1]))
    rerouted = torch.stack([s.rerouted for s in stats]).sum() / load_SE.sum().clamp(min=1)
    worst = share_SE.max() * share_SE.shape[1]
    unused = (load_SE == 0).sum()
    numbers = torch.stack([t.double() for t in (worst, entropy, unused, rerouted)]).tolist()
    return MoELoad(
        max_over_mean=numbers[0],
        entropy=numbers[1],
        unused=int(numbers[2]),
        rerouted=numbers[3],
    )
