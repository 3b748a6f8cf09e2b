"""SiLU, fast on a CPU too.

MLX's exponential is scalar code on an x86 CPU, 13 ns an element, and its compiled functions need
a C++ compiler there. In float32 on a CPU the exponential is computed here from array operations
that do run as vector code: e^x = 2^n * 2^f, with n rounded by adding and subtracting 1.5 * 2^23,
2^f a polynomial, and n added to the exponent's bits. SiLU takes a sixth of the time; it differs
by 1e-6 at most.
"""

from __future__ import annotations

from clowder_aimage.model.backend import mx, on_gpu

_LOG2_E = 1.4426950408889634
_ROUND = 12582912.0  # 1.5 * 2^23: adding it leaves no bits for a fraction
_POLYNOMIAL = (  # 2^f for f from -0.5 to 0.5, the highest power first: (ln 2)^k / k!
    0.0013333558146428443,
    0.009618129107628477,
    0.05550410866482158,
    0.2402265069591007,
    0.6931471805599453,
    1.0,
)


def silu(x: mx.array) -> mx.array:
    """x * sigmoid(x), of any shape, in the type of x."""
    if x.dtype == mx.float32 and not on_gpu():
        return x / (1 + exp(-x))
    return x * mx.sigmoid(x)


def exp(x: mx.array) -> mx.array:
    """e^x in float32, to a relative error of 3e-6; beyond 2^126 and 2^-126 it stays there."""
    power = mx.clip(x * _LOG2_E, -126, 126)
    rounded = mx.array(_ROUND)
    whole = (power + rounded) - rounded
    fraction = power - whole
    result = mx.array(_POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        result = result * fraction + coefficient
    bits = result.view(mx.int32) + mx.left_shift(whole.astype(mx.int32), mx.array(23))
    return bits.view(mx.float32)
