"""Manifests of other tools are read as far as they are valid."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clowder_aimage.dialect import DIALECTS, READABLE, AImage, Layer, detect
from clowder_aimage.dialect.vendor import read_count
from clowder_aimage.document.schema import validate
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.oci import Descriptor, Digest, Manifest, mediatype
from tests.vectors.vector import raw, value

VECTORS = {
    "ollama-gguf": "ollama",
    "modelpack": "modelpack",
    "docker-model": "docker",
    "kitops": "kitops",
}
FILEPATH = "org.cncf.model.filepath"
SUBJECT = Descriptor(mediatype.OCI_MANIFEST, Digest.of(b"base"), 4)
EMPTY = b'{"schemaVersion":1,"components":{}}'


def changed(vector: str, change: Callable[[Any], object]) -> Manifest:
    """Return a vector's manifest with a change."""
    document = value(vector)
    change(document)
    return Manifest.build(document)


def read_vendor(manifest: Manifest, config: bytes = b"{}") -> AImage:
    return detect(manifest).read(manifest, config)


def names(aimage: AImage) -> list[str]:
    return [layer.name for layer in aimage.layers]


def made(media_type: str, *layers: tuple[str, str], artifact: str = "") -> Manifest:
    """Return a manifest with a config of that type and layers of these types and paths."""
    rows = [
        Descriptor(kind, Digest.of(b"%d" % n), n, {FILEPATH: path} if path else {}).to_json()
        for n, (kind, path) in enumerate(layers)
    ]
    config = Descriptor(media_type, Digest.of(b"{}"), 2).to_json()
    document = {"schemaVersion": 2, "config": config, "layers": rows}
    return Manifest.build(document | ({"artifactType": artifact} if artifact else {}))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def spoilt(draw: st.DrawFn, vector: str) -> bytes:
    """Draw a vector's config in which one value, anywhere, is another."""
    root = value(f"{vector}-config")
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, item in list(items):
            places.append((node, key))
            if isinstance(item, dict | list):
                walk(item)

    walk(root)
    node, key = draw(st.sampled_from(places))
    node[key] = draw(json_values)
    return json.dumps(root).encode()


@pytest.mark.parametrize("vector", VECTORS)
@settings(max_examples=40)
@given(st.data())
def test_a_config_with_a_wrong_value_is_read_without_it(vector: str, data: st.DataObject) -> None:
    config = data.draw(spoilt(vector) | json_values.map(lambda one: json.dumps(one).encode()))
    try:
        aimage = read_vendor(Manifest.parse(raw(vector)), config)
    except FormatError as error:  # only a path can be so wrong that nothing is read
        assert vector == "kitops"
        assert "invalid layer name" in error.message or "duplicate layer" in error.message
        return
    validate("aimage-config", aimage.properties)
    assert len(aimage.layers) == len(value(vector)["layers"])


@pytest.mark.parametrize("vector", VECTORS)
def test_a_config_that_is_not_an_object_is_read_as_empty(vector: str) -> None:
    for config in (b"", b"[]", b"[" * 9999, b'{"a":1,"a":1}'):
        aimage = read_vendor(Manifest.parse(raw(vector)), config)
        validate("aimage-config", aimage.properties)
        assert "name" not in aimage.properties
        assert len(set(names(aimage))) == len(value(vector)["layers"])


@pytest.mark.parametrize("name", ["\ud800", "a\x1b[2J", "x" * 1025, " ", 1])
def test_a_name_that_cannot_be_printed_is_left_out(name: str | int) -> None:
    config = value("modelpack-config")
    config["descriptor"] |= {"name": name, "title": name}
    aimage = read_vendor(Manifest.parse(raw("modelpack")), json.dumps(config).encode())
    assert "name" not in aimage.properties
    assert aimage.properties["family"] == "heron"


@pytest.mark.parametrize("vector", VECTORS)
def test_the_subject_is_passed_on(vector: str) -> None:
    def add(document: Any) -> None:
        document["subject"] = SUBJECT.to_json()

    aimage = read_vendor(changed(vector, add))
    assert aimage.subject == SUBJECT
    assert DIALECTS["modelpack"].write(aimage)[0].subject == SUBJECT


@pytest.mark.parametrize("name", ["docker", "kitops"])
def test_read_only_dialects_refuse_to_write(name: str) -> None:
    with pytest.raises(UsageError, match="can only be read"):
        READABLE[name].write(AImage(EMPTY, ()))
    assert name not in DIALECTS


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        ("cncf.model.config.v1", "cncf.model.weight.v1.raw"),
        ("docker.ai.model.config.v0.2", "docker.ai.gguf.v3"),
    ],
)
@pytest.mark.parametrize("path", ["a/../../x", "/x"])
def test_a_path_that_climbs_is_refused(config: str, layer: str, path: str) -> None:
    manifest = made(f"application/vnd.{config}+json", (f"application/vnd.{layer}", path))
    with pytest.raises(FormatError, match="invalid layer name"):
        read_vendor(manifest)


def test_a_kitfile_that_climbs_is_refused() -> None:
    config = value("kitops-config")
    config["docs"][0]["path"] = "../x"
    with pytest.raises(FormatError, match="invalid layer name"):
        read_vendor(Manifest.parse(raw("kitops")), json.dumps(config).encode())


def test_a_path_twice_is_refused() -> None:
    layers = [("application/vnd.cncf.model.weight.v1.raw", path) for path in ("a", "./a")]
    with pytest.raises(FormatError, match="duplicate layer name: 'a'"):
        read_vendor(made("application/vnd.cncf.model.config.v1+json", *layers))


def test_read_count() -> None:
    cases: list[tuple[object, int | None]] = [
        ("8B", 8 * 10**9),
        ("361.82 M", 361_820_000),
        ("1.0t", 10**12),
        ("0.5k", 500),
        ("2q", 2 * 10**15),
        ("7241732096", 7241732096),
        (" 8b ", 8 * 10**9),
        (8, 8),
        ("", None),
        ("8x7B", None),
        ("1.5", None),
        ("-1B", None),
        ("1e9", None),
        ("8 GB", None),
        ("٨B", None),
        ("9" * 99, None),
        (-1, None),
        (True, None),
        (1.5, None),
        (None, None),
    ]
    assert [read_count(text) for text, _ in cases] == [count for _, count in cases]


def test_files_of_a_modelpack_by_their_names() -> None:
    weight, config = (
        "application/vnd.cncf.model.weight.v1",
        "application/vnd.cncf.model.weight.config",
    )
    aimage = read_vendor(
        made(
            "application/vnd.cncf.model.config.v1+json",
            (f"{weight}.raw", "./m.GGUF"),
            (f"{weight}.raw", "text_encoder/model.safetensors"),
            (f"{weight}.raw", "adapter_model.safetensors"),
            (f"{weight}.raw", "net.onnx"),
            (f"{weight}.raw", "pytorch_model.bin"),
            (f"{weight}.gguf", "blob"),
            (f"{config}.v1.raw", "model.safetensors.index.json"),
            (f"{config}.v1.raw", "tokenizer.model"),
            (f"{weight}.raw", "."),
            ("application/x-other", "notes.json"),
        )
    )
    assert [(one.name, one.descriptor.media_type) for one in aimage.layers] == [
        ("m.GGUF", mediatype.AIMAGE_GGUF),
        ("text_encoder/model.safetensors", mediatype.AIMAGE_TRANSFORMERS),
        ("adapter_model.safetensors", mediatype.AIMAGE_LORA),
        ("net.onnx", mediatype.AIMAGE_ONNX),
        ("pytorch_model.bin", f"{weight}.raw"),
        ("blob", mediatype.AIMAGE_GGUF),
        ("model.safetensors.index.json", mediatype.AIMAGE_TRANSFORMERS),
        ("tokenizer.model", mediatype.AIMAGE_FILE),
        ("weight.8", f"{weight}.raw"),
        ("notes.json", "application/x-other"),
    ]


def test_a_modelpack_from_before_the_cncf_is_read() -> None:
    layers = [(f"application/vnd.cnai.model.weight.v1{form}", "m.gguf") for form in ("", ".tar")]
    manifest = made(
        "application/vnd.cnai.model.config.v1+json",
        *layers,
        artifact="application/vnd.cnai.model.manifest.v1+json",
    )
    aimage = read_vendor(manifest)
    assert detect(manifest).name == "modelpack"
    assert names(aimage) == ["m.gguf", "m.gguf.tar"]
    assert aimage.get_layer("m.gguf").descriptor.media_type == mediatype.AIMAGE_GGUF


def test_several_licenses_are_not_made_one() -> None:
    config = value("modelpack-config")
    config["descriptor"]["licenses"] = ["MIT", "Apache-2.0"]
    aimage = read_vendor(Manifest.parse(raw("modelpack")), json.dumps(config).encode())
    assert "license" not in aimage.properties


def test_pieces_and_paths_of_docker_model_runner() -> None:
    docker = "application/vnd.docker.ai."
    split = made(f"{docker}model.config.v0.1+json", *[(f"{docker}safetensors", "")] * 2)
    assert names(read_vendor(split)) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    nested = made(
        f"{docker}model.config.v0.2+json",
        (f"{docker}safetensors", "vae/model.safetensors"),
        (f"{docker}safetensors", "lora/adapter_model.safetensors"),
        (f"{docker}model.file", "vae/config.json"),
        (f"{docker}model.file", "other/m.gguf"),
        (f"{docker}model.file", ""),
        (f"{docker}dir.tar", "tokenizer"),
        (f"{docker}vllm.config.tar", ""),
    )
    assert [(one.name, one.descriptor.media_type) for one in read_vendor(nested).layers] == [
        ("vae/model.safetensors", mediatype.AIMAGE_TRANSFORMERS),
        ("lora/adapter_model.safetensors", mediatype.AIMAGE_LORA),
        ("vae/config.json", mediatype.AIMAGE_FILE),
        ("other/m.gguf", mediatype.AIMAGE_GGUF),
        ("file.4", mediatype.AIMAGE_FILE),
        ("tokenizer.tar", f"{docker}dir.tar"),
        ("config.tar", f"{docker}vllm.config.tar"),
    ]


@pytest.mark.parametrize(
    ("paths", "wanted"),
    [
        (("model.gguf", ""), ["model.gguf", "model-2.gguf"]),
        (("", "model.gguf"), ["model-2.gguf", "model.gguf"]),
        (("model.gguf", "model-2.gguf", ""), ["model.gguf", "model-2.gguf", "model-3.gguf"]),
        (("model.gguf/part", ""), ["model.gguf/part", "model-2.gguf"]),
    ],
    ids=str,
)
def test_names_that_are_made_up_go_around_paths(paths: tuple[str, ...], wanted: list[str]) -> None:
    kind = "application/vnd.docker.ai.gguf.v3"
    layers = [(kind, path) for path in paths]
    config = "application/vnd.docker.ai.model.config.v0.2+json"
    assert names(read_vendor(made(config, *layers))) == wanted


def test_the_licences_of_a_model_go_around_a_directory_of_licences() -> None:
    docker = "application/vnd.docker.ai."
    layers = [
        (f"{docker}license", ""),
        (f"{docker}license", ""),
        (f"{docker}model.file", "LICENSE/x"),
    ]
    found = read_vendor(made(f"{docker}model.config.v0.2+json", *layers))
    assert len(set(names(found))) == 3
    assert "LICENSE" not in names(found)
    assert names(found)[2] == "LICENSE/x"


@pytest.mark.parametrize(("title", "is_taken"), [("a", True), ("a/b/c", True), ("a/c", False)])
def test_a_title_that_collides_with_a_directory_is_not_used(title: str, is_taken: bool) -> None:
    first = Layer(Descriptor("application/vnd.x.ep", Digest.of(b"1"), 1), "a/b")
    other = Layer(Descriptor("application/vnd.x.ep", Digest.of(b"2"), 1), "z")
    manifest, config = DIALECTS["clowder"].write(AImage(EMPTY, (first, other)))
    document = json.loads(manifest.raw)
    document["layers"][1]["annotations"] = {"org.opencontainers.image.title": title}
    found = names(read_vendor(Manifest.build(document), config))
    assert found == ["a/b", "ep.1" if is_taken else title]


def test_the_config_of_dockers_specification_is_read() -> None:
    config = {
        "config": {
            "format": "gguf",
            "format_version": "3",
            "gguf": {"architecture": "llama", "parameter_count": "1.10 B", "quantization": "Q4_0"},
            "size": "635992801",
        },
        "descriptor": {"createdAt": "2025-01-01T00:00:00Z"},
    }
    found = read_vendor(Manifest.parse(raw("docker-model")), json.dumps(config).encode()).properties
    assert {key: found[key] for key in found.keys() - {"size", "components"}} == {
        "schemaVersion": 1,
        "format": "gguf",
        "formatVersion": "3",
        "architecture": "llama",
        "parameters": 1_100_000_000,
        "quantization": "Q4_0",
        "created": "2025-01-01T00:00:00Z",
    }


def test_layers_of_an_older_kitfile_are_matched_by_order() -> None:
    config = value("kitops-config")
    config["model"] |= {"parts": [{"path": "a"}, {"path": "b"}], "path": "./model/"}
    del config["model"]["digest"]
    config["datasets"] = [{"path": "s3://bucket/data", "digest": ""}, {"path": "local.csv"}]
    kit = "application/vnd.kitops.modelkit."
    manifest = made(
        f"{kit}config.v1+json",
        (f"{kit}modelpart.v1.tar", ""),
        (f"{kit}model.v1.tar", ""),
        (f"{kit}modelpart.v1.tar", ""),
        (f"{kit}dataset.v1.tar", ""),
        (f"{kit}dataset.v1.tar", ""),
    )
    found = names(read_vendor(manifest, json.dumps(config).encode()))
    assert found == ["a.tar", "model.tar", "b.tar", "local.csv.tar", "dataset.4"]


def test_parts_and_unknown_layers_of_an_ollama_model() -> None:
    ollama = "application/vnd.ollama.image."
    layers = [f"{ollama}model", f"{ollama}model", f"{ollama}adapter", f"{ollama}adapter"]
    manifest = made(mediatype.DOCKER_CONFIG, *((kind, "") for kind in [*layers, f"{ollama}new"]))
    aimage = read_vendor(manifest)
    assert names(aimage) == [
        "model-00001-of-00002.gguf",
        "model-00002-of-00002.gguf",
        "adapter.gguf",
        "adapter-2.gguf",
        "new.4",
    ]
    assert aimage.layers[4].descriptor.media_type == f"{ollama}new"


def test_a_container_image_is_not_taken_for_a_neighbour() -> None:
    manifest = Manifest.parse(raw("docker-manifest"))
    assert detect(manifest).name == "container"


LAYERS = (
    Layer(Descriptor(mediatype.AIMAGE_FILE, Digest.of(b"1"), 1), "LICENSE"),
    Layer(Descriptor(mediatype.AIMAGE_FILE, Digest.of(b"2"), 2), "docs/card.md"),
    Layer(Descriptor(mediatype.AIMAGE_FILE, Digest.of(b"3"), 3), "modeling.py"),
    Layer(Descriptor(mediatype.AIMAGE_FILE, Digest.of(b"4"), 4), "tokenizer.json"),
    Layer(Descriptor(mediatype.AIMAGE_GGUF, Digest.of(b"5"), 5), "m.gguf"),
    Layer(Descriptor(f"{mediatype.AIMAGE_GGUF}+zstd", Digest.of(b"6"), 6), "n.gguf"),
    Layer(Descriptor(mediatype.AIMAGE_SAFETENSORS, Digest.of(b"7"), 7), "transformer/layers.0.w"),
    Layer(
        Descriptor(mediatype.AIMAGE_TRANSFORMERS, Digest.of(b"8"), 8), "x.safetensors.index.json"
    ),
    Layer(Descriptor("application/vnd.clowder.aimage.ep.layer.v1", Digest.of(b"9"), 9), "ep.8"),
    Layer(Descriptor("application/vnd.cncf.model.doc.v1.tar", Digest.of(b"0"), 0), "more.tar"),
)


def test_files_are_put_where_a_modelpack_has_them() -> None:
    manifest, _ = DIALECTS["modelpack"].write(AImage(EMPTY, LAYERS))
    prefix = "application/vnd.cncf.model."
    assert [
        (layer.media_type.removeprefix(prefix), layer.annotations[FILEPATH])
        for layer in manifest.layers
    ] == [
        ("doc.v1.raw", "LICENSE"),
        ("doc.v1.raw", "docs/card.md"),
        ("code.v1.raw", "modeling.py"),
        ("weight.config.v1.raw", "tokenizer.json"),
        ("weight.v1.raw", "m.gguf"),
        ("weight.v1.raw", "n.gguf.zst"),
        ("weight.v1.raw", "transformer/layers.0.w.safetensors"),
        ("weight.config.v1.raw", "x.safetensors.index.json"),
        ("weight.config.v1.raw", "ep.8"),
        ("doc.v1.tar", "more"),
    ]


# What modelpack/model-spec's schema/config-schema.json (11571da63d78) has; it takes nothing else.
ALLOWED = {
    "descriptor": {"createdAt", "family", "name", "sourceURL", "licenses"},
    "modelfs": {"type", "diffIds"},
    "config": {"architecture", "format", "paramSize", "precision", "quantization"},
}


def written(**properties: object) -> Any:
    """Return the ModelPack config of an AImage whose config has these properties."""
    said = json.dumps({"schemaVersion": 1, "components": {}, **properties}).encode()
    return json.loads(DIALECTS["modelpack"].write(AImage(said, LAYERS[4:5]))[1])


def test_a_modelpack_config_repeats_the_aimage_config() -> None:
    found = written(
        created="2026-01-31T12:00:00Z",
        family="z-image",
        name="Heron",
        source="https://example.com/heron",
        license="MIT",
        architecture="heron",
        format="transformers",
        parameters=6_738_415_616,
        dtype="F16",
        quantization="Q4_K_M",
        unknown=[1],
    )
    assert {key: found[key].keys() for key in found} == ALLOWED
    assert found == {
        "descriptor": {
            "createdAt": "2026-01-31T12:00:00Z",
            "family": "z-image",
            "name": "Heron",
            "sourceURL": "https://example.com/heron",
            "licenses": ["MIT"],
        },
        "modelfs": {"type": "layers", "diffIds": [str(LAYERS[4].descriptor.digest)]},
        "config": {
            "architecture": "heron",
            "format": "safetensors",
            "paramSize": "6.7B",
            "precision": "fp16",
            "quantization": "Q4_K_M",
        },
    }


def test_a_modelpack_config_leaves_out_unknown_values() -> None:
    odd = {"name": 1, "license": [], "parameters": "8B", "created": "", "source": "team/heron"}
    assert written(**odd) | {"modelfs": None} == {"descriptor": {}, "modelfs": None, "config": {}}


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (8_030_261_248, "8B"),
        (361_821_120, "361.8M"),
        (999_960_000, "1B"),
        (1500, "1.5K"),
        (3, None),
    ],
)
def test_the_size_of_a_modelpack(count: int, text: str | None) -> None:
    assert written(parameters=count)["config"].get("paramSize") == text


def test_a_modelpack_has_a_layer() -> None:
    with pytest.raises(FormatError, match="at least one layer"):
        DIALECTS["modelpack"].write(AImage(EMPTY, ()))


def test_a_written_modelpack_is_read_without_annotations() -> None:
    """Another tool may have dropped them: what the standard says is enough to go on."""
    manifest, config = DIALECTS["modelpack"].write(AImage(EMPTY, LAYERS))
    document = json.loads(manifest.raw)
    del document["annotations"]
    for layer in document["layers"]:
        layer["annotations"] = {FILEPATH: layer["annotations"][FILEPATH]}
    aimage = read_vendor(Manifest.build(document), config)
    assert [layer.descriptor.digest for layer in aimage.layers] == [
        layer.descriptor.digest for layer in LAYERS
    ]
    assert "transformer/layers.0.w.safetensors" in names(aimage)
    validate("aimage-config", aimage.properties)


def test_a_generated_name_is_unique() -> None:
    ep = Layer(Descriptor("application/vnd.clowder.aimage.ep.layer.v1", Digest.of(b"1"), 1), "ep.1")
    other = replace(ep, name="ep.x")
    manifest, config = DIALECTS["clowder"].write(AImage(EMPTY, (ep, other)))
    document = json.loads(manifest.raw)
    for title in ("ep.1", "../x", "", None):
        document["layers"][1]["annotations"] = (
            {} if title is None else {"org.opencontainers.image.title": title}
        )
        assert names(read_vendor(Manifest.build(document), config)) == ["ep.1", "ep.1-2"]
