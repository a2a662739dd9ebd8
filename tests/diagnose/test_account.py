"""Figures of public traces against their published truth."""

from itertools import pairwise

import numpy as np
import pytest

from slipstream.diagnose import Account
from slipstream.diagnose.figures import ClassAccount
from tests.diagnose import real
from tests.diagnose.truth import TRUTH


def counted(name: str) -> tuple[Account, ...]:
    """The accounts of one job."""
    return real.counted(name).ranks


def of(name: str) -> Account:
    """The account of one trace of ``TRUTH``."""
    job, _, worker = name.partition("/worker")
    return counted(job)[int(worker or 0)]


def close(expected: float) -> object:
    """1 %, or the rounding of the published figures."""
    return pytest.approx(expected, rel=0.01, abs=0.02)


@pytest.mark.parametrize("name", TRUTH)
def test_figures_equal_the_published_ones(name: str) -> None:
    one, truth = of(name), TRUTH[name]
    split = one.split
    assert one.kernels is not None
    assert split.num_kernels == truth.kernels == one.kernels.num
    assert split.num_communication_kernels == truth.communication_kernels
    assert split.num_copies == truth.copies
    assert len(one.steps) == truth.steps
    assert split.kernel_span_ns / 1e6 == close(truth.span)
    assert split.busy_ns / 1e6 == close(truth.busy)
    assert split.busy_pct == close(truth.busy_pct)
    assert split.compute_ns / 1e6 == close(truth.compute)
    assert split.communication_ns / 1e6 == close(truth.communication)
    assert split.hidden_communication_ns / 1e6 == close(truth.hidden)
    assert split.exposed_communication_ns / 1e6 == close(truth.exposed_communication)
    assert split.busy_with_copies_pct == close(truth.busy_with_copies_pct)
    assert one.kernels.short_pct == close(truth.short_pct)
    if truth.overlap_pct is None:
        assert split.overlap_pct is None
    else:
        assert split.overlap_pct == close(truth.overlap_pct)


@pytest.mark.parametrize("name", TRUTH)
def test_additive_split_equals_the_published_one(name: str) -> None:
    split, truth = of(name).split, TRUTH[name]
    assert split.span_ns / 1e6 == close(truth.span_with_copies)
    assert split.exposed_copies_ns / 1e6 == close(truth.exposed_copies)
    assert split.idle_ns / 1e6 == close(truth.idle)
    assert split.pct(split.idle_ns) == close(truth.idle_pct)


@pytest.mark.parametrize("name", TRUTH)
def test_all_parts_add_up_to_the_nanosecond(name: str) -> None:
    one = of(name)
    for split in (one.split, *(step.split for step in one.steps)):
        parts = (
            split.compute_ns,
            split.exposed_communication_ns,
            split.exposed_copies_ns,
            split.idle_ns,
        )
        assert sum(parts) == split.span_ns
        assert min(parts) >= 0
    covered = one.split.span_ns - one.split.idle_ns
    if one.phases:
        assert sum(phase.exclusive_ns for phase in one.phases) == covered
    assert sum(entry.num for entry in one.classes) == one.split.num_kernels + one.split.num_copies
    assert max(stream.busy_ns for stream in one.streams) <= covered
    for before, after in pairwise(one.steps):
        assert before.end_ns == after.start_ns


def total(classes: tuple[ClassAccount, ...], start: str) -> tuple[int, float]:
    found = [one for one in classes if one.label.startswith(start)]
    return sum(one.num for one in found), sum(one.total_ns for one in found) / 1e6


def test_all_reduce_sizes_and_bus_bandwidth() -> None:
    all_reduce, *broadcasts = counted("nccl_data")[0].collectives
    assert (all_reduce.kind, all_reduce.num, all_reduce.group_size) == ("all-reduce", 15, 2)
    assert all_reduce.total_bytes == 306_684_384
    assert all_reduce.total_ns / 1e6 == close(46.76)
    assert all_reduce.bus_bytes_per_s / 1e9 == close(6.56)
    assert all_reduce.slowest_bytes_per_s / 1e9 == close(1.37)
    assert all_reduce.fastest_bytes_per_s / 1e9 == close(12.99)
    assert [(one.kind, one.num) for one in broadcasts] == [("broadcast", 3)] * 2
    assert sorted(one.total_bytes // one.num for one in broadcasts) == [424, 212_480]


def test_step_times_of_the_host() -> None:
    def host_ms(name: str) -> list[float]:
        return [step.host_ns / 1e6 for step in counted(name)[0].steps]

    control = [75.47, 76.94, 76.21, 76.73, 78.47, 81.12]
    test = [100.30, 122.15, 166.40, 81.97, 107.23, 166.35]
    assert host_ms("trace_diff_control") == [close(ms) for ms in control]
    assert host_ms("trace_diff_test") == [close(ms) for ms in test]
    assert host_ms("nccl_data") == [close(ms) for ms in (222.44, 219.73, 224.94)]
    assert host_ms("bert_small_h100") == [close(4.43)]


def test_gaps_of_launch_bound_and_idle_traces() -> None:
    bert, alexnet = counted("bert_small_h100")[0], counted("alexnet_cuda_sync")[0]
    assert bert.kernels is not None
    assert bert.kernels.median_gap_ns / 1e3 == close(50.53)
    assert alexnet.kernels is not None
    assert alexnet.kernels.longest_gap_ns / 1e6 > 10_000


def test_kinds_of_communication_by_kernel_and_by_host_call() -> None:
    control, test = (counted(f"trace_diff_{name}")[0] for name in ("control", "test"))
    assert [total(control.classes, f"collective {kind}")[0] for kind in ("all-t", "all-r")] == [
        42,
        18,
    ]
    sent = sum(total(test.classes, f"collective {kind}")[0] for kind in ("all-t", "send"))
    assert (sent, total(test.classes, "collective all-reduce")[0]) == (43, 21)
    resnet = counted("resnet_act_checkpoint_mi300")[0]
    assert total(resnet.classes, "collective all-reduce")[0] == 6
    assert total(resnet.classes, "collective broadcast")[0] == 6
    assert total(resnet.classes, "collective unknown")[0] == 5


def test_classes_of_a_compiled_graph() -> None:
    classes = counted("torch_compile_triton")[0].classes
    assert total(classes, "gemm Tensile bf16") == (7, close(8.03))
    assert total(classes, "attention") == (1, close(3.68))
    triton = [one for one in classes if "Triton" in one.label]
    assert sum(one.num for one in triton) == 4
    assert sum(one.total_ns for one in triton) / 1e6 == close(0.84)


def test_phases_from_autograd_alone() -> None:
    """No forward or backward annotation in this trace; checkpointing repeats the forward."""
    steps = counted("resnet_act_checkpoint_mi300")[0].steps
    for step in steps:
        kernels = {phase.phase: phase.num_kernels for phase in step.phases}
        assert set(kernels) == {"forward", "backward", "recompute", "optimizer", "other"}
        assert 0.8 * kernels["forward"] < kernels["recompute"] <= kernels["forward"]
        assert kernels["backward"] > kernels["forward"]
        assert kernels["other"] == 0


def test_hooks_and_root_gradients_are_no_recompute() -> None:
    for name in ("nccl_data", "trace_diff_control", "sampled_rank-0"):
        phases = {phase.phase for phase in counted(name)[0].phases}
        assert {"forward", "backward", "optimizer"} <= phases
        assert "recompute" not in phases


def test_traces_without_host_operators_have_no_phases() -> None:
    one = counted("gpu_only_mi210")[0]
    assert one.phases == ()
    assert one.steps == ()
    assert one.collectives == ()


def test_every_launched_kernel_belongs_to_the_step_that_launched_it() -> None:
    one = counted("trace_diff_control")[0]
    device = np.flatnonzero(one.step >= 0)
    launched = device[one.launch[device] >= 0]
    at_ns = one.trace.start_ns[one.launch[launched]]
    starts = np.array([step.host_start_ns for step in one.steps])
    ends = np.array([step.host_end_ns for step in one.steps])
    assert len(launched) > 8000
    assert (starts[one.step[launched]] <= at_ns).all()
    assert (at_ns < ends[one.step[launched]]).all()
