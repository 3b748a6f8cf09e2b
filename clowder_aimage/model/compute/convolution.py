"""Convolutions of 3 by 3 in float32 on a CPU: products of the picture's shifts with weights.

MLX copies the neighbourhood of every pixel, nine times the input, and multiplies that. Here the
BLAS multiplies slices of the padded picture: pixels in row order are a matrix, and the pixels below
or to the right of all of them are the same matrix from a later row on. Two rows of the result are
computed from four sums of rows, with twelve products instead of eighteen. Each core computes a few
rows at a time, so that they stay in its cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from clowder_aimage.model.backend import Conv2d, GroupNorm, mx
from clowder_aimage.model.compute.array_block import (
    Floats,
    contiguous,
    is_slow,
    run_on_all_cores,
    view_memory,
)
from clowder_aimage.model.compute.operation import linear, overwrite_with_silu, silu
from clowder_aimage.model.hardware import count_cores
from clowder_aimage.tensor import blas

# Values of a product, so that they stay in the processor's cache
_VALUES = 128 * 1024
# Elements that a core computes at a time
_BLOCK = 32 * 1024
# The least pixels of a product: the weights are read once for all of them
_PIXELS = 2048
_Tap = tuple[int, Floats]
# A factor and an offset for each channel
Affine = tuple[Floats, Floats]


def convolve(
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
        projected: mx.array = linear(x, conv.weight.reshape(len(conv.weight), -1), conv.bias)
        return projected
    if not is_slow(x) or conv.weight.shape[1:3] != (3, 3) or not blas.is_fast():
        x = x if norm is None else silu(norm(x))
        for axis in (1, 2) if scale > 1 else ():
            x = mx.repeat(x, scale, axis=axis)
        y = conv(x)
        return y if residual is None else residual + y
    _, height, width, _ = x.shape
    result = residual
    if result is None:
        result = mx.zeros((1, scale * height, scale * width, len(conv.weight)))
    arrays = contiguous(x, result, conv.weight, conv.bias)
    image, output, weight, bias = (view_memory(array) for array in arrays)
    affine = None if norm is None else _compute_affine(image[0], norm)
    base = None if residual is None else output[0]
    _convolve(image[0], affine, weight, bias, base, scale, output[0])
    return arrays[1]


def convolve_strided(x: mx.array, conv: Conv2d) -> mx.array:
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
    image, output, weight, bias = (view_memory(array) for array in arrays)
    matrices = [(*divmod(tap, 3), weight[:, tap // 3, tap % 3].T) for tap in range(9)]
    step = max(1, 2 * _PIXELS // width)

    def convolve_rows(start: int) -> None:
        count = min(step, height // 2 - start)
        source_rows = image[0, 2 * start : 2 * (start + count) + 1]
        padded = np.zeros((2 * count + 1, width + 1, channels), dtype=np.float32)
        padded[: len(source_rows), :width] = source_rows
        into = output[0, start : start + count].reshape(-1, len(bias))
        for tap, (down, right, matrix) in enumerate(matrices):
            every_second = padded[down : down + 2 * count : 2, right : right + width : 2]
            pixels = np.ascontiguousarray(every_second).reshape(-1, channels)
            blas.multiply(pixels, matrix, into, is_sum=tap > 0)
        into += bias

    run_on_all_cores(convolve_rows, range(0, height // 2, step), 3 * image.size, multiplies=True)
    return arrays[1]


def _compute_affine(image: Floats, norm: GroupNorm) -> Affine:
    """Return the factor and the offset of a group norm (1803.08494) for each channel."""
    channels = image.shape[-1]
    step = max(1, 4 * _BLOCK * len(image) // image.size)
    starts = range(0, len(image), step)
    sums = np.empty((2, len(starts), channels))

    def sum_moments(start: int) -> None:
        block_rows = image[start : start + step]
        sums[0, start // step] = block_rows.sum(axis=0).sum(axis=0)
        sums[1, start // step] = np.einsum("rwc,rwc->wc", block_rows, block_rows).sum(axis=0)

    run_on_all_cores(sum_moments, starts, image.size)
    groups = sums.sum(axis=1).reshape(2, norm.num_groups, -1).sum(axis=2)
    mean, square = groups * (norm.num_groups / image.size)
    scale = 1 / np.sqrt(np.maximum(square - mean * mean, 0) + norm.eps)
    repeats = channels // norm.num_groups
    factor = np.repeat(scale, repeats) * view_memory(norm.weight)
    offset = view_memory(norm.bias) - np.repeat(mean, repeats) * factor
    return factor.astype(np.float32), offset.astype(np.float32)


def _build_taps(weight: Floats, scale: int) -> list[list[_Tap]]:
    """Return the taps of each result pixel of a row modulo the scale, 1 or 2.

    A tap is a column of the padded picture, from the first, and its weights (4, outputs, channels),
    one for each of ``_iter_combinations``. weight: (outputs, 3, 3, channels). Neighbours in an
    upsampled picture are the same pixel, whose weights are added.
    """
    upper, middle, lower = (weight[:, row] for row in range(3))
    if scale == 1:
        outer, half = (upper + lower) / 2, middle / 2
        factors = np.stack([outer + half, outer - half, upper, lower])
        return [[(column, factors[:, :, column]) for column in range(3)]]
    factors = np.stack([upper + middle + lower, middle, upper, lower])
    left, centre, right = (factors[:, :, column] for column in range(3))
    return [[(0, left), (1, centre + right)], [(1, left + centre), (2, right)]]


def _iter_combinations(lines: Floats, scale: int) -> Iterator[tuple[int, Floats]]:
    """Yield the index of weights and their factor: an array (rows / 2, values).

    lines: padded rows of the picture. Two rows of the result are computed at a time: product 0 is
    part of both, 1, which a scale of 2 lacks, is added to the even row and subtracted from the odd
    one, 2 and 3 are parts of one row each. An array is overwritten with the next. Source: the
    minimal filter F(2, 3), arXiv 1509.09308; it needs two thirds of the products.
    """
    if scale == 1:
        above, upper, lower, below = lines[:-2:2], lines[1:-1:2], lines[2::2], lines[3::2]
        combined = upper + lower
        yield 0, combined
        yield 1, np.subtract(lower, upper, out=combined)
        yield 2, np.subtract(above, lower, out=combined)
        yield 3, np.subtract(below, upper, out=combined)
    else:
        yield 0, lines[1:-1]
        combined = lines[:-2] - lines[1:-1]
        yield 2, combined
        yield 3, np.subtract(lines[2:], lines[1:-1], out=combined)


def _convolve_row_pairs(lines: Floats, scale: int, taps: list[_Tap], bias: Floats) -> Floats:
    """Return rows 0, 2, 4 ... and 1, 3, 5 ... of the result: (2, rows, pixels, outputs).

    lines: padded rows of the picture; bias: of a row. Two pixels at the end of a row are undefined.
    """
    _, outputs, channels = taps[0][1].shape
    row = lines.shape[1] // channels
    result = np.empty((2, (len(lines) - 2) * scale // 2 * row, outputs), dtype=np.float32)
    even, odd = result
    difference = np.empty_like(even)
    for index, combined in _iter_combinations(lines, scale):
        pixels, into = combined.reshape(-1, channels), (even, difference, even, odd)[index]
        for number, (column, weights) in enumerate(taps):
            shifted = pixels[column : len(pixels) - 2 + column]
            blas.multiply(shifted, weights[index].T, into[:-2], is_sum=number > 0 or index > 1)
        if index == 0:
            by_row = even.reshape(-1, len(bias))
            by_row += bias
            if scale == 2:
                odd[...] = even
        elif index == 1:
            np.subtract(even, difference, out=odd)
            even += difference
    return result.reshape(2, -1, row, outputs)


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
    # Rows of the image for two of the result
    columns, every = _build_taps(weight, scale), 2 // scale
    pairs = -(-height // every)
    pixels = max(_VALUES // max(channels, outputs), _PIXELS)
    step = max(1, min(pixels // row, -(-pairs // count_cores())))
    # Lines that are normalized at a time
    few = max(1, _BLOCK // (width * channels))
    lines, biases = image.reshape(height, -1), np.tile(bias, row)
    factors = None if affine is None else [np.tile(values, width) for values in affine]

    def convolve_rows(start: int) -> None:
        count = min(step, pairs - start)
        padded = np.zeros((count * every + 2, row * channels), dtype=np.float32)
        top = start * every - 1
        top_line, bottom_line = max(top, 0), min(top + len(padded), height)
        inside = padded[top_line - top : bottom_line - top, channels:-channels]
        for line in range(top_line, bottom_line, few):
            into, source_lines = (
                inside[line - top_line :][:few],
                lines[line : min(line + few, bottom_line)],
            )
            if factors is None:
                into[...] = source_lines
            else:
                np.multiply(source_lines, factors[0], out=into)
                into += factors[1]
                overwrite_with_silu(into)
        for right, taps in enumerate(columns):
            for down, row_values in enumerate(_convolve_row_pairs(padded, scale, taps, biases)):
                across = slice(2 * start + down, 2 * (start + count), 2)
                into = result[across, right::scale]
                by_row = row_values[: len(into), :width]
                if residual is None:
                    into[...] = by_row
                else:
                    np.add(by_row, residual[across, right::scale], out=into)

    run_on_all_cores(convolve_rows, range(0, pairs, step), 9 * image.size, multiplies=True)
