"""JSON schemas: one loader for a checkout and a wheel, errors with a JSON path."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import jsonschema
import pytest

import clowder_aimage
from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.document.schema import iter_violations, list_names, load, validate
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import mediatype
from clowder_aimage.tensor.header import DTYPE_BITS
from tests.process import run

SCHEMAS = Path(__file__).parent.parent / "schemas"
FILES = sorted(SCHEMAS.glob("*.schema.json"))
GOOD = {
    "schemaVersion": 1,
    "family": "z-image",
    "components": {"vae": {"class": "AutoencoderKL", "dtype": "BF16", "size": 1}},
}
LORA = {
    "type": "lora",
    "rank": 16,
    "alpha": 8.5,
    "targets": ["to_q"],
    "triggerWords": ["a shape"],
    "weight": 0.8,
    "base": "example/shapes",
}


def places(name: str, document: dict[Any, Any]) -> list[Any]:
    """Return the JSON paths of all violations."""
    return sorted("/".join(map(str, one.path)) for one in iter_violations(name, document))


def subschemas(schema: Any, path: tuple[Any, ...] = ()) -> Iterator[Any]:
    """Return every property's schema and its path."""
    if isinstance(schema, list):
        for item in schema:
            yield from subschemas(item, path)
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in ("properties", "$defs"):
            yield from (((*path, name), one) for name, one in value.items())
            for name, one in value.items():
                yield from subschemas(one, (*path, name))
        elif key not in ("const", "enum", "examples", "default"):
            yield from subschemas(value, path)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_a_schema_is_valid_versioned_listed_and_described(path: Path) -> None:
    schema, name = json.loads(path.read_bytes()), path.name.removesuffix(".schema.json")
    assert schema == load(name)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == f"https://clowder.dev/schemas/{name}.v1.schema.json"
    assert schema["title"] and schema["description"]
    assert f"]({path.name})" in (SCHEMAS / "README.md").read_text("utf-8")
    assert name in list_names()
    found = list(subschemas(schema))
    assert found
    for where, one in found:
        reference = one.get("$ref", "")
        local = schema["$defs"][reference.removeprefix("#/$defs/")] if reference[:1] == "#" else one
        assert one.get("description") or local.get("description"), where
    for pattern in re.findall(r'"pattern": (".*")', path.read_text("utf-8")):
        assert json.loads(pattern).endswith("$")  # others match almost anything


def test_references_between_schemas_need_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **fields: Any) -> NoReturn:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for name in list_names():
        assert list(iter_violations(name, 7))  # no schema describes a bare number
        list(iter_violations(name, {"config": {"digest": ""}, "layers": [{}], "manifests": [{}]}))


def test_the_media_types_in_the_schemas_are_those_of_the_code() -> None:
    known = {value for key, value in vars(mediatype).items() if isinstance(value, str)}
    found = set(re.findall(r'"(application/[^"]*)"', "".join(p.read_text() for p in FILES)))
    assert len(found) > 6
    assert found <= known


def test_every_annotation_is_in_its_schema() -> None:
    keys = {v for v in vars(mediatype).values() if isinstance(v, str) and "vnd.clowder" in v}
    ours = {key for key in keys if key.startswith("vnd.clowder.aimage.")}
    assert ours == set(load("layer-annotations")["properties"])


def test_the_dtypes_in_the_schema_are_those_of_the_code() -> None:
    dtypes = load("layer-annotations")["$defs"]["dtype"]["enum"]
    assert set(dtypes) - set(DTYPE_BITS) == {"int4", "int8", "nvfp4", "mxfp4", "mxfp8"}
    assert set(DTYPE_BITS) <= set(dtypes)


def reads(name: str) -> bool:
    try:
        check_name(name)
    except FormatError:
        return False
    return True


def test_schema_and_reader_agree_on_layer_names() -> None:
    for name in (
        *("a", "a/b", "a/.b", "..a", "a..", "a/...", "größe/ß", "a b", "a" * 1024),
        *("", ".", "..", "/a", "a/", "a//b", "a/./b", "a/../b", "../a", "a/..", "a\\b"),
        *("a\nb", "a\n", "a\x7f", "\x00", "a" * 1025),
        *("a\x9b", "a\xa0", "a\xad", "a\u200b", "a\u202e", "a\u2028", "a\u2069", "a\ufeff"),
    ):
        found = places("layer-annotations", {mediatype.NAME: name})
        assert found == ([] if reads(name) else [mediatype.NAME]), name


def test_loading_an_unknown_schema_fails() -> None:
    with pytest.raises(FileNotFoundError, match="no-such"):
        load("no-such")


GOOD_CHANGES: list[dict[str, object]] = [
    {},
    {"x-mine": [1]},
    {"created": "2026-01-31T12:00:00Z"},
    {"created": "2026-01-31T12:00:00.5+01:00"},
    {"defaults": {"width": 64, "height": 1024, "steps": 8, "guidance": 0}},
    {"defaults": {"guidance_end": 0.5, "cache_threshold": 0}},
    {"components": {}},
    {
        "components": {},
        "format": "gguf",
        "formatVersion": "3",
        "name": "Tiny Llama",
        "architecture": "llama",
        "parameters": 1000,
        "quantization": "Q4_K_M",
        "context": 2048,
        "pickled": False,
    },
    {"format": "one-of-2027"},
    {"format": "lora", "adapter": LORA},
    {"adapters": {"my-style.v2": LORA, "other": {}}},
    {"adapter": {"type": "one-of-2027", "x-mine": {}}},
]
BAD_CHANGES: list[tuple[dict[str, object], str]] = [
    ({"schemaVersion": 2}, "schemaVersion"),
    ({"family": "Z Image"}, "family"),
    ({"family": "z-image\n"}, "family"),
    ({"parameters": -1}, "parameters"),
    ({"size": 1.5}, "size"),
    ({"size": 7.0}, "size"),
    ({"size": True}, "size"),
    ({"dtype": "bfloat16"}, "dtype"),
    ({"components": []}, "components"),
    ({"components": {"../x": {}}}, "components"),
    ({"components": {"vae": {"size": "1"}}}, "components/vae/size"),
    ({"defaults": {"width": 65}}, "defaults/width"),
    ({"defaults": {"steps": 0}}, "defaults/steps"),
    ({"license": ""}, "license"),
    ({"created": "yesterday"}, "created"),
    ({"created": "2026-01-31"}, "created"),
    ({"format": "GGUF"}, "format"),
    ({"formatVersion": 3}, "formatVersion"),
    ({"name": ""}, "name"),
    ({"architecture": ["llama"]}, "architecture"),
    ({"quantization": 4}, "quantization"),
    ({"context": 0}, "context"),
    ({"pickled": "no"}, "pickled"),
    ({"adapter": []}, "adapter"),
    ({"adapter": {"rank": 0}}, "adapter/rank"),
    ({"adapter": {"type": "LoRA"}}, "adapter/type"),
    ({"adapter": {"alpha": "16"}}, "adapter/alpha"),
    ({"adapter": {"targets": "to_q"}}, "adapter/targets"),
    ({"adapter": {"targets": ["to_q", 1]}}, "adapter/targets/1"),
    ({"adapter": {"triggerWords": [""]}}, "adapter/triggerWords/0"),
    ({"adapter": {"weight": None}}, "adapter/weight"),
    ({"adapter": {"base": 7}}, "adapter/base"),
    ({"adapters": [LORA]}, "adapters"),
    ({"adapters": {"style": {"rank": 1.5}}}, "adapters/style/rank"),
    ({"adapters": {"..": {}}}, "adapters"),
    ({"adapters": {"a/b": {}}}, "adapters"),
]


def test_valid_configs_pass() -> None:
    for change in GOOD_CHANGES:
        validate("aimage-config", GOOD | change)
        assert places("aimage-config", GOOD | change) == []


def test_invalid_configs_are_refused_with_a_path() -> None:
    for change, where in BAD_CHANGES:
        with pytest.raises(FormatError, match="invalid aimage-config") as caught:
            validate("aimage-config", GOOD | change)
        assert caught.value.message.endswith(f"(at {where})")
        (place,) = places("aimage-config", GOOD | change)
        assert place.startswith(where)  # an invalid name is reported by its own path


def test_violations_are_all_yielded_once() -> None:
    bad = {"schemaVersion": 1, "size": -1, "context": "1", "components": {"a b": {}, "c": []}}
    assert places("aimage-config", bad) == ["components/a b", "components/c", "context", "size"]


def test_a_document_that_is_not_a_config_is_refused_at_the_top() -> None:
    documents: tuple[Any, ...] = (None, [], {}, {"schemaVersion": 1})
    for document in documents:
        with pytest.raises(FormatError, match=r"\(at the top\)"):
            validate("aimage-config", document)


def test_an_installed_package_contains_the_schemas(tmp_path: Path) -> None:
    """The wheel has schemas/ inside the package, and nothing beside it."""
    package = Path(clowder_aimage.__file__).parent
    installed = tmp_path / "clowder_aimage"
    (installed / "document").mkdir(parents=True)
    for name in (
        "__init__.py",
        "document/optional_file.py",
        "document/schema.py",
        "document/schema_check.py",
        "document/similarity.py",
        "document/strict_json.py",
        "document/unicode_text.py",
        "errors.py",
    ):
        shutil.copy(package / name, installed / name)
    shutil.copytree(SCHEMAS, installed / "schemas")
    code = (
        "from clowder_aimage.document.schema import *;"
        "print(load('aimage-config')['title'], len(list_names()))"
    )
    done = run([sys.executable, "-S", "-c", code], cwd=tmp_path, text=True)
    assert done.stdout == f"AImage config {len(FILES)}\n", done.stderr
