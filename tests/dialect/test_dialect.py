"""The ways to write the same AImage down."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clowder_aimage.dialect import (
    DEFAULT,
    DIALECTS,
    FALLBACK_ORDER,
    READABLE,
    AImage,
    Layer,
    detect,
)
from clowder_aimage.dialect.aimage import check_name, parse_dtype, parse_shape
from clowder_aimage.errors import FormatError, NotFoundError
from clowder_aimage.oci import Descriptor, Digest, Manifest, mediatype

A, B = "a" * 64, "b" * 64
CONFIG = '{"schemaVersion":1,"components":{"vae":{}},"license":"mit","x-größe":[1.50]}'.encode()
TENSOR = Layer(
    Descriptor(mediatype.AIMAGE_SAFETENSORS, Digest("sha256", A), 76), "vae/w", "BF16", (2, 0)
)
FILE = Layer(Descriptor(mediatype.AIMAGE_FILE, Digest("sha256", B), 9), "vae/config.json")
AIMAGE = AImage(CONFIG, (FILE, TENSOR))
CONTAINER_CONFIG = (
    '{"architecture":"unknown","os":"unknown","config":{},"rootfs":{"type":"layers","diff_ids":['
    f'"sha256:{B}","sha256:{A}"]}},"vnd.clowder.aimage.config":'
    + json.dumps(CONFIG.decode(), ensure_ascii=False)
    + ',"vnd.clowder.aimage.layers":[{"mediaType":'
    '"application/vnd.clowder.aimage.model.file.layer.v1",'
    f'"digest":"sha256:{B}","size":9,"name":"vae/config.json"}},{{"mediaType":'
    '"application/vnd.clowder.aimage.model.safetensors.layer.v1",'
    f'"digest":"sha256:{A}","size":76,"name":"vae/w","dtype":"BF16","shape":[2,0]}}]}}'
).encode()
OLLAMA_CONFIG = (
    '{"model_format":"safetensors","model_family":"","capabilities":["image"],'
    '"vnd.clowder.aimage.config":' + json.dumps(CONFIG.decode(), ensure_ascii=False) + "}"
).encode()
MODELPACK_CONFIG = (
    '{"descriptor":{"licenses":["mit"]},"modelfs":{"type":"layers","diffIds":['
    f'"sha256:{B}","sha256:{A}"]}},"config":{{"format":"safetensors"}}}}'
).encode()


def clowder(media_type: str) -> str:
    return (
        f'{{"schemaVersion":2,"mediaType":"{media_type}",'
        '"artifactType":"application/vnd.clowder.aimage.manifest.v1+json",'
        '"config":{"mediaType":"application/vnd.clowder.aimage.config.v1+json",'
        f'"digest":"{Digest.of(CONFIG)}","size":{len(CONFIG)}}},'
        '"layers":[{"mediaType":"application/vnd.clowder.aimage.model.file.layer.v1",'
        f'"digest":"sha256:{B}","size":9,'
        '"annotations":{"vnd.clowder.aimage.name":"vae/config.json"}},'
        '{"mediaType":"application/vnd.clowder.aimage.model.safetensors.layer.v1",'
        f'"digest":"sha256:{A}","size":76,"annotations":{{"vnd.clowder.aimage.name":"vae/w",'
        '"vnd.clowder.aimage.dtype":"BF16","vnd.clowder.aimage.shape":"[2,0]"}}],'
        '"annotations":{"org.opencontainers.image.licenses":"mit"}}'
    )


# Digests of published AImages hang on these bytes: they may never change.
PINNED = {
    "clowder": (clowder("application/vnd.oci.image.manifest.v1+json"), CONFIG),
    "custom": (clowder("application/vnd.clowder.aimage.manifest.v1+json"), CONFIG),
    "ollama": (
        '{"schemaVersion":2,"mediaType":"application/vnd.docker.distribution.manifest.v2+json",'
        '"config":{"mediaType":"application/vnd.docker.container.image.v1+json",'
        f'"digest":"{Digest.of(OLLAMA_CONFIG)}","size":{len(OLLAMA_CONFIG)}}},'
        '"layers":[{"mediaType":"application/vnd.ollama.image.json",'
        f'"digest":"sha256:{B}","size":9,"name":"vae/config.json"}},'
        '{"mediaType":"application/vnd.ollama.image.tensor",'
        f'"digest":"sha256:{A}","size":76,"name":"vae/w","dtype":"BF16","shape":[2,0]}}]}}',
        OLLAMA_CONFIG,
    ),
    "container": (
        '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json",'
        '"config":{"mediaType":"application/vnd.oci.image.config.v1+json",'
        f'"digest":"{Digest.of(CONTAINER_CONFIG)}","size":{len(CONTAINER_CONFIG)}}},'
        '"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar",'
        f'"digest":"sha256:{B}","size":9,'
        '"annotations":{"vnd.clowder.aimage.name":"vae/config.json",'
        '"vnd.clowder.aimage.mediatype":"application/vnd.clowder.aimage.model.file.layer.v1"}},'
        '{"mediaType":"application/vnd.oci.image.layer.v1.tar",'
        f'"digest":"sha256:{A}","size":76,"annotations":{{"vnd.clowder.aimage.name":"vae/w",'
        '"vnd.clowder.aimage.dtype":"BF16","vnd.clowder.aimage.shape":"[2,0]",'
        '"vnd.clowder.aimage.mediatype":'
        '"application/vnd.clowder.aimage.model.safetensors.layer.v1"}}]}',
        CONTAINER_CONFIG,
    ),
    "modelpack": (
        '{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json",'
        '"artifactType":"application/vnd.cncf.model.manifest.v1+json",'
        '"config":{"mediaType":"application/vnd.cncf.model.config.v1+json",'
        f'"digest":"{Digest.of(MODELPACK_CONFIG)}","size":{len(MODELPACK_CONFIG)}}},'
        '"layers":[{"mediaType":"application/vnd.cncf.model.weight.config.v1.raw",'
        f'"digest":"sha256:{B}","size":9,'
        '"annotations":{"org.cncf.model.filepath":"vae/config.json",'
        '"vnd.clowder.aimage.name":"vae/config.json",'
        '"vnd.clowder.aimage.mediatype":"application/vnd.clowder.aimage.model.file.layer.v1"}},'
        '{"mediaType":"application/vnd.cncf.model.weight.v1.raw",'
        f'"digest":"sha256:{A}","size":76,'
        '"annotations":{"org.cncf.model.filepath":"vae/w.safetensors",'
        '"vnd.clowder.aimage.name":"vae/w","vnd.clowder.aimage.dtype":"BF16",'
        '"vnd.clowder.aimage.shape":"[2,0]","vnd.clowder.aimage.mediatype":'
        '"application/vnd.clowder.aimage.model.safetensors.layer.v1"}}],'
        '"annotations":{"org.opencontainers.image.licenses":"mit","vnd.clowder.aimage.config":'
        + json.dumps(CONFIG.decode(), ensure_ascii=False)
        + "}}",
        MODELPACK_CONFIG,
    ),
}


def test_the_pins_are_of_all_dialects() -> None:
    assert set(PINNED) == set(DIALECTS)
    assert list(DIALECTS) == ["custom", "clowder", "ollama", "container", "modelpack"]
    assert DEFAULT == "clowder"
    assert all(name == dialect.name for name, dialect in READABLE.items())


def test_the_ladder_has_the_dialects_that_may_replace_each_other() -> None:
    assert FALLBACK_ORDER == ("custom", "clowder", "ollama", "container")
    assert set(READABLE) == {*DIALECTS, "docker", "kitops"}
    assert list(READABLE)[-1] == "container"  # looks like many others: asked last


@pytest.mark.parametrize("name", DIALECTS)
def test_the_bytes_are_pinned(name: str) -> None:
    manifest, config = DIALECTS[name].write(AIMAGE)
    expected, expected_config = PINNED[name]
    assert manifest.raw.decode() == expected
    assert config == expected_config
    assert manifest.config.digest == Digest.of(config)


names = st.lists(
    st.text(
        st.characters(categories=["L", "N", "P"], include_characters=" ", exclude_characters="/\\"),
        min_size=1,
    )
    .filter(lambda part: part not in (".", ".."))
    .map(lambda part: part[:20]),
    min_size=1,
    max_size=3,
).map("/".join)
digests = st.binary(max_size=8).map(Digest.of) | st.binary(max_size=2).map(
    lambda data: Digest.of(data, "sha512")
)
plain_layers = st.builds(
    Layer,
    st.builds(
        Descriptor,
        st.sampled_from(
            [
                mediatype.AIMAGE_SAFETENSORS,
                mediatype.AIMAGE_FILE,
                mediatype.AIMAGE_GGUF,
                mediatype.AIMAGE_LORA,
                "application/vnd.ollama.image.license",
                "application/vnd.ollama.image.model",
                "application/vnd.cncf.model.doc.v1.tar",
                "application/vnd.clowder.aimage.ep.layer.v1",
            ]
        ),
        digests,
        st.integers(0, 2**50),
    ),
    names,
    st.none() | st.sampled_from(["BF16", "F32", "U32"]),
    st.none() | st.lists(st.integers(0, 10**6), max_size=4).map(tuple),
)
packed_layers = st.builds(
    lambda suffix, packed, plain, name: Layer(
        Descriptor(f"{mediatype.AIMAGE_GGUF}+{suffix}", packed, 9),
        name,
        content=Descriptor(mediatype.AIMAGE_GGUF, plain, 99),
    ),
    st.sampled_from(mediatype.COMPRESSIONS),
    digests,
    digests,
    names,
)
layers = plain_layers | packed_layers
properties = st.fixed_dictionaries(
    {"schemaVersion": st.just(1), "components": st.just({})},
    optional={
        "license": st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        "created": st.just("2026-01-31T12:00:00Z"),
        "pipeline": st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
        "unknown": st.recursive(st.integers() | st.none(), st.lists, max_leaves=4),
    },
)
aimages = st.builds(
    lambda value, spaced, found, base: AImage(
        json.dumps(value, ensure_ascii=False, indent=1 if spaced else None).encode(),
        tuple(found),
        base,
    ),
    properties,
    st.booleans(),
    st.lists(layers, min_size=1, max_size=5, unique_by=lambda layer: layer.name),
    st.none() | st.builds(Descriptor, st.just(mediatype.OCI_MANIFEST), digests, st.just(1)),
)


@given(aimages, st.sampled_from(sorted(DIALECTS)))
def test_write_then_read_gives_the_same_aimage(aimage: AImage, name: Any) -> None:
    manifest, config = DIALECTS[name].write(aimage)
    assert detect(manifest) is DIALECTS[name]
    assert DIALECTS[name].read(manifest, config) == aimage
    again, again_config = DIALECTS[name].write(DIALECTS[name].read(manifest, config))
    assert (again.raw, again_config) == (manifest.raw, config)


@settings(max_examples=40)
@given(aimages, st.permutations(sorted(DIALECTS)))
def test_any_way_through_the_dialects_ends_at_the_digest_of_create(
    aimage: AImage, way: list[Any]
) -> None:
    created, created_config = DIALECTS["clowder"].write(aimage)
    manifest, config = created, created_config
    for name in [*way, "clowder"]:
        manifest, config = DIALECTS[name].write(detect(manifest).read(manifest, config))
        blobs = [layer.digest for layer in manifest.layers]
        assert blobs == [layer.descriptor.digest for layer in aimage.layers]
    assert (manifest.digest, config) == (created.digest, created_config)


def test_oci_annotations_repeat_the_config() -> None:
    def annotations(**fields: object) -> object:
        config = json.dumps({"schemaVersion": 1, "components": {}, **fields}).encode()
        manifest, _ = DIALECTS["clowder"].write(AImage(config, (TENSOR,)))
        return json.loads(manifest.raw).get("annotations")

    assert annotations() is None
    assert annotations(license="") is None
    assert annotations(license=["mit"]) is None
    assert annotations(created="2026-01-31T12:00:00Z", license="mit") == {
        "org.opencontainers.image.created": "2026-01-31T12:00:00Z",
        "org.opencontainers.image.licenses": "mit",
    }


CLIMBING = [
    *("", "..", "../x", "a/../x", "a/..", ".", "./x", "/x", "a//x", "a/", "a\\..\\x", "C:\\x"),
    *("a\nb", "a\0", "\x1b[2J", "a\x7f", "\ud800", "x" * 1025),
    *(
        "README\u202egnp.md",
        "a\x9b2J",
        "a\u2028b",
        "a\u200bb",
    ),  # C1, direction, separators
]


def refuses(name: str) -> bool:
    try:
        check_name(name)
    except FormatError:
        return True
    return False


def test_check_name_refuses_paths_that_climb() -> None:
    assert [name for name in CLIMBING if not refuses(name)] == []
    unusual = ["a", "a b/ü 重.json", "a..b", "...", "x" * 1024, "-", "a:b"]
    assert [name for name in unusual if refuses(name)] == []


@pytest.mark.parametrize("dialect", DIALECTS)
def test_read_refuses_a_name_that_climbs(dialect: str) -> None:
    manifest, config = DIALECTS[dialect].write(AIMAGE)
    raw, config = (data.replace(b'"vae/w"', b'"../x"') for data in (manifest.raw, config))
    with pytest.raises(FormatError, match="invalid layer name"):
        DIALECTS[dialect].read(Manifest.parse(raw), config)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_name_twice_is_refused(dialect: str) -> None:
    twice = AImage(CONFIG, (TENSOR, replace(FILE, name=TENSOR.name)))
    manifest, config = DIALECTS[dialect].write(twice)
    with pytest.raises(FormatError, match="duplicate layer name"):
        DIALECTS[dialect].read(manifest, config)


@pytest.mark.parametrize(
    "value",
    ["[1", "[1.5]", "[true]", "null", "[" * 9999, [-1]],
    ids=lambda value: repr(value)[:20],
)
def test_parse_shape_refuses(value: str | list[int]) -> None:
    with pytest.raises(FormatError, match="invalid shape"):
        parse_shape(value)


def test_shapes_and_dtypes() -> None:
    assert parse_shape("[]") == parse_shape([]) == ()
    assert parse_shape("[2, 0]") == parse_shape([2, 0]) == (2, 0)
    assert parse_shape(None) is None
    assert parse_dtype("BF16") == "BF16"
    assert parse_dtype(None) is None
    with pytest.raises(FormatError):
        parse_dtype(16)


@pytest.mark.parametrize("field", ["name", "dtype", "shape"])
def test_ollama_fields_of_odd_types_are_refused(field: str) -> None:
    manifest, config = DIALECTS["ollama"].write(AIMAGE)
    document = json.loads(manifest.raw)
    document["layers"][1][field] = {"a": 1}
    with pytest.raises(FormatError):
        DIALECTS["ollama"].read(Manifest.build(document), config)


@pytest.mark.parametrize("config", [b"", b"[]", b"{}", b'{"vnd.clowder.aimage.config":1}'])
def test_a_genuine_ollama_config_carries_nothing(config: bytes) -> None:
    manifest, _ = DIALECTS["ollama"].write(AIMAGE)
    aimage = DIALECTS["ollama"].read(manifest, config)
    assert aimage.layers == AIMAGE.layers
    assert aimage.properties == {"schemaVersion": 1, "components": {"vae": {}}}


def test_a_carried_config_that_is_not_text_is_refused() -> None:
    manifest, _ = DIALECTS["ollama"].write(AIMAGE)
    with pytest.raises(FormatError, match="not Unicode"):
        DIALECTS["ollama"].read(manifest, b'{"vnd.clowder.aimage.config":"\\ud800"}')


@pytest.mark.parametrize("config", [b"\xff\xfe{}", b"[]", b"[" * 100_000])
def test_a_broken_aimage_config_is_our_error(config: bytes) -> None:
    aimage = AImage(config, (TENSOR,))
    with pytest.raises(FormatError, match="AImage config"):
        _ = aimage.properties
    for name in ("clowder", "custom", "ollama", "modelpack"):
        with pytest.raises(FormatError, match="AImage config"):
            DIALECTS[name].write(aimage)


def test_a_config_that_is_not_utf8_cannot_travel_in_another() -> None:
    with pytest.raises(FormatError, match="not UTF-8"):
        DIALECTS["container"].write(AImage(b"\xff", (TENSOR,)))


def test_a_gguf_model_in_ollamas_dialect_is_found_again() -> None:
    """It has no layer that ollama has a word for; the names of all its layers tell."""
    gguf = Layer(replace(TENSOR.descriptor, media_type=mediatype.AIMAGE_GGUF), "model.gguf")
    manifest, config = DIALECTS["ollama"].write(AImage(CONFIG, (gguf,)))
    assert detect(manifest).read(manifest, config) == AImage(CONFIG, (gguf,))


def recompressed(strip: bool) -> tuple[Manifest, bytes, dict[str, bytes]]:
    """Return the container dialect with compressed layers without their annotations."""
    blobs = {"vae/config.json": b"{}", "vae/w": b"not really a tensor"}
    found = tuple(
        replace(layer, descriptor=Descriptor.of(layer.descriptor.media_type, blobs[layer.name]))
        for layer in AIMAGE.layers
    )
    manifest, config = DIALECTS["container"].write(AImage(CONFIG, found))
    document = json.loads(manifest.raw)
    for layer, plain in zip(document["layers"], found, strict=True):
        packed = gzip.compress(blobs[plain.name], mtime=0)
        layer |= Descriptor.of(mediatype.OCI_LAYER_TAR_GZIP, packed).to_json()
        if strip:
            del layer["annotations"]
    return Manifest.build(document), config, blobs


@pytest.mark.parametrize("strip", [True, False])
def test_a_recompressed_container_is_read_by_its_diff_ids(strip: bool) -> None:
    manifest, config, blobs = recompressed(strip)
    aimage = DIALECTS["container"].read(manifest, config)
    assert [(layer.name, layer.descriptor.digest) for layer in aimage.layers] == [
        (name, Digest.of(data)) for name, data in blobs.items()
    ]
    assert [layer.descriptor.size for layer in aimage.layers] == [2, 19]
    assert aimage.get_layer("vae/w").is_tensor
    assert aimage.config == CONFIG


def test_a_container_without_the_table_is_read_by_its_annotations() -> None:
    manifest, config = DIALECTS["container"].write(AIMAGE)
    value = json.loads(config)
    del value["vnd.clowder.aimage.layers"]
    assert DIALECTS["container"].read(manifest, json.dumps(value).encode()) == AIMAGE


@pytest.mark.parametrize(
    "change",
    [
        {"rootfs": None},
        {"rootfs": {"diff_ids": None}},
        {"rootfs": {"diff_ids": [f"sha256:{B}"]}},
        {"rootfs": {"diff_ids": [f"sha256:{A}", f"sha256:{B}"]}},
        {"rootfs": {"diff_ids": [f"sha256:{B}", "sha256:../../x"]}},
        {"vnd.clowder.aimage.layers": {}},
        {"vnd.clowder.aimage.layers": [1, 2]},
    ],
    ids=str,
)
def test_a_container_config_that_contradicts_its_layers_is_refused(change: dict[str, Any]) -> None:
    manifest, config = DIALECTS["container"].write(AIMAGE)
    with pytest.raises(FormatError):
        DIALECTS["container"].read(manifest, json.dumps(json.loads(config) | change).encode())


@pytest.mark.parametrize("config", [b"", b"[]", b"[" * 100_000])
def test_a_container_config_without_an_object_is_refused(config: bytes) -> None:
    manifest, _ = DIALECTS["container"].write(AIMAGE)
    with pytest.raises(FormatError, match=r"no rootfs\.diff_ids"):
        DIALECTS["container"].read(manifest, config)


def test_a_plain_container_image_is_not_an_aimage() -> None:
    manifest = Manifest.build(
        {
            "schemaVersion": 2,
            "config": Descriptor(mediatype.OCI_CONFIG, Digest("sha256", A), 1).to_json(),
            "layers": [Descriptor(mediatype.OCI_LAYER_TAR_GZIP, Digest("sha256", B), 1).to_json()],
        }
    )
    config = json.dumps({"rootfs": {"diff_ids": [f"sha256:{B}"]}}).encode()
    with pytest.raises(FormatError, match="container image, not an AImage"):
        detect(manifest).read(manifest, config)


def test_layers_are_found_by_name_and_component() -> None:
    top = Layer(FILE.descriptor, "model_index.json")
    aimage = AImage(CONFIG, (top, FILE, TENSOR))
    assert aimage.get_layer("vae/w") is TENSOR
    assert aimage.list_layers("vae") == (FILE, TENSOR)
    assert aimage.list_layers("") == (top,)
    with pytest.raises(NotFoundError, match="vae/x not found"):
        aimage.get_layer("vae/x")
