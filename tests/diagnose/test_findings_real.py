"""The diagnosis of public traces against the verdicts that were published with them."""

import pytest

from slipstream.diagnose.findings import Findings, find
from tests.diagnose.real import JOBS, counted

VERDICTS = {
    "dlrm": ("straggler", "launch-bound"),
    "sampled": ("exposed-communication", "idle-unexplained"),
    "sampled_rank-0": ("exposed-communication", "idle-unexplained"),
    "sampled_rank-1": ("exposed-communication", "idle-unexplained"),
    "trace_diff_control": ("exposed-communication",),
    "trace_diff_test": ("exposed-copies", "exposed-communication"),
    "nccl_data": ("host-bound", "exposed-communication"),
    "resnet_act_checkpoint_mi300": ("exposed-communication",),
    "bert_small_h100": ("launch-bound",),
    "torch_compile_triton": ("healthy",),
    "gpu_only_mi210": ("healthy",),
    "alexnet_cuda_sync": ("not-a-training-window",),
}
_FOUND: dict[str, Findings] = {}


def findings(job: str) -> Findings:
    if job not in _FOUND:
        _FOUND[job] = find(counted(job))
    return _FOUND[job]


@pytest.mark.parametrize("job", JOBS)
def test_verdict(job: str) -> None:
    wanted = VERDICTS[job]
    assert tuple(one.id for one in findings(job).findings[: len(wanted)]) == wanted


def test_dlrm_waits_for_rank_7() -> None:
    first = findings("dlrm").findings[0]
    assert first.ranks == (7,)
    assert first.evidence["slow_rank_last_in"] == 5
    assert first.evidence["collectives"] == 8
    assert first.evidence["shown_rank"] == 1
    assert first.evidence["waiting_ms"] == pytest.approx(11.13, abs=0.02)
    assert first.evidence["transfer_at_most_ms"] == pytest.approx(0.22, abs=0.02)
    assert first.evidence["largest_start_skew_us"] == pytest.approx(7624)


def test_waiting_is_not_advised_as_overlap() -> None:
    found = findings("dlrm")
    exposed = found.of("exposed-communication")
    assert exposed is None or exposed.ms < 0.25
    assert any(line.startswith("exposed-communication") for line in found.resolved)


def test_dlrm_is_launch_bound_as_well() -> None:
    found = findings("dlrm").of("launch-bound")
    assert found is not None
    share = found.evidence["kernels_below_10_us_pct"]
    assert isinstance(share, float)
    assert 88 < share < 94
    assert found.ranks == tuple(range(8))


@pytest.mark.parametrize(("rank", "exposed", "idle"), [(0, 27.56, 55.21), (1, 24.65, 52.89)])
def test_sampled(rank: int, exposed: float, idle: float) -> None:
    found = findings(f"sampled_rank-{rank}")
    assert found.findings[0].pct == pytest.approx(exposed, abs=0.01)
    assert found.findings[1].pct == pytest.approx(idle, abs=0.01)


def test_sampled_waiting_is_not_judged() -> None:
    reasons = {one.id: one.reason for one in findings("sampled").abstained}
    assert "ends" in reasons["straggler"]
    assert "sample" in reasons["launch-bound"]


@pytest.mark.parametrize(
    ("job", "finding", "pct"),
    [
        ("trace_diff_control", "exposed-communication", 18.92),
        ("trace_diff_test", "exposed-copies", 12.95),
        ("trace_diff_test", "exposed-communication", 9.84),
        ("nccl_data", "exposed-communication", 5.99),
        ("resnet_act_checkpoint_mi300", "exposed-communication", 64.26),
    ],
)
def test_share(job: str, finding: str, pct: float) -> None:
    found = findings(job).of(finding)
    assert found is not None
    assert found.pct == pytest.approx(pct, abs=0.01)


def test_nccl_data_is_idle() -> None:
    assert findings("nccl_data").findings[0].evidence["idle_pct"] == pytest.approx(76.16, abs=0.01)


def test_host_bound_withdraws_faster_kernels() -> None:
    ids = {one.id for one in findings("bert_small_h100").findings}
    assert not ids & {"fusible-chains", "memory-bound", "tensor-cores-unused"}


def test_bert_gaps() -> None:
    evidence = findings("bert_small_h100").findings[0].evidence
    assert evidence["idle_pct"] == pytest.approx(92.08, abs=0.01)
    assert evidence["kernels_below_10_us_pct"] == pytest.approx(96.67, abs=0.01)
    assert evidence["median_gap_us"] == pytest.approx(50.53, abs=0.01)


def test_gpu_only_causes_are_not_judged() -> None:
    reasons = {one.id: one.reason for one in findings("gpu_only_mi210").abstained}
    assert reasons["launch-bound"] == "the trace has no host operators"


def test_start_up_has_no_throughput_finding() -> None:
    found = findings("alexnet_cuda_sync")
    assert [one.id for one in found.findings] == ["not-a-training-window"]
    assert found.findings[0].evidence["idle_pct"] == pytest.approx(99.49, abs=0.01)
    assert "all" in {one.id for one in found.abstained}


def test_resnet_recomputes() -> None:
    found = findings("resnet_act_checkpoint_mi300").of("recompute-cost")
    assert found is not None
    assert found.ms > 1


@pytest.mark.parametrize("job", JOBS)
def test_ranked_and_complete(job: str) -> None:
    found = findings(job)
    weights = [one.weight for one in found.findings if one.id != "healthy"]
    assert weights == sorted(weights, reverse=True)
    for one in found.findings:
        assert one.action_pytorch
        assert one.per == ("step" if counted(job).ranks[0].steps else "file")
        if one.start_ms is not None:
            assert one.end_ms is not None
            assert -1e-6 <= one.start_ms <= one.end_ms
