"""The short formulas of activations of 16-bit numbers, for every number there is."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from slipstream.ops.norm import tuned
from slipstream.ops.triton_support import interpreting
from slipstream.verify.budget import FACTOR

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
kernels = pytest.importorskip("slipstream.ops.activation.kernels")
launch = pytest.importorskip("slipstream.ops.activation.launch")

STOCK = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu}
DTYPES = [torch.bfloat16, torch.float16]
UNIT = 2.0**-22
"""Relative error of an approximate power of 2 (of a reciprocal: half), by NVIDIA's PTX manual."""
BLOCK = 4096


@triton.jit
def gate_kernel(x_ptr, value_ptr, slope_ptr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value, slope = kernels.gate_function(tl.load(x_ptr + at), 0.0, ACTIVATION)
    tl.store(value_ptr + at, value)
    tl.store(slope_ptr + at, slope)


def _ours(x, kind, dtype):
    """The kernels' value and slope for ``x`` of ``dtype``, rounded to it."""
    wide = F.pad(x.float(), (0, -len(x) % BLOCK))
    value, slope = torch.empty_like(wide), torch.empty_like(wide)
    name = launch.function_name(kind, dtype)
    gate_kernel[(len(wide) // BLOCK,)](wide, value, slope, ACTIVATION=name, BLOCK=BLOCK)
    return value[: len(x)].to(dtype), slope[: len(x)].to(dtype)


def _torch(x, kind):
    leaf = x.clone().requires_grad_()
    value = STOCK[kind](leaf)
    (slope,) = torch.autograd.grad(value, leaf, torch.ones_like(value))
    return value.detach(), slope


def _every_number(dtype):
    """All whose squares are finite in fp32: with others, eager's slopes are NaN."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    return x[x.float().square().isfinite()]


def _off_by(monkeypatch, error):
    """Make the interpreter's exact instructions as wrong as the approximate ones may be."""
    power_of_2, reciprocal = kernels.power_of_2, kernels.reciprocal
    monkeypatch.setattr(kernels, "power_of_2", lambda x: power_of_2(x) * (1 + error))
    # Of 1 it is exact.
    off = partial(_reciprocal_off, reciprocal, 1 + error / 2)
    monkeypatch.setattr(kernels, "reciprocal", off)


def _reciprocal_off(exact, factor, x):
    return tl.where(x == 1, x, exact(x) * factor)


@pytest.mark.parametrize("error", [0, UNIT, -UNIT])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", STOCK)
def test_every_number_is_as_close_as_eager_in_its_binade(kind, dtype, error, monkeypatch):
    """By powers of two, both signs apart: large numbers shall not set the budget of small ones."""
    if error:
        if not interpreting():
            pytest.skip("a GPU brings its own errors")
        _off_by(monkeypatch, error)
    x = _every_number(dtype)
    binade = torch.frexp(x.float().clamp(-8, 8)).exponent.clamp(min=-6)
    for ours, eager, truth in zip(
        _ours(x, kind, dtype), _torch(x, kind), _torch(x.double(), kind), strict=True
    ):
        for sign in (x < 0, x >= 0):
            for exponent in binade.unique():
                these = sign & (binade == exponent)
                found, stock = (t.double()[these] - truth[these] for t in (ours, eager))
                # The truth's own: it is 1 - 1 times x far out.
                rounding = x[these].double().abs().clamp(max=16).max() * 2**-53
                assert found.abs().max() <= FACTOR * stock.abs().max() + rounding
                assert _rms(found) <= FACTOR * _rms(stock) + rounding


def _rms(errors):
    return errors.square().mean().sqrt()


@pytest.mark.parametrize("kind", STOCK)
def test_nan_infinities_and_zeros(kind):
    x = torch.tensor([torch.nan, torch.inf, 0.0, -0.0]).half()
    value, slope = _ours(x, kind, torch.float16)
    assert value[0].isnan()
    assert slope[0].isnan()
    assert value[1:].tolist() == [torch.inf, 0, 0]
    assert slope[2:].tolist() == [0.5, 0.5]


def test_fp32_keeps_the_long_formulas():
    assert launch.function_name("gelu", torch.float32) == "gelu"
    assert launch.function_name("gelu", torch.bfloat16) == "gelu_16_bit"


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100, 103, 120])
def test_tiles_of_activated_rows_fit(capability, direction):
    """Of 16-bit rows: ``x``, and in the backward what came for ``y``, perhaps for ``s`` too."""
    shared = {86: 99, 89: 99, 120: 99, 80: 163}.get(capability, 227)
    for width in (1, 63, 64, 257, 2048, 2049, 5120, 8192, 16384, 16385):
        for column_bytes in (2, 4, 6):
            tile = tuned.lookup(direction, capability, width, column_bytes, activated=True)
            assert tile.block_d >= width or width > 16384
            ahead = (tile.num_stages - 1) * tile.block_t * tile.block_d * column_bytes
            assert max(1, tile.programs_per_sm) * ahead <= shared << 10
            # The backward of 32 elements takes 236 registers, that of 16 takes 128.
            elements = tile.block_t * tile.block_d // (32 * tile.num_warps)
            if direction == "backward" and width <= 8192:
                assert tile.max_registers >= (236 if elements > 16 else 128)
