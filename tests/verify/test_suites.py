"""Every op through every case, as ``slipstream verify`` runs them."""

import re

import pytest
import torch

from slipstream.ops import dispatch
from slipstream.ops.moe.route.options import RouteOptions
from slipstream.verify import DTYPES, Options, suites, verify
from slipstream.verify.budget import DRAWN
from slipstream.verify.checks import Data, Subject, check_budget
from slipstream.verify.routings import draw_experts, routing_of
from tests.verify.broken import row_of

OPS = dispatch.ops()
KERNELS = [op for op in OPS if "triton" in dispatch.implementations(op) and op != "moe_router"]
"""Ops with Triton kernels that the interpreter can run: the router's take bf16 alone."""
CPU = torch.device("cpu")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--device")


@pytest.mark.parametrize("op", OPS)
def test_every_implementation_passes(op, device):
    rows = verify(Options(only=(op,), device=device, quick=True))
    judged = [row for row in rows if row.op == op]
    failed = [
        f"{o.check} of {o.case}: {o.detail}"
        for r in judged
        for o in r.outcomes
        if o.verdict == "fail"
    ]
    assert not failed, "\n".join(failed)
    assert {row.implementation for row in judged} == set(dispatch.implementations(op))
    assert {row.dtype for row in judged} == set(DTYPES)
    for row in judged:
        assert row.verdict == "pass" or row.reason, row
    # Somebody serves the op in every dtype.
    assert {row.dtype for row in judged if row.verdict == "pass"} == set(DTYPES)


def test_every_op_has_a_suite_and_every_suite_an_op():
    assert list(suites()) == OPS


@pytest.mark.parametrize("op", OPS)
def test_suites_have_the_hazards(op):
    cases = suites()[op].cases("normal")
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    data = [Data(case, CPU, torch.float32) for case in cases]
    floats = [[t for t in d.draws[0].values() if t.is_floating_point()] for d in data]
    sizes = {size for tensors in floats for t in tensors for size in t.shape}
    assert {1, 63, 257} <= sizes
    assert any(t.numel() == 0 for tensors in floats for t in tensors)
    if "expert" in data[0].draws[0] or op in ("grouped_gemm", "moe_route"):
        text = " ".join(names)
        assert "one-takes-all" in text
        assert re.search("empty-(experts|groups)", text) or op == "moe_route"


@pytest.mark.parametrize("op", OPS)
def test_cases_of_every_scale_draw_the_same_numbers_every_time(op):
    case = suites()[op].cases("small")[0]
    first, again = (Data(case, CPU, torch.bfloat16).draws[0] for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = Data(case, CPU, torch.bfloat16).draw(7)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_no_decision_of_the_routing_cases_hangs_on_rounding(dtype):
    """Logits moved by 8 roundings of fp32 lead to the same experts, maps and counts."""
    for case in suites()["moe_route"].cases("large"):
        data = Data(case, CPU, dtype)
        for seed in range(DRAWN[-1] * case.pool):
            draw = data.inputs(seed)
            exact = draw | {"logits": draw["logits"].double()}
            nudges = torch.randn(draw["logits"].shape).sign() * 8 * 2**-24
            moved = exact | {"logits": exact["logits"] + nudges.double()}
            fields = [case.eager(**inputs) for inputs in (exact, moved)]
            for name in ("expert_TK", "order_N", "demand_E"):
                if not torch.equal(fields[0][name], fields[1][name]):
                    # Only what the dtype makes exactly equal may change places.
                    tied = _tied(draw["logits"], fields[0]["expert_TK"], fields[1]["expert_TK"])
                    assert tied, (case.name, name)


def _tied(logits_TE: torch.Tensor, left_TK: torch.Tensor, right_TK: torch.Tensor) -> bool:
    return torch.equal(logits_TE.gather(1, left_TK), logits_TE.gather(1, right_TK))


def test_the_plain_maps_are_those_of_the_router():
    expert_TK = draw_experts(torch.Generator().manual_seed(0), 63, 8, 2)
    logits_TE = torch.zeros(63, 8).scatter(1, expert_TK, torch.tensor([[2.0, 1.0]]).expand(63, 2))
    options = RouteOptions(
        top_k=2,
        score="softmax",
        num_groups=1,
        top_groups=1,
        group_top=2,
        normalize=False,
        scale=1.0,
        aux="none",
        num_sequences=1,
        depth=4,
    )
    with dispatch.force(moe_route="reference"):
        expected = dispatch.call("moe_route", logits_TE, None, None, None, options)
    actual = routing_of(expert_TK, 8)
    for name in ("expert_TK", "offsets_E1", "order_N", "position_N", "demand_E"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name


@pytest.mark.parametrize("op", KERNELS)
def test_the_first_case_of_every_kernel_passes_interpreted(op, interpreted):
    subject = Subject(op=op, implementation="triton", device=CPU, dtype=torch.float32)
    outcome = check_budget(subject, Data(suites()[op].cases("small")[0], CPU, torch.float32))
    assert outcome.verdict == "pass", outcome.detail


def test_bf16_products_are_skipped_in_the_interpreter_with_a_reason(interpreted):
    rows = verify(Options(only=("grouped_gemm",), device="cpu", dtypes=("bf16",), quick=True))
    row = row_of(rows, "grouped_gemm", "triton")
    assert row.reason == "Triton's interpreter multiplies bf16 matrices wrongly"
