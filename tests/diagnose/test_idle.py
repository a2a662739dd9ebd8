"""Idle time by cause, and the replay, against programs whose counterfactual can be run."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.diagnose import Trace, account, read
from slipstream.diagnose.account import account_trace
from slipstream.diagnose.findings.context import View
from slipstream.diagnose.idle import HOST_CAUSES, Cause, Idle, explain
from slipstream.diagnose.replay import saved_ns
from tests.diagnose.machine import GEMM, US, Machine
from tests.diagnose.real import JOBS, counted

# What a program does, and for how many us. A burst gives the host a lead of milliseconds, a stretch
# of slow launches lives on it, and the causes take it away.
CAUSES = ["data", "collect", "allocate", "synchronise"]
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["launch", "work", "burst", "stretch", *CAUSES]),
        st.integers(1, 200),
    ),
    min_size=2,
    max_size=40,
)
PARTS = 10
FOLDER = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def perform(actions: list[tuple[str, int]], *, without: str = "") -> Machine:
    machine = Machine()
    machine.launch(GEMM, 10)
    act(machine, actions, without)
    machine.launch(GEMM, 10)
    return machine


def act(machine: Machine, actions: list[tuple[str, int]], without: str) -> None:
    for action, us in actions:
        if action == without:
            # A synchronisation takes 1 us more after the call, which is not the waiting.
            machine.work(1 if action == "synchronise" else 0)
        elif action == "launch":
            machine.launch(GEMM, us)
        elif action == "work":
            machine.work(us, "aten::view")
        elif action == "burst":
            for _ in range(PARTS):
                machine.launch(GEMM, 2 * us)
        elif action == "stretch":
            for _ in range(PARTS):
                machine.work(us, "aten::view")
                machine.launch(GEMM, 5)
        elif action == "data":
            with machine.range("enumerate(DataLoader)#next"):
                machine.work(us)
        elif action == "collect":
            machine.frame("<built-in function collect>", us)
        elif action == "allocate":
            machine.call("cudaMalloc", us)
        else:
            machine.synchronise()


def traced(machine: Machine, folder: Path) -> Trace:
    return read([machine.save(folder)]).traces[0]


def device_ns(machine: Machine) -> int:
    kernels = [one for one in machine.events if one["cat"] == "kernel"]
    return kernels[-1]["ts"] + kernels[-1]["dur"] - kernels[0]["ts"]


@FOLDER
@given(ACTIONS)
def test_causes_add_up(tmp_path: Path, actions: list[tuple[str, int]]) -> None:
    trace = traced(perform(actions), tmp_path)
    idle = explain(trace)
    whole = sum(idle.by_cause.values())
    assert np.array_equal(whole, idle.gaps[:, 1] - idle.gaps[:, 0])
    assert idle.total_ns == account_trace(trace).split.idle_ns
    assert all((part >= 0).all() for part in idle.by_cause.values())


@FOLDER
@given(ACTIONS)
def test_replay_of_everything_is_the_trace(tmp_path: Path, actions: list[tuple[str, int]]) -> None:
    assert saved_ns(explain(traced(perform(actions), tmp_path)), frozenset()) == 0


@pytest.mark.parametrize(
    ("action", "cause"),
    [
        ("data", Cause.DATA),
        ("collect", Cause.COLLECTION),
        ("allocate", Cause.ALLOCATOR),
        ("synchronise", Cause.SYNC),
    ],
)
@FOLDER
@given(actions=ACTIONS)
def test_replay_is_the_counterfactual(
    tmp_path: Path, action: str, cause: Cause, actions: list[tuple[str, int]]
) -> None:
    """What the replay says a cause costs is what leaving it out of the program saves."""
    machine = perform(actions)
    saved = saved_ns(explain(traced(machine, tmp_path)), frozenset({cause}))
    assert saved == device_ns(machine) - device_ns(perform(actions, without=action))


STEPS = 4


def in_steps(actions: list[tuple[str, int]], *, without: str = "") -> Machine:
    """The actions in every step, whose end the host waits for: all steps are alike."""
    machine = Machine()
    for number in range(STEPS):
        with machine.step(number):
            act(machine, actions, without)
            machine.launch(GEMM, 10)
            machine.synchronise()
    return machine


def period_ns(machine: Machine) -> int:
    """From the begin of a step's device work to that of the next."""
    starts = [one["ts"] for one in machine.events if one["cat"] == "kernel"]
    per_step = len(starts) // STEPS
    return starts[-per_step] - starts[-2 * per_step]


@pytest.mark.parametrize(
    ("action", "cause"),
    [("data", Cause.DATA), ("collect", Cause.COLLECTION), ("allocate", Cause.ALLOCATOR)],
)
@FOLDER
@given(actions=ACTIONS)
def test_cost_per_step_is_that_of_a_steady_step(
    tmp_path: Path, action: str, cause: Cause, actions: list[tuple[str, int]]
) -> None:
    """Also of what comes before a step's first device work, and is not seen of the first step."""
    machine = in_steps(actions)
    (rank,) = account(read([machine.save(tmp_path)])).ranks
    saved, _ = View(account=rank, position=0).saved(cause)
    assert saved / STEPS == period_ns(machine) - period_ns(in_steps(actions, without=action))


@FOLDER
@given(ACTIONS)
def test_more_causes_save_more(tmp_path: Path, actions: list[tuple[str, int]]) -> None:
    idle = explain(traced(perform(actions), tmp_path))
    saved, before = set(), 0
    for cause in (*HOST_CAUSES, Cause.HOST):
        saved.add(cause)
        now = saved_ns(idle, frozenset(saved))
        assert before <= now <= idle.total_ns
        before = now


def test_without_host_time_only_the_device_remains(tmp_path: Path) -> None:
    idle = explain(traced(perform([("launch", 3), ("work", 50), ("launch", 3)]), tmp_path))
    assert saved_ns(idle, frozenset({*HOST_CAUSES, Cause.HOST})) == idle.total_ns


@pytest.mark.parametrize("job", [job for job in JOBS if not job.startswith("sampled_")])
def test_real_traces(job: str) -> None:
    for one in counted(job).ranks:
        idle = explain(one.trace)
        assert idle.total_ns == one.split.idle_ns
        assert sum(idle.ns(cause) for cause in Cause) == idle.total_ns
        assert saved_ns(idle, frozenset()) == 0


def idle_of(machine: Machine, folder: Path) -> Idle:
    return explain(traced(machine, folder))


def test_blocking_copy_to_the_host_is_a_synchronisation(tmp_path: Path) -> None:
    machine = Machine()
    machine.launch(GEMM, 500)
    begin = machine.now
    machine.copy("Memcpy DtoH (Device -> Pageable)", 20)
    call = machine.events[-2]
    assert call["name"] == "cudaMemcpyAsync"
    call["dur"] = machine.events[-1]["ts"] + machine.events[-1]["dur"] + US - begin
    machine.now = begin + call["dur"]
    machine.work(30, "aten::view")
    machine.launch(GEMM, 10)
    idle = idle_of(machine, tmp_path)
    assert (idle.spans[Cause.SYNC] == [[begin, machine.now - 35 * US]]).all()


def test_waits_of_other_threads_do_not_count(tmp_path: Path) -> None:
    machine = perform([("launch", 50), ("work", 100)])
    machine.synchronise()
    machine.events[-1]["tid"] = 99
    assert not len(idle_of(machine, tmp_path).spans[Cause.SYNC])


def test_launch_that_is_not_in_the_trace(tmp_path: Path) -> None:
    machine = perform([("work", 100)])
    machine.events = [one for one in machine.events if one["cat"] != "cuda_runtime"]
    idle = idle_of(machine, tmp_path)
    assert idle.ns(Cause.UNKNOWN) == idle.total_ns > 0
