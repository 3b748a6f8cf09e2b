"""Blobs, layers and groups that are not what they claim to be: a sentence, and nothing loaded."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.dialect.aimage import Layer
from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.model.backend import Conv2d, Network, RMSNorm, mx
from clowder_aimage.model.stored_tensor import WeightBlob
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import mediatype
from clowder_aimage.tensor import Quantization, read_header
from tests.model.model_blobs import FolderStore
from tests.model.quantized_blobs import (
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
    values,
)


@pytest.fixture
def folder_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


GOOD = {NAME + part: bits(value) for part, value in quantize(MATRICES[NAME], "int8").items()}
INT8 = {"quant_type": "int8", "group_size": "64"}
BAD: dict[str, tuple[bytes, str]] = {
    "truncated": (blob(GOOD, INT8)[:-1], "have 544 bytes, the file has 543"),
    "unknown type": (blob(GOOD, INT8 | {"quant_type": "int3"}), "unknown quantization 'int3'"),
    "another group size": (blob(GOOD, INT8 | {"group_size": "32"}), r"requires .* \[8, 2\]"),
    "no biases": (
        blob({k: v for k, v in GOOD.items() if ".bias" not in k}, INT8),
        "requires biases",
    ),
    "another name": (blob({k.replace("fc", "up"): v for k, v in GOOD.items()}, INT8), "instead"),
    "another tensor as well": (
        blob(GOOD | {"model.other": bits(mx.ones((2,)))}, INT8),
        r"also contains model\.other",
    ),
    "not quantized": (blob({NAME: bits(mx.zeros((8, 64)))}), "its layer has int8"),
    "another shape": (
        blob({NAME + k: bits(v) for k, v in quantize(values(8, 128), "int8").items()}, INT8),
        r"contains int8 \[8, 128\], its layer has int8 \[8, 64\]",
    ),
}


def with_blob(folder_store: FolderStore, data: bytes, **layer: Any) -> ModelWeights:
    maker = Maker(folder_store)
    for name, array in MATRICES.items():
        if name == NAME:
            maker.add(name, data, **({"dtype": "int8", "shape": (8, 64)} | layer))
        else:
            maker.quantized(name, array, "int8")
    for name, array in VECTORS.items():
        maker.plain(name, array)
    return opened(maker)


@pytest.mark.parametrize(("data", "message"), BAD.values(), ids=BAD.keys())
def test_bad_blobs_load_nothing(folder_store: FolderStore, data: bytes, message: str) -> None:
    weights, net = with_blob(folder_store, data), Net()
    before = {
        name: np.array(value) for name, value in (("fc", net.fc.weight), ("t", net.table.weight))
    }
    for load in (lambda: weights.apply(net), weights.load, lambda: weights.read_numpy(NAME)):
        with pytest.raises(FormatError, match=message) as caught:
            load()
        assert caught.value.exit_code == 5
        assert str(caught.value).count(NAME) == 1 or "scale" in str(caught.value)
    assert (np.array(net.fc.weight) == before["fc"]).all()
    assert (np.array(net.table.weight) == before["t"]).all()


@pytest.mark.parametrize(
    "layer",
    [
        {"dtype": "BF16"},
        {"shape": (64, 8)},
        {"dtype": "U32", "shape": (8, 64)},
    ],
)
def test_layers_that_promise_something_else(
    folder_store: FolderStore, layer: dict[str, Any]
) -> None:
    weights = with_blob(folder_store, blob(GOOD, INT8), **layer)
    with pytest.raises(FormatError, match="its layer has"):
        weights.apply(Net())


def test_layers_that_promise_codes(folder_store: FolderStore) -> None:
    """ollama's way: U32, and the shape that the codes have."""
    for layer in ({"dtype": "U32", "shape": (8, 16)}, {"dtype": None, "shape": (8, 16)}):
        weights = with_blob(folder_store, blob(GOOD, INT8), **layer)
        np.testing.assert_array_equal(weights.read_numpy(NAME), judge(MATRICES[NAME], "int8"))


def test_a_tensor_more_is_refused_whatever_the_layer_says(folder_store: FolderStore) -> None:
    for name, key in ((NAME, NAME), (NAME, f"net/{NAME}"), (NAME, "data"), ("top", "top")):
        data = blob({key: bits(mx.ones((2, 2))), "other": bits(mx.ones((2,)))})
        for promise in (("F32", (2, 2)), (None, None)):
            maker = Maker(folder_store)
            maker.add(name, data, *promise)
            with pytest.raises(FormatError, match=r"also contains|of another group"):
                opened(maker).load()


def test_errors_name_the_layer_once(folder_store: FolderStore) -> None:
    weights = with_blob(folder_store, blob(GOOD, INT8), dtype="int4")
    message = rf"^net/{NAME}: the blob contains int8 \[8, 64\], its layer has int4 \[8, 64\]$"
    with pytest.raises(FormatError, match=message):
        weights.read_numpy(NAME)
    weights = with_blob(folder_store, blob({"x": bits(mx.ones((2,)))}))
    with pytest.raises(FormatError, match=rf"^net/{NAME}: the blob contains x instead$"):
        weights.read_numpy(NAME)


def test_blob_of_another_size_than_its_layer_is_refused(folder_store: FolderStore) -> None:
    weights = with_blob(folder_store, blob(GOOD, INT8))
    (path,) = (
        path for path in folder_store.root.iterdir() if path.read_bytes() == blob(GOOD, INT8)
    )
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(FormatError, match=r"has \d+ bytes, expected \d+"):
        weights.apply(Net())


@pytest.mark.parametrize("length", [64, 4088, 5000])
def test_a_header_of_any_length(folder_store: FolderStore, length: int) -> None:
    """The short way reads and refuses the same blobs as the long way."""
    text = b'{"w":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}'.ljust(length)
    whole = length.to_bytes(8, "little") + text + bytes(8)
    lying = (length + 1).to_bytes(8, "little") + whole[8:]
    beyond = (length + 17).to_bytes(8, "little") + whole[8:]
    for data in (whole, whole + b"x", whole[:-1], whole[:-9], whole[:7], b"", lying, beyond):
        layer = Layer(folder_store.add(mediatype.AIMAGE_SAFETENSORS, data), "net/w")
        try:
            expected = read_header(io.BytesIO(data), len(data))
        except FormatError as error:
            with pytest.raises(FormatError, match=re.escape(f"net/w: {error}")):
                WeightBlob.read(folder_store, layer)
        else:
            assert data is whole
            assert WeightBlob.read(folder_store, layer).header == expected


def test_headers_come_before_weights(
    folder_store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bad blob is the last one; nothing has been asked of MLX when it is found."""
    maker = made(folder_store, "int8", "combined")
    maker.add("model.last.weight", b"hello", "F32", (1,))
    monkeypatch.setattr(mx, "load", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(FormatError, match=r"net/model\.last\.weight: truncated"):
        opened(maker).load()


class Strange(Network):
    """Layers that no codes can be put into."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = Conv2d(8, 8, 64, bias=False)
        self.norm = RMSNorm(64)
        self.norm.weight = mx.ones((4, 64))
        self.token = mx.zeros((4, 64))

    @staticmethod
    def sanitize(name: str) -> str:
        return name


@pytest.mark.parametrize(
    ("wrong", "kind", "keep"),
    [
        ("conv.weight", "Conv2d", True),
        ("norm.weight", "RMSNorm", False),
        ("token", "Strange", True),
    ],
)
def test_layers_that_cannot_take_codes(
    folder_store: FolderStore, wrong: str, kind: str, keep: bool
) -> None:
    shapes = {"conv.weight": (8, 8, 64, 64), "norm.weight": (4, 64), "token": (4, 64)}
    maker = Maker(folder_store)
    for name, shape in shapes.items():
        if name == wrong:
            maker.quantized(name, values(*shape), "int8")
        else:
            maker.plain(name, values(*shape))
    with pytest.raises(FormatError, match=f"{wrong}: {kind} does not support int8 weights"):
        opened(maker).apply(Strange(), keep_quantized=keep)


def test_a_configuration_that_is_wrong_about_the_blobs(folder_store: FolderStore) -> None:
    """The blob's own word counts; where it has none, the shapes must fit the configuration."""
    maker = made(folder_store, "int8", "combined")
    maker.config["quantization"] = {"group_size": 32, "bits": 4}
    assert opened(maker).get_quantization(NAME) == Quantization.parse("int8", 64)
    maker = made(folder_store, "int8", "layers of mlx")
    maker.config["quantization"]["group_size"] = 32
    with pytest.raises(FormatError, match="groups of 32"):
        opened(maker).read_numpy(NAME)
    maker.config = {}
    with pytest.raises(FormatError, match="has scales, but no quant_type"):
        opened(maker).read_numpy(NAME)


def test_mlx_may_say_how_one_module_is_quantized(folder_store: FolderStore) -> None:
    maker = Maker(folder_store)
    maker.quantized("one.weight", values(4, 64), "int4", "layers of mlx")
    maker.quantized("two.weight", values(4, 64), "int8", "layers of mlx", 32)
    maker.config["quantization"] = {
        "group_size": 64,
        "bits": 4,
        "two": {"group_size": 32, "bits": 8},
    }
    weights = opened(maker)
    assert weights.get_quantization("one.weight") == Quantization.parse("int4", 64)
    assert weights.get_quantization("two.weight") == Quantization.parse("int8", 32)
    np.testing.assert_array_equal(
        weights.read_numpy("two.weight"), judge(values(4, 64), "int8", 32)
    )


@pytest.mark.parametrize(("size", "mode"), [(32, "affine"), (64, "nvfp4")])
def test_mlx_may_say_no_more_than_the_bits_of_a_module(
    folder_store: FolderStore, size: int, mode: str
) -> None:
    """The shapes say the rest; what has no mode is affine, whatever the others are."""
    maker = Maker(folder_store)
    maker.quantized("one.weight", values(4, 64), "int4" if mode == "affine" else mode, "mlx keys")
    maker.quantized("two.weight", values(4, 128), "int8", "layers of mlx", size)
    how = {"group_size": 64, "bits": 4} if mode == "affine" else {"group_size": 16, "bits": 4}
    maker.config["quantization"] = how | {"mode": mode, "two": {"bits": 8}}
    weights = opened(maker)
    assert weights.get_quantization("two.weight") == Quantization.parse("int8", size)
    expected = judge(values(4, 128), "int8", size)
    np.testing.assert_array_equal(weights.read_numpy("two.weight"), expected)


def test_other_makers_scales_beside_floats(folder_store: FolderStore) -> None:
    """As compressed-tensors has them: 8-bit floats, and a scale in a layer of its own."""
    maker = Maker(folder_store)
    maker.add("x.weight", blob({"x.weight": ("F8_E4M3", (2, 4), bytes(8))}), "F8_E4M3", (2, 4))
    maker.plain("x.weight_scale", mx.ones((2, 1)))
    with pytest.raises(FormatError, match="must be U32, not F8_E4M3"):
        opened(maker).read_numpy("x.weight")


@pytest.mark.parametrize(
    ("name", "promised"), [("x.scales", ("F32", (2, 64))), ("x.weight_scale", ())]
)
def test_floats_are_not_codes_whatever_stands_beside_them(
    folder_store: FolderStore, name: str, promised: tuple[Any, ...]
) -> None:
    maker = Maker(folder_store)
    maker.add("x.weight", blob({"x.weight": bits(mx.ones((2, 64)))}), *promised)
    maker.plain(name, 2 * mx.ones((2, 1)))
    weights = opened(maker)
    assert set(weights.keys()) == {"x.weight", name}
    assert weights.get_quantization("x.weight") is None
    assert (weights.read_numpy("x.weight") == 1).all()
    assert (weights.read_numpy(name) == 2).all()
    weights.load()


def test_codes_with_scales_of_their_own_take_no_others(folder_store: FolderStore) -> None:
    maker = made(folder_store, "int8", "combined")
    maker.plain("model.fc.scales", mx.zeros((8, 1)))
    weights = opened(maker)
    assert "model.fc.scales" in weights
    np.testing.assert_array_equal(weights.read_numpy(NAME), judge(MATRICES[NAME], "int8"))


def test_a_broken_blob_of_codes_spoils_no_other(folder_store: FolderStore) -> None:
    maker = made(folder_store, "int8", "layers of the first generation")
    whole = maker.aimage()
    (layer,) = (layer for layer in whole.layers if layer.name == f"net/{NAME}")
    folder_store.find_path(layer.descriptor).write_bytes(b"hello")
    weights = ModelWeights.open(folder_store, whole, "net")
    assert weights.get_shape("norm.weight") == (64,)
    with pytest.raises(FormatError, match=rf"net/{NAME}"):
        weights.read_numpy(NAME)


def test_nothing_is_kept_of_a_load_that_breaks_off(folder_store: FolderStore) -> None:
    """Headers are read on the way: the first tensors were there already."""
    maker = Maker(folder_store)
    for index in range(40):
        maker.plain(f"{index}", mx.ones((4,)))
    whole = maker.aimage()
    folder_store.find_path(maker.layers[-1].descriptor).write_bytes(b"hello")
    weights = ModelWeights.open(folder_store, whole, "net")
    with pytest.raises(FormatError, match="net/39"):
        weights.load()
    assert weights._loaded == {}


def test_groups_that_are_not_what_they_claim(folder_store: FolderStore) -> None:
    one = bits(mx.ones((2, 2)))
    for parts, message in (
        ({"a.experts.0.w": one, "b.experts.0.w": one}, "of another group"),
        ({"a.experts.0.w": one, "net/a.experts.0.w": one}, "of another group"),
        ({}, "no tensors"),
    ):
        maker = Maker(folder_store)
        maker.add("a.experts", blob(parts))
        with pytest.raises(FormatError, match=message):
            opened(maker).keys()
    maker = Maker(folder_store)
    maker.add("mlp.fc", blob({"mlp.fcx.w": one}))
    with pytest.raises(FormatError, match=r"contains mlp\.fcx\.w instead"):
        opened(maker).keys()
    maker = Maker(folder_store)
    maker.add("experts", blob({"experts.0.w": one, "experts.1.w": one}), "F32", (2, 2))
    with pytest.raises(NotFoundError, match=r"tensor net/experts\.0\.w not found"):
        opened(maker).read_numpy("experts.0.w")
    maker = Maker(folder_store)
    maker.add("experts", blob({"experts.0.w": one}))
    maker.plain("experts.0.w", mx.ones((2, 2)))
    with pytest.raises(FormatError, match=r"duplicate tensor name: experts\.0\.w"):
        opened(maker).load()


def test_unknown_tensor_names_are_not_found(folder_store: FolderStore) -> None:
    weights = opened(made(folder_store, "int8", "layers of the first generation"))
    for name in ("model.fc.weight_scale", "model.fc", "model.up.weight", ""):
        with pytest.raises(NotFoundError, match=r"tensor net/.* not found"):
            weights.get_quantization(name)
    with pytest.raises(FormatError, match="is not quantized: it is F32"):
        weights.read_parts("norm.weight")
