"""Timing: turns, order, quantiles."""

import time

import pytest
import torch

from slipstream.bench.timing import Quantiles, interleaved

CPU = torch.device("cpu")


def test_quantiles_of_known_samples() -> None:
    found = Quantiles.of([float(i) for i in range(11)][::-1])
    assert found == Quantiles(n=11, median=5.0, p10=1.0, p90=9.0)
    assert found.row() == {"n": 11, "median": 5.0, "p10": 1.0, "p90": 9.0}


def test_every_turn_runs_all_and_the_order_rotates() -> None:
    order: list[str] = []
    variants = {name: (lambda name=name: order.append(name)) for name in "abc"}
    timings = interleaved(variants, CPU, warmup=1, repetitions=4)
    assert "".join(order) == "abc" + "abc" + "bca" + "cab" + "abc"
    assert {name: timing.device_ms.n for name, timing in timings.items()} == dict.fromkeys("abc", 4)


def test_what_goes_before_a_call_runs_each_time_and_is_not_timed() -> None:
    order: list[str] = []
    variants = {name: (lambda name=name: order.append(name)) for name in "ab"}

    def before_b() -> None:
        order.append("-")
        time.sleep(0.02)

    timings = interleaved(variants, CPU, warmup=1, repetitions=2, before={"b": before_b})
    assert "".join(order) == "a-b" + "a-b" + "-ba"
    assert timings["b"].host_ms.p90 < 20


def test_a_call_is_timed_to_its_end() -> None:
    sleeps = {"short": 0.002, "long": 0.01}
    variants = {name: (lambda s=s: time.sleep(s)) for name, s in sleeps.items()}
    timings = interleaved(variants, CPU, warmup=1, repetitions=3)
    for name, seconds in sleeps.items():
        assert timings[name].device_ms.p10 >= seconds * 1e3
        assert timings[name].host_ms == timings[name].device_ms


@pytest.mark.gpu
def test_host_time_does_not_wait_for_the_device() -> None:
    device = torch.device("cuda")
    x = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)
    timing = interleaved({"product": lambda: x @ x}, device, warmup=3, repetitions=5)["product"]
    assert timing.host_ms.median < timing.device_ms.median


@pytest.mark.gpu
def test_device_time_has_no_launch_gaps() -> None:
    device = torch.device("cuda")
    x = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(200):
            x.add_(1)

    timing = interleaved({"many": many}, device, warmup=3, repetitions=5)["many"]
    assert timing.device_ms.median < timing.host_ms.median
