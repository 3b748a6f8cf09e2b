"""Quantized tensors in every layout: the same values by every way of asking for them."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.errors import ModelError
from clowder_aimage.model import quantized
from clowder_aimage.model.backend import mx
from clowder_aimage.model.quantized import QuantizedEmbedding, QuantizedLinear
from clowder_aimage.tensor import Quantization
from tests.model.model_blobs import FolderStore
from tests.model.quantized_blobs import (
    KINDS,
    LAYOUTS,
    MATRICES,
    NAME,
    VECTORS,
    Maker,
    Net,
    bits,
    blob,
    judge,
    made,
    opened,
    quantize,
)
from tests.process import run


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


# Every layout once, and every kind in one blob
CASES = {
    *zip(itertools.cycle(KINDS), LAYOUTS, strict=False),
    *((kind, LAYOUTS[0]) for kind in KINDS),
}


@pytest.mark.parametrize(("kind", "layout"), sorted(CASES))
def test_weights_read_every_layout_and_kind(
    folder_store: FolderStore, kind: str, layout: str
) -> None:
    size = 32 if kind == "int4" else None  # not what int4 has when nothing is said
    maker = made(folder_store, kind, layout, size)
    weights = opened(maker)
    mixed = {name.replace(".weight", ".other") for name in MATRICES if "mixed" in layout}
    assert set(weights.keys()) == MATRICES.keys() | VECTORS.keys() | mixed
    for name, array in MATRICES.items():
        expected = judge(array, kind, size)
        assert weights.get_quantization(name) == Quantization.parse(kind, size)
        assert weights.get_shape(name) == array.shape
        np.testing.assert_array_equal(weights.read_numpy(name), expected)
        kept = weights[name]  # nothing said of a type: as the scales have it
        np.testing.assert_array_equal(
            np.array(kept.astype(mx.float32)),
            np.array(mx.array(expected).astype(mx.bfloat16).astype(mx.float32)),
        )
    assert weights.get_quantization("norm.weight") is None


@pytest.mark.parametrize("layout", ["combined", "group", "layers of mlx"])
def test_into_a_module(folder_store: FolderStore, layout: str) -> None:
    net = Net()
    opened(made(folder_store, "int4", layout)).apply(net, dtype=mx.float32, keep_quantized=False)
    for path, name in ((net.fc, NAME), (net.rest[0], "rest.0.weight"), (net.table, "table.weight")):
        np.testing.assert_array_equal(np.array(path.weight), judge(MATRICES[name], "int4"))
    np.testing.assert_array_equal(np.array(net.fc.bias), VECTORS["model.fc.bias"])


@pytest.mark.parametrize("kind", KINDS)
def test_kept_quantized_computes_the_same(folder_store: FolderStore, kind: str) -> None:
    weights = opened(made(folder_store, kind, "combined"))
    plain, kept = Net(), Net()
    weights.apply(plain, dtype=mx.float32, keep_quantized=False)
    weights.apply(kept, dtype=mx.float32, keep_quantized=True)
    assert isinstance(kept.fc, QuantizedLinear)
    assert isinstance(kept.rest[0], QuantizedLinear)
    assert isinstance(kept.table, QuantizedEmbedding)
    assert kept.fc.weight.dtype == mx.uint32
    tokens = mx.array([[3, 0, 15, 3]])
    np.testing.assert_array_equal(np.array(kept.table(tokens)), np.array(plain.table(tokens)))
    one, other = np.array(plain(tokens)), np.array(kept(tokens))
    assert one.shape == (1, 4, 8)
    np.testing.assert_allclose(one, other, atol=1e-4 * np.abs(one).max())


@pytest.mark.parametrize("kind", KINDS)
def test_cuda_multiplies_many_rows_with_dequantized_weights(
    folder_store: FolderStore, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    net = Net()
    opened(made(folder_store, kind, "combined")).apply(net, dtype=mx.float32, keep_quantized=True)
    few, many = mx.array([[3] * 64]), mx.array([[3] * 65])
    expected = np.array(net(many))
    monkeypatch.setattr(quantized, "is_on_cuda", lambda: True)
    products = []
    real = mx.quantized_matmul

    def multiply(x: mx.array, *arguments: Any, **keywords: Any) -> mx.array:
        products.append(x.size // x.shape[-1])
        return real(x, *arguments, **keywords)

    monkeypatch.setattr(mx, "quantized_matmul", multiply)
    np.testing.assert_allclose(np.array(net(many)), expected, atol=1e-4 * np.abs(expected).max())
    assert products == []
    net(few)
    assert products and set(products) == {64}


@pytest.mark.parametrize("keep", [True, False])
def test_the_type_to_compute_in(folder_store: FolderStore, keep: bool) -> None:
    net = Net()
    opened(made(folder_store, "nvfp4", "combined")).apply(
        net, dtype=mx.bfloat16, keep_quantized=keep
    )
    assert net(mx.array([1])).dtype == mx.bfloat16
    assert net.norm.weight.dtype == mx.bfloat16
    assert net.fc.weight.dtype == (mx.uint32 if keep else mx.bfloat16)


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_scales_of_another_type(folder_store: FolderStore, dtype: mx.Dtype) -> None:
    """Kept, they become the type to compute in, so that a product is not a float32 one."""
    maker = made(folder_store, "int8", "combined")
    parts = quantize(MATRICES[NAME], "int8", dtype=dtype)
    data = blob({NAME + key: bits(part) for key, part in parts.items()}, {"quant_type": "int8"})
    maker.layers = [layer for layer in maker.layers if not layer.name.endswith(NAME)]
    maker.add(NAME, data, "int8", (8, 64))
    weights = opened(maker)
    expected = judge(MATRICES[NAME], "int8", dtype=dtype)
    np.testing.assert_array_equal(weights.read_numpy(NAME), expected)
    assert weights[NAME].dtype == dtype
    net = Net()
    weights.apply(net, dtype=mx.bfloat16, keep_quantized=True)
    assert net.fc.scales.dtype == net.fc.biases.dtype == mx.bfloat16
    x = mx.array(np.random.RandomState(9).standard_normal((1, 64))).astype(mx.bfloat16)
    found = net.fc(x)
    assert found.dtype == mx.bfloat16
    exact = np.array(x.astype(mx.float32)) @ expected.T + VECTORS["model.fc.bias"]
    assert np.corrcoef(np.array(found.astype(mx.float32)), exact)[0, 1] > 0.999


def test_on_a_cpu_nothing_is_kept(folder_store: FolderStore) -> None:
    net = Net()
    opened(made(folder_store, "int8", "combined")).apply(net)
    kept = mx.default_device().type == mx.DeviceType.gpu
    assert isinstance(net.fc, QuantizedLinear) == kept


@pytest.mark.parametrize("keep", [True, False])
def test_loaded_and_asked_for(folder_store: FolderStore, keep: bool) -> None:
    weights = opened(made(folder_store, "mxfp8", "combined"))
    weights.load(mx.bfloat16, keep_quantized=keep)
    assert weights[NAME].dtype == weights["norm.weight"].dtype == mx.bfloat16
    expected = mx.array(judge(MATRICES[NAME], "mxfp8")).astype(mx.bfloat16)
    assert mx.array_equal(weights[NAME], expected)
    for path in folder_store.root.iterdir():
        path.unlink()
    assert weights[NAME].shape == (8, 64)
    weights.release()
    with pytest.raises(ModelError, match="cannot be loaded"):
        weights["rest.0.weight"]


@pytest.mark.parametrize("shape", [(), (8,), (8, 1)])
def test_a_global_scale(folder_store: FolderStore, shape: tuple[int, ...]) -> None:
    factor = (np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32) * 3e-4).reshape(shape)
    maker = Maker(folder_store)
    for name, array in MATRICES.items():
        own = factor if name == NAME or factor.size == 1 else np.resize(factor, (len(array),))
        parts = {name + key: bits(value) for key, value in quantize(array, "nvfp4").items()}
        parts[f"{name}.global_scale"] = ("F32", own.shape, own.tobytes())
        maker.add(name, blob(parts, {"quant_type": "NVFP4"}), "nvfp4", array.shape)
    for name, array in VECTORS.items():
        maker.plain(name, array)
    weights = opened(maker)
    expected = judge(MATRICES[NAME], "nvfp4") * np.broadcast_to(factor.reshape(-1), (8,))[:, None]
    np.testing.assert_array_equal(weights.read_numpy(NAME), expected)
    assert set(weights.read_parts(NAME)) == {"", ".scale", ".global_scale"}
    plain, kept = Net(), Net()
    weights.apply(plain, dtype=mx.float32, keep_quantized=False)
    weights.apply(kept, dtype=mx.float32, keep_quantized=True)
    np.testing.assert_array_equal(np.array(plain.fc.weight), expected)
    tokens = mx.array([[5, 1], [0, 9]])
    np.testing.assert_array_equal(np.array(kept.table(tokens)), np.array(plain.table(tokens)))
    np.testing.assert_allclose(np.array(kept(tokens)), np.array(plain(tokens)), atol=1e-4)


def test_only_the_blob_that_is_asked_for_is_opened(folder_store: FolderStore) -> None:
    maker = made(folder_store, "int8", "combined")
    weights = opened(maker)
    (wanted,) = (layer for layer in maker.layers if layer.name.endswith(NAME))
    for layer in maker.layers:
        if layer is not wanted:
            folder_store.find_path(layer.descriptor).unlink()
    np.testing.assert_array_equal(weights.read_numpy(NAME), judge(MATRICES[NAME], "int8"))
    assert NAME in weights
    assert len(weights) == len(maker.layers)


# -- within the means of a process

FEW_FILES = """
import sys
sys.path[:0] = {path!r}
import numpy as np
from pathlib import Path
from typing import Any
from tests.model.model_blobs import FolderStore
from tests.model.quantized_blobs import Maker, judge, opened, values
from clowder_aimage.model import quantized
from clowder_aimage.model.backend import mx
import resource
maker = Maker(FolderStore(Path({root!r})))
for index in range(300):
    maker.quantized(f"{{index}}.weight", values(2, 64, seed=index), "int8", {layout!r})
weights = opened(maker)
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
mx.async_eval = lambda _: None  # nothing is read before it must be: as on the slowest disk
weights.load(mx.float32)
views = [weights.read_numpy(name) for name in weights.keys()]
parts = [weights.read_parts(name) for name in weights.keys()]
for index in range(300):
    expected = judge(values(2, 64, seed=index), "int8")
    assert (views[index] == expected).all()
    assert (np.array(weights[f"{{index}}.weight"]) == expected).all()
"""


@pytest.mark.integration
@pytest.mark.parametrize("layout", ["combined", "layers of the first generation"])
def test_256_open_files_are_enough(tmp_path: Path, layout: str) -> None:
    path = [str(Path(__file__).parents[2]), *sys.path]
    program = FEW_FILES.format(path=path, root=str(tmp_path), layout=layout)
    done = run([sys.executable, "-c", program], text=True)
    assert done.returncode == 0, done.stderr
