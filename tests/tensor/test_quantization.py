"""Types of quantization: names, group sizes and shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from clowder_aimage.errors import FormatError
from clowder_aimage.tensor import Quantization
from clowder_aimage.tensor.weight import SourceTensor, TensorChunk, Weight, sort_weights, to_weight


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("int4", None, ("int4", 64, 8)),
        ("INT8", "32", ("int8", 32, 4)),
        ("fp8", 128, ("int8", 128, 4)),
        ("q4", None, ("int4", 64, 8)),
        ("nvfp4", None, ("nvfp4", 16, 8)),
        ("mxfp4", 32, ("mxfp4", 32, 8)),
        ("mxfp8", None, ("mxfp8", 32, 4)),
    ],
)
def test_names_and_group_sizes(
    name: str, size: int | str | None, expected: tuple[str, int, int]
) -> None:
    found = Quantization.parse(name, size)
    assert (found.type.name, found.group_size, found.per_word) == expected


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("int3", None, "unknown quantization 'int3'"),
        ("int4", 16, "int4 requires group size 32 or 64 or 128, not 16"),
        ("nvfp4", 32, "nvfp4 requires group size 16"),
    ],
)
def test_unsupported_types_and_sizes_are_refused(name: str, size: int | None, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Quantization.parse(name, size)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ((8, 64), True),
        ((2, 8, 128), True),
        ((64,), False),  # a vector
        ((8, 32), False),
        ((8, 96), False),
        ((8, 0), False),
        ((), False),
    ],
)
def test_only_matrices_of_whole_groups_fit(shape: tuple[int, ...], fits: bool) -> None:
    assert Quantization.parse("int4").fits(shape) is fits


def test_shapes_of_codes_and_scales() -> None:
    int4 = Quantization.parse("int4", 32)
    assert int4.compute_codes_shape((3, 8, 128)) == (3, 8, 16)
    assert int4.compute_scales_shape((3, 8, 128)) == (3, 8, 4)
    assert int4.compute_shape((3, 8, 16)) == (3, 8, 128)
    assert int4.metadata == {"quant_type": "int4", "group_size": "32"}


def test_weight_counts_the_bytes_of_its_parts() -> None:
    codes = SourceTensor("x", "U32", (8, 16), Path("file"), 100, 512, 1)
    scales = SourceTensor("x.scales", "BF16", (8, 2), Path("file"), 612, 32, 1)
    parts = (
        TensorChunk("", codes.dtype, codes.shape, codes),
        TensorChunk(".scale", scales.dtype, scales.shape, scales),
    )
    weight = Weight("x", "int4", (8, 128), parts, Quantization.parse("int4"))
    assert (weight.elements, weight.nbytes, weight.tensor) == (1024, 544, codes)
    assert (codes.file_range.offset, codes.file_range.nbytes) == (100, 512)
    one = to_weight(scales)
    assert (one.name, one.dtype, one.shape, one.nbytes) == ("x.scales", "BF16", (8, 2), 32)
    assert sort_weights([one, weight]) == (weight, one)
