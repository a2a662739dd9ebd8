"""The Mixture-of-Experts feed-forward block: router, experts, combine, and its balancing state.

Expert weights lie contiguous by expert: ``w13 (E, 2F, D)`` and ``w2 (E, D, F)``. The block counts
the load of a step; ``end_step`` turns it, summed over ranks, into the next step's expert bias and
smoothed load.
"""

from typing import NamedTuple

import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.nn.mlp import MLP
from slipstream.nn.norm import Normed
from slipstream.nn.site import Site
from slipstream.ops import check, moe
from slipstream.ops.activation import is_gated
from slipstream.ops.moe import Routing
from slipstream.ops.moe.route import AuxScope, BalanceMode, Score


class MoEStats(NamedTuple):
    """Load of one MoE layer since the step began."""

    load_E: torch.Tensor
    """fp32 (E,): slots per expert that ran."""
    demand_E: torch.Tensor
    """fp32 (E,): slots per expert the router asked for."""
    rerouted: torch.Tensor
    """fp32 scalar: slots moved by load balancing."""


class MoE(Site):
    """Router, E experts of which each token uses K, optional shared expert, summed.

    ``recompute``: what backward keeps. keep: the normed input and the experts' hidden values; norm:
    the hidden values; experts: the normed input; full: neither. The routing is always kept.
    """

    recompute_actions = ("keep", "norm", "experts", "full")

    load_E: torch.Tensor
    demand_E: torch.Tensor
    rerouted: torch.Tensor
    smoothed_E: torch.Tensor
    steps: torch.Tensor
    expert_bias_E: torch.Tensor | None

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        num_experts: int,
        top_k: int,
        activation: str = "swiglu",
        shared_hidden: int = 0,
        score: Score = "softmax",
        normalize: bool = False,
        scale: float = 1.0,
        num_groups: int = 1,
        top_groups: int = 1,
        group_top: int = 2,
        expert_bias: bool = False,
        bias_update_rate: float = 1e-3,
        aux_scope: AuxScope = "none",
        threshold: float = float("inf"),
        window: int = 32,
        ramp: int = 100,
        depth: int = 4,
        mode: BalanceMode = "weight",
    ) -> None:
        super().__init__()
        _check(threshold=threshold, window=window, ramp=ramp, shared_hidden=shared_hidden)
        self.activation, self.top_k, self.aux_scope = activation, top_k, aux_scope
        self.score, self.normalize, self.scale = score, normalize, scale
        self.num_groups, self.top_groups, self.group_top = num_groups, top_groups, group_top
        self.bias_update_rate = bias_update_rate
        self.threshold, self.window, self.ramp, self.depth = threshold, window, ramp, depth
        self.mode: BalanceMode = mode
        rows = hidden * (2 if is_gated(activation) else 1)
        self.router = nn.Parameter(torch.empty(num_experts, dim))
        self.w13 = nn.Parameter(torch.empty(num_experts, rows, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, hidden))
        self.shared = MLP(dim, shared_hidden, activation=activation) if shared_hidden else None
        bias = torch.zeros(num_experts) if expert_bias else None
        self.register_buffer("expert_bias_E", bias)
        self.register_buffer("smoothed_E", torch.zeros(num_experts))
        self.register_buffer("steps", torch.zeros(()))
        for name in ("load_E", "demand_E"):
            self.register_buffer(name, torch.zeros(num_experts), persistent=False)
        self.register_buffer("rerouted", torch.zeros(()), persistent=False)
        self._last_threshold: tuple[torch.Tensor, int, torch.Tensor | None] = (self.steps, 0, None)

    def forward(self, x_BLD: torch.Tensor | Normed) -> tuple[torch.Tensor, Routing]:
        """``(B, L, D)`` to ``(B, L, D)`` and the routing, whose losses the caller weighs.

        A plain tensor stays with who keeps it.
        """
        if not isinstance(x_BLD, Normed):
            return self._mix(x_BLD)
        if self.recompute in ("norm", "full"):
            # The router, the experts and the shared expert all read the one that is made again.
            return x_BLD.recomputed(lambda y: (y,), self._mix)
        return self._mix(x_BLD.read())

    def _mix(self, x_BLD: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        check.shape("MoE", "x", x_BLD, None, None, self.router.shape[1])
        batch = x_BLD.shape[0]
        logits_TE, x_TD = moe.router_logits_and_x(x_BLD.flatten(0, 1), self.router)
        routing = moe.route(
            logits_TE,
            top_k=self.top_k,
            score=self.score,
            bias_E=self.expert_bias_E,
            num_groups=self.num_groups,
            top_groups=self.top_groups,
            group_top=self.group_top,
            normalize=self.normalize,
            scale=self.scale,
            aux=self.aux_scope,
            num_sequences=batch,
            share_E=self._share() if self.aux_scope == "global" else None,
            load_E=self.smoothed_E if self.balances else None,
            threshold=self._threshold_now() if self.balances else None,
            depth=self.depth,
            mode=self.mode,
            check_values=False,  # a step that is not finite is for the trainer to drop
        )
        if self.training:
            self._count(routing)
        shared_TD = None if self.shared is None else self.shared(x_TD)
        out_TD = moe.moe_mlp(
            x_TD,
            self.w13,
            self.w2,
            routing,
            activation=self.activation,
            shared_TD=shared_TD,
            save="x" if self.recompute in ("experts", "full") else "h",
        )
        return out_TD.view_as(x_BLD), routing

    @property
    def balances(self) -> bool:
        """Whether load balancing inside routing is on (while training)."""
        return self.training and self.threshold != float("inf")

    def stats(self) -> MoEStats:
        """This rank's load since the last ``end_step``."""
        return MoEStats(self.load_E, self.demand_E, self.rerouted)

    def counters(self) -> torch.Tensor:
        """This rank's load since the last ``end_step``, one new vector to sum over ranks."""
        return torch.cat((self.load_E, self.demand_E, self.rerouted[None]))

    @torch.no_grad()
    def end_step(self, counters: torch.Tensor | None = None) -> MoEStats:
        """Close a step with the ``counters`` of all ranks (None: this one's); returns the load."""
        experts = self.load_E.numel()
        packed = self.counters() if counters is None else counters
        load_E, demand_E, rerouted = packed.split([experts, experts, 1])
        if self.expert_bias_E is not None:
            self.expert_bias_E += self.bias_update_rate * (load_E.mean() - load_E).sign()
        self.smoothed_E += (demand_E - self.smoothed_E) / self.window
        self.steps += 1
        self.forget_step()
        return MoEStats(load_E, demand_E, rerouted[0])

    @torch.no_grad()
    def forget_step(self) -> None:
        """Drop the load counted since the last ``end_step``."""
        for counter in (self.load_E, self.demand_E, self.rerouted):
            counter.zero_()

    def _share(self) -> torch.Tensor:
        # Of the slots of all ranks over a window of steps, up to the last one; equal before that.
        total = self.smoothed_E.sum()
        return torch.where(total > 0, self.smoothed_E / total, 1 / self.smoothed_E.numel())

    def _threshold_now(self) -> torch.Tensor:
        # The same until `steps` changes; a graph that is being recorded has to compute it anew.
        recording = self.steps.is_cuda and torch.cuda.is_current_stream_capturing()
        if torch.compiler.is_compiling() or recording:
            return self._ramped_threshold()
        steps, version, threshold = self._last_threshold
        if threshold is None or steps is not self.steps or version != self.steps._version:
            threshold = self._ramped_threshold()
            self._last_threshold = (self.steps, self.steps._version, threshold)
        return threshold

    def _ramped_threshold(self) -> torch.Tensor:
        # From infinity at step 0 down to the threshold at step `ramp`.
        return self.threshold * self.ramp / self.steps.clamp(max=self.ramp)

    @torch.no_grad()
    def _count(self, routing: Routing) -> None:
        # Without load balancing every slot goes where the router asked for.
        self.load_E += routing.counts_E if self.balances else routing.demand_E
        self.demand_E += routing.demand_E
        if self.balances:
            self.rerouted += routing.rerouted

    @torch.no_grad()
    def reset_parameters(self, std: float, out_std: float) -> None:
        """Normal weights; ``out_std`` for the projections into the residual stream."""
        nn.init.normal_(self.router, std=std)
        nn.init.normal_(self.w13, std=std)
        nn.init.normal_(self.w2, std=out_std)
        if self.shared is not None:
            self.shared.reset_parameters(std, out_std)
        for buffer in self.buffers(recurse=False):
            buffer.zero_()


def _check(*, threshold: float, window: int, ramp: int, shared_hidden: int) -> None:
    if not threshold >= 1:  # NaN neither
        raise ConfigError(f"MoE: threshold = {threshold}, expected 1 (the mean load) or more")
    for name, steps in (("window", window), ("ramp", ramp)):
        if steps < 1:
            raise ConfigError(f"MoE: {name} = {steps}, expected 1 step or more")
    if shared_hidden < 0:
        raise ConfigError(f"MoE: shared_hidden = {shared_hidden}, expected 0 (none) or more")
