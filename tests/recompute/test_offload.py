"""Tensors on the host: same values and layout, one copy per memory, back one block ahead."""

import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.nn import offload
from slipstream.nn.offload import Offload, offloading
from slipstream.nn.saved import Scope, recomputed


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Sizes of the groups of tensors sent and brought back, in order."""
    seen: list[tuple[str, int]] = []
    for name in ("send", "bring"):
        plain = getattr(offload._Lane, name)

        def noted(lane: Any, tensors: list[torch.Tensor], name: str = name, plain: Any = plain):
            seen.append((name, sum(t.numel() for t in tensors)))
            return plain(lane, tensors)

        monkeypatch.setattr(offload._Lane, name, noted)
    return seen


def block(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * x.T.cos()


def chain(x: torch.Tensor, sizes: int, wrapped: bool) -> torch.Tensor:
    for _ in range(sizes):
        with offloading(nn.Identity(), enabled=wrapped):
            x = block(x)
    return x


def test_gradients_are_equal(copies: list[tuple[str, int]]) -> None:
    x = torch.randn(6, 6, dtype=torch.float64, requires_grad=True)
    (wanted,) = torch.autograd.grad(chain(x, 3, wrapped=False).sum(), x)
    loss = chain(x, 3, wrapped=True).sum()
    for retain in (True, False):
        (found,) = torch.autograd.grad(loss, x, retain_graph=retain)
        assert torch.equal(found, wanted)
    assert [name for name, _ in copies].count("send") == 3


def test_each_block_is_brought_back_while_the_next_runs(
    copies: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    order = []
    for name in ("fetch", "view"):
        plain = getattr(offload._Away, name)

        def noted(away: Any, *args: Any, name: str = name, plain: Any = plain) -> Any:
            order.append((name, id(away)))
            return plain(away, *args)

        monkeypatch.setattr(offload._Away, name, noted)
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    chain(x, 4, wrapped=True).sum().backward()
    viewed = list(dict.fromkeys(key for name, key in order if name == "view"))
    assert [key for name, key in order if name == "fetch"] == viewed
    assert len(viewed) == 4
    for later, earlier in pairwise(viewed):
        # Its copy begins before the block behind it has read its last tensor.
        last = len(order) - 1 - order[::-1].index(("view", later))
        assert order.index(("fetch", earlier)) <= last
    # The last block had not left the device.
    assert [name for name, _ in copies] == ["send"] * 4 + ["bring"] * 3


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
    loss = chain(x, 2, wrapped=True).sum()
    gc.collect()
    assert given == []
    loss.backward()
    del loss
    gc.collect()
    # Of each block its input and both factors.
    assert given[-2:] == [3 * 8 * 8 * 8] * 2
