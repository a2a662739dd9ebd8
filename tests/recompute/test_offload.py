"""Tensors on the host: same values and layout, one copy per memory, gone and back when told."""

import gc
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.nn import offload
from slipstream.nn.offload import Offload, around
from slipstream.nn.saved import Scope, recomputed
from slipstream.nn.site import offload_times, timed_offload
from tests.recompute.models import after_two_passes, build


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Sizes of the groups of tensors sent and brought back, in order."""
    seen: list[tuple[str, int]] = []
    for name in ("send", "bring"):
        plain = getattr(offload._Lane, name)

        def noted(lane: Any, tensors: Any, *rest: Any, name: str = name, plain: Any = plain) -> Any:
            whole = [t for part in tensors for t in (part if isinstance(part, list) else [part])]
            seen.append((name, sum(t.numel() for t in whole)))
            return plain(lane, tensors, *rest)

        monkeypatch.setattr(offload._Lane, name, noted)
    return seen


def block(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.T.cos()


def chain(x: torch.Tensor, *actions: str) -> torch.Tensor:
    for action in actions:
        x = around(nn.Identity(), action, partial(block, x))
    return x


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens to blocks, numbered as they are made, and the layers that end or begin."""
    seen: list[str] = []
    made: list[int] = []

    def note(name: str, plain: Any, away: Any, *args: Any, **kwargs: Any) -> Any:
        before = len(away.sources) if name == "let_go" else id(away.here)
        result = plain(away, *args, **kwargs)
        after = len(away.sources) if name == "let_go" else id(away.here)
        if before != after:
            seen.append(f"{name} {made.index(id(away))}")
        return result

    for name in ("let_go", "_bring"):
        plain = getattr(offload._Away, name)
        monkeypatch.setattr(
            offload._Away, name, lambda *a, name=name, plain=plain: note(name, plain, *a)
        )
    start = offload._Away.__init__

    def init(away: Any, *args: Any) -> None:
        made.append(id(away))
        start(away, *args)

    monkeypatch.setattr(offload._Away, "__init__", init)
    return seen


def told(x: torch.Tensor, i: int, events: list[str], action: str) -> torch.Tensor:
    """One layer that says when it has ended, and when its backward begins."""
    y = around(nn.Identity(), action, partial(block, x))
    events.append(f"end {i}")
    # Behind the hooks of the layer itself.
    y.register_hook(lambda _: events.append(f"begin {i}"))
    return y


def test_gradients_are_equal(copies: list[tuple[str, int]]) -> None:
    x = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(chain(x, *["keep"] * 3).sum(), x)
    loss = chain(x, *["offload"] * 3).sum()
    for retain in (True, False):
        (found,) = torch.autograd.grad(loss, x, retain_graph=retain)
        assert torch.equal(found, wanted)
    assert [name for name, _ in copies].count("send") == 3


def test_each_block_is_brought_back_while_the_next_runs(
    copies: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    for name in ("_bring", "view"):
        plain = getattr(offload._Away, name)

        def noted(away: Any, *args: Any, name: str = name, plain: Any = plain) -> Any:
            order.append((name, id(away)))
            return plain(away, *args)

        monkeypatch.setattr(offload._Away, name, noted)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    chain(x, *["offload"] * 4).sum().backward()
    viewed = list(dict.fromkeys(key for name, key in order if name == "view"))
    # The last block's has not left, and is not waited for.
    assert [key for name, key in order if name == "_bring" and key != viewed[0]] == viewed[1:]
    assert len(viewed) == 4
    for later, earlier in pairwise(viewed):
        # Its copy begins before the block behind it has read its last tensor.
        last = len(order) - 1 - order[::-1].index(("view", later))
        assert order.index(("_bring", earlier)) <= last
    # The last block had not left the device.
    assert [name for name, _ in copies] == ["send"] * 4 + ["bring"] * 3


def test_blocks_leave_and_come_back_when_told(events: list[str]) -> None:
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    actions = ["offload:2:1", "offload:9:2", "keep", "keep", "keep"]
    (wanted,) = torch.autograd.grad(chain(x, *["keep"] * 5).sum(), x)
    y = x
    for i, action in enumerate(actions):
        y = told(y, i, events, action)
    y.sum().backward()
    assert torch.equal(x.grad, wanted)
    assert events == [
        "end 0", "end 1", "let_go 0", "end 2", "end 3", "end 4",
        # What has not left by the end of forward leaves when backward begins.
        "let_go 1", "begin 4", "_bring 1", "begin 3", "begin 2", "_bring 0", "begin 1", "begin 0",
    ]  # fmt: skip


def test_parts_of_a_block_leave_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 0)
    left: list[list[int]] = []
    plain = offload._Lane.passed

    def passed(lane: Any, output: torch.Tensor) -> None:
        plain(lane, output)
        found = [ref() for ref in lane.blocks]
        left.append(sorted(t.numel() for away in found for t in away.sources.values()))

    monkeypatch.setattr(offload._Lane, "passed", passed)
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)

    def sized(x: torch.Tensor) -> torch.Tensor:
        # Saves memory of 1, 2, 3 and 4 numbers, not in this order.
        return sum((x[:n] * 1).sin().sum() for n in (3, 1, 4, 2)) + x

    y = around(nn.Identity(), "offload:1,2,4:1", partial(sized, x))
    for _ in range(3):
        y = around(nn.Identity(), "keep", partial(torch.sin, y))
    # The largest after four layers, the next after two, all others after one.
    assert left == [[8, 16, 24, 32], [24, 32], [32], [32]]
    (found,) = torch.autograd.grad(y.sum(), x)
    assert left[-1] == [32]
    x = x.detach().requires_grad_()
    y = sized(x)
    for _ in range(3):
        y = y.sin()
    (wanted,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, wanted)


def test_a_block_comes_back_late_rather_than_never(events: list[str]) -> None:
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    y = x
    for i, action in enumerate(["offload:1:0", "keep", "keep"]):
        y = told(y, i, events, action)
    y.sum().backward()
    assert events[-2:] == ["begin 0", "_bring 0"]
    assert "let_go 0" in events


@pytest.mark.parametrize(
    "wrong",
    [
        "offload:",
        "offload:1",
        "offload:0:1",
        "offload:-1:2",
        "off",
        "offload:1,:1",
        "offload:1,0:1",
    ],
)
def test_actions_that_make_no_sense_are_named(wrong: str) -> None:
    layer = build("dense").layers[0]
    with pytest.raises(ConfigError, match=f"recompute = '{wrong}', expected one of keep, offload"):
        layer.recompute = wrong
    layer.recompute = "offload:3:0"
    assert layer.recompute == "offload:3:0"
    layer.recompute = "offload:1,3:0"
    assert offload_times(layer.recompute) == ((1, 3), 0)


def test_an_action_names_only_the_ages_that_differ() -> None:
    assert timed_offload([2, 2, 2], 1) == "offload:2:1"
    assert timed_offload([1, 1, 2, 4, 4], 3) == "offload:1,2,4,4:3"
    for ages in ([3], [1, 2], [1, 1, 2]):
        found = offload_times(timed_offload(ages, 0))
        assert found == (tuple(ages[-2:]), 0)


def test_micro_batches_one_after_another_offload_alike(copies: list[tuple[str, int]]) -> None:
    plain, other = build("moe", num_layers=4), build("moe", num_layers=4)
    for layer, action in zip(other.layers, ("offload:2:1", "offload:3:2"), strict=False):
        layer.recompute = action
    wanted, found = after_two_passes(plain), after_two_passes(other)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    assert [name for name, _ in copies] == ["send", "send", "bring", "bring"] * 2


def test_two_forward_passes_before_their_backward(copies: list[tuple[str, int]]) -> None:
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(chain(x, *["keep"] * 3).sum(), x)
    losses = [chain(x, "offload:1:1", "offload:2:1", "keep").sum() for _ in range(2)]
    for loss in losses:
        (found,) = torch.autograd.grad(loss, x)
        assert torch.equal(found, wanted)
    assert sorted(name for name, _ in copies) == ["bring"] * 4 + ["send"] * 4


def test_views_of_one_memory_travel_once(copies: list[tuple[str, int]]) -> None:
    base = torch.randn(4, 6, requires_grad=True)
    with Offload(nn.Identity()):
        whole = base * 2
        a, b = whole[:, :3], whole[:, 3:].T
        out = (a * a).sum() + (b * b).sum()
    assert copies == [("send", 4 * 6 * 4)]
    out.backward()
    assert torch.equal(base.grad, 8 * base)


def test_weights_and_small_tensors_stay(
    copies: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "MIN_BYTES", 200)
    layer = nn.Linear(8, 8)
    x, small = torch.randn(16, 8, requires_grad=True), torch.randn(16, 1, requires_grad=True)
    with Scope() as scope, Offload(layer):
        (layer(x) * small).sum().backward()
    sizes = {box.tensor.numel() for box in scope.boxes if box.tensor is not None}
    assert {64, 16} <= sizes  # the weight and the small factor
    assert sum(size for name, size in copies if name == "send") == 2 * 16 * 8 * 4


def test_offload_around_recompute_moves_what_is_left(copies: list[tuple[str, int]]) -> None:
    x = torch.randn(5, 5, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad((x.exp().sin() ** 3).sum(), x)
    with Offload(nn.Identity()):
        y = recomputed(lambda t: (t.exp(),), lambda e: e.sin() ** 3, x)
    (found,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(found, wanted)
    # x, for the second run, and the sine; not the exponential.
    assert copies[0] == ("send", 2 * 25 * 8)


def test_host_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what other tests left
    given: list[int] = []
    monkeypatch.setattr(
        offload._Lane, "give_back", lambda _, buffers: given.append(sum(b.numel() for b in buffers))
    )
    x = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    loss = chain(x, *["offload"] * 2).sum()
    gc.collect()
    assert given == []
    loss.backward()
    del loss
    gc.collect()
    # Of each block its input and both factors.
    assert given[-2:] == [3 * 8 * 8 * 8] * 2


def _gradient(action: str, kept: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    loss = around(nn.Module(), action, lambda: (kept * weight).sum().abs())
    return torch.autograd.grad(loss, weight)[0]


def test_conjugates_keep_their_sign():
    kept, weight = torch.randn(2, 256, 256, dtype=torch.complex64).unbind()
    weight.requires_grad_()
    plain, moved = (_gradient(action, kept.conj(), weight) for action in ("keep", "offload"))
    assert torch.equal(plain, moved)


def test_memory_of_any_number_of_bytes_moves():
    memory = torch.zeros(4 * 256 * 256 + 2, dtype=torch.uint8)
    kept = memory[: 4 * 256 * 256].view(torch.float32).view(256, 256).normal_()
    weight = torch.randn(256, 256, requires_grad=True)
    assert torch.equal(*(_gradient(action, kept, weight) for action in ("keep", "offload")))


def test_inputs_of_many_sizes_share_host_buffers(monkeypatch):
    monkeypatch.setattr(offload, "pinned", lambda size: torch.empty(size, dtype=torch.uint8))
    lane = offload._Lane(torch.device("cpu"))
    monkeypatch.setattr(lane, "stream", object())
    for size in range(1 << 20, (1 << 20) + 40_000, 1000):
        buffer = lane._buffer(size)
        assert buffer.numel() == size
        lane.give_back([buffer])
    assert sum(len(buffers) for buffers in lane.free.values()) == 2
