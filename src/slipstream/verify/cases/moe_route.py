"""The routing pass: decisions, weights, maps and losses, against the fp64 reference.

Decisions are compared exactly, so the logits of a token are spread evenly and jittered a little:
no two scores are so close that rounding decides.
"""

from typing import Any

import torch

from slipstream.ops import dispatch, moe
from slipstream.verify.budget import Results, bitwise_equal
from slipstream.verify.case import TOKENS, Case, Promise, Scale, Suite
from slipstream.verify.checks import poisoned


def draw_logits(generator: torch.Generator, tokens: int, num_experts: int) -> torch.Tensor:
    """``(T, E)`` between -2 and 2, every row in an order of its own."""
    steps = torch.linspace(-2, 2, num_experts)
    jitter = (torch.rand(tokens, num_experts, generator=generator) - 0.5) * 1.6 / num_experts
    order = torch.rand(tokens, num_experts, generator=generator).argsort(dim=1)
    return steps[order] + jitter


def _call(**options: Any) -> Any:
    def run(
        logits: torch.Tensor,
        bias: torch.Tensor | None = None,
        share: torch.Tensor | None = None,
        load: torch.Tensor | None = None,
        threshold: torch.Tensor | None = None,
    ) -> Results:
        balance: dict[str, Any] = {"load_E": load, "threshold": threshold}
        routing = moe.route(logits, bias_E=bias, share_E=share, **balance, **options)
        fields = routing._asdict()
        # Not compared: undefined past its end. A promise checks what is defined.
        del fields["schedule"]
        if options.get("aux", "none") == "none":
            del fields["aux_loss"]
        return fields

    return run


def _eager(**options: Any) -> Any:
    def run(**t: torch.Tensor) -> Results:
        with dispatch.force(moe_route="reference"):
            return _call(**options)(**t)

    return run


def _case(
    tokens: int,
    num_experts: int,
    top_k: int,
    more: str = "",
    *,
    bias: bool = False,
    hot: float = 0.0,
    spike: float = 0.0,
    pool: int = 1,
    **options: Any,
) -> Case:
    def draw(generator: torch.Generator) -> Results:
        logits = draw_logits(generator, tokens, num_experts)
        logits[:, -1] += spike
        logits[:, :1] += hot
        drawn = {"logits": logits}
        if options.get("aux") == "global":
            share = torch.rand(num_experts, generator=generator)
            drawn["share"] = share / share.sum()
        if bias:
            drawn["bias"] = torch.rand(num_experts, generator=generator) / 5
        if hot:
            load = torch.ones(num_experts)
            load[0] = num_experts
            drawn |= {"load": load, "threshold": torch.tensor(1.25)}
        return drawn

    options = {"top_k": top_k, **options}
    return Case(
        name=f"T{tokens}-E{num_experts}-K{top_k}" + (f"-{more}" if more else ""),
        inputs=draw,
        call=_call(**options),
        eager=_eager(**options),
        fp32=frozenset({"bias", "share", "load", "threshold"}),
        wanted=frozenset({"logits"}),
        pool=pool,
        own_units=True,
    )


def _cases(scale: Scale) -> list[Case]:
    groups = {"num_groups": 4, "top_groups": 2, "bias": True}
    sigmoid = {"score": "sigmoid", "normalize": True}
    tokens = TOKENS[scale]
    found = [
        _case(tokens, 8, 2, "normalised-aux", normalize=True, aux="batch"),
        _case(tokens, 5, 1, aux="batch"),
        _case(tokens, 12, 3, "groups-bias", **groups, **sigmoid, scale=2.5),
        _case(tokens, 12, 4, "sequences", **sigmoid, aux="sequence", num_sequences=3),
        _case(tokens, 5, 2, "global", aux="global"),
        _case(tokens, 8, 2, "balance", hot=2.0, aux="batch"),
        _case(tokens, 8, 2, "causal", hot=2.0, mode="causal"),
        _case(tokens, 8, 2, "one-takes-all", spike=20.0, normalize=True, aux="batch"),
        _case(tokens, 4, 4, "all", normalize=True),
        _case(tokens, 1, 1, "single", aux="batch"),
        _case(1, 8, 2, aux="batch", pool=4 if scale == "small" else 32),
        _case(0, 8, 2, normalize=True),
    ]
    if scale != "small":
        found += [_case(257, 60, 6, aux="batch"), _case(257, 8, 2, "balance", hot=3.0)]
    if scale == "large":
        found.append(_case(4099, 128, 8, normalize=True, aux="batch"))
    return found


def _logits(device: torch.device, dtype: torch.dtype, hot: float = 0.0) -> torch.Tensor:
    logits = draw_logits(torch.Generator("cpu").manual_seed(0), 63, 8)
    logits[:, 0] += hot
    return logits.to(device, dtype)


def _same(left: moe.Routing, right: moe.Routing) -> str | None:
    a, b = left._asdict(), right._asdict()
    names = [name for name in a if name != "schedule"]
    differ = [name for name in names if not bitwise_equal(a[name], b[name])]
    return f"{', '.join(differ)} differ" if differ else None


def _no_balance_is_plain(device: torch.device, dtype: torch.dtype) -> str | None:
    logits = _logits(device, dtype, hot=2.0)
    load = torch.tensor([8.0, 1, 1, 1, 1, 1, 1, 1], device=device)
    plain = moe.route(logits, top_k=2, normalize=True, aux="batch")
    for mode in ("weight", "causal"):
        options: dict[str, Any] = {"load_E": load, "threshold": float("inf"), "mode": mode}
        found = _same(moe.route(logits, top_k=2, normalize=True, aux="batch", **options), plain)
        if found:
            return f"mode {mode}: {found}"
    return None


def _calm_load_is_plain(device: torch.device, dtype: torch.dtype) -> str | None:
    logits, calm = _logits(device, dtype, hot=2.0), torch.ones(8, device=device)
    balanced = moe.route(logits, top_k=2, load_E=calm, threshold=1.25)
    return _same(balanced, moe.route(logits, top_k=2))


def _ties_go_to_the_lower_index(device: torch.device, dtype: torch.dtype) -> str | None:
    generator = torch.Generator("cpu").manual_seed(0)
    for score in ("softmax", "sigmoid"):
        # Few distinct values: nearly every choice is between equals.
        values = torch.randint(0, 3, (63, 33), generator=generator).to(device, dtype)
        expected = values.sort(dim=1, descending=True, stable=True)[1][:, :4]
        found = moe.route(values, top_k=4, score=score).expert_TK
        if not torch.equal(found, expected):
            return f"{int((found != expected).sum())} of {found.numel()} choices differ ({score})"
    return None


def schedule_problem(routing: moe.Routing) -> str | None:
    """What is wrong with the schedule of tiles, beside what ``Routing`` says; None: nothing."""
    if routing.schedule is None:
        return None
    counts, starts = routing.counts_E.tolist(), routing.offsets_E1.tolist()
    by_size = sorted(range(len(counts)), key=lambda e: (-counts[e], e))
    tiles = [[e, starts[e] + row] for e in by_size for row in range(0, counts[e], 128)]
    found = routing.schedule.tolist()
    if found[0] != [len(tiles), 0]:
        return f"the schedule has {found[0]} first, expected {[len(tiles), 0]}"
    if found[1 : len(tiles) + 1] != tiles:
        return "the schedule has other tiles"
    sizes = [[e, counts[e]] for e in by_size]
    return None if found[-len(counts) :] == sizes else "the schedule has other rows per expert"


def _schedule_covers_every_row_once(device: torch.device, dtype: torch.dtype) -> str | None:
    with poisoned():
        routing = moe.route(_logits(device, dtype, hot=3.0).repeat(9, 1), top_k=2)
    return schedule_problem(routing)


SUITE = Suite(
    op="moe_route",
    groups=("moe",),
    cases=_cases,
    promises=(
        Promise(name="threshold inf is plain top-k, bit for bit", holds=_no_balance_is_plain),
        Promise(name="a calm load moves nothing", holds=_calm_load_is_plain),
        Promise(name="ties go to the lower index", holds=_ties_go_to_the_lower_index),
        Promise(name="tiles cover every row once", holds=_schedule_covers_every_row_once),
    ),
)
