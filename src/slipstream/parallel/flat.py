"""AdamW over flat buckets as a ``torch.optim.Optimizer``, for any PyTorch or Hugging Face script.

Making one moves the parameters into flat buckets, in place. A step is one launch per bucket on a
GPU, clipping included, and costs the host next to nothing per parameter.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import nn

from slipstream.errors import CheckpointError, ConfigError, TrainingError
from slipstream.ops import AdamWOptions, grad_norm
from slipstream.ops.adamw import Rounding
from slipstream.parallel.flat_state import Decision, FlatState, update
from slipstream.parallel.flat_storage import Block, flatten

Gradients = Literal["separate", "flat"]
Rules = dict[str, tuple[Callable[[Any], bool], str]]
GROUP_RULES: Rules = {
    "lr": (lambda lr: 0 <= lr < math.inf, "0 or more"),
    "betas": (
        lambda betas: len(betas) == 2 and all(0 <= beta < 1 for beta in betas),
        "two numbers in [0, 1)",
    ),
    "eps": (lambda eps: 0 < eps < math.inf, "more than 0"),
    "weight_decay": (lambda decay: 0 <= decay < math.inf, "0 or more"),
}
"""Of what a group may set: whether a value is one, and what is."""
RULES: Rules = GROUP_RULES | {
    "max_norm": (lambda norm: norm is None or norm > 0, "more than 0, or None"),
    "moments": (lambda dtype: dtype in (torch.float32, torch.bfloat16), "fp32 or bf16"),
    "gradients": (lambda kind: kind in get_args(Gradients), "separate or flat"),
}


class FlatAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over flat buckets.

    ``params``: a model, or what ``torch.optim.AdamW`` takes; ``lr``, ``betas``, ``eps`` and
    ``weight_decay`` as there, also per group. The parameters move into flat buckets here: make the
    optimizer after ``model.to()``. Frozen ones stay where they are. Parameters share step counts:
    one whose first gradient comes late is not corrected for that, as it is in ``torch.optim``.

    ``masters``: fp32 copies of 16-bit parameters; None: unless ``stochastic_rounding``; False: an
    update below half a unit of a weight vanishes, as in ``torch.optim.AdamW``. They follow what is
    written into the parameters, but not what goes past autograd, as ``param.data.copy_()`` does.
    ``stochastic_rounding``: of bf16 parameters and moments, from ``seed``, step and place.
    ``moments``: fp32, or bf16 for half the memory. Bytes per bf16 parameter, gradient included:
    masters 16, stochastic rounding 12, with bf16 moments 8.

    ``max_norm``: clip the norm of all gradients and skip steps where it is not finite, without a
    pass over the gradients or a host synchronisation for it; ``grad_norm`` and ``skipped`` tell
    the last step's, as tensors. ``gradients``: ``separate``, where autograd makes them, which is
    the least traffic; ``flat``: one buffer per bucket, fp32 beside masters, that every backward
    adds to and the step leaves zeroed. ``adjacent``: pairs of expert weights (E, ...) to lay side
    by side. Raises ConfigError.
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        masters: bool | None = None,
        stochastic_rounding: bool = False,
        moments: torch.dtype = torch.float32,
        max_norm: float | None = None,
        gradients: Gradients = "separate",
        adjacent: Iterable[Block] = (),
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options = {"max_norm": max_norm, "moments": moments, "gradients": gradients}
        _check(RULES, defaults | options)
        if masters and stochastic_rounding:
            raise ConfigError(
                "FlatAdamW: masters and stochastic_rounding exclude each other; choose one"
            )
        self.rounding: Rounding | None = None
        if stochastic_rounding:
            self.rounding = "stochastic"
        elif masters is False:
            self.rounding = "nearest"
        self.masters = masters if masters is not None else not stochastic_rounding
        self.moments, self.max_norm, self.seed = moments, max_norm, seed
        self.gradients: Gradients = gradients
        self.adjacent = tuple(adjacent)
        self.grad_norm: torch.Tensor | None = None
        self.skipped: torch.Tensor | None = None
        self._flat: list[list[FlatState]] = []
        self._frozen: list[nn.Parameter] = []
        given = params.parameters() if isinstance(params, nn.Module) else params
        super().__init__(given, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as ``torch.optim.Optimizer`` does, and flatten its parameters."""
        _check(GROUP_RULES, self.defaults | param_group)
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        self._check_params(params)
        self._frozen += [param for param in params if not param.requires_grad]
        buckets = flatten(
            [param for param in params if param.requires_grad],
            masters=self.masters,
            adjacent=self.adjacent,
        )
        flat = self.gradients == "flat"
        states = [FlatState(b, moments=self._moments_of(b.data), flat_grads=flat) for b in buckets]
        self._flat.append(states)
        for state in states:
            self.state.update(state.of_each())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure`` returns. TrainingError if a parameter has moved."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(param.grad is not None for param in self._frozen):
            raise TrainingError(
                "FlatAdamW: a parameter that was frozen when the optimizer was made has a "
                "gradient; unfreeze it before, or add it with add_param_group"
            )
        for states in self._flat:
            for state in states:
                state.bucket.follow_params()
        decision = self._decide()
        for group, states in zip(self.param_groups, self._flat, strict=True):
            update(states, self._options(group), decision)
            for state in states:
                state.bucket.note_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients; flat ones become zeros, which costs nothing right after a step."""
        if self.gradients == "separate":
            super().zero_grad(set_to_none)
            return
        for states in self._flat:
            for state in states:
                state.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter, as ``torch.optim.AdamW`` has it, with ``master`` where kept."""
        saved = super().state_dict()
        # A step count for each parameter: who loads them may count each of them up.
        saved["state"] = {
            key: {**state, "step": state["step"].clone()} for key, state in saved["state"].items()
        }
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a ``state_dict`` of this class or of ``torch.optim.AdamW``.

        Raises CheckpointError.
        """
        _check_state_dict(state_dict)
        saved = state_dict["param_groups"]
        have = [len(group["params"]) for group in self.param_groups]
        given = [len(group["params"]) for group in saved]
        if have != given:
            raise CheckpointError(
                f"FlatAdamW: the state has groups of {given} parameters, this optimizer of {have}; "
                "load the state of the same model and groups"
            )
        loads = []
        for group, theirs, states in zip(self.param_groups, saved, self._flat, strict=True):
            number = dict(zip(map(id, group["params"]), theirs["params"], strict=True))
            for state in states:
                keys = [number[id(param)] for param in state.bucket.params]
                loads.append((state, [state_dict["state"].get(key) for key in keys]))
                state.check_each(loads[-1][1])
        for state, given_states in loads:
            state.load_each(given_states)
        for group, theirs in zip(self.param_groups, saved, strict=True):
            group.update({key: value for key, value in theirs.items() if key != "params"})

    def __getstate__(self) -> NoReturn:
        """Nothing to pickle or copy: the parameters of a copy would lie in no bucket."""
        raise ConfigError(
            "FlatAdamW: an optimizer over flat buckets is not pickled or copied; save its "
            "state_dict(), or make one for the copied model and load that"
        )

    def _check_params(self, params: list[nn.Parameter]) -> None:
        for param in params:
            if not param.is_floating_point():
                raise ConfigError(f"FlatAdamW: a parameter is {param.dtype}; give float ones")
            if self.rounding == "stochastic" and param.dtype == torch.float16:
                raise ConfigError(
                    "FlatAdamW: stochastic_rounding is for bf16, a parameter is fp16; use masters"
                )

    def _moments_of(self, data: torch.Tensor) -> torch.dtype:
        # Moments shorter than the weights they move would be the weakest part.
        return self.moments if data.dtype == torch.bfloat16 else torch.float32

    def _decide(self) -> Decision:
        if self.max_norm is None:
            return Decision()
        grads = [g for states in self._flat for s in states if (g := s.grads()) is not None]
        if not grads:
            return Decision()
        self.grad_norm = grad_norm(grads)
        self.skipped = ~torch.isfinite(self.grad_norm)
        return Decision(divisor=(self.grad_norm / self.max_norm).clamp(min=1.0), skip=self.skipped)

    def _options(self, group: dict[str, Any]) -> AdamWOptions:
        beta1, beta2 = group["betas"]
        return AdamWOptions(
            lr=float(group["lr"]),
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            rounding=self.rounding,
            seed=self.seed,
            zero_grads=self.gradients == "flat",
        )


def _check(rules: Rules, values: Mapping[str, Any]) -> None:
    for name, (holds, allowed) in rules.items():
        try:
            fits = holds(values[name])
        except TypeError:  # no number at all
            fits = False
        if not fits:
            raise ConfigError(f"FlatAdamW: {name} = {values[name]}, expected {allowed}")


def _check_state_dict(state_dict: Any) -> None:
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError(
            f"FlatAdamW: the state is a {type(state_dict).__name__} without state and "
            "param_groups; load what an optimizer's state_dict() returned"
        )
    for group in state_dict["param_groups"]:
        other = next((name for name in ("amsgrad", "maximize") if group.get(name)), None)
        if other is not None:
            raise CheckpointError(
                f"FlatAdamW: the state is of an optimizer with {other}, which this one cannot do; "
                "go on with that one, or start anew"
            )
