"""One routing pass: scores, bias, groups, exact top-k, load balance, weights, maps, losses."""

from typing import Any

import torch

from slipstream.errors import ShapeError
from slipstream.ops import check, dispatch
from slipstream.ops.dispatch import Refusal
from slipstream.ops.moe import checks
from slipstream.ops.moe.route import values
from slipstream.ops.moe.route.autograd import route_triton
from slipstream.ops.moe.route.given import routing_from
from slipstream.ops.moe.route.options import AuxScope, BalanceMode, RouteOptions, Score
from slipstream.ops.moe.route.reference import route_reference
from slipstream.ops.moe.routing import Routing
from slipstream.ops.triton_support import refusal


def route(
    logits_TE: torch.Tensor,
    *,
    top_k: int,
    score: Score = "softmax",
    bias_E: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_top: int = 2,
    normalize: bool = False,
    scale: float = 1.0,
    aux: AuxScope = "none",
    num_sequences: int = 1,
    share_E: torch.Tensor | None = None,
    load_E: torch.Tensor | None = None,
    threshold: torch.Tensor | float | None = None,
    depth: int = 4,
    mode: BalanceMode = "weight",
    check_values: bool = True,
) -> Routing:
    """Choose ``top_k`` experts for every token and build everything the MoE layer needs.

    ``logits_TE (T, E)``, best fp32. ``score`` turns logits into gate scores. ``bias_E (E,)`` is
    added for the choice only, never to the weights (aux-free balancing, arXiv 2408.15664).
    With ``num_groups`` > 1 only experts of the best ``top_groups`` groups can be chosen, a group
    counting the sum of its ``group_top`` best (arXiv 2405.04434 takes 1, 2412.19437 takes 2).
    ``normalize`` makes the K weights of a token sum to 1, ``scale`` multiplies them.
    ``aux``: balance loss over the whole batch (arXiv 2101.03961); or per sequence and averaged,
    tokens being ``num_sequences`` equal runs; or global (arXiv 2501.11873): ``share_E (E,)``,
    summing to 1, is then the share of slots each expert got, over all ranks or several batches.
    ``threshold`` with ``load_E (E,)``, the smoothed load, turns on load balancing with at most
    ``depth`` proposals per slot; inf is plain top-k. ``mode``: experts shed their ``weight``
    (weakest) slots, or the latest ones: ``causal``.
    Ties go to the lower expert index. Weights are fp32. No host synchronisation.
    ``check_values``: logits that are not finite raise ConfigError; on a GPU, where looking would
    make the host wait, only with SLIPSTREAM_CHECK_VALUES=1 and as an assertion on the device. If
    unchecked, experts stay in range and the weights become NaN. ShapeError for all else.
    """
    options = RouteOptions(
        top_k=top_k,
        score=score,
        num_groups=num_groups,
        top_groups=top_groups,
        group_top=group_top,
        normalize=normalize,
        scale=scale,
        aux=aux,
        num_sequences=num_sequences,
        depth=depth,
        mode=mode,
    )
    _check(logits_TE, bias_E, share_E, load_E, threshold, options)
    if check_values:
        values.finite("route", "logits", logits_TE)
    limit = _on_device(threshold, logits_TE.device)
    return dispatch.call("moe_route", logits_TE, bias_E, load_E, limit, options, share_E)


def _check(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    share_E: torch.Tensor | None,
    load_E: torch.Tensor | None,
    threshold: torch.Tensor | float | None,
    options: RouteOptions,
) -> None:
    check.shape("route", "logits", logits_TE, None, None)
    checks.floating("route", logits=logits_TE, bias=bias_E, share=share_E)
    tokens, experts = logits_TE.shape
    check.choice("route", "score", options.score, Score)
    check.choice("route", "aux", options.aux, AuxScope)
    check.choice("route", "mode", options.mode, BalanceMode)
    top_k, num_sequences = options.top_k, options.num_sequences
    if not isinstance(top_k, int) or not 1 <= top_k <= experts:
        raise ShapeError(f"route: top_k = {top_k!r}, expected 1 to the number of experts {experts}")
    _check_groups(experts, top_k, options.num_groups, options.top_groups)
    for name, vector in (("bias", bias_E), ("share", share_E), ("load", load_E)):
        if vector is not None:
            check.shape("route", name, vector, experts)
    check.same_device("route", logits=logits_TE, bias=bias_E, share=share_E, load=load_E)
    if num_sequences < 1 or tokens % num_sequences:
        raise ShapeError(f"route: {tokens} tokens do not split into {num_sequences} sequences")
    if (threshold is None) != (load_E is None):
        raise ShapeError("route: load balancing needs both threshold and load")
    if options.depth < 0:
        raise ShapeError(f"route: depth = {options.depth}, expected 0 or more rounds")
    if isinstance(threshold, (int, float)) and not threshold > 0:
        raise ShapeError(
            f"route: threshold = {threshold}, expected a positive multiple of the mean"
        )
    if (options.aux == "global") != (share_E is not None):
        raise ShapeError(f"route: aux = {options.aux!r}; aux='global' and share go together")


def _on_device(threshold: torch.Tensor | float | None, device: torch.device) -> torch.Tensor | None:
    if threshold is None:
        return None
    if isinstance(threshold, torch.Tensor):
        return threshold.to(device=device, dtype=torch.float32)
    # Filled on the device: a copy from the host would wait for it.
    return torch.full((), threshold, dtype=torch.float32, device=device)


def _check_groups(experts: int, top_k: int, num_groups: int, top_groups: int) -> None:
    if num_groups < 1 or experts % num_groups:
        raise ShapeError(f"route: {experts} experts do not split into num_groups = {num_groups}")
    if not 1 <= top_groups <= num_groups:
        raise ShapeError(f"route: top_groups = {top_groups}, expected 1 to {num_groups}")
    reachable = experts // num_groups * top_groups
    if top_k > reachable:
        raise ShapeError(
            f"route: top_k = {top_k} exceeds the {reachable} experts of {top_groups} groups"
        )


def _example(device: torch.device, dtype: torch.dtype) -> tuple[tuple, dict[str, Any]]:
    logits_TE = torch.randn(16, 8, device=device, dtype=dtype)
    options = RouteOptions(
        top_k=2,
        score="softmax",
        num_groups=1,
        top_groups=1,
        group_top=2,
        normalize=True,
        scale=1.0,
        aux="batch",
        num_sequences=1,
        depth=4,
    )
    return (logits_TE, None, None, None, options), {}


def _refuse(logits_TE: torch.Tensor, *_: Any) -> Refusal | None:
    return refusal(logits_TE, products=False)


dispatch.register(
    "moe_route",
    ("triton", route_triton, _refuse),
    ("reference", route_reference, None),
    example=_example,
)

__all__ = ["AuxScope", "BalanceMode", "RouteOptions", "Score", "route", "routing_from"]
