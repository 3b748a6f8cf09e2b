"""Validate written documents with the schemas, and locate one wrong field."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clowder_aimage.content import build_bytes_body
from clowder_aimage.dialect import DIALECTS, AImage, Layer
from clowder_aimage.document.schema import list_names
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype, parse_document
from clowder_aimage.validate import check, detect_schema, validate_layout
from tests.conftest import TINY
from tests.process import Aimage
from tests.vectors.vector import HERE, raw

NAME, SHAPE, DTYPE = mediatype.NAME, mediatype.SHAPE, mediatype.DTYPE
CONTENT_DIGEST, CONTENT_SIZE = mediatype.CONTENT_DIGEST, mediatype.CONTENT_SIZE
CONFIG = {
    "schemaVersion": 1,
    "components": {"vae": {}},
    "license": "mit",
    "created": "2026-01-31T12:00:00Z",
    "adapters": {"style": {"type": "lora", "rank": 4}},
}
SCHEMA_OF = {
    "clowder": "aimage-manifest",
    "custom": "aimage-manifest",
    "ollama": "docker-manifest",
    "container": "oci-manifest",
    "modelpack": "oci-manifest",
}


def descriptor(media_type: str, number: int) -> Descriptor:
    return Descriptor(media_type, Digest("sha256", f"{number:064x}"), number)


LAYERS = (
    Layer(descriptor(mediatype.AIMAGE_LORA, 1), "adapters/style/adapter_model.safetensors"),
    Layer(
        descriptor(f"{mediatype.AIMAGE_GGUF}+zstd", 2),
        "model.gguf",
        content=descriptor(mediatype.AIMAGE_GGUF, 3),
    ),
    Layer(descriptor(mediatype.AIMAGE_SAFETENSORS, 4), "transformer/model.layers.1.mlp.experts"),
    Layer(descriptor(mediatype.AIMAGE_SAFETENSORS, 5), "transformer/scale", "F32", ()),
    Layer(descriptor(mediatype.AIMAGE_SAFETENSORS, 6), "transformer/w", "int8", (64, 128)),
    Layer(descriptor("application/vnd.example.ep.v1", 7), "vae/größe.json"),
    Layer(descriptor(mediatype.AIMAGE_FILE, 8), "vae/config.json"),
)
SUBJECT = descriptor(mediatype.OCI_MANIFEST, 99)


def encoded(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()


def places(value: dict[str, Any], schema: str = "") -> list[Any]:
    return [one.pointer for one in check("it", encoded(value), schema).violations]


# -- writers


def test_every_dialect_that_is_written_has_a_schema() -> None:
    assert set(DIALECTS) == set(SCHEMA_OF)
    assert set(SCHEMA_OF.values()) <= set(list_names())


@pytest.mark.parametrize("name", ["clowder", "custom", "ollama", "container"])
def test_a_written_manifest_is_valid(name: str) -> None:
    for subject in (None, SUBJECT):
        manifest, _ = DIALECTS[name].write(AImage(encoded(CONFIG), LAYERS, subject))
        checked = check("it", manifest.raw)
        assert (checked.schema, checked.violations) == (SCHEMA_OF[name], [])
        assert checked.value.get("subject") == (subject and subject.to_json())


def test_a_written_modelpack_is_valid() -> None:
    files = tuple(
        Layer(descriptor(mediatype.AIMAGE_FILE, n), f"part-{n}.json") for n in range(1, 4)
    )
    manifest, _ = DIALECTS["modelpack"].write(AImage(encoded(CONFIG), files))
    checked = check("it", manifest.raw)
    assert (checked.schema, checked.violations) == ("oci-manifest", [])


@pytest.mark.parametrize("name", ["clowder", "custom"])
def test_the_clowder_dialect_writes_optional_fields(name: str) -> None:
    manifest, _ = DIALECTS[name].write(AImage(encoded(CONFIG), LAYERS))
    assert manifest.artifact_type == mediatype.AIMAGE_MANIFEST
    assert [layer.annotations[NAME] for layer in manifest.layers] == [one.name for one in LAYERS]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Aimage:
    """Return a store with the embedded model: all dialects, quantized, renamed, pinned, partial."""
    home = tmp_path_factory.mktemp("written")
    here = Aimage(home, home / "store")
    for dialect in ("clowder", "ollama", "container"):
        here("create", dialect, TINY, "--dialect", dialect)
    here("create", "custom", TINY, "--manifest-type", "custom")
    here("create", "dated", TINY, "--created", "2026-01-31T12:00:00+01:00", "--license", "mit")
    here("create", "localhost:5000/a__b/c--d:V1.x_y", TINY, "--digest", "sha512")
    here("tag", "clowder", "again:v2")
    here("pin", "again:v2")
    layout = ImageLayout(here.store)
    part = Reference.parse("part")
    layout.tag(layout.resolve(Reference.parse("dated")), part, is_partial=True)
    return here


def test_a_written_store_is_valid(packed: Aimage) -> None:
    documents = validate_layout(packed.store)
    assert [one for one in documents if one.violations or one.note] == []
    assert {one.schema for one in documents} == {
        *("oci-layout", "oci-index", "aimage-config"),
        *("aimage-manifest", "docker-manifest", "oci-manifest"),
    }
    index = json.loads((packed.store / "index.json").read_bytes())
    marks = [entry["annotations"].get(mediatype.PARTIAL) for entry in index["manifests"]]
    assert (len(marks), marks.count("true")) == (8, 1)


def test_quantized_models_are_valid(packed: Aimage) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    packed("create", "small", TINY, "--quantize", "int8", "--store", packed.home / "small")
    assert not any(one.violations for one in validate_layout(packed.home / "small"))
    layout = ImageLayout(packed.home / "small")
    manifest = json.loads(layout.read(layout.resolve(Reference.parse("small"))))
    dtypes = {layer["annotations"].get(DTYPE) for layer in manifest["layers"]}
    assert "int8" in dtypes


def test_an_empty_layout_is_valid(tmp_path: Path) -> None:
    layout = ImageLayout(tmp_path / "store")
    data = b'{"schemaVersion":2,"manifests":[]}'
    content = Descriptor.of(mediatype.OCI_INDEX, data)
    layout.push(content, build_bytes_body(data), Reference.parse("nothing"))
    layout.untag(Reference.parse("nothing"))
    assert json.loads((layout.root / "index.json").read_bytes())["manifests"] == []
    assert [one.violations for one in validate_layout(layout.root)] == [[], []]


# -- the vectors

WRONG = {"oci-unknown-fields": ["/annotations"]}  # null, as Go writes it: read, but not in the spec
OTHERS = {"safetensors-headers", "chat-template-digests"}  # not documents


def test_vectors_are_valid() -> None:
    for name in (path.stem for path in HERE.glob("*.json")):
        value = json.loads(raw(name))
        kind = detect_schema(value)
        assert kind or name.endswith("-config") or name in OTHERS, f"unknown kind: {name}"
        if kind:
            assert places(value) == WRONG.get(name, []), name


# -- one wrong field

GOOD = json.loads(DIALECTS["clowder"].write(AImage(encoded(CONFIG), LAYERS, SUBJECT))[0].raw)
GONE = object()


def changed(document: dict[str, Any], path: tuple[str | int, ...], new: Any) -> dict[str, Any]:
    """Return a copy of ``document`` with another value at ``path``, or without it."""
    value = copy.deepcopy(document)
    *inner, last = path
    target: Any = value
    for key in inner:
        target = target[key]
    if new is GONE:
        del target[last]
    else:
        target[last] = new
    return value


def at(*keys: str) -> tuple[Any, ...]:
    return ("layers", 4, *keys)


WRONG_IN_MANIFEST: list[tuple[tuple[str | int, ...], object, str]] = [
    (("schemaVersion",), 1, "/schemaVersion"),
    (("schemaVersion",), GONE, ""),
    (("mediaType",), "application/json", "/mediaType"),
    (("mediaType",), GONE, ""),
    (("artifactType",), "application/vnd.example", "/artifactType"),
    (("artifactType",), GONE, ""),
    (("config",), GONE, ""),
    (("config",), [], "/config"),
    (("config", "mediaType"), mediatype.OCI_CONFIG, "/config/mediaType"),
    (("config", "digest"), "sha256:123", "/config/digest"),
    (("config", "size"), "9", "/config/size"),
    (("layers",), {}, "/layers"),
    (("layers",), None, "/layers"),
    (("layers",), GONE, ""),
    (at(), "x", "/layers/4"),
    (at("mediaType"), GONE, "/layers/4"),
    (at("mediaType"), "tensor", "/layers/4/mediaType"),
    (at("digest"), GONE, "/layers/4"),
    (at("digest"), "sha256:" + "A" * 64, "/layers/4/digest"),
    (at("digest"), "sha256:" + "a" * 63, "/layers/4/digest"),
    (at("digest"), "sha256:" + "a" * 64 + "\n", "/layers/4/digest"),
    (at("digest"), "sha512:" + "a" * 64, "/layers/4/digest"),
    (at("digest"), "md5:" + "a" * 32, "/layers/4/digest"),
    (at("size"), GONE, "/layers/4"),
    (at("size"), -1, "/layers/4/size"),
    (at("size"), 1.5, "/layers/4/size"),
    (at("size"), 6.0, "/layers/4/size"),
    (at("size"), True, "/layers/4/size"),
    (at("size"), 1 << 63, "/layers/4/size"),
    (at("data"), "e30", "/layers/4/data"),
    (at("data"), "e30=", "/layers/4/data"),  # two bytes, but the size is six
    (at("urls"), "https://example.com", "/layers/4/urls"),
    (at("platform"), {"os": "linux"}, "/layers/4/platform"),
    (at("annotations"), GONE, "/layers/4"),
    (at("annotations"), [], "/layers/4/annotations"),
    (at("annotations", "com.example"), 7, "/layers/4/annotations/com.example"),
    (at("annotations", "a/b~c"), None, "/layers/4/annotations/a~1b~0c"),
    (at("annotations", NAME), GONE, "/layers/4/annotations"),
    (at("annotations", NAME), "../w", f"/layers/4/annotations/{NAME}"),
    (at("annotations", NAME), "w\n", f"/layers/4/annotations/{NAME}"),
    (at("annotations", NAME), "\ud800", f"/layers/4/annotations/{NAME}"),
    (at("annotations", NAME), "vae/config.json", "/layers/6/annotations/" + NAME),
    (at("annotations", DTYPE), "bfloat16", f"/layers/4/annotations/{DTYPE}"),
    (at("annotations", SHAPE), [64, 128], f"/layers/4/annotations/{SHAPE}"),
    (at("annotations", SHAPE), "64x128", f"/layers/4/annotations/{SHAPE}"),
    (at("annotations", SHAPE), "[64,-1]", f"/layers/4/annotations/{SHAPE}"),
    (at("annotations", SHAPE), "[064]", f"/layers/4/annotations/{SHAPE}"),
    (at("annotations", CONTENT_SIZE), "3", "/layers/4/annotations"),
    (at("annotations", mediatype.PARTIAL), "yes", f"/layers/4/annotations/{mediatype.PARTIAL}"),
    (("layers", 1, "annotations", CONTENT_SIZE), GONE, "/layers/1/annotations"),
    (("layers", 1, "annotations", CONTENT_DIGEST), GONE, "/layers/1/annotations"),
    (
        ("layers", 1, "annotations", CONTENT_SIZE),
        "3.0",
        f"/layers/1/annotations/{CONTENT_SIZE}",
    ),
    (
        ("layers", 1, "annotations", CONTENT_DIGEST),
        "sha256:3",
        f"/layers/1/annotations/{CONTENT_DIGEST}",
    ),
    (("layers", 1, "mediaType"), mediatype.AIMAGE_GGUF, "/layers/1/mediaType"),
    (("subject",), "sha256:1", "/subject"),
    (("subject", "size"), -1, "/subject/size"),
    (("annotations", mediatype.LICENSES), 3, f"/annotations/{mediatype.LICENSES}"),
    (("annotations", mediatype.CREATED), "today", f"/annotations/{mediatype.CREATED}"),
    (("Layers",), [], ""),  # another spelling: two parsers would read two documents
    (("manifests",), [], ""),
]


def test_a_wrong_field_of_a_manifest_is_found() -> None:
    assert places(GOOD, "aimage-manifest") == []
    found = [
        places(changed(GOOD, path, new), "aimage-manifest") for path, new, _ in WRONG_IN_MANIFEST
    ]
    assert found == [[place] for _, _, place in WRONG_IN_MANIFEST]


VALID_CHANGES: list[tuple[tuple[str | int, ...], object]] = [
    (("x-mine",), {"a": [1]}),
    (("config", "x-mine"), None),
    (at("x-mine"), 1.5),
    (at("annotations", "com.example"), ""),
    (at("annotations", "vnd.clowder.aimage.later"), "a newer version's"),
    (at("mediaType"), "application/vnd.example+gzip"),
    (("layers",), []),
    (("subject",), GONE),
    (("annotations",), GONE),
    (("subject", "platform"), {"os": "linux", "architecture": "arm64", "x-mine": 1}),
]


def test_unknown_and_optional_fields_are_valid() -> None:
    for path, new in VALID_CHANGES:
        assert places(changed(GOOD, path, new)) == [], path


OLLAMA = json.loads(raw("ollama-second"))
INDEX = {
    "schemaVersion": 2,
    "mediaType": mediatype.OCI_INDEX,
    "manifests": [
        descriptor(mediatype.OCI_MANIFEST, 5).to_json()
        | {"annotations": {mediatype.REF_NAME: "a:v1", mediatype.PARTIAL: "true"}}
    ],
}


WRONG_IN_INDEX: list[tuple[tuple[str | int, ...], object, str]] = [
    (("schemaVersion",), "2", "/schemaVersion"),
    (("mediaType",), mediatype.OCI_MANIFEST, "/mediaType"),
    (("manifests",), GONE, ""),
    (("manifests",), {}, "/manifests"),
    (("manifests", 0, "digest"), "sha256:", "/manifests/0/digest"),
    (("manifests", 0, "artifactType"), "", "/manifests/0/artifactType"),
    (("manifests", 0, "platform"), {"os": 1, "architecture": "a"}, "/manifests/0/platform/os"),
    (
        ("manifests", 0, "annotations", mediatype.REF_NAME),
        1,
        f"/manifests/0/annotations/{mediatype.REF_NAME}",
    ),
    (
        ("manifests", 0, "annotations", mediatype.PARTIAL),
        "false",
        f"/manifests/0/annotations/{mediatype.PARTIAL}",
    ),
    (
        ("manifests", 0, "annotations", mediatype.VARIANT),
        "",
        f"/manifests/0/annotations/{mediatype.VARIANT}",
    ),
]


def test_a_wrong_field_of_an_index_is_found() -> None:
    assert places(INDEX, "oci-index") == []
    found = [places(changed(INDEX, path, new), "oci-index") for path, new, _ in WRONG_IN_INDEX]
    assert found == [[place] for _, _, place in WRONG_IN_INDEX]


ANYTHING = st.sampled_from(
    [None, True, -1, 0, 1.5, 1 << 70, "", "x", "a/b\n", "\ud800", [], [[]], {}, {"": None}, GONE]
)


@settings(deadline=None)
@given(st.data())
def test_check_reports_every_change_that_the_parser_refuses(data: st.DataObject) -> None:
    """A document without violations is accepted by the parser."""
    document = data.draw(st.sampled_from([GOOD, INDEX, OLLAMA, json.loads(raw("oci-index"))]))
    path: tuple[str | int, ...] = ()
    target: Any = document
    while isinstance(target, dict | list) and target and data.draw(st.booleans() | st.just(True)):
        keys = list(target) if isinstance(target, dict) else range(len(target))
        key: Any = data.draw(st.sampled_from(keys))
        path, target = (*path, key), target[key]
    value = changed(document, path, data.draw(ANYTHING)) if path else data.draw(VALUES)
    checked = check("it", encoded(value))
    for one in checked.violations:
        assert one.message and one.line and one.pointer[:1] in ("", "/")
    if checked.schema in SCHEMA_OF.values() or checked.schema == "oci-index":
        assert checked.violations or parse_document(encoded(value))


VALUES: st.SearchStrategy[Any] = st.sampled_from(
    [None, [], {}, "x", 1, {"config": 1, "layers": 2}, {"manifests": {}}]
)


def test_an_empty_config_requires_an_artifact_type() -> None:
    artifact = json.loads(raw("oci-artifact"))
    assert places(artifact) == []
    assert places(changed(artifact, ("artifactType",), GONE)) == [""]
    other = changed(artifact, ("config", "mediaType"), mediatype.OCI_CONFIG)
    assert places(changed(other, ("artifactType",), GONE)) == []


def test_embedded_data_must_match_its_descriptor() -> None:
    artifact = json.loads(raw("oci-artifact"))  # embeds {}, its config
    assert places(changed(artifact, ("config", "data"), "e10=")) == ["/config/data"]
    assert places(changed(artifact, ("config", "data"), "e30K")) == ["/config/data"]


WRONG_IN_OLLAMA: list[tuple[tuple[str | int, ...], object, str]] = [
    (("mediaType",), GONE, ""),
    (("config", "digest"), GONE, "/config"),
    (("layers", 0, "name"), GONE, "/layers/0"),
    (("layers", 0, "name"), "/etc/passwd", "/layers/0/name"),
    (("layers", 0, "shape"), "[1]", "/layers/0/shape"),
    (("layers", 0, "shape"), [1, -1], "/layers/0/shape/1"),
    (("layers", 0, "dtype"), 16, "/layers/0/dtype"),
    (("layers", 0, "content"), {"size": 1}, "/layers/0/content"),
    (("layers", 1, "name"), OLLAMA["layers"][0]["name"], "/layers/1/name"),
]


def test_a_wrong_field_of_ollamas_manifest_is_found() -> None:
    found = [
        places(changed(OLLAMA, path, new), "docker-manifest") for path, new, _ in WRONG_IN_OLLAMA
    ]
    assert found == [[place] for _, _, place in WRONG_IN_OLLAMA]


def test_the_layout_file_is_validated() -> None:
    assert places({"imageLayoutVersion": "1.0.0"}) == []
    assert places({"imageLayoutVersion": "2.0.0"}) == ["/imageLayoutVersion"]


def test_the_user_configuration_is_validated(tmp_path: Path) -> None:
    good = {"registries": {"localhost:5000": {"jobs": 4, "limitRate": "20M"}}}
    assert check("it", encoded(good)).schema == "config"
    assert places(good) == []
    bad = {"registries": {"no host": {}, "a": {"jobs": 0, "mirrors": ["B A D"]}}}
    assert sorted(places(bad)) == [
        "/registries/a/jobs",
        "/registries/a/mirrors/0",
        "/registries/no host",
    ]
