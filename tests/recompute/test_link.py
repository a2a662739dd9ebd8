"""Copies beside the device's work, on streams that stand in for a GPU's: pieces, order, rates."""

from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.nn import offload
from slipstream.nn.offload import around
from slipstream.recompute import link
from slipstream.recompute.meter import Meter


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is asked of streams and events, in order; lanes behave as on a GPU."""
    seen: list[str] = []

    class Event:
        count = 0

        def __init__(self, **_: Any) -> None:
            self.number = Event.count
            Event.count += 1

        def record(self, *_: Any) -> None:
            seen.append(f"record {self.number}")

        def elapsed_time(self, _: Any) -> float:
            return 2.0

    def stream(name: str) -> Any:
        return SimpleNamespace(
            wait_stream=lambda other: seen.append(f"{name} waits for {other.name}"),
            wait_event=lambda event: seen.append(f"{name} waits for event {event.number}"),
            synchronize=lambda: None,
            name=name,
        )

    @contextmanager
    def on(_: Any):
        yield

    compute = stream("compute")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: stream("copies"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: compute)
    monkeypatch.setattr(torch.cuda, "stream", on)
    for module in (offload, link):
        monkeypatch.setattr(module, "pinned", partial(torch.empty, dtype=torch.uint8))
        monkeypatch.setattr(module, "PIECE_BYTES", 100)
    lane = offload._Lane(torch.device("cpu"))
    lane.stream = torch.cuda.Stream()
    monkeypatch.setattr(offload, "_lanes", {torch.device("cpu"): lane})
    return seen


def squares(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.cos()


def chain(x: torch.Tensor, *actions: str) -> torch.Tensor:
    for action in actions:
        x = around(nn.Identity(), action, partial(squares, x))
    return x


def test_tensors_travel_in_pieces_and_come_back_whole(streams: list[str]) -> None:
    x = torch.randn(9, 7, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(chain(x, *["keep"] * 3).sum(), x)
    streams.clear()
    y = chain(x, "offload:1:1", "offload:2:0", "keep")
    # One event for each of three tensors, none of which the compute stream waits for until the
    # next layer has ended.
    assert streams[0] == "copies waits for compute"
    assert streams.count("copies waits for compute") == 2
    assert sum(entry.startswith("compute waits") for entry in streams) == 1
    lane = offload._lanes[torch.device("cpu")]
    for _ in range(2):
        (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(found, wanted)
    del y
    # 504 bytes each: five pieces of 100, which take 128, and 4.
    sizes = {size: len(buffers) for size, buffers in lane.free.items()}
    assert sizes == {128: 2 * 3 * 5, 4: 2 * 3}
    chain(x, "offload", "keep").sum().backward()
    assert {size: len(buffers) for size, buffers in lane.free.items()} == sizes


def test_what_is_needed_first_comes_back_first(
    streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[int] = []
    lane = offload._lanes[torch.device("cpu")]
    plain = lane.bring

    def bring(host: list[torch.Tensor], sizes: list[int]) -> Any:
        tensors, events = plain(host, sizes)
        arrived.extend(event.number for event in events)
        return tensors, events

    monkeypatch.setattr(lane, "bring", bring)
    x = torch.randn(9, 7, dtype=torch.float64, requires_grad=True)
    chain(x, "offload:1:1", "keep").sum().backward()
    # Backward reads what was saved last first.
    assert arrived == sorted(arrived, reverse=True)
    assert len(arrived) == 3


def test_what_an_early_end_left_unread_is_waited_for(
    streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[list[int]] = []
    lane = offload._lanes[torch.device("cpu")]
    plain = lane.bring

    def bring(host: list[list[torch.Tensor]], sizes: list[int]) -> Any:
        tensors, events = plain(host, sizes)
        arrived.append([event.number for event in events])
        return tensors, events

    monkeypatch.setattr(lane, "bring", bring)
    monkeypatch.setattr(offload, "MIN_BYTES", 0)
    x = torch.randn(9, 7, dtype=torch.float64, requires_grad=True)
    y, z = around(nn.Identity(), "offload:1:1", lambda: ((x * 1).sin(), (x * 2).cos()))
    around(nn.Identity(), "keep", partial(torch.sin, y))
    for _ in range(2):
        (found,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        assert torch.equal(found, x.detach().cos())
    first, second = arrived
    # The second pass found the one it needs read, and let go of the other one's first copy.
    waited = {entry for entry in streams if entry.startswith("compute waits for event")}
    assert {f"compute waits for event {number}" for number in first} <= waited
    assert len(first) == len(second) == 2
    (found,) = torch.autograd.grad(z.sum(), x)
    assert torch.equal(found, -2 * (2 * x.detach()).sin())


def test_rates_are_a_little_less_than_those_of_the_slowest_copies(
    streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter(torch.device("cpu"))
    meter.on_gpu = True
    times = iter([10.0, *[10.0, 10.5] * link.REPEATS, 10.0, *[10.0, 10.0] * link.REPEATS])
    ran: list[int] = []

    def timed(run: Callable[[], object]) -> float:
        run()
        return next(times)

    monkeypatch.setattr(meter, "time", timed)
    found = link.measure_link(meter, lambda: ran.append(1))
    # One copy takes 1 ms (two take 2), so ten go beside 10 ms of work, and then take 2 ms.
    assert found.out_bytes_per_ms == found.back_bytes_per_ms == 0.95 * 10 * 100 / 2
    assert found.slowdown_ms_per_byte == pytest.approx(0.5 / (10 * 100))
    assert len(ran) == 2 * (1 + 2 * link.REPEATS)


def test_the_host_memory_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(link, "_available", lambda: 1000)
    monkeypatch.setattr(link, "_allowed", lambda: 600)
    assert link.host_bytes() == 300
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert link.host_bytes() == 75


def test_what_a_container_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = link.Path
    monkeypatch.setattr(link, "Path", lambda _: tmp_path)
    assert link._allowed() == float("inf")
    for name, text in (("max", "max\n"), ("current", "700\n"), ("stat", "inactive_file 200\n")):
        (tmp_path / f"memory.{name}").write_text(text)
    assert link._allowed() == float("inf")
    (tmp_path / "memory.max").write_text("1000\n")
    assert link._allowed() == 500
    monkeypatch.setattr(link, "Path", plain)
    assert link._available() > 1 << 20
