"""A capture that fails leaves streams, memory and random numbers as they were."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from slipstream.hw import capture
from slipstream.hw.capture import captured

POOL = (0, 7)


class Tape:
    """Stands in for CUDA: a capture during which ``invalid`` was set fails as PyTorch's does."""

    def __init__(self, *, ends_itself: bool) -> None:
        self.ends_itself = ends_itself
        self.invalid = False
        self.capturing = False
        self.streams: list[object] = ["default"]
        self.underway: list[object] = []
        self.released: list[object] = []

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before = list(self.streams)
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams = before

    @contextmanager
    def graph(
        self, graph: object, pool: object = None, stream: object = None, **_: str
    ) -> Iterator[None]:
        self.streams.append(stream)
        assert pool not in self.underway
        self.underway.append(pool)
        self.capturing = True
        try:
            yield
        finally:
            # As in PyTorch: nothing after this error is done.
            if self.invalid:
                self.invalid = False
                if self.ends_itself:
                    self.end(0, pool)
                raise RuntimeError("the capture was invalidated")
            self.end(0, pool)
            self.capturing = False
            self.streams.pop()

    def end(self, device: int, pool: object) -> None:
        if pool not in self.underway:
            raise RuntimeError("not recording to this pool")
        self.underway.remove(pool)

    def release(self, device: int, pool: object) -> None:
        self.released.append(pool)


@pytest.fixture(params=[False, True], ids=["2.11", "newer"])
def tape(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tape:
    tape = Tape(ends_itself=request.param)
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, getattr(tape, name))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: POOL)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", tape.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", tape.release, raising=False)
    monkeypatch.setattr(capture, "_ABANDONED", [])
    return tape


SIDE = SimpleNamespace(device_index=0, device=torch.device("cpu"))


def _breaks(tape: Tape) -> Callable[[], None]:
    def wait() -> None:
        tape.invalid = True
        raise RuntimeError("not permitted when stream is capturing")

    return wait


def test_what_a_capture_returns_and_leaves(tape: Tape) -> None:
    _, returned = captured(lambda: tape.streams[-1], SIDE)
    assert returned is SIDE
    assert (tape.streams, tape.capturing) == (["default"], False)
    assert (tape.underway, tape.released, capture._ABANDONED) == ([], [], [])


def test_a_failed_capture_is_ended_everywhere_and_its_error_kept(tape: Tape) -> None:
    with pytest.raises(RuntimeError, match="invalidated") as found:
        captured(_breaks(tape), SIDE)
    assert "not permitted" in str(found.value.__context__)
    assert (tape.streams, tape.capturing, tape.underway) == (["default"], False, [])
    # Memory that PyTorch has ended the use of itself is not released behind its back.
    assert tape.released == ([] if tape.ends_itself else [POOL])
    assert len(capture._ABANDONED) == len(tape.released)


def test_work_that_raises_without_spoiling_the_capture_keeps_no_graph(tape: Tape) -> None:
    def fails() -> None:
        raise KeyError("weights")

    with pytest.raises(KeyError, match="weights"):
        captured(fails, SIDE)
    assert (tape.streams, tape.capturing) == (["default"], False)
    assert (tape.released, capture._ABANDONED) == ([], [])


def _pools() -> set[tuple[int, ...]]:
    gc.collect()
    torch.cuda.empty_cache()
    return {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_wait_in_a_capture_spoils_nothing_on_a_gpu(mode: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.ones(2**21, device=device, requires_grad=True)

    def waits() -> float:
        return float((x * torch.rand_like(x)).sum().sin())

    def twice() -> torch.Tensor:
        return torch.autograd.grad((x * torch.rand_like(x)).sum(), x)[0] * 2

    torch.cuda.manual_seed(3)
    expected = torch.randn(8, device=device)
    before, pools = torch.cuda.current_stream(), _pools()
    torch.cuda.manual_seed(3)
    for _ in range(2):
        stream = torch.cuda.Stream(device)
        with pytest.raises(RuntimeError) as found:
            captured(waits, stream, error_mode=mode)
        assert found.value.__context__ is not None
        del found
        assert torch.cuda.current_stream() == before
        assert _pools() == pools
    assert torch.equal(torch.randn(8, device=device), expected)
    stream = torch.cuda.Stream(device)
    graph, doubled = captured(twice, stream, error_mode=mode)
    for _ in range(2):
        drawn = doubled.clone()
        graph.replay()
        torch.cuda.synchronize()
        assert not torch.equal(drawn, doubled)
        assert 0.99 < doubled.mean() < 1.01
