"""The norm of all gradients: one number, whatever they are cut into and wherever they are."""

import pytest
import torch

from slipstream.errors import ShapeError
from slipstream.ops import dispatch, grad_norm
from slipstream.ops.scattered import Layout, Piece, Scattered
from tests.budget import assert_within
from tests.ops.implementations import runnable

IMPLEMENTATIONS = runnable("grad_norm")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make(dtype: torch.dtype, *sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator(torch.get_default_device()).manual_seed(3)
    return [torch.randn(n, generator=generator).to(dtype) for n in sizes]


def assert_norms(implementation: str, draws: list[list[torch.Tensor]], grads: list[list]) -> None:
    """Several draws together: the error of one number is luck."""
    with dispatch.force(grad_norm=implementation):
        ours = [torch.stack([grad_norm(grad) for grad in grads]) for _ in range(2)]
    assert torch.equal(*ours)
    flat = [torch.cat(draw).float() for draw in draws]
    assert_within(
        {"norm": ours[0]},
        {"norm": torch.stack([g.norm() for g in flat])},
        {"norm": torch.stack([g.double().norm() for g in flat])},
        torch.float32,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_it_stays_in_the_budget_of_torch(implementation, dtype):
    draws = [make(dtype, 1, 63, 257, 40_000 + 7 * i) for i in range(16)]
    assert_norms(implementation, draws, draws)


@pytest.mark.parametrize("packed", [False, True], ids=["aligned", "packed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_a_bucket_count_wherever_they_are(implementation, dtype, packed):
    draws, grads = [], []
    for i in range(16):
        sizes = (20_001 + i, 63, 1)
        places = enumerate(zip((0, 20_032, 20_096), sizes, strict=True))
        pieces = [Piece(start=start, tensor=j, inner=0, size=n) for j, (start, n) in places]
        draws.append(make(dtype, *sizes))
        found = list(torch.cat(draws[-1]).split(sizes)) if packed else draws[-1]
        grads.append([Scattered(Layout(pieces, 20_160), found)])
    assert_norms(implementation, draws, grads)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_one_bad_element_shows(implementation, bad):
    for place in (0, 17_000, 39_999):
        (grad,) = make(torch.float32, 40_000)
        grad[place] = bad
        with dispatch.force(grad_norm=implementation):
            assert not torch.isfinite(grad_norm([torch.ones(5), grad]))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shapes_and_strides_do_not_matter_and_empty_is_zero(implementation):
    grad = make(torch.float32, 48)[0].view(6, 8)
    with dispatch.force(grad_norm=implementation):
        assert grad_norm([grad.T]).item() == pytest.approx(grad.norm().item(), rel=1e-6)
        assert grad_norm([torch.zeros(0), torch.zeros(3)]).item() == 0.0


def test_errors():
    with pytest.raises(ShapeError, match="no gradients; give one tensor or more"):
        grad_norm([])
    with pytest.raises(ShapeError, match="grads is a Tensor, expected a list of tensors"):
        grad_norm(torch.ones(2))
    with pytest.raises(ShapeError, match="a gradient is None, expected a tensor; leave it out"):
        grad_norm([torch.ones(2), None])
    with pytest.raises(ShapeError, match=r"gradients are on .*meta.*; move them to one device"):
        grad_norm([torch.ones(2, device="cpu"), torch.ones(2, device="meta")])
