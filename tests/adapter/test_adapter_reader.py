"""Adapters are read from every dialect and kind, and changes are those of the definitions."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.adapter import dense
from clowder_aimage.adapter.adapter import LowRank
from clowder_aimage.adapter.reader import read_adapter
from clowder_aimage.tensor import encode_header
from tests.adapter import vectors
from tests.adapter.vectors import AdapterVector

SHAPES = vectors.tiny_shapes()
VECTORS = {one.name: one for one in vectors.vectors()}


def weight_of(tensor: str) -> np.ndarray:
    """Return random values for a tensor of the base; zeros for a bias that it lacks."""
    shape = SHAPES.get(tensor)
    if shape is None:
        rows = SHAPES[tensor.removesuffix("bias") + "weight"][0]
        return np.zeros(rows, np.float32)
    seed = sum(tensor.encode())
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("vector", VECTORS.values(), ids=str)
def test_a_vector_is_read(vector: AdapterVector, tmp_path: Path) -> None:
    adapter = read_adapter(vector.write(tmp_path), SHAPES, label="style", base="tiny")
    assert adapter.changes.keys() == vector.effects.keys()
    weights = {tensor: weight_of(tensor) for tensor in vector.effects}
    for strength in (1.0, -0.7):
        expected = vector.changed(weights, strength)
        for tensor, changes in adapter.changes.items():
            uses = [(change, strength) for change in changes]
            found = dense.apply_changes(weights[tensor], uses)
            where = f"{tensor} {strength}"
            np.testing.assert_allclose(found, expected[tensor], 2e-5, 2e-6, err_msg=where)


TO_Q = "transformer/layers.0.attention.to_q.weight"
CODES = {
    "F32": struct.pack("<4f", 1, -2, 0.5, 448),
    "F16": struct.pack("<4e", 1, -2, 0.5, 448),
    "F64": struct.pack("<4d", 1, -2, 0.5, 448),
    "BF16": b"".join(struct.pack("<f", one)[2:] for one in (1, -2, 0.5, 448)),
    "F8_E4M3": bytes((0x38, 0xC0, 0x30, 0x7E)),  # OCP OFP8, table 1 and 2
    "F8_E5M2": bytes((0x3C, 0xC0, 0x38, 0x5F)),
}


@pytest.mark.parametrize("dtype", CODES)
def test_values_of_each_type_are_read(dtype: str, tmp_path: Path) -> None:
    names = [("layers.0.lora_A.weight", dtype, (1, 4)), ("layers.0.lora_B.weight", dtype, (4, 1))]
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode_header(names) + 2 * CODES[dtype])
    shapes = {"transformer/layers.0.weight": (4, 4)}
    adapter = read_adapter(path, shapes, label="style", base="base")
    (change,) = adapter.changes["transformer/layers.0.weight"]
    assert isinstance(change, LowRank)
    assert change.down.tolist() == [[1, -2, 0.5, 448]]
    assert change.up.dtype == np.float32


def test_all_codes_of_e4m3(tmp_path: Path) -> None:
    """OCP OFP8: the smallest subnormal is 2^-9, the largest value 448."""
    good = bytes(code for code in range(256) if code & 127 != 127)
    names = [("x.lora_A", "F8_E4M3", (1, 254)), ("x.lora_B", "F8_E4M3", (1, 1))]
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode_header(names) + good + b"\x38")
    adapter = read_adapter(path, {"unet/x.weight": (1, 254)}, label="style", base="base")
    (change,) = adapter.changes["unet/x.weight"]
    assert isinstance(change, LowRank)
    values = change.down[0]
    assert values[1] == 2**-9
    assert values[126] == 448
    assert (np.diff(values[:127]) > 0).all()
    assert (values[127:] == -values[:127]).all()


def test_a_table_of_embeddings_has_a_row_for_each_word(tmp_path: Path) -> None:
    rows, columns = SHAPES["text_encoder/embed_tokens.weight"]
    first, second = vectors.random(4, rows), vectors.random(columns, 4)
    stem = "base_model.model.model.embed_tokens"
    tensors = {f"{stem}.lora_embedding_A": first, f"{stem}.lora_embedding_B": second}
    path = tmp_path / "a.safetensors"
    path.write_bytes(vectors.safetensors(tensors))
    adapter = read_adapter(
        path, SHAPES, label="style", base="tiny", config={"r": 4, "lora_alpha": 2}
    )
    (change,) = adapter.changes["text_encoder/embed_tokens.weight"]
    found = dense.compute_effect(np.zeros((rows, columns), np.float32), change, 1.0)
    np.testing.assert_allclose(found, 0.5 * (second @ first).T, atol=1e-6)
    assert found.shape == (rows, columns)


def test_the_memory_of_an_adapter_is_that_of_its_values(tmp_path: Path) -> None:
    path = VECTORS["diffusers-metadata"].write(tmp_path)
    adapter = read_adapter(path, SHAPES, label="style", base="tiny")
    assert adapter.nbytes == 4 * 2 * 48 * vectors.RANK
    assert adapter.changes.keys() == {TO_Q}
