"""The implementations of an MoE layer that are measured side by side, and how each is called.

Each gets the same tokens, router and expert weights and computes softmax over all experts, top-k,
weights that sum to 1, SwiGLU experts, weighted sum; gradients of x, router, w13 and w2. Peers are
optional packages, imported when they are built.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from slipstream import __version__
from slipstream.bench.environment import version
from slipstream.bench.moe_problem import Problem, gated_mlp
from slipstream.bench.peer_names import chosen_names
from slipstream.ops import moe
from slipstream.ops.moe.experts import Save
from slipstream.verify.budget import Results


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A peer ready to run one problem."""

    forward: Callable[[], torch.Tensor]
    """The layer's output (T, D), on the autograd tape."""
    leaves: dict[str, nn.Parameter]
    """What gets gradients, in the order of ``Problem.leaves`` (a dense MLP has no router)."""
    restore: Callable[[Results], Results] = lambda found: found
    """Brings gradients of weights that lie in another order back to the problem's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One implementation."""

    name: str
    """As given to ``--peers``."""
    build: Callable[[Problem], Layer]
    """Prepares the layer; compiles and tunes nothing yet."""
    module: str | None = None
    """Python module that must be importable; None: nothing beyond torch."""
    package: str | None = None
    """Distribution whose version goes into the row."""
    cuda_only: bool = False
    """Its kernels run on NVIDIA GPUs only."""
    dense: bool = False
    """A dense MLP of the same active FLOPs: an upper bound, not the same function."""
    settings: tuple[str, ...] = ()
    """Environment variables that change how it tunes; they go into the row."""

    def absent(self, device: torch.device) -> str | None:
        """Why it cannot run here, or None."""
        if self.module is not None and find_spec(self.module) is None:
            return f"{self.module} is not installed"
        if self.cuda_only and device.type != "cuda":
            return "its kernels need a CUDA device"
        return None

    def version(self) -> str | None:
        """Version of what does the work."""
        if self.name.startswith("slipstream"):
            return __version__
        return version(self.package) if self.package else torch.__version__

    def chosen_settings(self) -> dict[str, str]:
        """The settings that are set."""
        return {name: os.environ[name] for name in self.settings if name in os.environ}


def slipstream_layer(
    problem: Problem, *, save: Save = "h", compiled: bool = False, **balance: Any
) -> Layer:
    """The ops as ``nn.MoE`` chains them; ``balance``: load, threshold and depth of ``route``."""
    leaves, top_k = problem.leaves, problem.shape.top_k
    weights = tuple(leaves.values())

    def layer(
        x_TD: torch.Tensor, router_ED: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
    ) -> torch.Tensor:
        logits_TE, x_TD = moe.router_logits_and_x(x_TD, router_ED)
        routing = moe.route(logits_TE, top_k=top_k, normalize=True, **balance)
        return moe.moe_mlp(x_TD, w13, w2, routing, save=save)

    function = torch.compile(layer, fullgraph=True) if compiled else layer
    return Layer(forward=lambda: function(*weights), leaves=leaves)


def _slipstream(save: Save = "h", compiled: bool = False) -> Callable[[Problem], Layer]:
    return lambda problem: slipstream_layer(problem, save=save, compiled=compiled)


def _dense(problem: Problem) -> Layer:
    shape, x_TD = problem.shape, problem.leaves["x"]
    rows = shape.hidden * shape.top_k
    # As many experts' weights as a token uses, side by side.
    w13 = problem.leaves["w13"][: shape.top_k].detach().unflatten(1, (2, -1)).transpose(0, 1)
    w2 = problem.leaves["w2"][: shape.top_k].detach().transpose(0, 1)
    leaves = {
        "x": x_TD,
        "w13": nn.Parameter(w13.reshape(2 * rows, shape.width).clone()),
        "w2": nn.Parameter(w2.reshape(shape.width, rows).clone()),
    }
    compiled = torch.compile(gated_mlp)
    return Layer(forward=lambda: compiled(*leaves.values()), leaves=leaves)


def _transformers(implementation: str) -> Callable[[Problem], Layer]:
    def build(problem: Problem) -> Layer:
        family = import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")
        shape, leaves = problem.shape, problem.leaves
        config = import_module("transformers").Qwen3MoeConfig(
            hidden_size=shape.width,
            moe_intermediate_size=shape.hidden,
            num_experts=shape.experts,
            num_experts_per_tok=shape.top_k,
            norm_topk_prob=True,
        )
        config._experts_implementation = implementation
        with torch.device("meta"):
            block = family.Qwen3MoeSparseMoeBlock(config)
        block.gate.weight = leaves["router"]
        block.experts.gate_up_proj = leaves["w13"]
        block.experts.down_proj = leaves["w2"]
        return Layer(forward=lambda: block(leaves["x"][None])[0], leaves=leaves)

    return build


def route_plainly(
    x_TD: torch.Tensor, router_ED: torch.Tensor, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights (T, K) in the dtype of ``x`` and experts (T, K), as model code computes them."""
    prob_TE = F.softmax(x_TD @ router_ED.T, dim=-1, dtype=torch.float32)
    weight_TK, expert_TK = torch.topk(prob_TE, top_k, dim=-1)
    return (weight_TK / weight_TK.sum(-1, keepdim=True)).to(x_TD.dtype), expert_TK


def _grouped(compiled: bool) -> Callable[[Problem], Layer]:
    def build(problem: Problem) -> Layer:
        leaves, top_k = problem.leaves, problem.shape.top_k
        x_TD, router_ED, w13, w2 = leaves.values()
        function = torch.compile(_grouped_mm_layer) if compiled else _grouped_mm_layer
        return Layer(forward=lambda: function(x_TD, router_ED, w13, w2, top_k), leaves=leaves)

    return build


def _grouped_mm_layer(
    x_TD: torch.Tensor, router_ED: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, top_k: int
) -> torch.Tensor:
    weight_TK, expert_TK = route_plainly(x_TD, router_ED, top_k)
    expert_N = expert_TK.flatten()
    order_N = expert_N.argsort(stable=True)
    token_N = order_N // top_k
    experts = torch.arange(router_ED.shape[0], device=x_TD.device)
    ends_E = torch.searchsorted(expert_N[order_N], experts, right=True, out_int32=True)
    gate, up = F.grouped_mm(x_TD[token_N], w13.mT, offs=ends_E).chunk(2, dim=-1)
    y_ND = F.grouped_mm(F.silu(gate) * up, w2.mT, offs=ends_E)
    y_ND = y_ND * weight_TK.flatten()[order_N][:, None]
    return torch.zeros_like(x_TD).index_add(0, token_N, y_ND)


def _liger(problem: Problem) -> Layer:
    function = import_module("liger_kernel.ops").LigerFusedMoEFunction
    leaves, top_k = problem.leaves, problem.shape.top_k

    def forward() -> torch.Tensor:
        x_TD, router_ED, w13, w2 = leaves.values()
        weight_TK, expert_TK = route_plainly(x_TD, router_ED, top_k)
        return function.apply(x_TD, w13, w2, expert_TK.int(), weight_TK)

    return Layer(forward=forward, leaves=leaves)


def _scattermoe(problem: Problem) -> Layer:
    library = import_module("scattermoe")
    shape = problem.shape
    leaves = problem.leaves

    def forward() -> torch.Tensor:
        x_TD, router_ED, w13, w2 = leaves.values()
        weight_TK, expert_TK = route_plainly(x_TD, router_ED, shape.top_k)
        maps = library.flatten_sort_count(expert_TK, num_experts=shape.experts)
        h = library.parallel_linear(x_TD, w13.mT, shape.top_k, *maps, grouped_out=True)
        gate, up = h.chunk(2, dim=-1)
        a = F.silu(gate) * up
        return library.parallel_linear(a, w2.mT, 1, *maps, grouped_in=True, gates=weight_TK)

    return Layer(forward=forward, leaves=leaves)


def _sonic(problem: Problem) -> Layer:
    functional = import_module("sonicmoe.functional")
    # Its own layout of w13: gate 0, up 0, gate 1, up 1, ...
    w13 = problem.leaves["w13"].detach().unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    leaves = problem.leaves | {"w13": nn.Parameter(w13.contiguous())}
    top_k = problem.shape.top_k
    stream = torch.cuda.current_stream(problem.device).cuda_stream

    def forward() -> torch.Tensor:
        x_TD, router_ED, w13, w2 = leaves.values()
        return functional.moe_TC_softmax_topk_layer(
            x_TD,
            router_ED,
            w13.permute(1, 2, 0),
            None,
            w2.permute(1, 2, 0),
            None,
            top_k,
            stream,
            activation_type="swiglu",
            is_softmax_over_topk=True,
        )[0]

    def restore(found: Results) -> Results:
        name = "gradient of w13"
        return found | {name: found[name].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)}

    return Layer(forward=forward, leaves=leaves, restore=restore)


PEERS = {
    peer.name: peer
    for peer in (
        Peer(name="slipstream", build=_slipstream()),
        Peer(name="slipstream-compiled", build=_slipstream(compiled=True)),
        Peer(name="slipstream-save-x", build=_slipstream(save="x")),
        Peer(name="dense-compiled", build=_dense, dense=True),
        Peer(name="grouped_mm-compiled", build=_grouped(True)),
        Peer(name="grouped_mm-eager", build=_grouped(False)),
        Peer(
            name="transformers-grouped_mm",
            build=_transformers("grouped_mm"),
            module="transformers",
            package="transformers",
        ),
        Peer(
            name="transformers-eager",
            build=_transformers("eager"),
            module="transformers",
            package="transformers",
        ),
        Peer(name="scattermoe", build=_scattermoe, module="scattermoe", cuda_only=True),
        Peer(
            name="sonicmoe",
            build=_sonic,
            module="sonicmoe",
            package="sonic-moe",
            cuda_only=True,
            settings=("QUACK_CACHE_AUTOTUNING",),
        ),
        Peer(
            name="liger",
            build=_liger,
            module="liger_kernel",
            package="liger-kernel",
            cuda_only=True,
            settings=("LIGER_FUSED_MOE_AUTOTUNE", "TRITON_CACHE_AUTOTUNING"),
        ),
    )
}


def select(names: str) -> list[Peer]:
    """Peers of a comma-separated list; ``all``, and ``-name`` takes one away. ConfigError."""
    return [PEERS[name] for name in chosen_names(names, PEERS)]
