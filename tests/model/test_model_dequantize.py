"""Codes to values with numpy, bit for bit as MLX does it."""

from __future__ import annotations

import numpy as np
import pytest

from clowder_aimage.model.backend import mx
from clowder_aimage.model.dequantize import dequantize, unpack
from clowder_aimage.model.quantized import QuantizedArray
from clowder_aimage.tensor import Header, Quantization, TensorInfo, read_tensors
from clowder_aimage.tensor.float_code import decode_e4m3, decode_e5m2, decode_e8m0
from tests.model.quantized_blobs import KINDS, judge, quantize

EVERY = np.arange(256, dtype=np.uint8)


def same(one: np.ndarray, other: np.ndarray) -> None:
    """Equal bits, or not numbers in both."""
    assert one.dtype == other.dtype == np.float32
    assert one.shape == other.shape
    np.testing.assert_array_equal(one, other)
    assert (np.signbit(one) == np.signbit(other))[~np.isnan(one)].all()


def numpy_parts(values: np.ndarray, kind: str, size: int | None) -> list[np.ndarray]:
    parts = quantize(values, kind, size)
    arrays = [np.array(part.astype(mx.float32)) for name, part in parts.items() if name]
    if Quantization.parse(kind).type.has_bias:
        return [np.array(parts[""]), *arrays]
    return [np.array(parts[""]), np.array(parts[".scale"])]


@pytest.mark.parametrize(
    ("kind", "size", "scale"),
    [*((kind, None, 1.0) for kind in KINDS), ("int4", 32, 0.1), ("int8", 128, 300.0)],
)
def test_values_equal_those_of_mlx(kind: str, size: int | None, scale: float) -> None:
    values = (np.random.RandomState(1).standard_normal((24, 256)) * scale).astype(np.float32)
    found = dequantize(Quantization.parse(kind, size), *numpy_parts(values, kind, size))
    same(found, judge(values, kind, size))
    spread = np.corrcoef(found.ravel(), values.ravel())[0, 1]
    assert spread > (0.98 if "4" in kind else 0.999), spread


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4", "mxfp8"])
def test_every_scale_and_every_code_is_decoded(kind: str) -> None:
    """256 rows with a scale each, in which every code stands."""
    how = Quantization.parse(kind)
    row = np.resize(EVERY, 512).view(np.uint32)
    codes = np.tile(row, (256, 1))
    columns = codes.shape[1] * how.per_word
    scales = np.repeat(EVERY[:, None], columns // how.group_size, axis=1)
    expected = mx.dequantize(
        mx.array(codes),
        mx.array(scales),
        mode=how.type.mode,
        bits=how.type.bits,
        group_size=how.group_size,
        dtype=mx.float32,
    )
    with np.errstate(invalid="ignore", over="ignore"):  # infinity times nothing
        found = dequantize(how, codes, scales)
    same(found, np.array(expected))


def test_stacked_matrices_equal_those_of_mlx() -> None:
    values = np.random.RandomState(2).standard_normal((3, 4, 64)).astype(np.float32)
    found = dequantize(Quantization.parse("int8"), *numpy_parts(values, "int8", None))
    same(found, judge(values, "int8"))


def test_the_lowest_bits_are_the_first_value() -> None:
    word = np.array([[0x76543210]], np.uint32)
    assert unpack(word, 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert unpack(word, 8).tolist() == [[0x10, 0x32, 0x54, 0x76]]


@pytest.mark.parametrize("shape", [(), (4, 1)])
def test_a_factor_applies_to_the_matrix_or_to_each_row(shape: tuple[int, ...]) -> None:
    values = np.random.RandomState(3).standard_normal((4, 32)).astype(np.float32)
    codes, scales = numpy_parts(values, "nvfp4", None)
    factor = np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    factor = factor / np.float32(8)
    found = dequantize(Quantization.parse("nvfp4"), codes, scales, None, factor)
    rows = np.broadcast_to(factor.reshape(-1), (4,))[:, None]
    same(found, judge(values, "nvfp4") * rows)


STACKS = [
    ((3, 8, 32), [(), (1,), (1, 1, 1), (3,), (3, 1), (3, 1, 1), (3, 8), (3, 8, 1)]),
    ((3, 3, 32), [(3,), (3, 1), (3, 1, 1), (3, 3), (3, 3, 1)]),
    ((3, 1, 32), [(3,), (3, 1), (3, 1, 1)]),
    ((1, 3, 32), [(1,), (1, 1), (1, 3), (1, 3, 1)]),
    ((3, 32), [(), (1,), (1, 1), (3,), (3, 1)]),
]


def test_factors_of_stacks_are_aligned_with_the_leading_dimensions() -> None:
    for shape, every in STACKS:
        for factors in every:
            check_factors(shape, factors)


def check_factors(shape: tuple[int, ...], factors: tuple[int, ...]) -> None:
    """Compare one factor a matrix or a row by numpy, by MLX, and by hand."""
    random = np.random.RandomState(4)
    values = random.standard_normal(shape).astype(np.float32)
    factor = random.uniform(1, 2, factors).astype(np.float32)
    codes, scales = numpy_parts(values, "nvfp4", None)
    sizes = {"": codes.shape, ".scale": scales.shape, ".global_scale": factors}
    dtypes = {"": "U32", ".scale": "U8", ".global_scale": "F32"}
    infos = {f"w{part}": TensorInfo(dtypes[part], size, 0, 0) for part, size in sizes.items()}
    how = read_tensors(Header(infos, {"quant_type": "nvfp4"}, 0))["w"].quantization
    assert how is not None
    expected = judge(values, "nvfp4").copy()
    for row in np.ndindex(shape[:-1]):
        place = tuple(i if size > 1 else 0 for i, size in zip(row, factors, strict=False))
        expected[row] *= factor[place[: len(factors)]]
    same(dequantize(how, codes, scales.astype(np.uint8), None, factor), expected)
    kept = QuantizedArray(how, mx.array(codes), mx.array(scales), None, mx.array(factor))
    same(np.array(kept.dequantize(mx.float32)), expected)


def test_8_bit_floats_are_decoded() -> None:
    ml = np.array(mx.from_fp8(mx.array(EVERY), dtype=mx.float32))
    same(decode_e4m3(EVERY), ml)
    assert decode_e5m2(EVERY)[[0x3C, 0x7B, 0x7C, 0xBC]].tolist() == [1, 57344, np.inf, -1]
    assert decode_e8m0(EVERY)[[0, 127, 128, 255]].tolist() == [2.0**-127, 1, 2, np.inf]
