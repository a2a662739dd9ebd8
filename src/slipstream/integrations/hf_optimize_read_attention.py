"""What an attention module computes, found by running its own code beside ours on a few numbers."""

import inspect
import sys
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from slipstream.integrations.hf_optimize_attention import (
    AttentionSettings,
    attention_forward,
    read_arguments,
    read_path,
)
from slipstream.integrations.hf_optimize_probe import attempt, numbers, read_norm, same, stand_in
from slipstream.integrations.hf_optimize_state import KEY, State

PROBE = "slipstream_probe"
PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
# Arguments of an attention implementation, and where modules have them.
ARGUMENTS = {
    "dropout": ("attention_dropout",),
    "scaling": ("scaling",),
    "sliding_window": ("sliding_window", "config.sliding_window"),
    "softcap": ("attn_logit_softcapping",),
}
PASSED = {"of_another_caller": "passed on"}
WIDTH = 6


class _Config:
    """The module's config, with our attention implementation and a clip that bites."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._attn_implementation, self.clip_qkv = PROBE, 0.5

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _Cache:
    """Stands in for a key-value cache."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def update(self, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Numbers that no cache would give."""
        self.calls.append((args, kwargs))
        return k + 1, v + 2


class _Run:
    """One run of an attention forward on a stand-in, and what it called."""

    def __init__(self, module: nn.Module, forward: Any, cache_name: str) -> None:
        self.module, self.forward, self.cache_name = module, forward, cache_name
        self.cache, self.attended = _Cache(), []

    def attend(self, module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        """The attention implementation: something of queries, keys and values."""
        self.attended.append((q, k, v, mask, kwargs))
        groups = q.shape[1] // k.shape[1]
        mixed = q + (k * v).repeat_interleave(groups, dim=1)
        return mixed.transpose(1, 2), None

    def __call__(self, positions: tuple[torch.Tensor, torch.Tensor], training: bool) -> Any:
        """The output for ``(2, 3, WIDTH)`` numbers."""
        x, mask = numbers(2, 3, WIDTH, seed=5), numbers(2, 1, 3, 3, seed=6)
        cache = {self.cache_name: self.cache}
        ALL_ATTENTION_FUNCTIONS[PROBE] = self.attend
        try:
            return self.forward(
                self.module.train(training),
                hidden_states=x,
                position_embeddings=positions,
                attention_mask=mask,
                **cache,
                **PASSED,
            )[0]
        finally:
            del ALL_ATTENTION_FUNCTIONS[PROBE]


def read_attention(module: nn.Module) -> AttentionSettings | None:
    """How an attention module works, or None if not as one of ours."""
    return attempt(lambda: _read(module))


def _read(module: Any) -> AttentionSettings | None:
    norms = set(module._modules) - PARTS
    if not set(module._modules) >= PARTS or norms not in (set(), {"q_norm", "k_norm"}):
        return None
    width = module.head_dim
    heads, kv_heads = (p.out_features // width for p in (module.q_proj, module.k_proj))
    qk_norm = _qk_norm(module, width) if norms else "none"
    defining = (sys.modules[kind.__module__] for kind in type(module).__mro__)
    eager = next((m.eager_attention_forward for m in defining if _has_eager(m)), None)
    if qk_norm is None or eager is None:
        return None
    names = inspect.signature(type(module).forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"
    theirs = _Run(_small(module), type(module).forward, cache_name)
    theirs(_positions(1, width), True)
    arguments = _arguments(theirs)
    if arguments is None:
        return None
    takes_call = "kwargs" in theirs.cache.calls[0][1]
    for clip in (False, True):
        settings = AttentionSettings(heads, kv_heads, qk_norm, clip, takes_call, arguments, eager)
        if _agrees(module, settings, theirs):
            return settings
    return None


def _has_eager(module: Any) -> bool:
    return callable(getattr(module, "eager_attention_forward", None))


def _qk_norm(module: Any, width: int) -> str | None:
    """Over what queries and keys are normed; None if the norms are none of ours, or unlike."""
    settings = read_norm(module.q_norm)
    if settings is None or settings != read_norm(module.k_norm):
        return None
    sizes = module.q_norm.weight.numel(), module.k_norm.weight.numel()
    if sizes == (width, width):
        return "head"
    whole = module.q_proj.out_features, module.k_proj.out_features
    return "full" if sizes == whole else None


def _small(module: Any) -> Any:
    """A stand-in with few input features and every width of the module itself."""
    parts: dict[str, Any] = {"config": _Config(module.config)}
    for seed, name in enumerate(("q_proj", "k_proj", "v_proj")):
        parts[name] = _linear(WIDTH, getattr(module, name).out_features, seed)
    parts["o_proj"] = _linear(module.q_proj.out_features, WIDTH, 3)
    for name in ("q_norm", "k_norm"):
        if name in module._modules:
            norm = getattr(module, name)
            parts[name] = stand_in(norm, weight=numbers(norm.weight.numel(), seed=len(name)))
    return stand_in(module, **parts)


def _linear(features: int, outputs: int, seed: int) -> nn.Linear:
    linear = nn.Linear(features, outputs, dtype=torch.float64)
    linear.weight.data = numbers(outputs, features, seed=seed)
    return linear


def _positions(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = numbers(rows, 3, width // 2, seed=8).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def _arguments(run: _Run) -> tuple[tuple[str, str], ...] | None:
    """Where the module has what it gave to the attention implementation while training."""
    found = {}
    for name, value in run.attended[0][4].items():
        if name in PASSED:
            continue
        paths = [p for p in ARGUMENTS.get(name, ()) if read_path(run.module, p) == value]
        if not paths:
            return None
        found[name] = paths[0]
    return tuple(found.items())


def _agrees(module: Any, settings: AttentionSettings, theirs: _Run) -> bool:
    """Whether ours does the same, for positions shared and not, training and not."""
    small = theirs.module
    small.__dict__[KEY] = State(
        kind="attention", forward=attention_forward, stock=theirs.forward, own=False,
        settings=settings,
    )  # fmt: skip
    ours = _Run(small, attention_forward, theirs.cache_name)
    for rows in (1, 2):
        for training in (False, True):
            positions = _positions(rows, module.head_dim)
            if not same(ours(positions, training), theirs(positions, training)):
                return False
            if not _same_calls(ours, theirs):
                return False
    return read_arguments(small.eval(), settings.arguments).get("dropout", 0.0) == 0.0


def _same_calls(ours: _Run, theirs: _Run) -> bool:
    (*heads, mask, kwargs), (*their_heads, their_mask, their_kwargs) = (
        run.attended[-1] for run in (ours, theirs)
    )
    (args, update), (their_args, their_update) = (run.cache.calls[-1] for run in (ours, theirs))
    return (
        all(same(a, b) for a, b in zip((*heads, mask), (*their_heads, their_mask), strict=True))
        and kwargs == their_kwargs
        and args == their_args
        and update == their_update
    )
