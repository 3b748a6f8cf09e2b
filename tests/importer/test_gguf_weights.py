"""Tensors of GGUF files are decoded by the package gguf, row by row."""

from __future__ import annotations

from pathlib import Path

import gguf as reference
import numpy as np
import pytest

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.codes.coded_tensor import GGUF_TYPES
from clowder_aimage.formats.gguf_header import SHAPES
from clowder_aimage.formats.weight_source import read_source
from tests.importer.coded_file import values_of
from tests.importer.formats_gguf import ARRAY, INT32, STRING, UINT32, Pair, gguf

ROWS, COLUMNS = 7, 512
RANDOM = np.random.default_rng(23)


def write(path: Path, kind: str, shape: tuple[int, int] = (ROWS, COLUMNS)) -> np.ndarray:
    """Write a tensor of random codes, and return their values by the package."""
    type_ = reference.GGMLQuantizationType[kind]
    block, size = reference.GGML_QUANT_SIZES[type_]
    codes = RANDOM.integers(0, 120, (shape[0], shape[1] // block * size), np.uint8)
    writer = reference.GGUFWriter(path, "lumina2")
    writer.add_tensor("w.weight", codes, raw_dtype=type_)
    writer.add_tensor("n.weight", np.arange(6, dtype=np.float16).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values: np.ndarray = reference.dequantize(codes, type_)
    return values


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_values_are_those_of_the_package_gguf(kind: str, tmp_path: Path) -> None:
    expected = write(tmp_path / "x", kind)
    source = read_source(tmp_path / "x")
    coded, plain = source.tensors
    assert source.decoded == {(kind, "F32"): 1} and not source.is_exact
    assert source.metadata["general.architecture"] == "lumina2"
    assert (coded.dtype, coded.shape) == ("F32", (ROWS, COLUMNS))
    assert values_of(coded).tobytes() == expected.tobytes()
    assert values_of(coded.slice_rows("v", 2, 5)).tobytes() == expected[2:5].tobytes()
    assert (plain.dtype, plain.shape, plain.decoded) == ("F16", (2, 3), None)


def joined(tensor: tuple[int, ...], shape: tuple[int, ...], kind: int = INT32) -> bytes:
    """Return a file whose tensor has a shape of its own in the metadata."""
    pairs: list[Pair] = [("general.architecture", STRING, "lumina2")]
    pairs += [(f"{SHAPES}w", ARRAY, (kind, list(shape)))]
    return gguf(pairs, [("w", 8, tensor)])


def test_rows_that_were_joined_have_their_shape_again(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(joined((64, 5), (20, 4, 4)))
    (tensor,) = read_source(tmp_path / "x").tensors
    assert tensor.shape == (20, 4, 4)
    whole = values_of(tensor)
    # a row is half a block
    assert values_of(tensor.slice_rows("v", 3, 8)).tobytes() == whole[3:8].tobytes()


@pytest.mark.parametrize(
    "raw, message",
    [
        (joined((64, 5), (20, 15)), "has 320 values, which are not of the shape"),
        (joined((64, 5), (-20, -16)), "not of the shape"),
        (joined((64, 5), (1,) * 9), "not a short list of INT32"),
        (joined((64, 5), (20, 16), UINT32), "not a short list of INT32"),
        (gguf([], [("w", 9, (32, 2))]), "has the type Q8_1, which cannot be decoded"),
        (joined((64, 5), (20, 16))[:-40], "truncated"),
    ],
    ids=["product", "negative", "long", "type", "Q8_1", "short"],
)
def test_other_types_are_refused(raw: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(raw)
    with pytest.raises(FormatError, match=message):
        read_source(tmp_path / "x")
