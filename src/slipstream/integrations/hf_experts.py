"""What the experts modules of transformers compute, read from the modules themselves.

A module says whether it has a gate, biases, transposed weights; its gating is a method. The method
is tried on a few numbers and compared with ours: a family that is new, or that changes its gating,
is then recognised or not, and never computed wrongly.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from slipstream.ops.activation.reference import activation_reference

# By where the class is defined: a class of the same name elsewhere may compute something else.
ACTIVATIONS = {
    "transformers.activations.SiLUActivation": "silu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.functional.silu": "silu",
    "transformers.activations.GELUActivation": "gelu",
    "transformers.activations.NewGELUActivation": "gelu_tanh",
    "transformers.activations.FastGELUActivation": "gelu_tanh",
    "transformers.activations.GELUTanh": "gelu_tanh",
    "transformers.activations.PytorchGELUTanh": "gelu_tanh",
    "transformers.activations.ReLUSquaredActivation": "relu2",
}
GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu_tanh"}
ALPHAS = {"alpha": 1.3, "swiglu_alpha": 1.7}
LIMITS = {"limit": 0.6, "swiglu_limit": 0.9}


class Gate(NamedTuple):
    """The activation of an experts module in the terms of ``moe_mlp``."""

    activation: str
    """``swiglu``, ``swiglu_clamped``, ``relu2``, ..."""
    interleaved: bool = False
    """Whether gate and up rows alternate."""
    alpha: str | None = None
    """Attribute of the module that holds alpha."""
    limit: str | None = None
    """Attribute of the module that holds limit."""


def read_gate(module: torch.nn.Module) -> Gate | None:
    """The activation of an experts module, or None if it is none of ours. Can be traced."""
    act = getattr(module, "act_fn", None)
    defined = type(act) if isinstance(act, torch.nn.Module) else act
    return _read(type(module), defined, bool(module.has_gate))


def _read(experts: type, act: Any, gated: bool) -> Gate | None:
    return _read_once(experts, act, gated)


# What torch.compiler.assume_constant_result sets, without importing the compiler.
_read._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=256)
def _read_once(experts: Any, act: Any, gated: bool) -> Gate | None:
    names = (getattr(act, name, None) for name in ("__module__", "__qualname__"))
    function = ACTIVATIONS.get(".".join(map(str, names)))
    if not gated:
        return None if function is None else Gate(function)
    gate = _match(experts._apply_gate)
    if gate is None or gate.activation == "swiglu_clamped":
        return gate
    activation = GATED.get(function or "")
    return None if activation is None else gate._replace(activation=activation)


class _Probe:
    """Stands in for an experts module whose activation is SiLU."""

    act_fn = staticmethod(F.silu)

    def __init__(self) -> None:
        vars(self).update(ALPHAS, **LIMITS)


def _match(apply_gate: Callable[..., Any]) -> Gate | None:
    generator = torch.Generator("cpu").manual_seed(0)
    h = torch.randn(64, 8, generator=generator, dtype=torch.float64, device="cpu")
    try:
        found = apply_gate(_Probe(), h.clone())
    except Exception:  # code of others, which wants more of a module than the probe has
        return None
    for gate, expected in _candidates(h):
        # 1e-4: far above the rounding of a gating that works in fp32, far below any other formula.
        if found.shape == expected.shape and torch.allclose(found.double(), expected, 1e-4, 1e-4):
            return gate
    return None


def _candidates(h: torch.Tensor) -> Iterator[tuple[Gate, torch.Tensor]]:
    halves = {False: h.chunk(2, dim=-1), True: (h[:, 0::2], h[:, 1::2])}
    for interleaved, (gate, up) in halves.items():
        yield Gate("swiglu", interleaved), activation_reference(gate, up, "silu")
        for alpha, limit in product(ALPHAS, LIMITS):
            value = activation_reference(gate, up, "clamped", ALPHAS[alpha], LIMITS[limit])
            yield Gate("swiglu_clamped", interleaved, alpha, limit), value
