"""One document: what it is, what its schema says of it, and what no schema can say.

What it is is told by its media type, its artifact type and its structure. Beyond the schema no key
may stand twice, no two layers may have one name, content that a descriptor carries must be what the
descriptor says, and what is left over must be something that our own reader takes.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from clowder_aimage import schema as schemas
from clowder_aimage.dialect import Dialect, detect
from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import (
    MAX_MANIFEST_SIZE,
    Descriptor,
    Digest,
    Manifest,
    mediatype,
    parse_document,
    read_json,
)
from clowder_aimage.oci.position import (
    LineIndex,
    NotJSONError,
    Path,
    Positions,
    find_positions,
    pointer,
)

MAX_SIZE = 64 * 1024 * 1024  # of any document: an index.json, or a config, of that size is read
SAFETENSORS = "safetensors"  # what a file of tensors is called among the names of schemas
AIMAGE_MANIFEST = "aimage-manifest"
_MANIFESTS = {
    mediatype.OCI_MANIFEST: "oci-manifest",
    mediatype.DOCKER_MANIFEST: "docker-manifest",
    mediatype.AIMAGE_MANIFEST: AIMAGE_MANIFEST,
}
_INDEXES = {
    mediatype.OCI_INDEX: "oci-index",
    mediatype.DOCKER_MANIFEST_LIST: "docker-manifest-list",
}
SCHEMAS = _MANIFESTS | _INDEXES | {mediatype.AIMAGE_CONFIG: "aimage-config"}
"""By media type. An AImage's manifest may have OCI's: ``kind_of`` tells it from another."""


@dataclass(frozen=True, slots=True)
class DocumentViolation:
    """What is wrong in a document; ``pointer`` is a JSON pointer, empty of the whole.

    ``line`` and ``column`` are those of the nearest value there is, and 0 where lines mean nothing.
    """

    pointer: str
    message: str
    line: int = 0
    column: int = 0


@dataclass(slots=True)
class CheckedDocument:
    """A document that was looked at. ``schema`` is what it was taken for, empty where nobody knows,
    and ``note`` says why then nothing was checked."""

    name: str
    schema: str
    violations: list[DocumentViolation] = field(default_factory=list)
    note: str = ""
    value: Any = None


def check(
    name: str, raw: bytes, schema: str = "", *, media_type: str = "", has_lines: bool = True
) -> CheckedDocument:
    """Everything that is wrong with the document ``raw``, in the order of its places.

    ``schema`` is a schema's name; without one the document says what it is, and ``media_type``
    what it was called by whoever named it.
    """
    text = raw.decode("utf-8", "replace")
    try:
        value, found = _parse(raw, text)
    except NotJSONError as error:
        line, column = LineIndex(text).find(error.offset)
        wrong = DocumentViolation("", f"not JSON: {error.message}", line, column)
        return CheckedDocument(name, schema or SCHEMAS.get(media_type, ""), [wrong])
    schema = schema or kind_of(value) or SCHEMAS.get(media_type, "")
    if schema:
        found += schemas.violations(schema, value)
    found += _beyond(schema, value, raw, {one.path for one in found})
    if not found:
        found += _reader(schema, raw, media_type)
    placed = _placed(text, found, has_lines=has_lines)
    note = "" if schema else f"no schema is known for {media_type or 'it'}"
    return CheckedDocument(name, schema, placed, note, value)


def check_tensors(name: str, raw: bytes, size: int) -> CheckedDocument:
    """The header of a safetensors file of ``size`` bytes that begins with ``raw``."""
    from clowder_aimage.tensor import read_header

    try:
        read_header(io.BytesIO(raw), size)
    except FormatError as error:
        return CheckedDocument(name, SAFETENSORS, [DocumentViolation("", error.message)])
    return CheckedDocument(name, SAFETENSORS)


def kind_of(value: object) -> str:
    """The name of the schema that a document is about, or nothing."""
    if not isinstance(value, dict):
        return ""
    config, media_type = value.get("config"), value.get("mediaType")
    is_manifest = "layers" in value or ("config" in value and "schemaVersion" in value)
    if (
        mediatype.AIMAGE_MANIFEST in (media_type, value.get("artifactType"))
        or (isinstance(config, dict) and config.get("mediaType") == mediatype.AIMAGE_CONFIG)
    ) and "manifests" not in value:
        return AIMAGE_MANIFEST
    if isinstance(media_type, str) and media_type in _MANIFESTS | _INDEXES:
        return (_MANIFESTS | _INDEXES)[media_type]
    if is_manifest or "manifests" in value:
        return "oci-manifest" if is_manifest else "oci-index"
    for key, schema in (
        ("imageLayoutVersion", "oci-layout"),
        ("registries", "config"),
        ("components", "aimage-config"),
    ):
        if key in value:
            return schema
    return "aimage-config" if "schemaVersion" in value and "fsLayers" not in value else ""


def _parse(raw: bytes, text: str) -> tuple[Any, list[schemas.Violation]]:
    """The value of a text, and the keys in it that stand twice; of two the last counts.

    Raises:
        NotJSONError: with the place.
    """
    try:
        return read_json(raw, "it"), []
    except FormatError:
        twice = find_positions(text, ()).twice
    if not twice:  # as a text it reads well
        raise NotJSONError("not UTF-8", max(0, text.find("\N{REPLACEMENT CHARACTER}")))
    found = {path: schemas.Violation(path, "this key stands twice") for path, _ in twice}
    return json.loads(text), list(found.values())


def _beyond(schema: str, value: Any, raw: bytes, known: set[Path]) -> Iterator[schemas.Violation]:
    """What a schema cannot say; of the ``known`` places enough is said."""
    if schema not in _MANIFESTS.values() and schema not in _INDEXES.values():
        return
    if not isinstance(value, dict):
        return
    if schema != "oci-index" and len(raw) > MAX_MANIFEST_SIZE:  # an index.json may be larger
        message = f"{len(raw)} bytes are more than registries take ({MAX_MANIFEST_SIZE})"
        yield schemas.Violation((), message)
    for path, descriptor in _descriptors(value):
        if (*path, "data") not in known:
            yield from _carried(path, descriptor)
    first: dict[str, Path] = {}
    for path, name in _names(value):
        if path in known:
            continue
        if name in first:
            message = f"two layers are called {name[:100]!r}: {pointer(first[name])} is the other"
            yield schemas.Violation(path, message)
        first.setdefault(name, path)
        try:
            check_name(name)
        except FormatError as error:
            yield schemas.Violation(path, error.message)


def _descriptors(value: dict[str, Any]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The descriptors in a manifest or an index."""
    for key in ("config", "subject"):
        if isinstance(value.get(key), dict):
            yield (key,), value[key]
    for key in ("layers", "manifests"):
        items = value.get(key)
        for position, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, dict):
                yield (key, position), item


def _names(value: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """The names that layers have, whichever way they are said."""
    for path, layer in _descriptors(value):
        annotations = layer.get("annotations")
        said = annotations.get(mediatype.NAME) if isinstance(annotations, dict) else None
        if path[0] != "layers":
            continue
        if isinstance(said, str):
            yield (*path, "annotations", mediatype.NAME), said
        elif isinstance(layer.get("name"), str):
            yield (*path, "name"), layer["name"]


def _carried(path: Path, descriptor: dict[str, Any]) -> Iterator[schemas.Violation]:
    """``data`` must be the content itself (OCI image-spec, descriptor.md, "data")."""
    data = descriptor.get("data")
    if not isinstance(data, str):
        return
    try:
        content = base64.b64decode(data, validate=True)
        expected = Descriptor.from_json(descriptor)
    except (binascii.Error, ValueError, FormatError):  # the schema has said so
        return
    if expected.size != len(content):
        message = f"holds {len(content)} bytes, and the size is {expected.size}"
        yield schemas.Violation((*path, "data"), message)
    elif Digest.of(content, expected.digest.algorithm) != expected.digest:
        yield schemas.Violation((*path, "data"), "holds another content than that of the digest")


def _reader(schema: str, raw: bytes, media_type: str) -> Iterator[schemas.Violation]:
    """What our own reader refuses, although the schema allows it."""
    if schema not in _MANIFESTS.values() and schema not in _INDEXES.values():
        return
    if len(raw) > MAX_MANIFEST_SIZE:
        return
    try:
        document = parse_document(raw, media_type)
        if isinstance(document, Manifest) and (dialect := _named(document)):
            dialect.read(document, b"")  # which names the layers without the config
    except FormatError as error:
        yield schemas.Violation((), error.message)


def _named(manifest: Manifest) -> Dialect | None:
    """The dialect of a manifest whose layers are named without its config."""
    try:
        dialect = detect(manifest)
    except FormatError:
        return None
    return dialect if dialect.name in ("clowder", "custom", "ollama", "modelpack") else None


def _placed(
    text: str, found: list[schemas.Violation], *, has_lines: bool
) -> list[DocumentViolation]:
    """The violations with their lines, in the order of their places."""
    if not found:
        return []
    wanted = {one.path[:length] for one in found for length in range(len(one.path) + 1)}
    try:
        positions = find_positions(text, wanted)
    except NotJSONError:  # nothing that read_json took
        positions = Positions()
    positions.of.update(dict(positions.twice))  # of two keys the second is the one too many
    lines = LineIndex(text)
    placed = []
    for one in sorted(found, key=lambda one: _nearest(one.path, positions)):
        line, column = lines.find(_nearest(one.path, positions)) if has_lines else (0, 0)
        placed.append(DocumentViolation(pointer(one.path), one.message, line, column))
    return placed


def _nearest(path: Path, positions: Positions) -> int:
    """Where the value is, or what it would be in."""
    while path and path not in positions.of:
        path = path[:-1]
    return positions.of.get(path, 0)
