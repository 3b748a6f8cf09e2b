"""Convert an AImage to another one; unchanged tensors keep their blobs."""

from __future__ import annotations

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.content import build_bytes_body
from clowder_aimage.create import convert
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.document.schema import validate
from clowder_aimage.errors import FormatError, ModelError, NotFoundError, UsageError
from clowder_aimage.importer import PackedModel, Provenance, Recipe
from clowder_aimage.importer.range_reader import RangeReader
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.tensor import encode_header
from tests.importer.test_importer_prequantized import CONFIGS, REST, compressed, mlx
from tests.importer.test_importer_quantize import parts, quantized_by_mlx
from tests.importer.valued import (
    ValuedModel,
    as_dtype,
    bf16_values,
    blob_of,
    file_of,
    make_valued,
    read_back,
    transformer,
)

PLAIN, NEW = Reference.parse("plain"), Reference.parse("new")
Q = "transformer/layers.0.attention.to_q.weight"


@pytest.fixture
def model(tmp_path: Path) -> ValuedModel:
    return make_valued(tmp_path / "model")


def converted(model: ValuedModel, source: Reference = PLAIN, **recipe: Any) -> PackedModel:
    return convert(ImageLayout(model.store), source, NEW, Recipe.parse(**recipe))


def names(store: Path) -> list[Any]:
    return sorted(name for name, _ in ImageLayout(store).list_tags())


# -- the same as create


@pytest.mark.parametrize(
    ("dialect", "recipe"),
    list(
        zip(
            DIALECTS,
            [
                {"quantize": "int8"},
                {"quantize": "transformer=int4,text_encoder=mxfp8", "group_size": 32},
                {"quantize": "nvfp4"},
                {"dtype": "f32"},
                {"dtype": "f16", "quantize": "int4"},
            ],
            strict=True,
        )
    ),
    ids=str,
)
def test_convert_gives_the_same_blobs_as_create(
    model: ValuedModel, dialect: Any, recipe: Any
) -> None:
    from clowder_aimage.create import create

    store = ImageLayout(model.store)
    given = Provenance("mit", "https://example.com", "2026-01-31T12:00:00Z")
    create(store, PLAIN, model.directory, dialect=dialect, provenance=given)
    made = converted(model, **recipe)
    wanted = create(
        store,
        Reference.parse("wanted"),
        model.directory,
        dialect=dialect,
        provenance=given,
        recipe=Recipe.parse(**recipe),
    )
    assert made.descriptor == wanted.descriptor
    assert made.report == wanted.report
    assert all(written.existed for written in wanted.layers)


def test_a_sha512_aimage_keeps_its_algorithm(model: ValuedModel) -> None:
    from clowder_aimage.create import create

    create(ImageLayout(model.store), PLAIN, model.directory, algorithm="sha512")
    made = converted(model, quantize="int8")
    assert {layer.descriptor.digest.algorithm for layer in made.aimage.layers} == {"sha512"}


def test_bf16_to_f32_and_auto_round_trip(model: ValuedModel) -> None:
    """BF16 as F32, which auto reverses."""
    plain = model.make("plain")
    converted(model, dtype="f32")
    again = convert(
        ImageLayout(model.store), NEW, Reference.parse("back"), Recipe.parse(dtype="auto")
    )
    assert again.descriptor == plain.descriptor
    assert all(written.existed for written in again.layers)


def test_the_times_of_blobs_do_not_matter(
    model: ValuedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A FUSE that writes behind sets them later."""
    model.make("plain")
    end = RangeReader.check_unchanged

    def change(self: RangeReader) -> None:
        os.utime(self._range.path, ns=(1, 1))
        end(self)

    monkeypatch.setattr(RangeReader, "check_unchanged", change)
    assert converted(model, dtype="f32").descriptor.size


def test_unchanged_tensors_keep_their_blobs(model: ValuedModel) -> None:
    plain = {layer.name: layer for layer in model.make("plain").aimage.layers}
    made = converted(model, quantize="int8")
    for written in made.layers:
        is_same = written.layer == plain[written.layer.name]
        assert is_same == written.existed == (written.layer.dtype != "int8")


def test_components_can_be_quantized_in_succession(model: ValuedModel) -> None:
    """First the transformer, then the text encoder; the config keeps the former fields."""
    model.make("plain", quantize="int4")
    made = converted(model, quantize="text_encoder=int8", dtype="f16")
    found = made.aimage.properties["components"]
    wanted = model.make("other", quantize="transformer=int4,text_encoder=int8")
    expected = wanted.aimage.properties["components"]
    for name in ("transformer", "text_encoder"):
        assert found[name]["quantization"] == expected[name]["quantization"]
    assert made.report.quantized.keys() == {"text_encoder", "transformer"}


def test_quantized_tensors_are_copied_unchanged(tmp_path: Path) -> None:
    """Prequantized tensors and nvfp4 scales, while the other tensors are cast."""
    tensors = compressed(struct.pack("<f", 3.0)) | REST
    model = make_valued(tmp_path / "model", transformer=tensors)
    plain = model.make("plain")
    made = converted(model, dtype="f32")
    assert made.aimage.get_layer(Q) == plain.aimage.get_layer(Q)
    assert made.aimage.get_layer("transformer/layers.0.norm.weight").dtype == "F32"


def test_unknown_fields_of_a_config_are_kept(model: ValuedModel) -> None:
    made = model.make("plain")
    store = ImageLayout(model.store)
    value = json.loads(made.aimage.config)
    value["x-mine"] = [1.5]
    value["components"]["transformer"]["x-theirs"] = {"a": None}
    keep(store, PLAIN, replace(made.aimage, config=json.dumps(value).encode()))
    config = converted(model, quantize="int8").aimage.properties
    assert config["x-mine"] == [1.5]
    assert config["components"]["transformer"]["x-theirs"] == {"a": None}
    assert config["components"]["transformer"]["dtype"] == "int8"


# -- models without components


LANGUAGE_Q = "model.layers.1.self_attn.q_proj.weight"
MATRICES = [
    *(f"self_attn.{letter}_proj.weight" for letter in "qkvo"),
    *(f"mlp.{word}_proj.weight" for word in ("gate", "up", "down")),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small language model as saved by transformers."""
    directory = tmp_path_factory.mktemp("saved") / "model"
    directory.mkdir()
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{layer}.{name}": (64, 64) for layer in range(2) for name in MATRICES
    }
    shapes |= {"model.embed_tokens.weight": (64, 64), "model.norm.weight": (64,)}
    values = {name: bf16_values(name, shape) for name, shape in shapes.items()}
    (directory / "model.safetensors").write_bytes(file_of(as_dtype(values, "F32")))
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def whole(store: ImageLayout, reference: Reference = NEW) -> tuple[AImage, ModelWeights]:
    aimage = read_aimage(store, reference).aimage
    return aimage, ModelWeights.open(store, aimage)


@pytest.mark.parametrize("recipe", [{"dtype": "f16", "quantize": "int4"}], ids=str)
def test_converting_a_language_model_equals_create(
    tmp_path: Path, saved: Path, recipe: Any
) -> None:
    from clowder_aimage.create import create

    store = ImageLayout(tmp_path / "store")
    create(store, PLAIN, saved)
    made = convert(store, PLAIN, NEW, Recipe.parse(**recipe))
    direct = create(store, Reference.parse("direct"), saved, recipe=Recipe.parse(**recipe))
    assert direct.descriptor == made.descriptor
    assert direct.report == made.report
    assert all(written.existed for written in direct.layers)


def test_a_quantized_language_model_declares_it_at_the_top_level(
    tmp_path: Path, saved: Path
) -> None:
    from clowder_aimage.create import create

    store = ImageLayout(tmp_path / "store")
    create(store, PLAIN, saved)
    made = convert(store, PLAIN, NEW, Recipe.parse(quantize="int8"))
    (_, before), (aimage, after) = whole(store, PLAIN), whole(store)
    validate("aimage-config", aimage.properties)
    assert aimage.properties["quantization"] == "int8"
    assert aimage.properties["dtype"] == "int8"
    assert aimage.properties["components"] == {}
    assert made.report.quantized[""]["tensors"] == 14  # seven matrices in each of two layers
    assert aimage.get_layer(LANGUAGE_Q).dtype == "int8"
    off = after.read_numpy(LANGUAGE_Q) - before.read_numpy(LANGUAGE_Q)
    assert 0 < np.linalg.norm(off) < 0.01 * np.linalg.norm(before.read_numpy(LANGUAGE_Q))
    kept = "model.embed_tokens.weight"
    np.testing.assert_array_equal(after.read_numpy(kept), before.read_numpy(kept))
    with pytest.raises(UsageError, match="of the model are already quantized"):
        convert(store, NEW, Reference.parse("twice"), Recipe.parse(quantize="int4"))


# -- AImages of other tools


def keep(
    store: ImageLayout, reference: Reference, aimage: AImage, dialect: str = "clowder"
) -> None:
    """Tag an AImage whose layers are already stored."""
    manifest, config = DIALECTS[dialect].write(aimage)
    store.push(manifest.config, build_bytes_body(config))
    store.push(manifest.descriptor, build_bytes_body(manifest.raw), reference)


def put(
    store: ImageLayout,
    name: str,
    header: bytes,
    data: bytes,
    dtype: Any = None,
    shape: Any = None,
) -> Layer:
    raw = header + data
    content = Descriptor.of(mediatype.AIMAGE_SAFETENSORS, raw)
    store.push(content, build_bytes_body(raw))
    return Layer(content, name, dtype, shape)


VALUES = bf16_values("theirs", (64, 64))
BITS = (VALUES.view(np.uint32) >> 16).astype("<u2").tobytes()


@pytest.mark.parametrize("key", ["data", Q, "layers.0.attention.to_q.weight"])
def test_any_name_that_a_blob_may_have_is_read(tmp_path: Path, key: str) -> None:
    model = make_valued(tmp_path / "model")
    store = ImageLayout(model.store)
    layer = put(store, Q, encode_header([(key, "BF16", (64, 64))]), BITS, "BF16", (64, 64))
    keep(store, PLAIN, AImage(b'{"schemaVersion":1,"components":{}}', (layer,)), "ollama")
    made = converted(model, quantize="int8")
    plain = as_dtype({Q.partition("/")[2]: VALUES}, "BF16")
    ours = make_valued(tmp_path / "ours" / "model", transformer=plain)
    assert made.aimage.get_layer(Q) == ours.make(quantize="int8").aimage.get_layer(Q)
    component = made.aimage.properties["components"]["transformer"]
    assert component["quantization"]["tensors"] == 1


SEPARATE = {"ollama": ("{name}_scale", "{name}_qbias"), "mlx": ("{stem}.scales", "{stem}.biases")}
AFFINE = {"quantization": {"group_size": 64, "bits": 4}}
SAID = {
    "ollama": ("model_index.json", {"quantization": "int4", "group_size": 64}),
    "no size": ("model_index.json", {"quantization": "q4"}),
    "mlx": ("transformer/config.json", AFFINE),
}


def separate(
    store: ImageLayout,
    words: str,
    said: str | None,
    promised: tuple[str | tuple[int, int], ...] = ("U32", (64, 8)),
) -> AImage:
    """Return a first-generation AImage: codes, scales and biases in separate layers."""
    name = Q.partition("/")[2]
    codes, scales, biases = (data for _, _, data in mlx64())
    put_own = [
        (name, "U32", (64, 8), codes, promised),
        *(
            (word.format(name=name, stem=name.removesuffix(".weight")), "F32", (64, 1), data, ())
            for word, data in zip(SEPARATE[words], (scales, biases), strict=True)
        ),
        ("layers.0.norm.weight", "F32", (64,), bytes(256), ()),
    ]
    layers = [
        put(store, f"transformer/{key}", encode_header([("data", dtype, shape)]), data, *promise)
        for key, dtype, shape, data, promise in put_own
    ]
    if said is not None:
        file, value = SAID[said]
        raw = json.dumps(value).encode()
        content = Descriptor.of(mediatype.AIMAGE_FILE, raw)
        store.push(content, build_bytes_body(raw))
        layers.append(Layer(content, file))
    aimage = AImage(b'{"schemaVersion":1,"components":{}}', tuple(layers))
    keep(store, PLAIN, aimage)
    return aimage


def mlx64() -> list[Any]:
    """Return codes, scales and biases of VALUES in F32."""
    codes, scales, biases = quantized_by_mlx(VALUES, "F32", "int4", None)
    return [("U32", (64, 8), codes), ("F32", (64, 1), scales), ("F32", (64, 1), biases)]


@pytest.mark.parametrize(
    ("words", "said", "promised", "dtype"),
    [
        ("ollama", "ollama", ("int4", (64, 64)), "bf16"),
        ("ollama", "no size", ("int4", (64, 64)), "auto"),
        ("mlx", "mlx", ("int4", (64, 64)), "bf16"),
        ("mlx", None, ("U32", (64, 8)), "bf16"),
        ("ollama", None, (), "bf16"),
    ],
)
def test_scales_in_separate_layers_are_not_cast(
    tmp_path: Path,
    words: str,
    said: str | None,
    promised: tuple[str | tuple[int, int], ...],
    dtype: str,
) -> None:
    model = make_valued(tmp_path / "model")
    aimage = separate(ImageLayout(model.store), words, said, promised)
    made = converted(model, dtype=dtype)
    norm = "transformer/layers.0.norm.weight"
    for layer in aimage.layers:
        if layer.name == norm:
            assert made.aimage.get_layer(norm).dtype == "BF16"
        else:
            assert made.aimage.get_layer(layer.name) == layer
    assert made.report.cast == {("F32", "BF16"): 1}
    assert made.report.tensors == 2
    facts = made.aimage.properties["components"]["transformer"]
    assert facts["tensors"] == 2
    if said is not None:
        assert facts["parameters"] == 64 * 64 + 64
        assert facts["quantization"] == {
            "type": "int4",
            "group_size": 64,
            "tensors": 1,
            "kept": {"as in the source": 1},
        }
    with pytest.raises(UsageError, match="already quantized"):
        converted(model, quantize="int8")


def test_mismatched_scales_in_separate_layers_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_valued(tmp_path / "model")
    for value in (
        {"quantization": "int8", "group_size": 64},
        {"quantization": "int4", "group_size": 32},
        {"quantization": "int5"},
    ):
        monkeypatch.setitem(SAID, "ollama", ("model_index.json", value))
        separate(ImageLayout(model.store), "ollama", "ollama")
        with pytest.raises(FormatError, match=f"{Q}: "):
            converted(model, dtype="bf16")


@pytest.mark.parametrize("said", [None, {"type": "int4", "tensors": 1}], ids=str)
def test_configs_with_incomplete_quantization_are_read(
    tmp_path: Path, said: dict[str, Any] | None
) -> None:
    from clowder_aimage.cli.create.result import encode_result, format_result

    model = make_valued(tmp_path / "model", transformer=mlx("int4") | REST)
    model.write("transformer/config.json", {"quantization": CONFIGS["int4"]})
    made = model.make("plain")
    value = json.loads(made.aimage.config)
    del value["components"]["transformer"]["quantization"]
    if said is not None:
        value["components"]["transformer"]["quantization"] = said
    keep(ImageLayout(model.store), PLAIN, replace(made.aimage, config=json.dumps(value).encode()))
    packed = converted(model, quantize="text_encoder=int8")
    shown = format_result(encode_result(NEW, packed), packed, Recipe())
    assert ("transformer: 1 of 1 tensors are int4" in shown) == (said is not None)
    assert "text_encoder: 1 of 4 tensors are int8" in shown


# -- refusals


def test_an_unknown_aimage_is_refused(model: ValuedModel) -> None:
    model.make("plain")
    with pytest.raises(NotFoundError):
        converted(model, Reference.parse("absent"), quantize="int8")


def test_an_empty_recipe_is_refused(model: ValuedModel) -> None:
    with pytest.raises(UsageError, match="changes nothing"):
        converted(model)


def test_quantizing_twice_is_refused(model: ValuedModel) -> None:
    model.make("plain", quantize="int8")
    with pytest.raises(UsageError, match="transformer are already quantized") as caught:
        converted(model, quantize="int4")
    assert "unquantized model" in str(caught.value.hint)
    assert names(model.store) == ["plain:latest"]


def test_a_value_beyond_the_type_is_refused(tmp_path: Path) -> None:
    values = transformer()
    values["layers.0.attention.to_q.weight"][0, 0] = 1e10
    model = make_valued(tmp_path / "model", transformer=as_dtype(values, "BF16"))
    model.make("plain")
    with pytest.raises(ModelError, match=r"1 value of transformer/layers\.0\.attention\.to_q"):
        converted(model, dtype="f16")
    assert names(model.store) == ["plain:latest"]


def test_a_missing_blob_is_refused(model: ValuedModel) -> None:
    made = model.make("plain")
    store = ImageLayout(model.store)
    store.find_path(made.aimage.get_layer(Q).descriptor).unlink()
    with pytest.raises(NotFoundError):
        converted(model, quantize="int8")


OWN = "layers.0.attention.to_q.weight"
HEADER = encode_header([("layers.0.attention.to_q.weight", "BF16", (64, 64))])
OTHER = encode_header([("layers.0.attention.to_k.weight", "BF16", (64, 64))])


@pytest.mark.parametrize(
    ("header", "data", "dtype", "shape", "said"),
    [
        (OTHER, BITS, None, None, "contains layers.0.attention.to_k.weight instead"),
        (HEADER, BITS, "F32", (64, 64), "its layer has F32"),
        (HEADER, BITS, "BF16", (64, 32), "its layer has BF16"),
        (HEADER, BITS[:-1], None, None, "the file has 8191"),
        (
            encode_header(
                [
                    ("layers.0.attention.to_q.weight", "U32", (64, 8)),
                    (f"{Q[12:]}.scale", "BF16", (64, 1)),
                ],
                {"quant_type": "int5"},
            ),
            bytes(2048 + 128),
            None,
            None,
            "unknown quantization",
        ),
    ],
    ids=["another", "dtype", "shape", "short", "type"],
)
def test_a_blob_that_contradicts_its_layer_is_refused(
    tmp_path: Path,
    header: bytes,
    data: bytes,
    dtype: str | None,
    shape: tuple[int, int] | None,
    said: str,
) -> None:
    model = make_valued(tmp_path / "model")
    store = ImageLayout(model.store)
    layer = put(store, Q, header, data, dtype, shape)
    keep(store, PLAIN, AImage(b'{"schemaVersion":1,"components":{}}', (layer,)))
    with pytest.raises(FormatError, match=said) as caught:
        converted(model, quantize="int8")
    assert Q in caught.value.message
    assert names(model.store) == ["plain:latest"]


def test_a_second_tensor_in_a_blob_is_refused(tmp_path: Path) -> None:
    """Running the model refuses it too."""
    model = make_valued(tmp_path / "model")
    store = ImageLayout(model.store)
    for key in (OWN, Q, "data"):
        header = encode_header([(key, "BF16", (64, 64)), ("extra", "BF16", (64, 64))])
        layer = put(store, Q, header, BITS + BITS)
        keep(store, PLAIN, AImage(b'{"schemaVersion":1,"components":{}}', (layer,)))
        with pytest.raises(FormatError, match="the blob also contains extra"):
            converted(model, dtype="f32")


def group(store: ImageLayout, prefix: str, *names: str, **promise: Any) -> None:
    header = encode_header([(name, "BF16", (64, 64)) for name in names])
    layer = put(store, f"transformer/{prefix}", header, BITS * len(names), **promise)
    keep(store, PLAIN, AImage(b'{"schemaVersion":1,"components":{}}', (layer,)))


def test_stacked_experts_may_stand_beside_their_group(tmp_path: Path) -> None:
    model = make_valued(tmp_path / "model")
    store = ImageLayout(model.store)
    stacked = "layers.1.mlp.switch_mlp.up_proj.weight"
    own = "layers.1.mlp.experts.0.up_proj.weight"
    group(store, "layers.1.mlp.experts", own, f"transformer/{stacked}")
    made = converted(model, quantize="int8")
    raw = blob_of(model.store, made.aimage, "transformer/layers.1.mlp.experts")
    _, found = parts(raw)
    assert [name for name in found if name.endswith("weight")] == [own, stacked]


@pytest.mark.parametrize(
    ("prefix", "names", "promise", "said"),
    [
        ("layers.1.mlp.experts", ["layers.1.mlp.a", "x"], {}, "of another group"),
        ("layers.1.mlp.other", ["layers.1.mlp.switch_mlp.up_proj.weight"], {}, "instead"),
        ("layers.1.mlp.experts", ["layers.1.mlp.experts.0.a"], {"shape": (64, 64)}, "instead"),
    ],
    ids=str,
)
def test_a_group_that_does_not_fit_is_refused(
    tmp_path: Path, prefix: str, names: list[str], promise: dict[str, tuple[int, int]], said: str
) -> None:
    model = make_valued(tmp_path / "model")
    group(ImageLayout(model.store), prefix, *names, **promise)
    with pytest.raises(FormatError, match=said) as caught:
        converted(model, dtype="f32")
    assert caught.value.message.startswith(f"transformer/{prefix}: the blob ")


def test_first_generation_manifests_of_ollama_are_read(model: ValuedModel) -> None:
    """Their configurations are ``.config`` layers, on the same blobs."""
    from clowder_aimage.create import create

    store = ImageLayout(model.store)
    made = create(store, Reference.parse("now"), model.directory, dialect="ollama")
    raw = store.find_path(made.descriptor).read_bytes()
    older = raw.replace(b"vnd.ollama.image.json", b"vnd.ollama.image.config")
    assert older.count(b"image.config") == 9
    store.push(Descriptor.of(made.descriptor.media_type, older), build_bytes_body(older), PLAIN)
    assert read_back(model.store, "plain") == read_back(model.store, "now")
    again = converted(model, quantize="int8")
    direct = converted(model, Reference.parse("now"), quantize="int8")
    assert again.descriptor == direct.descriptor


def test_an_expert_with_a_tensor_named_like_scales_is_converted(tmp_path: Path) -> None:
    model = make_valued(tmp_path / "model")
    own = "layers.1.mlp.experts.0.up_proj.weight"
    group(ImageLayout(model.store), "layers.1.mlp.experts", own, f"{own}.scale")
    with pytest.raises(FormatError, match=r"^transformer/layers\.1\.mlp\.experts: .*\.scale"):
        converted(model, quantize="int8")
    assert names(model.store) == ["plain:latest"]


def test_prequantized_weights_are_the_same_from_create_and_convert(tmp_path: Path) -> None:
    model = make_valued(tmp_path / "model", transformer=mlx("int4") | REST)
    model.write("transformer/config.json", {"quantization": CONFIGS["int4"]})
    model.make("plain")
    made = converted(model, dtype="f32")
    wanted = model.make("wanted", dtype="f32")
    assert made.descriptor == wanted.descriptor
    assert (
        read_back(model.store, "new")
        == read_aimage(ImageLayout(model.store), Reference.parse("wanted")).aimage
    )
