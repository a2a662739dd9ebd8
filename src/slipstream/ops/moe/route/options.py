"""The scalars of a routing pass."""

from dataclasses import dataclass
from typing import Literal

Score = Literal["softmax", "sigmoid"]
AuxScope = Literal["none", "batch", "sequence", "global"]
BalanceMode = Literal["weight", "causal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOptions:
    """What is not a tensor; field meanings are those of ``route``."""

    top_k: int
    score: Score
    num_groups: int
    top_groups: int
    group_top: int
    normalize: bool
    scale: float
    aux: AuxScope
    num_sequences: int
    depth: int
    mode: BalanceMode = "weight"
