"""Descriptors, manifests and indexes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clowder_aimage.errors import FormatError
from clowder_aimage.oci import (
    MAX_MANIFEST_SIZE,
    Descriptor,
    Digest,
    Index,
    Manifest,
    mediatype,
    parse_document,
)
from clowder_aimage.oci.manifest import encode

DIGEST = str(Digest.of(b""))
ENTRY = {"mediaType": "application/vnd.example", "digest": DIGEST, "size": 0}
MANIFEST: dict[str, Any] = {"schemaVersion": 2, "config": ENTRY, "layers": [ENTRY]}
INDEX: dict[str, Any] = {"schemaVersion": 2, "manifests": [ENTRY]}


def parse(document: object, media_type: str = "") -> Manifest | Index:
    return parse_document(json.dumps(document).encode(), media_type)


@pytest.mark.parametrize("size", [None, "1", -1, 1.0, True, 1 << 51])
def test_a_size_is_a_number_of_bytes(size: str | float | None) -> None:
    with pytest.raises(FormatError, match="size must be a number of bytes"):
        Descriptor.from_json({**ENTRY, "size": size})


@pytest.mark.parametrize("value", [None, []])
def test_a_descriptor_is_an_object(value: list[Any] | None) -> None:
    with pytest.raises(FormatError, match="a descriptor must be an object"):
        Descriptor.from_json(value)


@pytest.mark.parametrize("media_type", [None, 1])
def test_a_media_type_is_a_string(media_type: int | None) -> None:
    with pytest.raises(FormatError, match="mediaType must be a string"):
        Descriptor.from_json({**ENTRY, "mediaType": media_type})


@pytest.mark.parametrize("annotations", [[], "", {"a": 1}])
def test_annotations_map_strings_to_strings(annotations: list[Any] | str | dict[str, int]) -> None:
    with pytest.raises(FormatError, match="annotations must map strings to strings"):
        Descriptor.from_json({**ENTRY, "annotations": annotations})
    with pytest.raises(FormatError, match="annotations must map strings to strings"):
        parse({**MANIFEST, "annotations": annotations})


def test_null_annotations_are_none() -> None:
    assert Descriptor.from_json({**ENTRY, "annotations": None}).annotations == {}
    assert parse({**MANIFEST, "annotations": None}).annotations == {}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


# Keys of descriptors are case-sensitive, and others may not differ by that alone
KNOWN = {"mediatype", "digest", "size", "urls", "annotations", "data", "artifacttype", "platform"}
unknown_keys = st.text().filter(lambda key: key.casefold() not in KNOWN)


@given(
    st.dictionaries(unknown_keys, json_values, max_size=4), st.dictionaries(st.text(), st.text())
)
def test_a_descriptor_keeps_fields_it_does_not_know(
    extra: dict[Any, Any], annotations: dict[Any, Any]
) -> None:
    written = {**extra, **ENTRY, "annotations": annotations}
    again = Descriptor.from_json(written).to_json()
    assert again == (
        written if annotations else {k: v for k, v in written.items() if k != "annotations"}
    )
    assert Descriptor.from_json(again) == Descriptor.from_json(written)


@given(
    st.dictionaries(st.sampled_from(["mediaType", "digest", "size", "annotations"]), json_values)
)
def test_a_descriptor_of_odd_types_is_refused_with_our_error(value: dict[Any, Any]) -> None:
    with pytest.raises(FormatError):
        Descriptor.from_json(value)


def test_the_order_of_a_descriptors_fields_is_fixed() -> None:
    descriptor = Descriptor("a/b", Digest.of(b"x"), 1, {"k": "v"}, {"name": "n"})
    assert list(descriptor.to_json()) == ["mediaType", "digest", "size", "name", "annotations"]
    assert list(Descriptor("", Digest.of(b"x"), 1).to_json()) == ["digest", "size"]


def test_both_layers_and_manifests_are_refused() -> None:
    """CVE-2021-41190: what it is must not depend on who reads it."""
    both = {**MANIFEST, **INDEX}
    for media_type in ("", mediatype.OCI_MANIFEST, mediatype.OCI_INDEX):
        for own in ({}, {"mediaType": media_type} if media_type else {}):
            with pytest.raises(FormatError, match="both layers and manifests"):
                parse({**both, **own}, media_type)
    with pytest.raises(FormatError, match="both layers and manifests"):
        parse({**INDEX, "config": ENTRY})


def test_the_transports_media_type_and_the_documents_own_must_agree() -> None:
    own = {**MANIFEST, "mediaType": mediatype.OCI_MANIFEST}
    for other in (mediatype.OCI_INDEX, mediatype.DOCKER_MANIFEST, "text/html"):
        with pytest.raises(FormatError, match="its media type is"):
            parse(own, other)
    for same in ("", mediatype.OCI_MANIFEST, f"{mediatype.OCI_MANIFEST}; charset=utf-8"):
        assert parse(own, same).media_type == mediatype.OCI_MANIFEST
    for nothing in ("application/json", "application/octet-stream", "application/json;x=y"):
        assert parse(own, nothing).media_type == mediatype.OCI_MANIFEST


def test_without_its_own_word_the_transports_counts_then_the_shape() -> None:
    assert parse(MANIFEST, mediatype.DOCKER_MANIFEST).media_type == mediatype.DOCKER_MANIFEST
    assert parse(MANIFEST).media_type == mediatype.OCI_MANIFEST
    assert parse(INDEX).media_type == mediatype.OCI_INDEX


def test_a_shape_that_contradicts_the_media_type_is_refused() -> None:
    for media_type in (mediatype.OCI_INDEX, mediatype.DOCKER_MANIFEST_LIST):
        with pytest.raises(FormatError):
            parse(MANIFEST, media_type)
        with pytest.raises(FormatError):
            parse({**MANIFEST, "mediaType": media_type})
    for media_type in (mediatype.OCI_MANIFEST, mediatype.AIMAGE_MANIFEST):
        with pytest.raises(FormatError):
            parse(INDEX, media_type)
        with pytest.raises(FormatError):
            parse({**INDEX, "mediaType": media_type})


def test_unknown_kinds_of_manifest_are_refused() -> None:
    for media_type in (
        "application/vnd.docker.distribution.manifest.v1+prettyjws",
        "application/vnd.oci.artifact.manifest.v1+json",
        "application/vnd.oci.image.manifest.v2+json",
    ):
        with pytest.raises(FormatError, match="unsupported manifest media type"):
            parse({**MANIFEST, "mediaType": media_type})


def test_an_index_is_not_a_manifest() -> None:
    with pytest.raises(FormatError, match="is an index, not a manifest"):
        Manifest.parse(json.dumps(INDEX).encode())


def test_null_lists_are_how_go_writes_empty_ones() -> None:
    assert parse({**MANIFEST, "layers": None}).children == (Descriptor.from_json(ENTRY),)
    assert parse({"schemaVersion": 2, "manifests": None}).children == ()


@pytest.mark.parametrize(
    "change",
    [
        {"layers": {}},
        {"layers": [None]},
        {"config": None},
        {"artifactType": None},
        {"mediaType": []},
        {"subject": "x"},
        {"schemaVersion": 1},
        {"schemaVersion": "2"},
        {"schemaVersion": 2.0},
        {"schemaVersion": True},
    ],
    ids=str,
)
def test_odd_types_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        parse({**MANIFEST, **change})


@pytest.mark.parametrize("key", ["schemaVersion", "config", "layers"])
def test_missing_fields_are_refused(key: str) -> None:
    with pytest.raises(FormatError):
        parse({k: v for k, v in MANIFEST.items() if k != key})


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"schemaVersion":' + b"2" * 5000 + b"}"])
def test_parse_document_refuses_bytes_without_a_manifest(raw: bytes) -> None:
    with pytest.raises(FormatError):
        parse_document(raw)


def test_the_size_cap_is_the_registries() -> None:
    body = json.dumps({**MANIFEST, "x": ""}).encode()
    full = body.replace(b'"x": ""', b'"x": "%s"' % (b"y" * (MAX_MANIFEST_SIZE - len(body))))
    assert len(parse_document(full).raw) == MAX_MANIFEST_SIZE
    with pytest.raises(FormatError, match="the limit is 4194304"):
        parse_document(full + b" ")


def test_fields_unknown_to_us_leave_the_bytes_alone() -> None:
    raw = (
        b'{ "zz":[1.50,{}],"schemaVersion":2,"layers":[],"config":%s}\n'
        % json.dumps(ENTRY).encode()
    )
    manifest = Manifest.parse(raw)
    assert manifest.raw == raw
    assert manifest.digest == Digest.of(raw)


def test_build_is_compact_and_in_the_order_given() -> None:
    manifest = Manifest.build({"layers": [], "schemaVersion": 2, "config": ENTRY, "ü": "ß"})
    assert (
        manifest.raw
        == (
            '{"layers":[],"schemaVersion":2,"config":{"mediaType":"application/vnd.example",'
            f'"digest":"{DIGEST}","size":0}},"ü":"ß"}}'
        ).encode()
    )


def test_half_a_surrogate_pair_cannot_be_written() -> None:
    with pytest.raises(FormatError, match="invalid Unicode"):
        encode({"name": "a\udcff"})


@given(json_values)
def test_encode_is_read_back_the_same(value: Any) -> None:
    assert json.loads(encode(value)) == value


@given(st.binary(max_size=200) | st.text().map(str.encode))
def test_arbitrary_bytes_are_refused_with_our_error(raw: Any) -> None:
    with pytest.raises(FormatError):
        parse_document(raw)


@given(st.data())
def test_a_mutated_manifest_parses_or_is_refused_with_our_error(data: st.DataObject) -> None:
    raw = bytearray(json.dumps({**MANIFEST, "mediaType": mediatype.OCI_MANIFEST}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        document = parse_document(bytes(raw))
    except FormatError:
        return
    assert document.raw == bytes(raw)
    assert document.digest == Digest.of(bytes(raw))


_COMPACT = json.dumps(MANIFEST, separators=(",", ":"))
_LAYER = json.dumps(ENTRY, separators=(",", ":"))
_CHANGED = _LAYER.replace('"size":0', '"size":1')


@pytest.mark.parametrize(
    "layers",
    [
        "",
        _LAYER,
        f"{_LAYER},{_CHANGED},{_LAYER}",
        f"{_LAYER} , {_CHANGED}",
        _LAYER.replace("}", ',"annotations":{"a":"},{","b":"}]"}}'),
        # As many separators as layers: one within a string, one with spaces
        _LAYER.replace("}", ',"annotations":{"a":"},{","b":""}}') + f" , {_CHANGED}",
        _LAYER.replace("}", ',"platform":{"os":"linux"}}'),
        _LAYER.replace("}", ',"list":[{"a":1},{"b":2}]}'),
        _LAYER.replace("}", f',"annotations":{{"a":"{"long" * 300}"}}}}'),
        ",".join([_LAYER] * 3000),
    ],
    ids="none one three spaced quoted both nested list long many".split(),
)
@pytest.mark.parametrize("tail", ["", ',"annotations":{"a":"}]"}', ',"x":[{"y":1},{"layers":[]}]'])
def test_layers_of_a_compact_manifest_are_those_of_its_json(layers: str, tail: str) -> None:
    text = _COMPACT.replace(f"[{_LAYER}]", f"[{layers}]")[:-1] + tail + "}"
    manifest = parse_document(text.encode())
    assert isinstance(manifest, Manifest)
    entries = json.loads(text)["layers"]
    assert [layer.to_json() for layer in manifest.layers] == entries
    assert parse_document(json.dumps(json.loads(text), indent=1).encode()).children == (
        manifest.children
    )


@pytest.mark.parametrize(
    "text",
    [
        # The list of another object, or of another key
        _COMPACT.replace('"layers"', '"x":{"layers"')[:-1] + '},"layers":[]}',
        _COMPACT.replace('"layers"', '"x":{"layers"')[:-1] + '},"l\\u0061yers":[]}',
        _COMPACT.replace('"layers"', '"x\\"layers"')[:-1] + ',"layers":[]}',
    ],
)
def test_only_the_layers_of_the_manifest_itself_are_its_layers(text: str) -> None:
    manifest = parse_document(text.encode())
    assert isinstance(manifest, Manifest)
    assert manifest.layers == ()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (f"{_LAYER},{{}}", r"layers\[1\]: size must be"),
        (f"{_LAYER}}},{{{_LAYER}", "not valid JSON"),
        (f"{_LAYER},", "not valid JSON"),
        (_LAYER.replace("}", ',"size":0}'), "duplicate key 'size'"),
        (_LAYER.replace("}", ',"Size":0}'), "invalid key 'Size'"),
        (_LAYER.replace("}", f',"x":{"[" * 99}{"]" * 99}}}'), "nested more than"),
    ],
)
def test_the_error_of_a_layer_is_that_of_the_whole_text(layers: str, message: str) -> None:
    text = _COMPACT.replace(f"[{_LAYER}]", f"[{layers}]")
    for _ in range(2):
        with pytest.raises(FormatError, match=message):
            parse_document(text.encode())


def test_manifests_share_the_values_of_equal_layers() -> None:
    first, second = (
        parse_document(f'{_COMPACT[:-1]},"annotations":{{"a":"{n}"}}}}'.encode()) for n in "12"
    )
    assert first.children[1] is second.children[1]
