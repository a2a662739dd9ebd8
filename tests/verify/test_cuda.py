"""The checks that need a GPU."""

import pytest
import torch

from slipstream.ops.norm.reference import norm_reference
from slipstream.verify import Options, verify
from tests.verify.broken import failures, row_of

pytestmark = pytest.mark.gpu


def waits_for_the_device(x, *rest):
    y, s = norm_reference(x, *rest)
    return (y, s) if not x.numel() or float(x.detach().sum()) < float("inf") else (s, y)


def waits_in_backward(x, *rest):
    y, s = norm_reference(x, *rest)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * (1.0 if float(grad.sum()) < float("inf") else 0.0))
    return y, s


def test_an_op_on_a_gpu_passes_without_waiting_and_in_a_graph():
    rows = verify(Options(only=("norm",), device="cuda", dtypes=("bf16",), quick=True))
    row = row_of(rows, "norm", "reference")
    assert row.verdict == "pass", row.reason
    assert {"sync", "graph"} <= {outcome.check for outcome in row.outcomes}
    assert "on a GPU only" not in " ".join(row.reason for row in rows)


@pytest.mark.parametrize("run", [waits_for_the_device, waits_in_backward])
def test_waiting_for_the_device_fails(run):
    found = failures("norm", run, device="cuda")
    assert {outcome.check for outcome in found} == {"sync", "graph"}
    sync = next(outcome for outcome in found if outcome.check == "sync")
    assert "synchronizing CUDA operation" in sync.detail


def test_an_op_that_cannot_be_captured_spoils_no_check_after_it():
    stream = torch.cuda.current_stream()
    assert "graph" in {
        outcome.check for outcome in failures("norm", waits_in_backward, device="cuda")
    }
    assert torch.cuda.current_stream() == stream
    torch.cuda.manual_seed(0)
    assert torch.rand(1, device="cuda") < 1
    assert failures("norm", norm_reference, device="cuda") == []
