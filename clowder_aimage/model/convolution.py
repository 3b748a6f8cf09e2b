"""Convolutions of 3 by 3 in float32 on a CPU: nine products of the picture's shifts with weights.

MLX copies the neighbourhood of every pixel, nine times the input, and multiplies that. Here the
BLAS multiplies slices of the padded picture: pixels in row order are a matrix, and the pixels below
or to the right of all of them are the same matrix from a later row on. Each core computes a few
rows of the result at a time, which stay in its cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clowder_aimage.model.backend import Conv2d, GroupNorm, mx
from clowder_aimage.model.operation import (
    BLOCK,
    Floats,
    contiguous,
    is_slow,
    linear,
    memory,
    on_all_cores,
    overwrite_with_silu,
    silu_in_place,
)
from clowder_aimage.tensor import blas

_PIXELS = 4096  # of a product
Affine = tuple[Floats, Floats]  # a factor and an offset for each channel


def convolution(
    x: mx.array,
    conv: Conv2d,
    *,
    norm: GroupNorm | None = None,
    residual: mx.array | None = None,
    scale: int = 1,
) -> mx.array:
    """Return conv(silu(norm(x))) + residual, or without the steps that are not given.

    x: (1, height, width, channels), first upsampled by ``scale`` (1 or 2) to the nearest pixel.
    residual: of the shape of the result; it may be overwritten.
    Returns (1, scale * height, scale * width, output channels).
    """
    if conv.weight.shape[1:3] == (1, 1) and norm is None and residual is None:
        return linear(x, conv.weight.reshape(len(conv.weight), -1), conv.bias)
    if not is_slow(x) or conv.weight.shape[1:3] != (3, 3) or not blas.is_fast():
        x = x if norm is None else silu_in_place(norm(x))
        for axis in (1, 2) if scale > 1 else ():
            x = mx.repeat(x, scale, axis=axis)
        y = conv(x)
        return y if residual is None else residual + y
    _, height, width, _ = x.shape
    result = residual
    if result is None:
        result = mx.zeros((1, scale * height, scale * width, len(conv.weight)))
    arrays = contiguous(x, result, conv.weight, conv.bias)
    image, found, weight, bias = (memory(array) for array in arrays)
    affine = None if norm is None else _affine(image[0], norm)
    base = None if residual is None else found[0]
    _convolve(image[0], affine, weight, bias, base, scale, found[0])
    return arrays[1]


def halving_convolution(x: mx.array, conv: Conv2d) -> mx.array:
    """Return ``conv``, 3 by 3, of every second pixel of x, with padding below and to the right.

    x: (1, height, width, channels), both sides even. Returns half the height and width. Source:
    diffusers' ``Downsample2D`` of an ``AutoencoderKL``.
    """
    if not is_slow(x) or not blas.is_fast():
        padded = mx.pad(x, [(0, 0), (0, 1), (0, 1), (0, 0)])
        return mx.conv_general(padded, conv.weight, stride=2) + conv.bias
    _, height, width, channels = x.shape
    result = mx.zeros((1, height // 2, width // 2, len(conv.weight)))
    arrays = contiguous(x, result, conv.weight, conv.bias)
    image, found, weight, bias = (memory(array) for array in arrays)
    matrices = [(*divmod(tap, 3), weight[:, tap // 3, tap % 3].T) for tap in range(9)]
    step = max(1, _PIXELS // width)

    def rows(start: int) -> None:
        count = min(step, height // 2 - start)
        part = image[0, 2 * start : 2 * (start + count) + 1]
        padded = np.zeros((2 * count + 1, width + 1, channels), dtype=np.float32)
        padded[: len(part), :width] = part
        into = found[0, start : start + count].reshape(-1, len(bias))
        for tap, (down, right, matrix) in enumerate(matrices):
            every_second = padded[down : down + 2 * count : 2, right : right + width : 2]
            pixels = np.ascontiguousarray(every_second).reshape(-1, channels)
            blas.multiply(pixels, matrix, into, is_sum=tap > 0)
        into += bias

    on_all_cores(rows, range(0, height // 2, step), 3 * image.size, multiplies=True)
    return arrays[1]


def _affine(image: Floats, norm: GroupNorm) -> Affine:
    """Return the factor and the offset of each channel by which a group norm (1803.08494) acts."""
    channels = image.shape[-1]
    step = max(1, 4 * BLOCK * len(image) // image.size)
    starts = range(0, len(image), step)
    sums = np.empty((2, len(starts), channels))

    def moments(start: int) -> None:
        part = image[start : start + step]
        sums[0, start // step] = part.sum(axis=0).sum(axis=0)
        sums[1, start // step] = (part * part).sum(axis=0).sum(axis=0)

    on_all_cores(moments, starts, image.size)
    groups = sums.sum(axis=1).reshape(2, norm.num_groups, -1).sum(axis=2)
    mean, square = groups * (norm.num_groups / image.size)
    scale = 1 / np.sqrt(np.maximum(square - mean * mean, 0) + norm.eps)
    repeats = channels // norm.num_groups
    factor = np.repeat(scale, repeats) * memory(norm.weight)
    offset = memory(norm.bias) - np.repeat(mean, repeats) * factor
    return factor.astype(np.float32), offset.astype(np.float32)


@dataclass(frozen=True, slots=True)
class _Phase:
    """The factors of all result pixels at (``down``, ``right``) modulo the scale.

    ``taps``: the first row and column of the padded picture, and the matrix (outputs, channels).
    """

    down: int
    right: int
    taps: list[tuple[int, int, Floats]]


def _phases(weight: Floats, scale: int) -> list[_Phase]:
    """Return the phases of weights (outputs, 3, 3, channels), for a scale of 1 or 2.

    Neighbours in an upsampled picture are the same pixel, whose weights are added: four products
    instead of nine.
    """
    if scale == 1:
        return [_Phase(0, 0, [(*divmod(tap, 3), weight[:, tap // 3, tap % 3]) for tap in range(9)])]
    first, middle, last = (weight[:, row] for row in range(3))
    by_row = [[(0, first), (1, middle + last)], [(1, first + middle), (2, last)]]
    phases = []
    for down, right in np.ndindex(2, 2):
        taps = []
        for row, part in by_row[down]:
            left, centre, end = (part[:, column] for column in range(3))
            columns = [[(0, left), (1, centre + end)], [(1, left + centre), (2, end)]][right]
            taps += [(row, column, matrix) for column, matrix in columns]
        phases.append(_Phase(down, right, taps))
    return phases


def _convolve(
    image: Floats,
    affine: Affine | None,
    weight: Floats,
    bias: Floats,
    residual: Floats | None,
    scale: int,
    result: Floats,
) -> None:
    """Write the convolution of ``image`` (height, width, channels) to ``result``.

    affine: applied before, with an activation; weight: (outputs, 3, 3, channels). ``residual`` may
    be ``result``. Values of channels are repeated for rows of pixels: numpy is slow on short rows.
    """
    height, width, channels = image.shape
    row, outputs = width + 2, len(weight)
    phases = _phases(weight, scale)
    step = max(1, min(_PIXELS // row, -(-height // 4)))
    lines, biases = image.reshape(height, -1), np.tile(bias, width)
    factors = None if affine is None else [np.tile(one, width) for one in affine]

    def rows(start: int) -> None:
        count = min(step, height - start)
        padded = np.zeros((count + 2, row * channels), dtype=np.float32)
        first, last = max(start - 1, 0), min(start + count + 1, height)
        inside = padded[first - start + 1 : last - start + 1, channels:-channels]
        if factors is None:
            inside[...] = lines[first:last]
        else:
            np.multiply(lines[first:last], factors[0], out=inside)
            inside += factors[1]
            overwrite_with_silu(inside)
        pixels = padded.reshape(-1, channels)
        # with the two pixels of padding between rows, which are left out afterwards
        product = np.empty((count * row, outputs), dtype=np.float32)
        found = product.reshape(count, -1)[:, : width * outputs]
        for phase in phases:
            for index, (down, right, matrix) in enumerate(phase.taps):
                shifted = pixels[down * row + right :][: len(product) - 2]
                blas.multiply(shifted, matrix.T, product[:-2], is_sum=index > 0)
            found += biases
            across = slice(scale * start + phase.down, scale * (start + count), scale)
            into = result[across, phase.right :: scale]
            by_row = product.reshape(count, row, outputs)[:, :width]
            if residual is None:
                into[...] = by_row
            else:
                np.add(by_row, residual[across, phase.right :: scale], out=into)

    on_all_cores(rows, range(0, height, step), 9 * image.size, multiplies=True)
