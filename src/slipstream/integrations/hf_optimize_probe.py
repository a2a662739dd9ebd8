"""What the modules of a model compute, found by running their own code on a few numbers.

A stand-in of a module's class, with small random weights and stubs for its parts, is run and
compared with ours. A family that is new, or that a release changed, is then recognised or left
alone with a reason, and never computed wrongly.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from slipstream.integrations.hf_optimize_state import KEY
from slipstream.ops.activation import GATED
from slipstream.ops.activation.reference import activation_reference
from slipstream.ops.moe.route.options import RouteOptions
from slipstream.ops.moe.route.reference import route_reference
from slipstream.ops.norm.reference import norm_reference

# Formulas that differ at all differ by far more; a norm of theirs works in fp32.
TOLERANCE = 1e-4
NORM_WIDTH = 64
CACHES = ("cache", "past_key_values")


class NormSettings(NamedTuple):
    """Arguments of ``ops.norm``."""

    kind: str
    eps: float
    cast: str
    offset: float


class RouterSettings(NamedTuple):
    """Arguments of ``route``."""

    top_k: int
    score: str
    normalize: bool
    scale: float


def stand_in(module: nn.Module, **parts: Any) -> Any:
    """A module of the same class and plain attributes whose parts are those given.

    Tensors become parameters, None a parameter or part that is not there.
    """
    other = object.__new__(type(module))
    nn.Module.__init__(other)
    skipped = {*vars(other), KEY, "forward"}
    other.__dict__.update({k: v for k, v in vars(module).items() if k not in skipped})
    for name, part in parts.items():
        is_tensor = isinstance(part, torch.Tensor)
        setattr(other, name, nn.Parameter(part, requires_grad=False) if is_tensor else part)
    return other


def numbers(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    """Normal numbers, the same ones every time, on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype, device="cpu")


def attempt(function: Callable[[], Any]) -> Any:
    """The result, or None if it raises: code of others, which may want more than a stand-in has."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return function()
    except Exception:
        return None


def same(found: Any, expected: torch.Tensor) -> bool:
    """Whether ``found`` is a tensor that agrees with ``expected``."""
    return (
        isinstance(found, torch.Tensor)
        and found.shape == expected.shape
        and torch.allclose(found.double(), expected.double(), TOLERANCE, TOLERANCE)
    )


def read_norm(module: nn.Module) -> NormSettings | None:
    """How a norm over the last dimension computes, or None if it is none of ours."""
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return _read_torch_norm(module)
    eps = next((name for name in ("variance_epsilon", "eps") if _is_number(module, name)), None)
    if eps is None or set(module._parameters) != {"weight"} or module._buffers or module._modules:
        return None
    return attempt(lambda: _match_norm(module, float(getattr(module, eps))))


def _read_torch_norm(module: nn.LayerNorm | nn.RMSNorm) -> NormSettings | None:
    known = type(module) in (nn.LayerNorm, nn.RMSNorm) and module.elementwise_affine
    if not known or len(module.normalized_shape) != 1 or module.eps is None:
        return None
    kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
    return NormSettings(kind, module.eps, "fp32", 0.0)


def _is_number(module: nn.Module, name: str) -> bool:
    return isinstance(module.__dict__.get(name), float)


def _match_norm(module: nn.Module, eps: float) -> NormSettings | None:
    weight, x = numbers(NORM_WIDTH, seed=1), numbers(6, NORM_WIDTH)
    for cast in ("llama", "fp32"):
        for offset in (0.0, 1.0):
            settings = NormSettings("rms", eps, cast, offset)
            if _is_norm(module, settings, weight, x):
                return settings
    return None


def _is_norm(
    module: nn.Module, settings: NormSettings, weight: torch.Tensor, x: torch.Tensor
) -> bool:
    # Small numbers too, for which an epsilon of another size would show.
    for wide in (x, x * settings.eps**0.5):
        if not same(_their_norm(module, weight, wide), _our_norm(settings, weight, wide)):
            return False
    # In 16 bits a third of the results depend on where it rounds, one in a thousand on luck.
    weight, x = weight.bfloat16(), x.bfloat16()
    theirs, ours = _their_norm(module, weight, x), _our_norm(settings, weight, x)
    return theirs.dtype == ours.dtype and (theirs != ours).double().mean().item() < 0.02


def _their_norm(module: nn.Module, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return type(module).forward(stand_in(module, weight=weight), x)


def _our_norm(settings: NormSettings, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return norm_reference(x, weight, None, None, *settings, None)[0]


def read_mlp(module: nn.Module) -> str | None:
    """The gated activation of a ``down(f(gate(x)) * up(x))`` block, or None."""
    if set(module._modules) - {"act_fn"} != {"gate_proj", "up_proj", "down_proj"}:
        return None
    sizes = {"gate_proj": (6, 10), "up_proj": (6, 10), "down_proj": (10, 6)}
    linears = {name: nn.Linear(*size, dtype=torch.float64) for name, size in sizes.items()}
    for seed, linear in enumerate(linears.values()):
        linear.weight.data = 3 * numbers(*linear.weight.shape, seed=seed)
    x = numbers(64, 6, seed=9)

    def run() -> torch.Tensor:
        other = stand_in(module, **linears)
        if "act_fn" in module._modules:
            other.act_fn = module.act_fn
        return type(module).forward(other, x)

    found = attempt(run)
    gate, up = linears["gate_proj"](x).detach(), linears["up_proj"](x).detach()
    for kind, activation in GATED.items():
        expected = linears["down_proj"](activation_reference(gate, up, activation)).detach()
        if kind != "swiglu_clamped" and same(found, expected):
            return kind
    return None


def read_router(module: Any) -> RouterSettings | None:
    """What a router with one weight and no bias chooses and weighs by, or None."""
    if set(module._parameters) != {"weight"} or module._buffers or module._modules:
        return None
    top_k, scale = getattr(module, "top_k", None), getattr(module, "routed_scaling_factor", 1.0)
    if not isinstance(top_k, int) or module.weight.dim() != 2:
        return None
    weight = numbers(*module.weight.shape, dtype=torch.float32, seed=1)
    x = numbers(16, weight.shape[1], dtype=torch.float32) * weight.shape[1] ** -0.5
    found = attempt(lambda: type(module).forward(stand_in(module, weight=weight), x))
    if not isinstance(found, tuple) or len(found) != 3 or not same(found[0], x @ weight.T):
        return None
    for score in ("softmax", "sigmoid"):
        for normalize in (False, True):
            settings = RouterSettings(top_k, score, normalize, float(scale))
            routing = route_reference(x @ weight.T, None, None, None, _options(settings))
            if same(found[1], routing.weight_TK) and torch.equal(found[2], routing.expert_TK):
                return settings
    return None


def _options(settings: RouterSettings) -> RouteOptions:
    return RouteOptions(
        **settings._asdict(),
        num_groups=1,
        top_groups=1,
        group_top=1,
        aux="none",
        num_sequences=1,
        depth=0,
    )


class Stub(nn.Module):
    """A part of a stand-in: returns what its function makes of the call and keeps the call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function, self.calls = function, []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record, then answer."""
        self.calls.append((args, kwargs))
        return self.function(*args, **kwargs)


def is_moe_block(module: nn.Module) -> bool:
    """Whether a block is its ``experts`` on what its ``gate`` chose, and nothing more."""
    if set(module._modules) != {"gate", "experts"} or module._parameters or module._buffers:
        return False
    scores, index = numbers(6, 2, seed=1), torch.arange(12, device="cpu").view(6, 2) % 5
    x = numbers(2, 3, 8)

    def experts(hidden: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return hidden.sin() * (weight * (1 + chosen)).sum(1, keepdim=True)

    def run() -> torch.Tensor:
        parts = {"gate": Stub(lambda _: (scores, scores, index)), "experts": Stub(experts)}
        return type(module).forward(stand_in(module, **parts).train(), x.clone())

    return same(attempt(run), experts(x.flatten(0, 1), index, scores).view_as(x))


PLAIN = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
SANDWICH = (*PLAIN, "pre_feedforward_layernorm", "post_feedforward_layernorm")


class LayerSettings(NamedTuple):
    """A decoder layer's structure and call."""

    sandwich: bool
    """Norms after attention and feed-forward too."""
    names: tuple[str, ...]
    """Parameters of its forward after the hidden states."""
    defaults: dict[str, Any]
    """Those that the attention is always given, with the value it gets if the caller gives none."""


def read_layer(module: nn.Module) -> LayerSettings | None:
    """How a decoder layer puts its parts together, or None if not as one of ours."""
    parts = set(module._modules)
    if parts not in (set(PLAIN), set(SANDWICH)) or module._parameters or module._buffers:
        return None
    sandwich = parts == set(SANDWICH)
    names = _parameters_of(type(module).forward)
    given = {name: f"the value of {name}" for name in (*names, "of_another_caller")}
    stubs = _layer_stubs(module._modules)
    x = numbers(2, 3, 8)

    def run(**kwargs: Any) -> torch.Tensor:
        other = stand_in(module, **stubs)
        other.gradient_checkpointing = False
        return type(module).forward(other, x.clone(), **kwargs)

    expected = _layer_expected(stubs, x, sandwich)
    attention = stubs["self_attn"]
    attention.calls.clear()
    if not same(attempt(lambda: run(**given)), expected):
        return None
    full = attention.calls[-1][1]
    if {k: v for k, v in full.items() if k != "hidden_states"} != given:
        return None
    if not same(attempt(run), expected):
        return None
    args, defaults = attention.calls[-1]
    defaults = {k: v for k, v in defaults.items() if k != "hidden_states"}
    return None if args else LayerSettings(sandwich, names, defaults)


def _parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Named parameters after the module and its input."""
    parameters = list(inspect.signature(function).parameters.values())[2:]
    return tuple(p.name for p in parameters if p.kind == p.POSITIONAL_OR_KEYWORD)


def _layer_stubs(names: Sequence[str] | Any) -> dict[str, Stub]:
    def norm(scale: float) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda hidden: hidden * scale + 0.1 * scale

    def attention(*, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return hidden_states.tanh(), None

    stubs = {name: Stub(norm(1.0 + seed)) for seed, name in enumerate(names)}
    return {**stubs, "self_attn": Stub(attention), "mlp": Stub(torch.sin)}


def _layer_expected(stubs: dict[str, Stub], x: torch.Tensor, sandwich: bool) -> torch.Tensor:
    after = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    attended, _ = stubs["self_attn"](hidden_states=stubs["input_layernorm"](x))
    if sandwich:
        attended = stubs["post_attention_layernorm"](attended)
    h = x + attended
    out = stubs["mlp"](stubs[after](h))
    return h + (stubs["post_feedforward_layernorm"](out) if sandwich else out)
