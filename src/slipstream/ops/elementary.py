"""Elementary functions for Triton kernels, as exact as those of PyTorch."""

import triton
import triton.language as tl


@triton.jit
def exponential(x):
    """``exp(x)`` of fp32 ``x <= 0``, to about a unit in the last place; zero below 2^-126.

    Triton's own rounds ``x log2(e)`` once, an error that grows with ``x``: ten units at -10. Here
    ``x`` is ``k ln2 + rest`` first, with a ln2 in two parts, whose first times k is exact (Cody and
    Waite, 1980); the series is that of the Cephes library. No instruction of the special unit.
    """
    # The integer k stands in the last bits of this sum.
    shifted = x * 1.4426950408889634 + 12582912.0
    k = shifted - 12582912.0
    rest = (x - k * 0.693359375) + k * 2.1219444005469058e-4
    bits = (shifted.to(tl.int32, bitcast=True) << 23) + 0x3F800000
    series = 1.3981999507e-3 + 1.9875691500e-4 * rest
    series = 4.1665795894e-2 + rest * (8.3334519073e-3 + rest * series)
    series = 0.50000001201 + rest * (0.16666665459 + rest * series)
    power = (rest * rest * series + rest + 1.0) * bits.to(tl.float32, bitcast=True)
    return tl.where(x < -87.33654, 0.0, power)
