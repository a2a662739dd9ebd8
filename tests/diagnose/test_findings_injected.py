"""Faults put into programs on a simulated machine: each has to be the first finding."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.diagnose import account, read
from slipstream.diagnose.findings import Finding, Findings, find
from slipstream.errors import DataError
from tests.diagnose.machine import GEMM, POINTWISE, Machine, all_reduce

STEPS = 4
KERNELS = 40


def diagnose(folder: Path, *machines: Machine) -> Findings:
    return find(account(read([machine.save(folder) for machine in machines])))


def first(folder: Path, *machines: Machine) -> Finding:
    found = diagnose(folder, *machines).first
    assert found is not None
    return found


def busy_step(machine: Machine, between: Callable[[Machine, int], None] | None = None) -> None:
    """A step in which the device is the limit: 40 kernels of 100 us, issued in 30 us each."""
    for number in range(KERNELS):
        machine.launch(GEMM, 100, op="aten::mm")
        machine.work(25, "aten::view")
        if between is not None:
            between(machine, number)


def run(fault: Callable[[Machine], None] | None = None, **step: object) -> Machine:
    """Four steps that end in a synchronisation each; ``fault`` is what each begins with."""
    machine = Machine()
    for number in range(STEPS):
        with machine.step(number):
            if fault is not None:
                fault(machine)
            busy_step(machine, **step)  # type: ignore[arg-type]
            machine.synchronise()
    return machine


def test_healthy(tmp_path: Path) -> None:
    found = first(tmp_path, run())
    assert found.id == "healthy"


def annotated(machine: Machine) -> None:
    with machine.range("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"):
        machine.work(15_000)


def of_our_trainer(machine: Machine) -> None:
    with machine.range("## load_batch ##"):
        machine.work(15_000)


def silent(machine: Machine) -> None:
    machine.work(15_000)


def in_frame(machine: Machine) -> None:
    machine.call("cudaEventQuery", 1)
    machine.frame("torch/utils/data/dataloader.py(733): __next__", 15_000)


@pytest.mark.parametrize("fault", [annotated, of_our_trainer, silent, in_frame])
def test_data_loading(tmp_path: Path, fault: Callable[[Machine], None]) -> None:
    found = first(tmp_path, run(fault))
    assert found.id == "data-loading"
    # The first step's batch comes before the first kernel, and costs what the others show.
    assert found.ms == pytest.approx(15, rel=0.01)
    assert found.confidence == "high"


def fetch(machine: Machine) -> None:
    with machine.range("## load_batch ##"):
        machine.work(10_000)


def on_its_lead(fault: Callable[[Machine], None] | None, waits: bool) -> Machine:
    """Long kernels give the host a lead, and a stretch in which it is slow lives on it.

    ``fault`` comes between the two; ``waits``: every step ends in a synchronisation.
    """
    machine = Machine()
    for number in range(STEPS):
        with machine.step(number):
            for _ in range(20):
                machine.launch(GEMM, 500, op="aten::mm")
            if fault is not None:
                fault(machine)
            for _ in range(KERNELS):
                machine.launch(GEMM, 40, op="aten::mm")
                machine.work(150, "aten::view")
            if waits:
                machine.synchronise()
    return machine


@pytest.mark.parametrize(
    ("fault", "finding"), [(fetch, "data-loading"), (Machine.synchronise, "host-synchronisation")]
)
def test_loss_of_the_lead_is_its_cause_s(
    tmp_path: Path, fault: Callable[[Machine], None], finding: str
) -> None:
    """The device waits for launches that would have been early; the host is not the limit."""
    waits = fault is fetch
    found = diagnose(tmp_path, on_its_lead(fault, waits))
    first = found.first
    assert first is not None
    assert first.id == finding
    assert first.ms == pytest.approx(
        period_ms(on_its_lead(fault, waits)) - period_ms(on_its_lead(None, waits)), rel=0.01
    )
    assert first.evidence["idle_inside_ms"] < 0.1 * first.evidence["saved_by_replay_ms"]  # type: ignore
    assert found.of("host-bound") is None
    assert diagnose(tmp_path, on_its_lead(None, waits)).of("host-bound") is None


def period_ms(machine: Machine) -> float:
    """From the first kernel of the first step to that of the last, per step."""
    starts = [one["ts"] for one in machine.events if one["cat"] == "kernel"]
    return (starts[-KERNELS - 20] - starts[0]) / 1e6 / (STEPS - 1)


def test_function_of_a_file_named_after_data_is_not_data_loading(tmp_path: Path) -> None:
    machine = run(between=lambda machine, number: machine.work(300, "aten::view"))
    whole = {"ts": 0, "dur": machine.now, "name": "my/data_loader.py(12): train"}
    machine.events.append(machine.events[0] | whole | {"cat": "python_function", "args": {}})
    assert diagnose(tmp_path, machine).of("data-loading") is None


def test_hidden_data_loading_is_no_finding(tmp_path: Path) -> None:
    machine = Machine()
    for number in range(STEPS):
        with machine.step(number):
            with machine.range("## load_batch ##"):
                machine.work(1_500)
            busy_step(machine)
    assert diagnose(tmp_path, machine).of("data-loading") is None


@pytest.mark.parametrize(
    ("call", "op"),
    [
        ("cudaDeviceSynchronize", None),
        ("cudaStreamSynchronize", "aten::_local_scalar_dense"),
        ("hipStreamSynchronize", "aten::nonzero"),
    ],
)
def test_synchronisation(tmp_path: Path, call: str, op: str | None) -> None:
    def wait(machine: Machine, number: int) -> None:
        machine.synchronise(call, op)
        machine.work(40, "aten::view")

    found = first(tmp_path, run(between=wait))
    assert found.id == "host-synchronisation"
    assert call in found.kernels
    if op is not None:
        assert found.evidence["operators"] == [op]


def test_launch_bound(tmp_path: Path) -> None:
    machine = Machine()
    for number in range(STEPS):
        with machine.step(number):
            for _ in range(300):
                machine.launch(POINTWISE, 2)
                machine.work(10, "aten::view")
            machine.synchronise()
    found = first(tmp_path, machine)
    assert found.id == "launch-bound"
    assert found.ms == pytest.approx(300 * (15 - 2) / 1000, rel=0.05)


def test_host_bound(tmp_path: Path) -> None:
    found = first(tmp_path, run(between=lambda machine, number: machine.work(300, "aten::view")))
    assert found.id == "host-bound"
    assert any("aten::view" in name for name in found.evidence["host_operators"])  # type: ignore


def test_garbage_collection(tmp_path: Path) -> None:
    def collect(machine: Machine) -> None:
        machine.call("cudaEventQuery", 1)
        machine.frame("<built-in function collect>", 6_000)

    assert first(tmp_path, run(collect)).id == "garbage-collection"


def test_allocator(tmp_path: Path) -> None:
    def allocate(machine: Machine) -> None:
        machine.call("cudaMalloc", 3_000)
        machine.call("cudaFree", 2_000)

    found = first(tmp_path, run(allocate))
    assert found.id == "allocator"
    assert set(found.kernels) == {"cudaMalloc", "cudaFree"}


def test_exposed_copies(tmp_path: Path) -> None:
    found = first(tmp_path, run(lambda m: m.copy("Memcpy HtoD (Pageable -> Device)", 2_000)))
    assert found.id == "exposed-copies"
    assert found.ms == pytest.approx(2)
    assert found.evidence["exposed_host_to_device_ms"] == pytest.approx(2 * STEPS)
    assert found.evidence["pageable_ms"] == pytest.approx(2 * STEPS)


def test_exposed_communication(tmp_path: Path) -> None:
    machine = Machine()
    for number in range(STEPS):
        with machine.step(number):
            busy_step(machine)
            all_reduce([machine], 3_000)
    found = first(tmp_path, machine)
    assert found.id == "exposed-communication"
    assert found.ms == pytest.approx(3)
    assert "not told apart" in found.detail


def ranks(slow: Callable[[Machine], None] | None, num: int = 2) -> list[Machine]:
    machines = [Machine(rank, num) for rank in range(num)]
    for number in range(STEPS):
        begins = [machine.now for machine in machines]
        for machine in machines:
            busy_step(machine)
            if slow is not None and machine.rank == 1:
                slow(machine)
        all_reduce(machines, 50)
        for machine, begin in zip(machines, begins, strict=True):
            machine.synchronise()
            machine.events.append(marked(number, begin, machine.now))
    return machines


def marked(number: int, begin: int, end: int) -> dict:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"ProfilerStep#{number}",
        "pid": 1,
        "tid": 1,
        "ts": begin,
        "dur": end - begin,
        "args": {},
    }


def more_on_device(machine: Machine) -> None:
    for _ in range(30):
        machine.launch(GEMM, 100, op="aten::mm")


def more_on_host(machine: Machine) -> None:
    machine.work(7_000, "aten::view")
    machine.launch(GEMM, 100, op="aten::mm")


# On the host: 1.2 ms of issuing, 7 ms of the fault, one more kernel, against 4 ms on the others.
@pytest.mark.parametrize(("slow", "late_ms"), [(more_on_device, 3.0), (more_on_host, 4.3)])
@pytest.mark.parametrize("num", [2, 4])
def test_straggler(
    tmp_path: Path, slow: Callable[[Machine], None], late_ms: float, num: int
) -> None:
    found = first(tmp_path, *ranks(slow, num))
    assert found.id == "straggler"
    assert found.ranks == (1,)
    assert found.ms == pytest.approx(late_ms, rel=0.01)


def test_ranks_that_take_turns(tmp_path: Path) -> None:
    machines = [Machine(rank, 2) for rank in range(2)]
    for number in range(8):
        for machine in machines:
            busy_step(machine)
            if machine.rank == number % 2:
                more_on_device(machine)
        all_reduce(machines, 50)
    found = first(tmp_path, *machines)
    assert found.id == "straggler"
    assert found.ranks == ()
    assert found.confidence == "medium"


def test_even_ranks_have_no_straggler(tmp_path: Path) -> None:
    found = diagnose(tmp_path, *ranks(None))
    assert found.of("straggler") is None
    assert found.first is not None
    assert found.first.id == "healthy"


def test_warm_up(tmp_path: Path) -> None:
    machine = Machine()
    for number in range(STEPS):
        with machine.step(number):
            if number == 0:
                machine.launch(GEMM, 100, op="aten::mm")
                machine.work(60_000, "aten::first_call")
            busy_step(machine)
            machine.synchronise()
    found = diagnose(tmp_path, machine).of("warm-up-in-window")
    assert found is not None
    assert found.evidence["first_step_ms"] > 60  # type: ignore[operator]
    assert found.ms == pytest.approx(60 / STEPS, rel=0.01)


def test_compiling_in_every_step(tmp_path: Path) -> None:
    found = first(tmp_path, run(lambda machine: machine.call("cuModuleLoadData", 5_000)))
    assert found.id == "warm-up-in-window"
    assert found.ms == pytest.approx(5, rel=0.01)


def test_fusible_chain(tmp_path: Path) -> None:
    def chain(machine: Machine, number: int) -> None:
        for _ in range(5):
            machine.launch(POINTWISE, 60, dims=[[4096, 4096], [4096, 4096]], host_us=10)

    found = first(tmp_path, run(between=chain))
    assert found.id == "fusible-chains"
    assert found.evidence["longest_chain"] == 5
    # Of five kernels of 60 us one stays, and a third of the other four.
    assert found.ms == pytest.approx(KERNELS * 4 * 60 * 2 / 3 / 1000)


def test_no_chain_of_other_sizes(tmp_path: Path) -> None:
    def chain(machine: Machine, number: int) -> None:
        machine.launch(POINTWISE, 60, dims=[[4096, 4096]], host_us=10)
        machine.launch(POINTWISE, 60, dims=[[128, 4096]], host_us=10)

    assert diagnose(tmp_path, run(between=chain)).of("fusible-chains") is None


def test_no_chain_around_a_copy(tmp_path: Path) -> None:
    def chain(machine: Machine, number: int) -> None:
        machine.launch(POINTWISE, 60, dims=[[4096, 4096]], host_us=10)
        machine.copy("Memcpy DtoD (Device -> Device)", 1)
        machine.launch(POINTWISE, 60, dims=[[4096, 4096]], host_us=10)

    assert diagnose(tmp_path, run(between=chain)).of("fusible-chains") is None


def test_tensor_cores(tmp_path: Path) -> None:
    def single(machine: Machine, number: int) -> None:
        machine.launch("ampere_sgemm_128x128_tn", 400, op="aten::mm")

    found = first(tmp_path, run(between=single))
    assert found.id == "tensor-cores-unused"
    assert found.ms == pytest.approx(KERNELS * 0.4 / 2)


def test_memory_bound(tmp_path: Path) -> None:
    elements = 2**26

    def slow(machine: Machine, number: int) -> None:
        machine.launch(POINTWISE, 1_000, op="aten::relu", dims=[[elements]], host_us=10)

    found = first(tmp_path, run(between=slow))
    assert found.id == "memory-bound"
    ideal_ms = 2 * 4 * elements / 4.8e12 * 1e3
    assert found.ms == pytest.approx(KERNELS * (1 - ideal_ms), rel=1e-6)


def beside(machine: Machine, number: int, name: str, stream: int) -> None:
    """Every other product runs beside something on another stream, and takes twice as long."""
    machine.synchronise()
    if number % 2:
        machine.launch(name, 200, stream=stream)
    machine.launch(GEMM, 200 + number % 3 if number % 2 else 100 + number % 3, grid=9)


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "gemm-slowed-by-communication"),
        ("void other_kernel", "streams-competing"),
    ],
)
def test_slowed_beside(tmp_path: Path, name: str, finding: str) -> None:
    machine = Machine()
    for number in range(STEPS):
        with machine.step(number):
            for kernel in range(KERNELS):
                beside(machine, kernel, name, 20)
    found = diagnose(tmp_path, machine).of(finding)
    assert found is not None
    assert found.evidence["median_slowdown"] == pytest.approx(2, rel=0.05)
    assert found.ms == pytest.approx(KERNELS / 2 * 0.1, rel=0.05)


def test_expert_imbalance(tmp_path: Path) -> None:
    machines = [Machine(rank, 2) for rank in range(2)]
    for machine in machines:
        for number in range(STEPS):
            with machine.step(number):
                for _ in range(KERNELS):
                    us = 150 if machine.rank else 50
                    machine.launch("void cutlass::device_kernel<GroupProblemShape, gemm>", us)
    found = diagnose(tmp_path, *machines).of("expert-imbalance")
    assert found is not None
    assert found.ms == pytest.approx(KERNELS * 0.05)


def test_no_gpu_work(tmp_path: Path) -> None:
    machine = Machine()
    with machine.step(0):
        machine.work(100, "aten::mm")
    found = diagnose(tmp_path, machine)
    assert found.findings == ()
    assert found.first is None
    assert [one.id for one in found.abstained] == ["all"]
    assert "no GPU kernels" in found.abstained[0].reason


def test_launches_without_kernels(tmp_path: Path) -> None:
    machine = Machine()
    machine.work(100, "aten::mm")
    machine.call("cudaLaunchKernel", 5)
    assert "not allowed" in diagnose(tmp_path, machine).abstained[0].reason


def test_uneven_all_to_all_of_one_rank(tmp_path: Path) -> None:
    machine = Machine()
    for number in range(STEPS):
        with machine.step(number):
            machine.launch("void cutlass::device_kernel<GroupProblemShape, gemm>", 150)
            machine.work(5, "record_param_comms")
            machine.events[-1]["args"]["In split size"] = "[700, 100, 100, 100]"
    found = diagnose(tmp_path, machine).of("expert-imbalance")
    assert found is not None
    assert found.evidence["largest_over_mean"] == pytest.approx(2.8)


ODD = st.sampled_from(
    [0, -1, 10**9, 2**63, 2**80, 1e30, None, "x", [], [[-1]], [[2**62, 2**62]], [["a"]], {}, True]
)
PLACES = st.sampled_from(
    [
        *("args.Input Dims", "args.Input type", "args.grid", "args.correlation", "args.stream"),
        *("args.External id", "args.bytes", "args.In split size", "args", "tid", "cat"),
    ]
)
CHANGES = st.lists(st.tuples(st.integers(0, 60), PLACES, ODD), max_size=12)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(CHANGES)
def test_damaged_events_are_survived(
    tmp_path: Path, changes: list[tuple[int, str, object]]
) -> None:
    machine = Machine()
    for number in range(3):
        with machine.step(number):
            machine.copy("Memcpy HtoD (Pageable -> Device)", 20)
            machine.launch(GEMM, 100, op="aten::mm", dims=[[64, 64], [64, 64]])
            machine.launch(POINTWISE, 30, dims=[[64, 64]])
            machine.launch("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 30, stream=20)
            machine.synchronise()
    for row, place, value in changes:
        event = machine.events[row % len(machine.events)]
        outer, _, inner = place.partition(".")
        if not inner:
            event[outer] = value
        elif isinstance(event["args"], dict):
            event["args"] = event["args"] | {inner: value}
    try:
        found = diagnose(tmp_path, machine)
    except DataError:
        return
    assert found.findings or found.abstained


def test_kernels_without_duration(tmp_path: Path) -> None:
    machine = Machine()
    machine.launch(GEMM, 0)
    machine.launch(GEMM, 0)
    assert diagnose(tmp_path, machine).findings == ()
