"""Activations forward and backward, elementwise: fp32 maths, each tensor rounded once.

A program takes ``BLOCK`` elements of the output, counted through its rows of ``F``. Where all
tensors are contiguous (``FLAT``) rows do not matter, and any F loads 16 bytes at a time; elsewhere
as many elements as ``ALIGNED``, which divides F and all strides. ``FUSED``: gate and up are the
halves of rows of ``2F``. NaN goes through every function.
"""

import triton
import triton.language as tl

from slipstream.ops.elementary import exponential
from slipstream.ops.triton_support import interpreting

ALL = tl.constexpr(tl.PropagateNan.ALL)
COMPILED = tl.constexpr(not interpreting())
"""Whether there are the processor's own instructions."""


@triton.jit
def reciprocal(x):
    """``1 / x`` in one instruction, within a unit in the last place."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def power_of_2(x):
    """``2 ** x`` in one instruction, within two units in the last place."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def widen(x):
    """A tile in fp32: one instruction for every bf16, where the compiler takes 1.5."""
    if COMPILED and x.dtype == tl.bfloat16 and x.shape[-1] > 1:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 16; mov.b32 $0, t;"
            " and.b32 t, $2, 0xffff0000; mov.b32 $1, t; }",
            "=f,=f,r", [x], dtype=tl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(tl.float32)


@triton.jit
def gelu_16_bit(x):
    """GELU and its derivative with an error that vanishes when they are rounded to 16 bits.

    The logarithm of the normal distribution's tail is almost a parabola: a polynomial (README.md)
    and one power give it within 4.5e-6 of itself where that shows, in half the instructions of
    ``erf``: with those, arithmetic would take longer than memory.
    """
    # Further out the tail is 0 and the polynomial no longer its logarithm.
    size = tl.minimum(tl.abs(x), 13.0, propagate_nan=ALL)
    log = 0.00799082 + size * (-0.000758161194 + size * 3.318641e-05)
    log = -1.1510968 + size * (-0.45904202 + size * (-0.05316615 + size * log))
    tail = power_of_2(-1.0 + size * log)
    # 1 / sqrt(2 pi) is in the exponent.
    bell = power_of_2(tl.fma(size * size, -0.7213475204444817, -1.3257480647361592))
    slope = tail - size * bell
    return tl.maximum(x, 0.0) - size * tail, tl.where(x > 0, 1 - slope, slope)


@triton.jit
def gelu_tanh_16_bit(x):
    """The tanh form of GELU and its derivative, as exact as 16 bits can tell."""
    square = x * x
    below = reciprocal(1.0 + power_of_2(x * (-2.302208198 - 0.1029432397 * square)))
    value = x * below
    return value, below + value * (1 - below) * (1.5957691216057308 + 0.2140644489 * square)


@triton.jit
def sigmoid_16_bit(x):
    """The logistic function, two instructions of the special unit."""
    return reciprocal(1.0 + power_of_2(-1.4426950408889634 * x))


@triton.jit
def sigmoid_pair(x):
    """``sigmoid(x)`` and ``1 - sigmoid(x)``, neither of them as a difference that loses digits."""
    power = exponential(-tl.abs(x))
    small = tl.div_rn(power, 1.0 + power)
    return tl.where(x < 0, small, 1 - small), tl.where(x < 0, 1 - small, small)


@triton.jit
def gate_function(gate, alpha, ACTIVATION: tl.constexpr):
    """The ungated function of fp32 ``gate`` and its derivative.

    Names that end in ``_16_bit``: of values that had 16 bits.
    """
    if ACTIVATION == "silu":
        below, above = sigmoid_pair(gate)
        value = gate * below
        slope = below + value * above
    elif ACTIVATION == "silu_16_bit":
        sigmoid = sigmoid_16_bit(gate)
        value = gate * sigmoid
        slope = sigmoid + value * (1 - sigmoid)
    elif ACTIVATION == "clamped":
        below, above = sigmoid_pair(alpha * gate)
        value = gate * below
        slope = below + alpha * value * above
    elif ACTIVATION == "clamped_16_bit":
        sigmoid = sigmoid_16_bit(alpha * gate)
        value = gate * sigmoid
        slope = sigmoid + alpha * value * (1 - sigmoid)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(gate, 0.0, propagate_nan=ALL)
        value = positive * positive
        slope = 2 * positive
    elif ACTIVATION == "gelu":
        below = 0.5 * (1 + tl.erf(gate * 0.7071067811865476))
        value = gate * below
        # Spelled out: a sum of two products is rounded in one of two ways, as the compiler likes.
        slope = tl.fma(gate * 0.3989422804014327, exponential(-0.5 * gate * gate), below)
    elif ACTIVATION == "gelu_16_bit":
        value, slope = gelu_16_bit(gate)
    elif ACTIVATION == "gelu_tanh_16_bit":
        value, slope = gelu_tanh_16_bit(gate)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        square = gate * gate
        inner = 1.5957691216057308 * gate * (1 + 0.044715 * square)
        below, above = sigmoid_pair(inner)
        value = gate * below
        slope = below + value * above * (1.5957691216057308 * (1 + 3 * 0.044715 * square))
    return value, slope


@triton.jit
def places(start, FLAT: tl.constexpr, F: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Row and column of ``BLOCK`` elements from element ``start`` on; flat: all in row 0."""
    i = tl.arange(0, BLOCK)
    if FLAT:
        row, column = tl.zeros((BLOCK,), tl.int64), start + i
    else:
        element = (start % F).to(tl.int32) + i
        row = tl.max_constancy(start // F + element // F, ALIGNED)
        column = element % F
        # The compiler does not see through a remainder.
        column = tl.max_contiguous(tl.multiple_of(column, ALIGNED), ALIGNED).to(tl.int64)
    return row, column


@triton.jit
def offsets(row, column, stride, FLAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Where the elements of a tensor are whose rows are ``stride`` apart."""
    if FLAT:
        return column
    else:
        return tl.multiple_of(row * stride, ALIGNED) + column


@triton.jit
def load(x_ptr, row, column, stride, mask, FLAT: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements in fp32; ``mask`` None: all are there."""
    at = offsets(row, column, stride, FLAT, ALIGNED)
    return tl.load(x_ptr + at, mask=mask).to(tl.float32)


@triton.jit
def store(x_ptr, row, column, stride, value, mask, FLAT: tl.constexpr, ALIGNED: tl.constexpr):
    """The counterpart of ``load``."""
    at = offsets(row, column, stride, FLAT, ALIGNED)
    tl.store(x_ptr + at, value.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def clamped(gate, up, limit):
    """Gate and factor of the clamped kind."""
    factor = tl.maximum(tl.minimum(up, limit, propagate_nan=ALL), -limit, propagate_nan=ALL) + 1
    return tl.minimum(gate, limit, propagate_nan=ALL), factor


@triton.jit
def forward_block(
    gate_ptr, up_ptr, out_ptr, row, column, stride_gate, stride_up, alpha, limit, mask,
    F: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, FUSED: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One block; ``mask`` None: all of it is there."""
    gate = load(gate_ptr, row, column, stride_gate, mask, FLAT, ALIGNED)
    if GATED:
        up = load(up_ptr, row, column, stride_up, mask, FLAT, ALIGNED)
        if ACTIVATION == "clamped" or ACTIVATION == "clamped_16_bit":
            gate, up = clamped(gate, up, limit)
        value, _ = gate_function(gate, alpha, ACTIVATION)
        value *= up
    else:
        value, _ = gate_function(gate, alpha, ACTIVATION)
    store(out_ptr, row, column, F, value, mask, FLAT, ALIGNED)


@triton.jit(do_not_specialize=["num_rows", "alpha", "limit"])
def activation_fwd_kernel(
    gate_ptr, up_ptr, out_ptr, num_rows, stride_gate, stride_up, alpha, limit,
    F: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, FUSED: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out = f(gate)``, times up where ``GATED``; ``up_ptr`` is None where there is no tensor."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    size = num_rows.to(tl.int64) * F
    row, column = places(start, FLAT, F, ALIGNED, BLOCK)
    if FUSED:
        up_ptr, stride_up = gate_ptr + F, stride_gate
    # Without a mask whole blocks load 16 bytes at a time even where rows end anywhere.
    if start + BLOCK <= size:
        forward_block(
            gate_ptr, up_ptr, out_ptr, row, column, stride_gate, stride_up, alpha, limit, None,
            F, ACTIVATION, GATED, FUSED, FLAT, ALIGNED,
        )  # fmt: skip
    else:
        forward_block(
            gate_ptr, up_ptr, out_ptr, row, column, stride_gate, stride_up, alpha, limit,
            start + tl.arange(0, BLOCK) < size,
            F, ACTIVATION, GATED, FUSED, FLAT, ALIGNED,
        )  # fmt: skip


@triton.jit
def backward_block(
    dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, act_ptr, row, column,
    stride_dout, stride_gate, stride_up, alpha, limit, mask,
    F: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, FUSED: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One block; ``mask`` None: all of it is there; ``act_ptr`` None: the output is not wanted."""
    STRIDE: tl.constexpr = 2 * F if FUSED else F
    grad = load(dout_ptr, row, column, stride_dout, mask, FLAT, ALIGNED)
    gate = load(gate_ptr, row, column, stride_gate, mask, FLAT, ALIGNED)
    if GATED:
        up = load(up_ptr, row, column, stride_up, mask, FLAT, ALIGNED)
        factor = up
        above = gate > limit
        if ACTIVATION == "clamped" or ACTIVATION == "clamped_16_bit":
            gate, factor = clamped(gate, up, limit)
        value, slope = gate_function(gate, alpha, ACTIVATION)
        dup = grad * value
        if ACTIVATION == "clamped" or ACTIVATION == "clamped_16_bit":
            # A value on the edge of the clamp still counts as inside, as in PyTorch.
            slope = tl.where(above, 0.0, slope)
            dup = tl.where(tl.abs(up) > limit, 0.0, dup)
        dgate = grad * factor * slope
        value *= factor
        store(dup_ptr, row, column, STRIDE, dup, mask, FLAT, ALIGNED)
    else:
        value, slope = gate_function(gate, alpha, ACTIVATION)
        dgate = grad * slope
    store(dgate_ptr, row, column, STRIDE, dgate, mask, FLAT, ALIGNED)
    if act_ptr is not None:
        store(act_ptr, row, column, F, value, mask, FLAT, ALIGNED)


@triton.jit(do_not_specialize=["num_rows", "alpha", "limit"])
def activation_bwd_kernel(
    dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, act_ptr, num_rows,
    stride_dout, stride_gate, stride_up, alpha, limit,
    F: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, FUSED: tl.constexpr,
    FLAT: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``dgate`` and ``dup`` from ``dout`` and the pre-activation, and the output once more.

    ``FUSED``: both gradients go to rows of ``2F`` at ``dgate_ptr``. ``act_ptr`` may be None.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    size = num_rows.to(tl.int64) * F
    row, column = places(start, FLAT, F, ALIGNED, BLOCK)
    if FUSED:
        up_ptr, dup_ptr, stride_up = gate_ptr + F, dgate_ptr + F, stride_gate
    if start + BLOCK <= size:
        backward_block(
            dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, act_ptr, row, column,
            stride_dout, stride_gate, stride_up, alpha, limit, None,
            F, ACTIVATION, GATED, FUSED, FLAT, ALIGNED,
        )  # fmt: skip
    else:
        backward_block(
            dout_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, act_ptr, row, column,
            stride_dout, stride_gate, stride_up, alpha, limit,
            start + tl.arange(0, BLOCK) < size,
            F, ACTIVATION, GATED, FUSED, FLAT, ALIGNED,
        )  # fmt: skip
