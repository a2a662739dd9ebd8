"""Dropping saved tensors: once recomputed, for all readers, no longer than they need it."""

import pytest
import torch

from slipstream.nn.saved import Recompute, Scope, recomputed, storage_of
from slipstream.recompute.meter import kept_bytes


def test_one_run_serves_all_readers() -> None:
    runs = []

    def make(x: torch.Tensor) -> tuple[torch.Tensor]:
        runs.append(1)
        return (x.tanh() * 2,)

    def use(h: torch.Tensor) -> torch.Tensor:
        return (h * h).sum() + (h[1:] * h.T[0]).sum() + h.sin().sum()

    x = torch.randn(5, 5, requires_grad=True)
    (wanted,) = torch.autograd.grad(use(*make(x)), x)
    runs.clear()
    loss = recomputed(make, use, x)
    assert len(runs) == 1
    (found,) = torch.autograd.grad(loss, x)
    assert len(runs) == 2
    assert torch.equal(found, wanted)


def test_a_value_is_let_go_of_when_its_last_reader_has_it() -> None:
    x = torch.arange(64.0, requires_grad=True)
    with Recompute() as scope:
        h = x * 3
        loss = (h * h).sum()
        scope.drop((h,), lambda t: (t * 3,), (x,))
    del h
    source = loss.grad_fn.next_functions[0][0]
    first = source._saved_self
    owner = first.untyped_storage()
    assert owner.nbytes() == 256
    # Read twice by one product: the second reading empties the store.
    again = source._saved_other
    assert storage_of(again) == storage_of(first)
    loss.backward()
    assert torch.equal(x.grad, 18 * x)


def test_nested_scopes_hand_up_what_they_keep() -> None:
    x = torch.randn(7, 7, dtype=torch.float64, requires_grad=True)

    def inner(y: torch.Tensor) -> torch.Tensor:
        return recomputed(lambda y: (y.exp(),), lambda e: e * e, y)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return recomputed(lambda x: (x.sin(),), lambda y: inner(y) + y * y, x)

    plain = (x.sin().exp() ** 2 + x.sin() ** 2).sum()
    (wanted,) = torch.autograd.grad(plain, x)
    with Scope() as scope:
        loss = outer(x).sum()
    # The input alone: what is made from it is made again, the inner from the outer.
    assert kept_bytes(scope, []) == 7 * 7 * 8
    (found,) = torch.autograd.grad(loss, x)
    assert torch.allclose(found, wanted, rtol=1e-14, atol=0)


def test_views_come_back_as_they_lay() -> None:
    x = torch.randn(4, 6, requires_grad=True)

    def use(whole: torch.Tensor) -> torch.Tensor:
        a, b = whole[:, 1:4], whole.T[2:5]
        return a * b.T

    out = recomputed(lambda x: (x * 1,), use, x)
    node = out.grad_fn
    assert node._saved_self.stride() == (6, 1)
    assert node._saved_self.storage_offset() == 1
    out.sum().backward()
    reference = x.detach().clone().requires_grad_()
    use(reference * 1).sum().backward()
    assert torch.equal(x.grad, reference.grad)


def test_without_gradients_nothing_is_set_up() -> None:
    x = torch.randn(3)
    with torch.no_grad(), Scope() as scope:
        assert torch.equal(recomputed(lambda x: (x * 2,), lambda y: y + 1, x), x * 2 + 1)
    assert scope.boxes == []


def test_an_error_inside_leaves_no_scope_behind() -> None:
    x = torch.randn(3, requires_grad=True)

    def fail(_: torch.Tensor) -> torch.Tensor:
        raise KeyError("inside")

    for _ in range(2):
        with pytest.raises(KeyError, match="inside"):
            recomputed(lambda x: (x * 2,), fail, x)
    with Scope() as scope:
        (x * x).sum()
    assert len(scope.boxes) == 2


def test_recompute_follows_the_autocast_of_forward() -> None:
    weight = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8, requires_grad=True)

    def make(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x @ weight,)

    def run(drop: bool) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = recomputed(make, torch.sin, x) if drop else torch.sin(*make(x))
            assert y.dtype == torch.bfloat16
        # Backward outside of it, as is usual.
        return torch.autograd.grad(y.float().sum(), weight)[0]

    assert torch.equal(run(True), run(False))
