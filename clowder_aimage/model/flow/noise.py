"""The noise of PyTorch's CPU generator, without PyTorch.

A seed gives the same picture as the reference. ``torch.randn`` on a CPU draws from
MT19937 and turns uniforms into normals (Box-Muller): for 16 or more numbers, eight pairs at a time;
for fewer, one pair at a time in double precision. On x86 processors with AVX2 it computes
logarithm, sine and cosine with Cephes's single-precision polynomials and fused multiply-adds; this
module does the same, and every bit is equal. Other processors differ by 2e-6 at most.
Reference: PyTorch, aten/src/ATen/native/cpu/DistributionTemplates.h and core/MT19937RNGEngine.h;
polynomials: Cephes (S. Moshier), single/logf.c and single/sinf.c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

BLOCK = 16
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
# ln 2 in two parts, for a product without cancellation
_LN2 = (0.693359375, -2.12194440e-4)
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
# Minus pi / 4 in three parts: subtracted one after another, they lose no bits of the angle
_QUARTER_PI = (-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8)


def randn(seed: int, shape: tuple[int, ...]) -> Floats:
    """Return ``torch.randn(shape, generator=torch.Generator().manual_seed(seed))``.

    seed: an integer; only the low 32 bits are used.
    """
    return draw_samples(seed, shape, 1)[0]


def draw_samples(seed: int, shape: tuple[int, ...], count: int) -> list[Floats]:
    """Return ``count`` results of ``torch.randn(shape)`` by one generator, one after another."""
    source, size = np.random.RandomState(seed & 0xFFFFFFFF), math.prod(shape)
    # PyTorch has two algorithms: the vectorized one needs a whole block
    draw = _draw_few if size < BLOCK else _draw_many
    return [draw(source, size).reshape(shape) for _ in range(count)]


def _draw_many(source: np.random.RandomState, size: int) -> Floats:
    """Draw whole blocks of 16; one more block over the last 16 covers a remainder."""
    values = _draw_uniforms(source, size)
    in_blocks = size - size % BLOCK
    values[:in_blocks] = _box_muller(values[:in_blocks])
    if in_blocks < size:
        values[-BLOCK:] = _box_muller(_draw_uniforms(source, BLOCK))
    return values


def _draw_uniforms(source: np.random.RandomState, count: int) -> Floats:
    """Draw multiples of 2**-24 in [0, 1)."""
    # A float32 has 24 bits of precision: as many as PyTorch takes
    words = _draw_words(source, count) & np.uint32((1 << 24) - 1)
    return words.astype(np.float32) * np.float32(2**-24)


def _draw_words(source: np.random.RandomState, count: int) -> npt.NDArray[np.uint32]:
    return source.randint(0, 1 << 32, size=count, dtype=np.uint32)


def _box_muller(uniforms: Floats) -> Floats:
    """Convert blocks of 16: the first eight numbers give radii, the last eight angles."""
    blocks = uniforms.reshape(-1, 2, BLOCK // 2)
    radius = np.sqrt(np.float32(-2) * _log(np.float32(1) - blocks[:, 0]))
    sine, cosine = _compute_sine_cosine(np.float32(2 * math.pi) * blocks[:, 1])
    return np.stack([radius * cosine, radius * sine], axis=1).reshape(-1)


def _multiply_add(a: Floats, b: Floats | float, c: Floats | float) -> Floats:
    """Return a * b + c, rounded once; constants are float32."""
    # A product of two float32 is exact in float64, so that the last cast rounds as an FMA does
    factor, summand = np.float32(b).astype(np.float64), np.float32(c).astype(np.float64)
    result: Floats = (a.astype(np.float64) * factor + summand).astype(np.float32)
    return result


def _evaluate_polynomial(coefficients: Sequence[float], x: Floats) -> Floats:
    result = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = _multiply_add(result, x, coefficient)
    return result


def _log(x: Floats) -> Floats:
    # x = mantissa * 2**exponent, mantissa in [0.5, 1)
    mantissa, exponent = np.frexp(x)
    small = mantissa < np.float32(0.707106781186547524)
    turns = (exponent - small).astype(np.float32)
    m = (mantissa - np.float32(1)) + np.where(small, mantissa, np.float32(0))
    square = m * m
    y = _evaluate_polynomial(_LOG, m) * m
    y = _multiply_add(y, square, turns * np.float32(_LN2[1]))
    y = _multiply_add(square, -0.5, y)
    return _multiply_add(turns, _LN2[0], m + y)


def _compute_sine_cosine(x: Floats) -> tuple[Floats, Floats]:
    """Return sine and cosine for x >= 0, by octants."""
    octant = (x * np.float32(4 / math.pi)).astype(np.int32)
    # The next even octant, whose angle is the nearest multiple of pi / 2
    octant = (octant + 1) & ~1
    turns = octant.astype(np.float32)
    for quarter_pi in _QUARTER_PI:
        x = _multiply_add(turns, quarter_pi, x)
    square = x * x
    cosine = _evaluate_polynomial(_COS, square) * square
    cosine = _multiply_add(cosine, square, -(square * np.float32(0.5))) + np.float32(1)
    sine = _multiply_add(_evaluate_polynomial(_SIN, square) * square, x, x)
    # In odd quadrants sine and cosine change places; the signs follow below
    swapped = octant & 2 != 0
    sine, cosine = np.where(swapped, cosine, sine), np.where(swapped, sine, cosine)
    sine = np.where(octant & 4 != 0, -sine, sine)
    cosine = np.where((octant - 2) & 4 == 0, -cosine, cosine)
    return sine, cosine


def _draw_few(source: np.random.RandomState, size: int) -> Floats:
    """Draw one pair at a time: angle from the first 53-bit uniform, radius from the second."""
    values: list[float] = []
    while len(values) < size:
        turn, uniform = _to_double(source), _to_double(source)
        radius, angle = math.sqrt(-2 * math.log1p(-uniform)), 2 * math.pi * turn
        values += [radius * math.cos(angle), radius * math.sin(angle)]
    return np.array(values[:size], dtype=np.float32)


def _to_double(source: np.random.RandomState) -> float:
    """Return a multiple of 2**-53 in [0, 1) from two words, the high one first."""
    high, low = (int(word) for word in _draw_words(source, 2))
    return ((high << 32 | low) & ((1 << 53) - 1)) * 2.0**-53
