"""The routing kernels as custom ops, and their autograd function.

Saved for backward: the logits, the experts and two numbers per token; scores are computed again.
Triton is imported when an op first runs.
"""

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from slipstream.ops.ahead import expecting
from slipstream.ops.custom import custom_op
from slipstream.ops.moe.route.options import AuxScope, RouteOptions
from slipstream.ops.moe.routing import Routing

Tensors = tuple[torch.Tensor, ...]


def route_triton(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    load_E: torch.Tensor | None,
    threshold: torch.Tensor | None,
    options: RouteOptions,
    share_E: torch.Tensor | None = None,
) -> Routing:
    """See ``route``."""
    vectors = [None if v is None else v.detach().float() for v in (bias_E, share_E, load_E)]
    outputs = _Route.apply(logits_TE.contiguous(), *vectors, threshold, options)
    weight, expert, offsets, order, position, demand, rerouted, aux, z, schedule = outputs
    return Routing(weight, expert, offsets, order, position, demand, rerouted, aux, z, schedule)


def sort_triton(expert_TK: torch.Tensor, weight_TK: torch.Tensor, num_experts: int) -> Routing:
    """See ``routing_from``."""
    outputs = moe_sort(expert_TK.contiguous(), num_experts)
    offsets, order, position, demand, rerouted, aux, z, schedule = outputs
    return Routing(
        weight_TK, expert_TK, offsets, order, position, demand, rerouted, aux, z, schedule
    )


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: torch.Tensor,
        bias_E: torch.Tensor | None,
        share_E: torch.Tensor | None,
        load_E: torch.Tensor | None,
        threshold: torch.Tensor | None,
        options: RouteOptions,
    ) -> Tensors:
        ints, names = _packed(options)
        arguments = (logits_TE, bias_E, share_E, load_E, threshold, ints, options.scale, names)
        with expecting(_all_launches, arguments, options.aux, ctx.needs_input_grad[0]):
            outputs = moe_route(*arguments)
        weight, expert, stats, share, *maps = outputs
        offsets, order, position, demand, rerouted, aux, z, schedule = maps
        ctx.save_for_backward(logits_TE, stats, expert, share)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(expert, offsets, order, position, demand, rerouted, schedule)
        return weight, expert, offsets, order, position, demand, rerouted, aux, z, schedule

    @staticmethod
    @once_differentiable
    # once_differentiable's own type hides the parameter names.
    # pyrefly: ignore[bad-override]
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        dweight_TK, daux, dz = grads[0], grads[7], grads[8]
        if dweight_TK is not None:
            dweight_TK = dweight_TK.contiguous()
        ints, names = _packed(ctx.options)
        dlogits_TE = moe_route_backward(
            *ctx.saved_tensors, dweight_TK, daux, dz, ints, ctx.options.scale, names
        )
        return dlogits_TE, None, None, None, None, None


def _all_launches(arguments: tuple[Any, ...], aux: AuxScope, needed: bool) -> None:
    """What forward, with these arguments, and its backward launch; the z-loss is seldom used."""
    weight_TK, expert_TK, stats_2T, share_SE, *maps = moe_route.function(*arguments)
    if needed:
        daux = None if aux == "none" else maps[5]
        saved = arguments[0], stats_2T, expert_TK, share_SE
        moe_route_backward.function(*saved, weight_TK, daux, None, *arguments[5:])


def _packed(options: RouteOptions) -> tuple[list[int], str]:
    """``options`` without ``scale`` as custom ops take them; ``_unpacked`` undoes it."""
    ints = [
        options.top_k,
        options.num_groups,
        options.top_groups,
        options.group_top,
        int(options.normalize),
        options.num_sequences,
        options.depth,
    ]
    return ints, f"{options.score} {options.aux} {options.mode}"


def _unpacked(ints: list[int], scale: float, names: str) -> RouteOptions:
    top_k, num_groups, top_groups, group_top, normalize, num_sequences, depth = ints
    score, aux, mode = names.split()
    return RouteOptions(
        top_k=top_k,
        score=score,  # type: ignore[arg-type]
        num_groups=num_groups,
        top_groups=top_groups,
        group_top=group_top,
        normalize=bool(normalize),
        scale=scale,
        aux=aux,  # type: ignore[arg-type]
        num_sequences=num_sequences,
        depth=depth,
        mode=mode,  # type: ignore[arg-type]
    )


@functools.lru_cache(maxsize=64, typed=True)
def _known(ints: tuple[int, ...], scale: float, names: str) -> RouteOptions:
    # Where an op runs, its scalars are plain numbers; its shape function may be given symbols.
    return _unpacked([*ints], scale, names)


@custom_op("moe_route")
def moe_route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    share_E: torch.Tensor | None,
    load_E: torch.Tensor | None,
    threshold: torch.Tensor | None,
    ints: list[int],
    scale: float,
    names: str,
) -> list[torch.Tensor]:
    """Everything ``route`` returns, after weights and experts what backward needs: stats, share."""
    from slipstream.ops.moe.route.launch import route_launch  # noqa: PLC0415

    options = _known(tuple(ints), scale, names)
    with torch.cuda.device_of(logits_TE):
        weight_TK, expert_TK, stats_2T, share_SE, maps = route_launch(
            logits_TE, bias_E, share_E, load_E, threshold, options
        )
    if share_SE is share_E:
        share_SE = share_SE.clone()  # an output must not be an input
    return [weight_TK, expert_TK, stats_2T, share_SE, *maps]


@moe_route.register_fake
def _(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    share_E: torch.Tensor | None,
    load_E: torch.Tensor | None,
    threshold: torch.Tensor | None,
    ints: list[int],
    scale: float,
    names: str,
) -> list[torch.Tensor]:
    (tokens, experts), options = logits_TE.shape, _unpacked(ints, scale, names)
    sequences = options.num_sequences if options.aux == "sequence" else 1
    expert_TK = logits_TE.new_empty((tokens, options.top_k), dtype=torch.int64)
    return [
        torch.empty_like(expert_TK, dtype=torch.float32),
        expert_TK,
        logits_TE.new_empty((2, tokens), dtype=torch.float32),
        logits_TE.new_empty((sequences, experts), dtype=torch.float32),
        *_empty_maps(expert_TK, experts),
    ]


@custom_op("moe_route_backward")
def moe_route_backward(
    logits_TE: torch.Tensor,
    stats_2T: torch.Tensor,
    expert_TK: torch.Tensor,
    share_SE: torch.Tensor,
    dweight_TK: torch.Tensor | None,
    daux: torch.Tensor | None,
    dz: torch.Tensor | None,
    ints: list[int],
    scale: float,
    names: str,
) -> torch.Tensor:
    """Gradient of the logits."""
    from slipstream.ops.moe.route.launch import route_backward_launch  # noqa: PLC0415

    options = _known(tuple(ints), scale, names)
    with torch.cuda.device_of(logits_TE):
        return route_backward_launch(
            logits_TE, stats_2T, expert_TK, share_SE, dweight_TK, daux, dz, options
        )


@moe_route_backward.register_fake
def _(logits_TE: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(logits_TE)


@custom_op("moe_sort")
def moe_sort(expert_TK: torch.Tensor, num_experts: int) -> list[torch.Tensor]:
    """The maps of given experts, fields of ``Routing`` from ``offsets_E1`` on."""
    from slipstream.ops.moe.route.launch import sort_launch  # noqa: PLC0415

    with torch.cuda.device_of(expert_TK):
        return list(sort_launch(expert_TK, num_experts))


@moe_sort.register_fake
def _(expert_TK: torch.Tensor, num_experts: int) -> list[torch.Tensor]:
    return _empty_maps(expert_TK, num_experts)


def _empty_maps(expert_TK: torch.Tensor, num_experts: int) -> list[torch.Tensor]:
    rows, longs = expert_TK.numel(), {"dtype": torch.int64}
    scalar = expert_TK.new_empty((), dtype=torch.float32)
    tiles = rows // 128 + torch.sym_min(rows, num_experts)
    return [
        expert_TK.new_empty(num_experts + 1, dtype=torch.int32),
        expert_TK.new_empty(rows, **longs),
        expert_TK.new_empty(rows, **longs),
        expert_TK.new_empty(num_experts, **longs),
        expert_TK.new_empty((), **longs),
        scalar,
        torch.empty_like(scalar),
        # pyrefly: ignore[no-matching-overload]
        expert_TK.new_empty((1 + tiles + num_experts, 2), dtype=torch.int32),
    ]
