"""``slipstream.optimize``: the ops inside a Hugging Face model that is already there.

Every module of the model is tried on a few numbers, and where it computes what an op of ours does
it gets a forward of its own, on this instance. Parameters, names and classes stay; what is not
recognised stays and is listed with the reason. ``slipstream.restore`` undoes all of it.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from slipstream import recompute
from slipstream.errors import ConfigError
from slipstream.integrations.hf import DTYPES, experts_forward
from slipstream.integrations.hf_experts import read_gate
from slipstream.integrations.hf_optimize_attention import attention_forward
from slipstream.integrations.hf_optimize_layers import (
    ACTIONS,
    layer_forward,
    mlp_forward,
    moe_forward,
    norm_forward,
    router_forward,
)
from slipstream.integrations.hf_optimize_loss import (
    bind_loss,
    follow_head,
    is_model,
    read_loss,
    unbind_loss,
)
from slipstream.integrations.hf_optimize_probe import (
    is_moe_block,
    read_layer,
    read_mlp,
    read_norm,
    read_router,
)
from slipstream.integrations.hf_optimize_read_attention import read_attention
from slipstream.integrations.hf_optimize_report import Kept, Replaced, Report
from slipstream.integrations.hf_optimize_state import (
    State,
    bind,
    own_forward,
    state_of,
    unbind,
)
from slipstream.integrations.hf_optimize_watch import follow, skipped, unwatch, watch


class Kind(NamedTuple):
    """A kind of module: how to know one, how to read it, and what it runs then."""

    looks: Callable[[nn.Module], bool]
    """Whether a module is meant to be one, by its parts or the name of its class."""
    read: Callable[[nn.Module], Any]
    """Its settings; None if it computes something else."""
    forward: Callable[..., Any]
    by: str
    """For the report."""
    otherwise: str
    """Why it stays, if it cannot be read."""


def _named(*endings: str) -> Callable[[nn.Module], bool]:
    return lambda module: type(module).__name__.endswith(endings)


def _read_experts(module: nn.Module) -> Any:
    """Their activation; False for one that runs in steps; None where they cannot run at all."""
    weights = [p for p in module.parameters(recurse=False) if p.dim() == 3]
    if not weights or any(weight.dtype not in DTYPES for weight in weights):
        return None
    gate = None if getattr(module, "has_post_expert_norm", False) else read_gate(module)
    return False if gate is None else gate


KINDS = {
    "norm": Kind(
        looks=_named("Norm"),
        read=read_norm,
        forward=norm_forward,
        by="ops.norm",
        otherwise="it computes none of the norms of ops.norm",
    ),
    "mlp": Kind(
        looks=lambda module: {"gate_proj", "up_proj", "down_proj"} <= set(module._modules),
        read=read_mlp,
        forward=mlp_forward,
        by="ops.activation",
        otherwise="it is not down(f(gate(x)) * up(x)) with an f of ops.activation",
    ),
    "experts": Kind(
        looks=lambda module: hasattr(module, "_apply_gate") and hasattr(module, "has_gate"),
        read=_read_experts,
        forward=experts_forward,
        by="ops.moe.moe_mlp",
        otherwise="its weights are quantised; load the model unquantised",
    ),
    "router": Kind(
        looks=_named("Router"),
        read=read_router,
        forward=router_forward,
        by="ops.moe.router_logits, ops.moe.route",
        otherwise="it chooses or weighs experts in a way ops.moe.route does not read from it",
    ),
    "moe": Kind(
        looks=lambda module: "experts" in module._modules,
        read=lambda module: True if is_moe_block(module) else None,
        forward=moe_forward,
        by="routing handed to the experts, residual added there",
        otherwise="it is more than the experts its router chooses",
    ),
    "attention": Kind(
        looks=lambda module: "q_proj" in module._modules or type(module).__name__.endswith(
            "Attention"
        ),
        read=read_attention,
        forward=attention_forward,
        by="one projection, ops.qkv_rope; the model's attention implementation",
        otherwise="its projections, norms or rotary embedding are arranged in another way",
    ),
    "layer": Kind(
        looks=_named("DecoderLayer"),
        read=read_layer,
        forward=layer_forward,
        by="residual additions inside the norms",
        otherwise="its parts are put together in another way",
    ),
}  # fmt: skip
BY_STEPS = "ops.rope; the model's attention implementation"
BY_LOSS = "ops.linear_cross_entropy: no logits while training with labels"
NAMES = (*KINDS, "loss")
"""Kinds of modules, as in a report and in ``skip``."""
SKIPPED = "skipped"


def optimize(
    model: nn.Module,
    recompute_budget_gib: float | None = None,
    sample: Mapping[str, Any] | None = None,
    *,
    skip: Iterable[str] = (),
) -> Report:
    """Run the ops of Slipstream inside a Hugging Face model, on this instance; returns a report.

    ``model``: a ``PreTrainedModel``, or a module that holds one (an adapter model of peft, a
    data-parallel wrapper). Norms, the additions before them, projections with RoPE, gated MLPs, MoE
    blocks and the loss are replaced where they compute what the ops do. While training with
    ``labels`` the model returns no logits; ``skip_logits=False`` in the call brings them back.
    ``skip``: kinds to leave as they are, of norm, mlp, experts, router, moe (the block around those
    two), attention, layer and loss.
    ``recompute_budget_gib``: GiB that the peak of a training call on ``sample``, its keyword
    arguments, may have, all that is allocated now included; layers then give up what costs least
    to make again. Optimizing twice changes nothing but that, and replaces what was put in place
    since; kinds skipped before stay so until ``restore``. Raises ConfigError, the model then
    being as it was.
    """
    _check(model)
    left = _kinds(skip)
    _check_sample(model, recompute_budget_gib, sample)
    already = _replaced(model)
    late = ", ".join(sorted(already & left))
    if late:
        raise ConfigError(
            f"optimize: skip names {late}, which an earlier call replaced; call "
            "slipstream.restore(model) first"
        )
    before = _count(model)
    kept = _replace(model, left | _left_before(model))
    report = replace(_report(model, kept), already=bool(already) and _count(model) == before)
    if recompute_budget_gib is None or sample is None:
        return report
    try:
        return replace(report, plan=_plan(model, sample, recompute_budget_gib))
    except BaseException:
        if not already:
            restore(model)
        raise


def _plan(model: nn.Module, sample: Mapping[str, Any], budget_gib: float) -> recompute.Plan:
    """What each layer keeps from now on, decided while training."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        sample = {"use_cache": False, **sample}  # a cache would hold what layers are to let go of
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        found = recompute.plan(model, sample, budget_gib)
    finally:
        for module, training in modes:
            module.training = training
    recompute.apply(model, found)
    return found


def restore(model: nn.Module) -> None:
    """Undo ``optimize``: every module of ``model`` computes what it did before, to the bit."""
    _check(model)
    for module in model.modules():
        state = state_of(module)
        if state is not None:
            (unbind_loss if state.kind == "loss" else unbind)(module)
            for name in ("recompute", "recompute_actions"):
                module.__dict__.pop(name, None)
        unwatch(module, _follow)


def _check(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"optimize: model is a {type(model).__name__}, expected a Hugging Face model; pass the "
            "model itself"
        )
    if not any(is_model(module) for module in model.modules()):
        raise ConfigError(
            f"optimize: model is a {type(model).__name__} without a transformers.PreTrainedModel "
            "in it; pass a Hugging Face model, or use slipstream.nn and slipstream.ops directly"
        )
    for name, module in model.named_modules():
        if module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
            raise ConfigError(
                f"optimize: {name or type(module).__name__} is compiled already; optimize the "
                "model first, then compile it"
            )


def _check_sample(model: nn.Module, budget_gib: float | None, sample: Any) -> None:
    if budget_gib is None:
        return
    expected = "the keyword arguments of one training call, as large as in training and on the "
    expected += "model's device"
    if sample is None:
        raise ConfigError(f"optimize: recompute_budget_gib needs sample, {expected}")
    if not isinstance(sample, Mapping) or not all(isinstance(name, str) for name in sample):
        raise ConfigError(
            f"optimize: sample is a {type(sample).__name__}, expected a dict of {expected}"
        )
    outer = next(module for module in model.modules() if is_model(module))
    if outer.get_output_embeddings() is not None and sample.get("labels") is None:
        raise ConfigError(
            f"optimize: sample has no labels, expected {expected}; add labels=input_ids"
        )


def _kinds(skip: Iterable[str]) -> frozenset[str]:
    allowed = ", ".join(NAMES)
    if isinstance(skip, str) or not isinstance(skip, Iterable):
        raise ConfigError(
            f"optimize: skip={skip!r} is a {type(skip).__name__}, expected a tuple of kinds; there "
            f"are {allowed}"
        )
    kinds = list(skip)
    wrong = [kind for kind in kinds if kind not in NAMES]
    if wrong:
        raise ConfigError(f"optimize: skip has no kind {wrong[0]!r}; there are {allowed}")
    return frozenset(kinds)


def _replaced(model: nn.Module) -> frozenset[str]:
    """Kinds that an earlier call has replaced."""
    states = [state_of(module) for module in model.modules()]
    return frozenset(state.kind for state in states if state is not None)


def _count(model: nn.Module) -> int:
    """How many modules run our code."""
    return sum(state_of(module) is not None for module in model.modules())


def _left_before(model: nn.Module) -> frozenset[str]:
    """Kinds that an earlier call was to leave."""
    return frozenset().union(*(skipped(module) for module in model.modules()))


def _replace(model: nn.Module, skip: frozenset[str]) -> dict[tuple[str, str], list[str]]:
    """Bind what can be bound; for what stays, its names by class and reason."""
    kept: dict[tuple[str, str], list[str]] = {}
    for name, module in model.named_modules():
        reason, state = None, state_of(module)
        if state is not None:
            reason = follow_head(module) if state.kind == "loss" else None
        elif is_model(module):
            if module.get_output_embeddings() is not None:
                with torch.autocast("cpu", enabled=False):
                    settings = SKIPPED if "loss" in skip else read_loss(module)
                if isinstance(settings, str):
                    reason = settings
                else:
                    bind_loss(module, settings)
        else:
            reason = _replace_one(module, skip)
        if reason is not None:
            kept.setdefault((type(module).__name__, reason), []).append(name)
    for module in model.modules():
        # The innermost ones: adapter models run those around them without their hooks.
        if is_model(module) and not any(map(is_model, list(module.modules())[1:])):
            watch(module, skip, _follow)
    return kept


def _follow(model: nn.Module, _: Any) -> None:
    """Before a forward of an optimized model: parts put in place since then are replaced too."""
    if not torch.compiler.is_compiling():
        follow(model, _replace_one, _follow)


def _replace_one(module: nn.Module, skip: frozenset[str]) -> str | None:
    """Bind one module; the reason if it is of a kind of ours and stays."""
    kind = next((name for name, kind in KINDS.items() if kind.looks(module)), None)
    if kind is None:
        return None
    if kind in skip:
        return SKIPPED
    if own_forward(module):
        return "another library has bound a forward to it"
    with torch.autocast("cpu", enabled=False):  # which would round what is compared
        settings = KINDS[kind].read(module)
    if settings is None:
        return KINDS[kind].otherwise
    bind(module, kind, KINDS[kind].forward, settings)
    if kind in ACTIONS:
        module.__dict__.update(recompute="keep", recompute_actions=ACTIONS[kind])
    return None


def _report(model: nn.Module, kept: dict[tuple[str, str], list[str]]) -> Report:
    counts: dict[tuple[str, str, str], int] = {}
    for module in model.modules():
        state = state_of(module)
        if state is not None and state.kind != "head":
            key = state.kind, type(module).__name__, _by(state)
            counts[key] = counts.get(key, 0) + 1
    return Report(
        model=type(model).__name__,
        replaced=tuple(
            Replaced(kind=kind, module=name, count=count, by=by)
            for (kind, name, by), count in sorted(
                counts.items(), key=lambda item: NAMES.index(item[0][0])
            )
        ),
        kept=tuple(
            Kept(module=module, count=len(names), first=names[0] or "the model", reason=reason)
            for (module, reason), names in kept.items()
        ),
    )


def _by(state: State) -> str:
    if state.kind == "loss":
        return BY_LOSS
    if state.kind == "attention" and not state.settings.joint:
        return BY_STEPS
    return KINDS[state.kind].by
