"""Forwards of replaced norms, feed-forward blocks, MoE blocks and decoder layers.

Each looks at its parts when it is called and takes the short way only through parts that are still
what they were: an adapter, a wrapper or a hook added later is called as a module.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from slipstream import ops
from slipstream.integrations.hf_experts import Gate
from slipstream.integrations.hf_optimize_attention import ATTENTION_ACTIONS
from slipstream.integrations.hf_optimize_linear import adjacent, can_join, joint_linear
from slipstream.integrations.hf_optimize_probe import (
    CACHES,
    LayerSettings,
    NormSettings,
    RouterSettings,
)
from slipstream.integrations.hf_optimize_state import (
    KEY,
    action_of,
    ours,
    runs,
    settings_if_plain,
    state_of,
)
from slipstream.nn.offload import around, concerns
from slipstream.nn.saved import Recompute, recomputed, region
from slipstream.ops import moe
from slipstream.ops.activation import ALPHA, LIMIT
from slipstream.ops.moe import Routing
from slipstream.ops.moe.experts import Save

# Of transformers 5.17; later releases checkpoint in the forward of the class.
CHECKPOINTED_BY_CALL = "__call__" in vars(GradientCheckpointingLayer)
# What backward keeps of a replaced block; names as in slipstream.nn.
ACTIONS = {
    "attention": ATTENTION_ACTIONS,
    "mlp": ("keep", "reemit", "recompute"),
    "moe": ("keep", "norm", "experts", "full"),
    "layer": ("keep", "offload"),
}
KEEP_NORM = ("keep", "experts")


@ours
def norm_forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """``norm(x)``."""
    return _norm(self, self.__dict__[KEY].settings, hidden_states, None)[0]


def _norm(
    module: Any, settings: NormSettings, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    kind, eps, cast, offset = settings
    bias = module.bias if kind == "layer" else None
    return ops.norm(
        x, module.weight, bias, residual=residual, kind=kind, eps=eps, cast=cast, offset=offset
    )


def add_norm(
    module: nn.Module, x: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``norm(s)`` and ``s = residual + x``; one op where the norm is one of ours."""
    settings = settings_if_plain(module, "norm")
    if residual is not None and x.dtype != residual.dtype:
        # Autocast: a branch in 16 bits joins a stream in 32, and the sum stays there.
        x, residual = residual + x, None
    if settings is not None:
        return _norm(module, settings, x, residual)
    s = x if residual is None else residual + x
    return module(s), s


@ours
def mlp_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """``down(f(gate(x)) * up(x))``."""
    kind, action = self.__dict__[KEY].settings, action_of(self)
    linears, down = (self.gate_proj, self.up_proj), self.down_proj
    joint = can_join(linears) and adjacent([linear.weight for linear in linears])

    def hidden(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (joint_linear(y, linears),) if joint else (linears[0](y), linears[1](y))

    def make(y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = hidden(y)
        return *h, ops.activation(*h, kind=kind)

    if action == "keep" or not can_join((*linears, down)):
        return down(make(x)[-1])
    if action == "recompute":
        return recomputed(make, lambda *made: down(made[-1]), x)
    gate, *up = hidden(x)
    return ops.activation_linear(gate, down.weight, *up, bias_D=down.bias, kind=kind)


@ours
def router_forward(self: Any, hidden_states: torch.Tensor, whole: bool = False) -> Any:
    """Logits, weights and experts of every token; with ``whole`` the tokens and the routing too."""
    settings: RouterSettings = self.__dict__[KEY].settings
    x_TD = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits_TE, x_TD = moe.router_logits_and_x(x_TD, self.weight)
    # A step that is not finite is for the training loop to notice, as it is without us.
    routing = moe.route(logits_TE, check_values=False, **settings._asdict())
    chosen = logits_TE, routing.weight_TK, routing.expert_TK
    return (*chosen, x_TD, routing) if whole else chosen


@ours
def moe_forward(
    self: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """The MoE block, plus ``residual`` if given."""
    action, x_TD = action_of(self), hidden_states.flatten(0, -2)
    if not _whole(self.gate, self.experts):
        _, weight_TK, expert_TK = self.gate(x_TD)
        out = self.experts(x_TD, expert_TK, weight_TK).view_as(hidden_states)
        return out if residual is None else residual + out
    *_, x_TD, routing = self.gate(x_TD, whole=True)
    inside = residual is not None and _stays(residual, x_TD)
    residual_TD = residual.flatten(0, -2) if inside else None
    save = "x" if action in ("experts", "full") else "h"
    out_TD = _experts(self.experts, x_TD, routing, residual_TD, save)
    # No view to autograd: wrappers put hooks on what a layer returns.
    out = torch.ops.aten._unsafe_view(out_TD, hidden_states.shape)
    return out if inside or residual is None else residual + out


def _whole(gate: nn.Module, experts: Any) -> bool:
    """Whether routing can go from the router to the experts as it is."""
    # Settings are False for experts that run in steps.
    if not settings_if_plain(experts, "experts") or _is_elsewhere(experts):
        return False
    # Hooks may stay: a recorder of router logits reads the first of what the call returns.
    state = state_of(gate)
    return state is not None and state.kind == "router" and runs(gate, state)


def _is_elsewhere(experts: nn.Module) -> bool:
    # Expert parallelism of newer releases changes what the router returns.
    return bool(getattr(experts, "_is_expert_parallel", False))


def _stays(residual: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether the experts return the dtype of the residual stream, so that they can add it."""
    device = x.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return residual.dtype == x.dtype and not autocast


def _experts(
    module: Any,
    x_TD: torch.Tensor,
    routing: Routing,
    residual_TD: torch.Tensor | None,
    save: Save,
) -> torch.Tensor:
    gate: Gate = module.__dict__[KEY].settings
    up = "gate_up_proj" if module.has_gate else "up_proj"
    w13, w2 = getattr(module, up), module.down_proj
    return moe.moe_mlp(
        x_TD,
        w13.mT if module.is_transposed else w13,
        w2.mT if module.is_transposed else w2,
        routing,
        activation=gate.activation,
        b13_EP=getattr(module, f"{up}_bias") if module.has_bias else None,
        b2_ED=module.down_proj_bias if module.has_bias else None,
        interleaved=gate.interleaved,
        alpha=ALPHA if gate.alpha is None else float(getattr(module, gate.alpha)),
        limit=LIMIT if gate.limit is None else float(getattr(module, gate.limit)),
        save=save,
        residual_TD=residual_TD,
    )


@ours
def layer_forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A decoder layer, under its gradient checkpointing."""
    settings: LayerSettings = self.__dict__[KEY].settings
    if args:
        kwargs.update(zip(settings.names, args, strict=False))
    checkpointing = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
    if CHECKPOINTED_BY_CALL or not checkpointing:
        return _layer(self, hidden_states, **kwargs)
    # The backward pass runs the layer again, which must not fill a cache a second time.
    kwargs.update({name: None for name in (*CACHES, "layer_past") if name in kwargs})
    if "use_cache" in kwargs:
        kwargs["use_cache"] = False
    return self._gradient_checkpointing_func(partial(_layer, self, **kwargs), hidden_states)


def _layer(self: Any, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    action = action_of(self)
    if concerns(action):
        return around(self, action, partial(_sublayers, self, x, kwargs))
    return _sublayers(self, x, kwargs)


def _sublayers(self: Any, x: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    settings: LayerSettings = self.__dict__[KEY].settings
    kwargs = {**settings.defaults, **kwargs}

    def attend(y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return self.self_attn(hidden_states=y, **kwargs)[0]

    def feed(y: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        if settings.sandwich:
            return s + self.post_feedforward_layernorm(self.mlp(y))
        if settings_if_plain(self.mlp, "moe") is not None:
            return self.mlp(y, residual=s)
        return s + self.mlp(y)

    out, s = _behind(self.input_layernorm, x, None, self.self_attn, attend)
    before = self.post_attention_layernorm
    if settings.sandwich:
        out, before = before(out), self.pre_feedforward_layernorm
    return _behind(before, out, s, self.mlp, feed)[0]


def _behind(
    norm: nn.Module,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    sublayer: nn.Module,
    use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """``use(norm(s), s)`` and ``s = residual + x``; the sublayer says if the norm is kept."""
    drops = sublayer.__dict__.get("recompute", "keep") not in KEEP_NORM
    if not drops or not torch.is_grad_enabled() or settings_if_plain(norm, "norm") is None:
        y, s = add_norm(norm, x, residual)
        return use(y, s), s
    if torch.compiler.is_compiling():
        s = x if residual is None else residual + x
        (y,) = region(lambda s: (norm(s),), s)
        return use(y, s), s
    with Recompute() as scope:
        y, s = add_norm(norm, x, residual)
        result = use(y, s)
        scope.drop((y,), lambda s: (norm(s),), (s,))
    return result, s
