"""A verification must be able to fail: every kind of wrong implementation is caught, by name."""

import pytest

from slipstream.ops.moe.combine.reference import combine_reference
from slipstream.ops.norm.reference import norm_reference
from slipstream.verify import Options, verify
from slipstream.verify import run as running
from tests.verify import broken
from tests.verify.broken import failures, served_by


def test_a_right_implementation_has_no_failures():
    assert failures("norm", norm_reference) == []
    assert failures("moe_combine", combine_reference) == []


@pytest.mark.parametrize("run", [broken.wrong_gradient, broken.gradient_of_ones])
def test_a_wrong_gradient_fails_the_budget_and_the_output_does_not(run):
    found = failures("norm", run)
    assert found
    assert {outcome.check for outcome in found} <= {"budget", "layout"}
    for outcome in found:
        assert "gradient of x" in outcome.detail
        assert "output 0" not in outcome.detail
        over = [figure for figure in outcome.figures if not figure.passed]
        assert all(figure.ratio > 1 for figure in over)
        assert all(figure.tensor.startswith("gradient of ") for figure in over)


def test_a_sum_in_16_bit_fails_in_16_bit_only():
    assert failures("moe_combine", broken.narrow_sum) == []
    found = failures("moe_combine", broken.narrow_sum, "bf16")
    assert "budget" in {outcome.check for outcome in found}


def test_nan_for_one_shape_fails_that_case():
    found = failures("norm", broken.nan_for_a_single_token)
    assert {outcome.case for outcome in found} == {"rms-1x63"}
    budget = next(outcome for outcome in found if outcome.check == "budget")
    assert "max error nan" in budget.detail


def test_reading_in_storage_order_fails_other_layouts():
    found = failures("norm", broken.as_if_contiguous)
    assert {outcome.check for outcome in found} == {"layout"}
    assert any(outcome.case.endswith("-transposed") for outcome in found)


def test_a_row_that_is_never_written_fails():
    found = failures("rope", broken.last_row_unwritten)
    assert "output 0: max error nan" in found[0].detail


def test_a_sum_in_any_order_fails_the_repetition_only():
    found = failures("moe_combine", broken.any_order)
    assert {outcome.check for outcome in found} == {"repeat"}
    assert "two runs differ: output 0" in found[0].detail


def test_reading_rows_of_absent_slots_fails():
    found = failures("moe_combine", broken.reads_absent_rows)
    assert "rows of absent slots are left alone" in {outcome.case for outcome in found}


def test_ties_to_the_higher_index_fail_their_promise():
    found = {o.case: o.detail for o in failures("moe_route", broken.prefers_later_experts)}
    assert "choices differ" in found["ties go to the lower index"]


def test_a_balance_that_is_off_and_does_something_fails_its_promise():
    found = {o.case: o.detail for o in failures("moe_route", broken.balance_touches_the_weights)}
    assert found["threshold inf is plain top-k, bit for bit"].endswith("weight_TK differ")
    assert found["a calm load moves nothing"] == "weight_TK differ"


def test_a_wrong_count_fails_however_small():
    found = failures("moe_route", broken.miscounts)
    assert "demand_E: 8 of 8 differ from the truth" in found[0].detail


def test_writing_past_the_last_offset_fails():
    (found,) = failures("grouped_gemm", broken.writes_past_the_end)
    assert found.case == "rows past the last offset are left alone"
    assert found.detail == "rows past the last offset were computed"


def test_reading_past_the_last_offset_fails():
    (found,) = failures("grouped_gemm", broken.reads_past_the_end)
    assert found.detail in (
        "rows past the last offset have a gradient",
        "rows past the last offset change the result",
    )


def test_any_gradient_of_an_expert_without_tokens_fails():
    found = failures("moe_experts", broken.gradient_for_empty_experts)
    promises = {outcome.case: outcome.detail for outcome in found if outcome.check == "promise"}
    assert promises["experts without tokens get zero gradients"] == (
        "the gradient of w2 is not zero"
    )


def test_a_graph_break_fails_the_compiler_only(monkeypatch):
    # Tracing fails before anything is compiled, so whether the compiler works need not be tried.
    monkeypatch.setattr(running, "no_compiler", lambda device: None)
    (found,) = failures("norm", broken.breaks_the_graph, quick=False)
    assert found.check == "compile"


def test_an_implementation_that_raises_fails_and_the_others_are_still_judged():
    with served_by("norm", broken.raises):
        rows = verify(Options(only=("norm", "rope"), device="cpu", dtypes=("fp32",), quick=True))
    verdicts = {(row.op, row.implementation): row.verdict for row in rows}
    assert verdicts["norm", "broken"] == "fail"
    assert verdicts["rope", "reference"] == "pass"
    norm = broken.row_of(rows, "norm", "broken")
    assert {outcome.detail for outcome in norm.outcomes} == {"RuntimeError: out of tiles"}
