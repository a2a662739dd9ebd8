"""Two jobs side by side: shift, interval, verdict, and what is not comparable."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from slipstream.diagnose import JobAccount, account, read
from slipstream.diagnose.compare import Verdict, compare, shift, u_probabilities
from tests.diagnose.machine import GEMM, POINTWISE, Machine, all_reduce
from tests.diagnose.real import counted


def job(folder: Path, steps: list[float], **change: str | int) -> JobAccount:
    """Steps of so many ms each: a product, and copies for the rest."""
    folder.mkdir(exist_ok=True)
    machine = Machine(device=str(change.get("device", "NVIDIA H200")))
    for number, length in enumerate(steps):
        with machine.step(number):
            for _ in range(int(change.get("products", 10))):
                machine.launch(GEMM, 50, op="aten::mm")
            machine.launch(POINTWISE, 1000 * length - 500, op="aten::mul")
            machine.synchronise()
    return account(read([machine.save(folder)]))


STEADY = [10.0, 10.1, 10.2, 10.05]


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ([8.0, 8.1, 8.2, 8.05], Verdict.BETTER),
        ([12.0, 12.1, 12.2, 12.05], Verdict.WORSE),
        ([9.0, 11.0, 10.1, 10.0], Verdict.INCONCLUSIVE),
        ([2.0, 30.0, 2.0, 30.0], Verdict.INCONCLUSIVE),
    ],
)
def test_verdict(tmp_path: Path, after: list[float], verdict: Verdict) -> None:
    found = compare(job(tmp_path / "a", STEADY), job(tmp_path / "b", after))
    assert found.verdict is verdict
    assert found.unlike == ()
    assert "interval" in found.reasons[0]


def test_three_steps_can_be_told_apart(tmp_path: Path) -> None:
    found = compare(job(tmp_path / "a", [10, 10.1, 10.2]), job(tmp_path / "b", [8, 8.1, 8.2]))
    assert found.verdict is Verdict.BETTER
    assert found.step.shift_ms == pytest.approx(-2, abs=0.01)


def test_two_steps_cannot(tmp_path: Path) -> None:
    found = compare(job(tmp_path / "a", [10, 10.1]), job(tmp_path / "b", [8, 8.1]))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "too few" in found.reasons[0]
    assert found.step.low_ms is None


def test_the_same_job(tmp_path: Path) -> None:
    one = job(tmp_path / "a", STEADY)
    found = compare(one, one)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.step.shift_ms == 0
    assert all(change.shift_ms == 0 for change in found.changes)


def test_what_changed(tmp_path: Path) -> None:
    found = compare(job(tmp_path / "a", STEADY), job(tmp_path / "b", [x + 2 for x in STEADY]))
    kinds = {change.kind for change in found.changes}
    assert kinds >= {"step", "split", "class"}
    parts = {change.name: change for change in found.changes if change.kind == "split"}
    assert parts["compute"].shift_ms == pytest.approx(2, abs=0.01)
    assert parts["compute"].verdict is Verdict.WORSE
    assert parts["exposed_communication"].shift_ms == 0
    largest = next(change for change in found.changes if change.kind == "class")
    assert "pointwise" in largest.name
    assert largest.pct == pytest.approx(100 * 2 / 9.575, abs=0.5)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "NVIDIA H100 80GB HBM3"}, "other GPU: NVIDIA H200 and NVIDIA H100 80GB HBM3"),
        ({"products": 20}, "other work: 10 and 20 matrix products in a step"),
    ],
)
def test_unlike(tmp_path: Path, change: dict[str, str | int], reason: str) -> None:
    found = compare(job(tmp_path / "a", STEADY), job(tmp_path / "b", [5.0] * 4, **change))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.unlike == (reason,)
    assert found.reasons[0] == "the jobs are not comparable like for like"


def test_other_number_of_ranks(tmp_path: Path) -> None:
    machines = [Machine(rank, 2) for rank in range(2)]
    for number in range(4):
        begins = [machine.now for machine in machines]
        for machine in machines:
            machine.launch(GEMM, 50, op="aten::mm")
        all_reduce(machines, 10)
        for machine, begin in zip(machines, begins, strict=True):
            machine.now = begin
            with machine.step(number):
                machine.work(10_000)
    two = account(read([machine.save(tmp_path) for machine in machines]))
    one = job(tmp_path / "a", STEADY, products=1)
    assert compare(one, two).unlike == ("other number of ranks: 1 and 2",)


def test_without_steps(tmp_path: Path) -> None:
    machine = Machine()
    machine.launch(GEMM, 50, op="aten::mm")
    one = account(read([machine.save(tmp_path)]))
    found = compare(one, one)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "no steps" in found.reasons[0]
    assert found.step.before_ms == pytest.approx(0.05)


def test_public_pair_is_not_comparable() -> None:
    found = compare(counted("trace_diff_control"), counted("trace_diff_test"))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.unlike == (
        "other GPU: NVIDIA A100-PG509-200 and Tesla V100-SXM2-16GB",
        "other number of ranks: 8 and 2",
    )
    assert found.step.before_ms == pytest.approx(
        np.median([75.47, 76.94, 76.21, 76.73, 78.47, 81.12]), abs=0.02
    )
    assert found.step.after_ms == pytest.approx(
        np.median([100.30, 122.15, 166.40, 81.97, 107.23, 166.35]), abs=0.02
    )


@pytest.mark.parametrize(("n", "m"), [(1, 1), (3, 3), (4, 2), (3, 5)])
def test_rank_distribution(n: int, m: int) -> None:
    counts = np.zeros(n * m + 1)
    for chosen in combinations(range(n + m), n):
        others = [x for x in range(n + m) if x not in chosen]
        counts[sum(x > y for x in chosen for y in others)] += 1
    assert u_probabilities(n, m) == pytest.approx(counts / counts.sum(), rel=1e-12)


def test_interval_covers_the_shift() -> None:
    """Of equal distributions at most one interval in ten may leave zero out."""
    rng = np.random.default_rng(0)
    outside = 0
    for _ in range(2000):
        _, low, high = shift(rng.exponential(size=5), rng.exponential(size=6))
        assert low is not None
        assert high is not None
        outside += not low <= 0 <= high
    # Three standard deviations of a binomial with p = 0.1.
    assert outside <= 200 + 3 * (2000 * 0.1 * 0.9) ** 0.5


def test_many_steps_agree_with_the_exact_ranks() -> None:
    rng = np.random.default_rng(0)
    before, after = rng.normal(size=101), rng.normal(1, size=101)
    estimate, low, high = shift(before, after)
    _, exact_low, exact_high = shift(before[:100], after[:100])
    assert low is not None
    assert high is not None
    assert low < estimate < high
    assert (low, high) == pytest.approx((exact_low, exact_high), abs=0.05)


def test_faster_kernels_that_bring_nothing(tmp_path: Path) -> None:
    """The host needs 2 ms a step whatever the kernels do."""
    jobs = []
    for name, us in (("a", 80), ("b", 40)):
        machine = Machine()
        for number in range(4):
            with machine.step(number):
                for _ in range(10):
                    machine.launch(GEMM, us + number, op="aten::mm")
                    machine.work(195, "aten::view")
                machine.synchronise()
        (tmp_path / name).mkdir()
        jobs.append(account(read([machine.save(tmp_path / name)])))
    found = compare(*jobs)
    assert found.verdict is Verdict.INCONCLUSIVE
    assert found.reasons[-1].startswith("kernels take 0.4 ms less, and idle grew by 0.4 ms")
