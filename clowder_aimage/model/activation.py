"""SiLU, fast on a CPU too.

MLX's exponential is scalar code on an x86 CPU, 13 ns an element, and its compiled functions need
a C++ compiler there. In float32 on a CPU the exponential is computed here from array operations
that do run as vector code: e^x = 2^n * e^r, with n rounded by adding and subtracting 1.5 * 2^23,
e^r a polynomial, and n added to the exponent's bits. SiLU takes a quarter of the time.
Polynomial: Cephes (S. Moshier), single/expf.c.
"""

from __future__ import annotations

from clowder_aimage.model.backend import mx, on_gpu

_LOG2_E = 1.4426950408889634
_LN2 = (0.693359375, -2.12194440e-4)  # high and low part
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves no bits for a fraction
_POLYNOMIAL = (  # (e^r - 1 - r) / r^2, the highest power first
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def silu(x: mx.array) -> mx.array:
    """Return x * sigmoid(x), of any shape, in the type of x."""
    if x.dtype == mx.float32 and not on_gpu():
        return x / (1 + exp(-x))
    return x * mx.sigmoid(x)


def exp(x: mx.array) -> mx.array:
    """Return e^x in float32, to a relative error of 2e-7; x is clipped to -87 ... 87."""
    x = mx.clip(x, -87, 87)
    rounded = mx.array(_ROUND)
    whole = (x * _LOG2_E + rounded) - rounded
    rest = (x - whole * _LN2[0]) - whole * _LN2[1]
    result = mx.array(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        result = result * rest + coefficient
    result = result * (rest * rest) + rest + 1
    bits = result.view(mx.int32) + mx.left_shift(whole.astype(mx.int32), mx.array(23))
    return bits.view(mx.float32)
