"""The grouped products of the MoE layer, each alone, on one problem's data: what tuning times."""

import torch

from slipstream.bench.moe_problem import Problem
from slipstream.bench.timing import Call
from slipstream.ops import moe
from slipstream.ops.moe.experts import launch, passes
from slipstream.ops.moe.experts.options import ExpertsOptions
from slipstream.ops.moe.experts.tuned import Tile


class Products:
    """Inputs of every product, built once."""

    def __init__(self, problem: Problem) -> None:
        shape = problem.shape
        x_TD, router_ED, w13, w2 = (leaf.detach() for leaf in problem.leaves.values())
        routing = moe.route(moe.router_logits(x_TD, router_ED), top_k=shape.top_k, normalize=True)
        schedule = launch.schedule(routing.offsets_E1, routing.order_N.shape[0])
        self.layout = passes.layout_of(
            routing.order_N, routing.position_N, routing.offsets_E1, schedule, shape.top_k
        )
        self.options = ExpertsOptions(activation="swiglu")
        self.x_TD, self.dout_TD, self.w13, self.w2 = x_TD, problem.dout_TD, w13, w2
        rows = shape.tokens * shape.top_k
        self.a_NF = x_TD.new_empty(rows + self.layout.room, shape.hidden).normal_()
        self.dh_NP = x_TD.new_empty(rows + self.layout.room, 2 * shape.hidden).normal_()
        self.h_NP = torch.randn_like(self.dh_NP)
        self.weight_TK = routing.weight_TK.contiguous()
        self._gathered: dict[str, torch.Tensor] = {}

    def call(self, product: str, tile: Tile) -> Call:
        """``product`` with ``tile``; a gather before it is not part of the call.

        ``da`` is timed together with the backward of the activation, which may be fused with it.
        """
        gather = product == "da" and not tile.gather_before
        tokens = self.dout_TD if product in ("da", "dw2") else self.x_TD
        before = product in ("da", "dw13", "dw2") and not gather
        if before and product not in self._gathered:
            self._gathered[product] = launch.spread_rows(
                tokens, None, self.layout, room=self.layout.room
            )
        rows = self._gathered[product] if before else tokens
        if product == "up":
            return lambda: launch.up(
                self.x_TD, self.w13, None, self.layout, self.options, tile,
                want_h=True, want_a=True,
            )  # fmt: skip
        if product == "down":
            return lambda: launch.rows(self.a_NF, self.w2, None, self.layout, tile)
        if product == "da":
            return lambda: passes.activation_backward(
                rows, self.w2, self.h_NP, self.weight_TK, self.layout, self.options, tile,
                gather=gather,
            )  # fmt: skip
        if product == "dx":
            return lambda: launch.rows(self.dh_NP, self.w13.mT, None, self.layout, tile)
        if product == "dw13":
            return self._outer(self.dh_NP, rows, tile, like=self.w13)
        return self._outer(rows, self.a_NF, tile, like=self.w2)

    def _outer(
        self, left: torch.Tensor, right: torch.Tensor, tile: Tile, *, like: torch.Tensor
    ) -> Call:
        return lambda: launch.outer(left, right, self.layout, tile, like=like, into=None)
