"""AdamW over the parameters of a model, with exact clipping and the non-finite guard.

The state is fp32 and lies in flat buckets with the weights (``optim.storage``). Weights that every
forward pass casts to a shorter dtype anyway can be kept in it, beside fp32 masters: training is the
same to the bit, without the casts. Nothing here waits for the device: the norm and the decision to
skip stay tensors.
"""

from dataclasses import dataclass

import torch
from torch import nn

from slipstream import ops
from slipstream.models import Transformer
from slipstream.nn import Linear, MoE
from slipstream.ops import AdamWOptions
from slipstream.ops.scattered import Grads
from slipstream.parallel.flat_state import Decision, FlatState, State, update
from slipstream.parallel.flat_storage import flatten
from slipstream.train.config import OptimConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What a step did, as tensors on the device."""

    grad_norm: torch.Tensor
    """fp32 scalar: norm of all gradients before clipping."""
    skipped: torch.Tensor
    """bool scalar: the gradient or the loss was not finite, so nothing was changed."""


class AdamW:
    """Two groups: tensors of two or more dimensions are decayed, vectors are not.

    ``weights``: dtype to keep those weights in that are cast to it wherever they are used.
    ``accumulate``: their gradients will be sums over several backward passes, which are fp32 then.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimConfig,
        *,
        weights: torch.dtype = torch.float32,
        accumulate: bool = False,
    ) -> None:
        self.config = config
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        cast = _cast_where_used(model) if weights != torch.float32 else set()
        self._groups: dict[bool, _Flat | _Separate] = {}
        for decayed in (True, False):
            members = [p for p in self.params.values() if (p.dim() >= 2) == decayed]
            if config.storage == "separate":
                self._groups[decayed] = _Separate(members)
                continue
            short = [p for p in members if id(p) in cast]
            rest = [p for p in members if id(p) not in cast]
            buckets = [*flatten(short, dtype=weights, masters=True), *flatten(rest)]
            self._groups[decayed] = _Flat([FlatState(bucket) for bucket in buckets])
            for param in short if accumulate else ():
                param.grad_dtype = torch.float32
        states = {id(p): s for group in self._groups.values() for p, s in group.of_each()}
        self._states: dict[str, State] = {name: states[id(p)] for name, p in self.params.items()}

    @property
    def state(self) -> dict[str, State]:
        """Moments and step count of every parameter, as views; masters belong to the model."""
        return {
            name: {key: value for key, value in state.items() if key != "master"}
            for name, state in self._states.items()
        }

    def exact(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A state dict of the model with the fp32 masters instead of shorter weights."""
        masters = {n: s["master"] for n, s in self._states.items() if "master" in s}
        return {**state_dict, **masters}

    @torch.no_grad()
    def follow_masters(self) -> None:
        """Round the masters into the weights, after something was loaded into ``exact``."""
        for name, state in self._states.items():
            if "master" in state:
                self.params[name].copy_(state["master"])
        for group in self._groups.values():
            group.note_versions()

    @torch.no_grad()
    def step(self, lr: float, healthy: torch.Tensor) -> Update:
        """Clip, update, and leave everything untouched where a gradient or ``healthy`` is bad."""
        for group in self._groups.values():
            group.follow_params()
        norm = self._norm()
        skipped = ~(torch.isfinite(norm) & healthy)
        decision = Decision(divisor=(norm / self.config.clip).clamp(min=1.0), skip=skipped)
        for decayed, group in self._groups.items():
            options = AdamWOptions(
                lr=lr,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                eps=self.config.eps,
                weight_decay=self.config.weight_decay * decayed,
            )
            group.update(options, decision)
        return Update(grad_norm=norm, skipped=skipped)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for param in self.params.values():
            param.grad = None

    def _norm(self) -> torch.Tensor:
        found = [group.whole_grads() for group in self._groups.values()]
        if all(grads is not None for grads in found):
            return ops.grad_norm([grad for grads in found for grad in grads or ()])
        # In the order of the model: the sum of the squares has the same bits in every storage.
        return ops.grad_norm([p.grad for p in self.params.values() if p.grad is not None])


class _Flat:
    """Parameters in flat buckets, each with its state."""

    def __init__(self, states: list[FlatState]) -> None:
        self.states = states

    def of_each(self) -> list[tuple[nn.Parameter, State]]:
        """Every parameter and its state."""
        return [pair for state in self.states for pair in state.of_each()]

    def whole_grads(self) -> Grads | None:
        """The gradients by bucket; None where buckets are not updated as a whole."""
        if not all(state.one_pass for state in self.states):
            return None
        return [grad for state in self.states if (grad := state.grads()) is not None]

    def follow_params(self) -> None:
        """Take over what others wrote into the weights."""
        for state in self.states:
            state.bucket.follow_params()

    def note_versions(self) -> None:
        """Regard the masters as those of the weights as they are."""
        for state in self.states:
            state.bucket.note_versions()

    def update(self, options: AdamWOptions, decision: Decision) -> None:
        """One step in place."""
        update(self.states, options, decision)


class _Separate:
    """Parameters where they are, each with its state."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.states = [
            {
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                "exp_avg": torch.zeros_like(p, dtype=torch.float32),
                "exp_avg_sq": torch.zeros_like(p, dtype=torch.float32),
            }
            for p in params
        ]

    def of_each(self) -> list[tuple[nn.Parameter, State]]:
        """Every parameter and its state."""
        return list(zip(self.params, self.states, strict=True))

    def whole_grads(self) -> None:
        """There are no buckets."""

    def follow_params(self) -> None:
        """There are no masters."""

    def note_versions(self) -> None:
        """There are no masters."""

    def update(self, options: AdamWOptions, decision: Decision) -> None:
        """One step in place."""
        have = [(p, s) for p, s in self.of_each() if p.grad is not None]
        ops.adamw(
            [param.data for param, _ in have],
            [grad for param, _ in have if (grad := param.grad) is not None],
            [state["exp_avg"] for _, state in have],
            [state["exp_avg_sq"] for _, state in have],
            [state["step"] for _, state in have],
            options=options,
            grad_divisor=decision.divisor,
            skip=decision.skip,
        )


def _cast_where_used(model: nn.Module) -> set[int]:
    """Ids of the matrices that are only ever read in the dtype of the activations.

    The router multiplies in fp32, the loss takes the head as it is and adds up its gradient in
    fp32, and so does the lookup of an embedding: these keep their bits only in fp32.
    """
    head = model.head if isinstance(model, Transformer) else None
    found: set[int] = set()
    for module in model.modules():
        if isinstance(module, MoE):
            found |= {id(module.w13), id(module.w2)}
        elif isinstance(module, Linear) and module is not head:
            found.add(id(module.weight))
    return found
