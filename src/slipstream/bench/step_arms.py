"""The arms of a step measurement: one model each, ready to train, in the stacks that are compared.

``stock``: ``torch.grouped_mm`` experts, every layer compiled, PyTorch's fused AdamW; ``-cudnn``:
cuDNN's attention; ``-liger``: Liger's fused linear cross entropy. ``slipstream-cache``:
``slipstream.optimize`` but for the MoE layer, which stays that of stock, compiled; FlatAdamW.
``slipstream``: all of it; ``-compiled``: every layer compiled; ``-graph``: forward and backward as
a CUDA graph; ``-auto``: with recomputation planned for a share of the unconstrained peak.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import slipstream
from slipstream.bench.ops_case import Missing
from slipstream.bench.step_graph import ModelGraph
from slipstream.bench.step_model import StepModel, build
from slipstream.bench.step_park import Parking, tensors_in
from slipstream.errors import ConfigError
from slipstream.parallel.flat import FlatAdamW
from slipstream.recompute import apply, plan

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1
MOE = ("experts", "router", "moe")
"""Kinds of modules, as ``slipstream.optimize`` names them, that make up the MoE layer."""
RECOMPILES, GIB, GRAPH = 64, 2**30, "slipstream-graph"
AUTO_SHARE = 0.6
"""Of the peak without recomputation: the budget of ``slipstream-auto``."""


@dataclass(slots=True, kw_only=True)
class Arm:
    """A model and its optimizer."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    attention: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around forward and backward."""
    movable: bool = True
    """Whether its memory may come back elsewhere; flat buckets know their addresses."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What the row says about how it was made."""
    graph: ModelGraph | None = None
    """Forward and backward in one, if recorded."""

    def loss(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Mean next-token loss of a batch."""
        if self.graph is not None:
            return self.graph.loss(tokens_BL)
        return self.model(input_ids=tokens_BL, labels=tokens_BL).loss

    def backward(self, loss: torch.Tensor) -> None:
        """Gradients of ``loss``, unless they came with it."""
        if self.graph is None:
            loss.backward()

    def update(self) -> None:
        """Optimizer step, and no gradients left."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def idle_bytes(self) -> int:
        """Memory of a graph that no tensor holds between steps."""
        return 0 if self.graph is None else self.graph.recorder.idle_bytes()

    def parking(self) -> Parking:
        """Its memory between steps."""
        own = [*self.model.parameters(), *self.model.buffers()]
        if self.graph is not None:
            own += self.graph.passes.gradients
        return Parking([*own, *tensors_in(self.optimizer)], movable=self.movable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an arm is made for."""

    model: StepModel
    device: torch.device
    seed: int
    lr: float
    tokens_BL: torch.Tensor
    """A batch to plan recomputation with."""
    budget_bytes: int | None = None
    """Peak of a step that recomputation is planned for, this arm's memory alone; None: none is."""
    others_bytes: int = 0
    """On the device and not this arm's."""


def make_arm(name: str, setting: Setting) -> Arm:
    """Build the arm of this name; raises what building raises, Missing for what is not there."""
    model = build(setting.model, setting.device, seed=setting.seed)
    return (
        _ours(name, model, setting)
        if name.startswith("slipstream")
        else _stock(name, model, setting)
    )


def _stock(name: str, model: nn.Module, setting: Setting) -> Arm:
    if "liger" in name:
        _fuse_liger_loss(model)
    _compile(*_layers(model))
    return Arm(
        name=name,
        model=model,
        optimizer=torch.optim.AdamW(
            model.parameters(),
            lr=setting.lr,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        ),
        attention=_cudnn if "cudnn" in name else nullcontext,
    )


def _ours(name: str, model: nn.Module, setting: Setting) -> Arm:
    report = slipstream.optimize(model, skip=MOE if "cache" in name else ())
    optimized: Counter[str] = Counter()
    for row in report.replaced:
        optimized[row.kind] += row.count
    if "cache" in name and "compiled" not in name:
        # The MoE layer is that of the stock arm, which compiles it with all around it.
        _compile(*(layer.mlp for layer in _layers(model)))
    if "compiled" in name:
        _compile(*_layers(model))
    # As PyTorch's AdamW keeps a bf16 model: no masters, bf16 moments, rounded to nearest.
    optimizer = FlatAdamW(
        model,
        lr=setting.lr,
        betas=BETAS,
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        masters=False,
        moments=torch.bfloat16,
    )
    notes: dict[str, Any] = {"optimized": dict(optimized)}
    if setting.budget_bytes is not None:
        notes |= _plan(model, setting, setting.budget_bytes)
    graph = ModelGraph(model, setting.device) if name == GRAPH else None
    return Arm(
        name=name,
        model=model,
        optimizer=optimizer,
        attention=nullcontext if graph is None else graph.attention,
        movable=False,
        notes=notes,
        graph=graph,
    )


def _layers(model: nn.Module) -> list[Any]:
    return list(model.get_submodule("model.layers").children())


def _compile(*modules: nn.Module) -> None:
    # Modules of all arms share one code object; past its limit they would silently run eagerly.
    torch._dynamo.config.recompile_limit = max(RECOMPILES, torch._dynamo.config.recompile_limit)
    for module in modules:
        module.compile()


def _plan(model: nn.Module, setting: Setting, budget_bytes: int) -> dict[str, Any]:
    """Plan and apply; a plan counts all memory of the device, the row this arm's."""
    others_gib = setting.others_bytes / GIB
    sample = {"input_ids": setting.tokens_BL, "labels": setting.tokens_BL}
    chosen = plan(model, sample, budget_bytes / GIB + others_gib)
    apply(model, chosen)
    notes: dict[str, Any] = {
        "budget_gib": round(budget_bytes / GIB, 2),
        "planned_ms": round(chosen.ms_paid, 3),
        "actions": dict(Counter(chosen.actions.values())),
    }
    if chosen.predicted_gib is not None:
        notes["predicted_peak_gib"] = round(chosen.predicted_gib - others_gib, 2)
    return notes


def _fuse_liger_loss(model: nn.Module) -> None:
    if find_spec("liger_kernel") is None:
        raise Missing("liger_kernel is not installed")
    if not torch.cuda.is_available():
        raise Missing("its kernels need a CUDA device")
    patch = import_module("liger_kernel.transformers").apply_liger_kernel_to_qwen3_moe
    patch(rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True, model=model)


def _cudnn() -> AbstractContextManager[Any]:
    return sdpa_kernel([SDPBackend.CUDNN_ATTENTION])


ARMS = (
    "stock", "stock-cudnn", "stock-liger", "stock-cudnn-liger",
    "slipstream-cache", "slipstream-cache-compiled",
    "slipstream", "slipstream-compiled", GRAPH, "slipstream-auto",
)  # fmt: skip


def select_arms(names: str) -> list[str]:
    """Arms of a comma-separated list in its order. Raises ConfigError."""
    chosen = list(dict.fromkeys(part.strip() for part in names.split(",") if part.strip()))
    wrong = [name for name in chosen if name not in ARMS]
    if wrong or not chosen:
        raise ConfigError(f"--arms {(wrong or [names])[0]}: there are {', '.join(ARMS)}")
    return chosen
