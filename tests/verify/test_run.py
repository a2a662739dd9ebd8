"""What is verified, what is left out and why, and what the certificate says."""

import json
import math

import pytest
import torch

from slipstream.errors import ConfigError, HardwareError
from slipstream.ops import dispatch
from slipstream.ops.dispatch import Refusal
from slipstream.ops.norm.reference import norm_reference
from slipstream.verify import Figure, Options, Outcome, Row, certificate, passed, verify
from slipstream.verify import run as running
from slipstream.verify.budget import bitwise_equal
from slipstream.verify.case import select
from slipstream.verify.checks import laid_out, poisoned
from tests.verify.broken import row_of, served_by

QUICK = Options(only=("norm",), device="cpu", dtypes=("fp32",), quick=True)


def test_only_takes_ops_and_groups_in_any_order():
    moe = [op for op in dispatch.ops() if op.startswith("moe_")]
    assert select(["moe"]) == ["grouped_gemm", *moe]
    assert select(["rope", "norm"]) == ["norm", "rope"]
    assert select([]) == dispatch.ops()


def test_an_unknown_op_is_named_with_what_there_is():
    with pytest.raises(
        ConfigError, match=r"--only nrom: no such op or group; there are moe, .*norm"
    ):
        verify(Options(only=("norm", "nrom")))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (Options(device="tpu"), ConfigError, "--device tpu: expected cpu or cuda"),
        (Options(dtypes=("fp8",)), ConfigError, "--dtype fp8: expected one of bf16, fp16, fp32"),
    ],
)
def test_wrong_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        verify(options)


def test_cuda_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HardwareError, match="--device cuda: PyTorch finds no GPU"):
        verify(Options(device="cuda"))


def test_what_cannot_run_here_is_a_row_with_its_reason():
    rows = [row for row in verify(QUICK) if row.op == "all"]
    assert [row.verdict for row in rows] == ["skipped", "skipped"]
    assert "--quick" in rows[0].reason
    assert "on a GPU only" in rows[1].reason


def test_a_machine_without_a_compiler_says_so(monkeypatch):
    monkeypatch.setattr(running, "no_compiler", lambda device: "the compiler does not work here")
    options = Options(only=("norm",), device="cpu", dtypes=("fp32",))
    rows = verify(options)
    reasons = [row.reason for row in rows if row.op == "all"]
    assert "torch.compile: the compiler does not work here" in reasons
    checks = {outcome.check for row in rows for outcome in row.outcomes}
    assert checks == {"budget", "repeat", "layout"}


def test_compiled_graphs_are_checked_and_pass():
    options = Options(only=("norm",), device="cpu", dtypes=("fp32",))
    row = row_of(verify(options), "norm", "reference")
    (compiled,) = [outcome for outcome in row.outcomes if outcome.check == "compile"]
    assert compiled.verdict == "pass"
    assert compiled.figures


def test_an_implementation_that_refuses_everything_is_skipped_with_its_reason():
    refusal = Refusal(reason="needs a larger machine")
    with served_by("norm", norm_reference, lambda *_: refusal):
        rows = verify(QUICK)
    row = row_of(rows, "norm", "broken")
    assert (row.verdict, row.reason, row.worst) == ("skipped", "needs a larger machine", None)
    # Nothing was verified, so nothing may be certified.
    assert not passed(rows)


def test_a_refusal_of_some_calls_is_noted():
    def refuse(x, *_):
        return Refusal(reason="x is not contiguous") if not x.is_contiguous() else None

    with served_by("norm", norm_reference, refuse):
        row = row_of(verify(QUICK), "norm", "broken")
    assert row.verdict == "pass"
    assert row.reason == "left out: layout: x is not contiguous"


def test_an_op_without_a_suite_fails():
    before = dict(dispatch._OPS)
    dispatch.register("toy", ("reference", torch.sin, None), example=lambda d, t: ((), {}))
    try:
        rows = verify(Options(only=("toy",), device="cpu", quick=True))
    finally:
        dispatch._OPS.clear()
        dispatch._OPS.update(before)
    assert rows[0].verdict == "fail"
    assert "add slipstream/verify/cases/toy.py" in rows[0].reason


def test_progress_names_what_runs():
    told: list[str] = []
    verify(QUICK, told.append)
    assert told == [f"norm {name}" for name in dispatch.implementations("norm")]


def test_the_certificate_holds_every_figure_as_valid_json():
    rows = verify(QUICK)
    document = json.loads(
        json.dumps(certificate(rows, QUICK, torch.device("cpu")), allow_nan=False)
    )
    assert document["verdict"] == "pass"
    assert document["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert document["options"]["dtypes"] == ["fp32"]
    assert document["device"]["type"] == "cpu"
    (row,) = [
        row
        for row in document["rows"]
        if (row["op"], row["implementation"]) == ("norm", "reference")
    ]
    budgets = [o for o in row["outcomes"] if o["check"] == "budget" and o["figures"]]
    names = {figure["tensor"] for outcome in budgets for figure in outcome["figures"]}
    assert {"output 0", "output 1", "gradient of x", "gradient of weight_D"} <= names
    ratios = [f["ratio"] for o in row["outcomes"] for f in o["figures"]]
    assert row["worst"] == max(ratios) <= 1


def test_nan_in_a_certificate_is_text_and_the_worst():
    figures = [
        Figure(tensor="y", kind="max", error=error, allowed=1.0, numbers=9)
        for error in (0.5, math.nan, 2.0)
    ]
    outcome = Outcome(case="c", check="budget", verdict="fail", figures=tuple(figures))
    row = Row(op="o", implementation="i", dtype="fp32", verdict="fail", outcomes=(outcome,))
    assert math.isnan(row.worst)
    document = certificate([row], QUICK, torch.device("cpu"))
    assert document["verdict"] == "fail"
    assert document["rows"][0]["worst"] == "nan"
    json.dumps(document, allow_nan=False)


@pytest.mark.parametrize(
    ("error", "allowed", "ratio", "ok"),
    [(0.0, 0.0, 0.0, True), (1.0, 2.0, 0.5, True), (1.0, 0.0, math.inf, False)],
)
def test_ratio_of_a_figure(error, allowed, ratio, ok):
    figure = Figure(tensor="y", kind="max", error=error, allowed=allowed, numbers=9)
    assert (figure.ratio, figure.passed) == (ratio, ok)


def test_bits_are_compared_and_not_values():
    zero, nan = torch.tensor([0.0]), torch.tensor([float("nan")])
    assert bitwise_equal(nan, nan.clone())
    assert not bitwise_equal(zero, -zero)
    assert not bitwise_equal(zero, zero.double())
    assert not bitwise_equal(zero, torch.zeros(1, 1))


@pytest.mark.parametrize("layout", ["strided", "transposed", "offset"])
def test_layouts_keep_the_values_and_change_the_memory(layout):
    dense = torch.randn(3, 4, 5)
    tensor = laid_out(dense, layout)
    assert torch.equal(tensor, dense)
    assert tensor.is_contiguous() == (layout == "offset")
    assert tensor.data_ptr() % 16 == (4 if layout == "offset" else 0)


def test_poison_is_there_within_the_block_and_gone_after_it():
    with poisoned():
        assert torch.empty(1000).isnan().all()
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
