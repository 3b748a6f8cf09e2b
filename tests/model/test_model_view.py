"""Tensors for other runtimes: numpy and torch over the blobs, without MLX."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from clowder_aimage.errors import ModelError, StoreError
from clowder_aimage.model import tensor_view
from clowder_aimage.model.backend import mx
from clowder_aimage.model.tensor_view import map_file
from clowder_aimage.model.weights import ModelWeights
from tests.model.model_blobs import FolderStore, into_layout
from tests.model.quantized_blobs import (
    MATRICES,
    NAME,
    Maker,
    Part,
    blob,
    judge,
    made,
    opened,
    quantize,
)
from tests.process import run

BYTES = bytes(range(16))
# dtype in the header: numpy's and torch's
PLAIN = {
    "BOOL": ("bool", "bool"),
    "U8": ("uint8", "uint8"),
    "I8": ("int8", "int8"),
    "U16": ("uint16", "uint16"),
    "I16": ("int16", "int16"),
    "F16": ("float16", "float16"),
    "U32": ("uint32", "uint32"),
    "I32": ("int32", "int32"),
    "F32": ("float32", "float32"),
    "U64": ("uint64", "uint64"),
    "I64": ("int64", "int64"),
    "F64": ("float64", "float64"),
    "C64": ("complex64", "complex64"),
    "BF16": ("float32", "bfloat16"),
    "F8_E4M3": ("float32", "float8_e4m3fn"),
    "F8_E5M2": ("float32", "float8_e5m2"),
    "F8_E8M0": ("float32", "float8_e8m0fnu"),
}
SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
SIZES |= {"U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4}


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def with_tensors(folder_store: FolderStore, tensors: dict[str, Part]) -> ModelWeights:
    maker = Maker(folder_store)
    for name, part in tensors.items():
        maker.add(name, blob({name: part}), *part[:2])
    return opened(maker)


def of(dtype: str, data: bytes = BYTES) -> Part:
    if dtype == "BOOL":
        data = bytes(value & 1 for value in data)
    return dtype, (2, len(data) // SIZES.get(dtype, 8) // 2), data


def test_numpy_views_every_dtype_read_only(folder_store: FolderStore) -> None:
    weights = with_tensors(folder_store, {dtype: of(dtype) for dtype in PLAIN})
    for dtype, (own, other) in PLAIN.items():
        found, (_, shape, data) = weights.read_numpy(dtype), of(dtype)
        assert found.dtype == own and found.shape == shape
        if own == other:
            assert found.tobytes() == data
        assert not found.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            found[0] = 0


@pytest.mark.integration
def test_torch_views_every_dtype(folder_store: FolderStore) -> None:
    torch = pytest.importorskip("torch")
    weights = with_tensors(folder_store, {dtype: of(dtype) for dtype in PLAIN})
    for dtype, (_, own) in PLAIN.items():
        found, (_, shape, data) = weights.read_torch(dtype), of(dtype)
        assert (found.dtype, tuple(found.shape)) == (getattr(torch, own), shape)
        assert bytes(found.contiguous().view(torch.uint8).flatten().tolist()) == data
        if found.dtype.is_floating_point:
            np.testing.assert_array_equal(
                found.to(torch.float64).numpy(), weights.read_numpy(dtype).astype(np.float64)
            )


def test_bf16_becomes_float32(folder_store: FolderStore) -> None:
    values = np.array([1.0, -2.5, 3e38, 1e-40, np.inf], np.float32)
    stored = np.array(mx.array(values).astype(mx.bfloat16).view(mx.uint16))
    weights = with_tensors(folder_store, {"x": ("BF16", (5,), stored.tobytes())})
    expected = np.array(mx.array(values).astype(mx.bfloat16).astype(mx.float32))
    np.testing.assert_array_equal(weights.read_numpy("x"), expected)


def test_numpy_does_not_copy(folder_store: FolderStore) -> None:
    """The view shows the file's own pages."""
    data = np.arange(4096, dtype=np.float32)
    weights = with_tensors(folder_store, {"x": ("F32", (4096,), data.tobytes())})
    found = weights.read_numpy("x")
    (path,) = (path for path in folder_store.root.iterdir() if path.stat().st_size > 4096)
    with path.open("r+b") as file:
        file.seek(-4, 2)
        file.write(np.float32(7).tobytes())
    assert found[-1] == 7
    assert found[-2] == 4094


@pytest.mark.integration
def test_writing_to_torch_stays_here(folder_store: FolderStore) -> None:
    pytest.importorskip("torch")
    weights = with_tensors(folder_store, {"x": ("F32", (2, 2), np.ones(4, np.float32).tobytes())})
    mine = weights.read_torch("x")
    mine[0, 0] = 5
    assert mine[0, 0] == 5
    assert weights.read_torch("x")[0, 0] == 1
    assert weights.read_numpy("x")[0, 0] == 1


def test_views_outlive_the_blob(folder_store: FolderStore) -> None:
    weights = with_tensors(folder_store, {"x": of("F32")})
    found = weights.read_numpy("x")
    del weights
    for path in folder_store.root.iterdir():
        path.unlink()
    assert found.tobytes() == BYTES


@pytest.mark.integration
def test_empty_scalar_and_unpadded(folder_store: FolderStore) -> None:
    torch = pytest.importorskip("torch")
    one = np.float32(2.5).tobytes()
    text = b'{"x":{"dtype":"F32","shape":[],"data_offsets":[0,4]}}'
    assert len(text) % 4
    maker = Maker(folder_store)
    maker.add("x", len(text).to_bytes(8, "little") + text + one)
    maker.add("none", blob({"none": ("BF16", (0, 4), b"")}))
    weights = opened(maker)
    assert float(weights.read_numpy("x")) == float(weights.read_torch("x")) == 2.5
    assert weights.read_numpy("x").shape == tuple(weights.read_torch("x").shape) == ()
    assert weights.read_numpy("none").shape == tuple(weights.read_torch("none").shape) == (0, 4)
    assert weights.read_torch("none").dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("dtype", "data", "value"),
    [
        ("BF16", b"\x20\x40", 2.5),
        ("F8_E5M2", b"\x41", 2.5),
        ("F8_E8M0", b"\x81", 4.0),
    ],
)
def test_a_single_number_is_an_array(
    folder_store: FolderStore, dtype: str, data: bytes, value: float
) -> None:
    found = with_tensors(folder_store, {"x": (dtype, (), data)}).read_numpy("x")
    assert isinstance(found, np.ndarray)
    assert not found.shape and found.dtype == np.float32
    assert float(found) == value
    assert not found.flags.writeable


@pytest.mark.integration
def test_quantized_tensors(folder_store: FolderStore) -> None:
    torch = pytest.importorskip("torch")
    weights = opened(made(folder_store, "int4", "combined"))
    expected = judge(MATRICES[NAME], "int4")
    found = weights.read_torch(NAME)
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy(), expected)
    assert not weights.read_numpy(NAME).flags.writeable
    parts, own = weights.read_parts(NAME), quantize(MATRICES[NAME], "int4")
    assert parts.keys() == own.keys()
    for key, value in parts.items():
        plain = own[key] if key == "" else own[key].astype(mx.float32)
        np.testing.assert_array_equal(value, np.array(plain))


def test_without_torch(folder_store: FolderStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ModelError, match="PyTorch is not installed") as caught:
        with_tensors(folder_store, {"x": of("F32")}).read_torch("x")
    assert "numpy" in (caught.value.hint or "")


def test_map_file_refuses_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be mapped: No such file"):
        map_file(str(tmp_path / "none"))
    (tmp_path / "empty").touch()
    with pytest.raises(StoreError, match="cannot be mapped"):
        map_file(str(tmp_path / "empty"))


@pytest.mark.parametrize("code", [errno.ENODEV, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_that_cannot_be_mapped_is_read(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tensor_view._map

    def refuse(handle: int, size: int, flags: int) -> int:
        if handle >= 0:
            raise OSError(code, os.strerror(code))
        return real(handle, size, flags)

    monkeypatch.setattr(tensor_view, "_map", refuse)
    (tmp_path / "file").write_bytes(bytes(range(256)) * 20)
    assert bytes(map_file(str(tmp_path / "file"))) == bytes(range(256)) * 20


def test_numpy_refuses_a_blob_that_was_truncated(folder_store: FolderStore) -> None:
    weights = with_tensors(folder_store, {"x": of("F32", bytes(8192))})
    assert weights.get_shape("x") == (2, 1024)
    for path in folder_store.root.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StoreError, match="was truncated"):
        weights.read_numpy("x")


WITHOUT_MLX = """
import sys
sys.modules["mlx"] = sys.modules["mlx.core"] = None
from pathlib import Path
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import Reference
store = ImageLayout(Path({root!r}))
weights = ModelWeights.open(store, read_aimage(store, Reference.parse("x:y")).aimage, "net")
for name in weights.keys():
    print(name, weights.read_numpy(name).sum(), weights.get_quantization(name))
"""


def test_without_mlx(tmp_path: Path) -> None:
    """From a name in a store to numpy arrays, in a process that cannot have MLX."""
    maker = made(FolderStore(tmp_path), "nvfp4", "combined")
    into_layout(maker.store, maker.aimage(), tmp_path / "layout", "x:y")
    program = WITHOUT_MLX.format(root=str(tmp_path / "layout"))
    done = run([sys.executable, "-c", program], text=True)
    assert done.returncode == 0, done.stderr
    assert f"{NAME} {judge(MATRICES[NAME], 'nvfp4').sum()} Quantization(" in done.stdout
