"""The exponential of the kernels against fp64, over all sizes of argument."""

import pytest
import torch
import triton
import triton.language as tl

from slipstream.ops.elementary import exponential


@triton.jit
def _exponential_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, exponential(x), mask=at < n)


def _of(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    _exponential_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024)
    return out


def test_it_is_exact_to_a_unit_at_any_size():
    """Triton's own is off by up to a hundred units at -80."""
    x = -87.33 * torch.rand(1 << 15).double().pow(4).float()
    units = (_of(x).double() / x.double().exp() - 1).abs() * 2**24
    assert units.max() <= 4.0


@pytest.mark.parametrize("value", [0.0, -0.0, -104.0, -1e30, -float("inf"), float("nan")])
def test_limits(value):
    x = torch.tensor([value])
    assert torch.equal(_of(x).isnan(), x.isnan())
    if value == value:
        torch.testing.assert_close(_of(x), x.exp(), rtol=0, atol=2**-126)


def test_the_smallest_normal_numbers_are_there():
    x = torch.linspace(-87.33, -86.0, 1000)
    assert ((_of(x).double() / x.double().exp() - 1).abs() < 2**-21).all()
