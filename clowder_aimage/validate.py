"""validate: check documents against schemas, and against rules that a schema cannot express.

Keys and names of layers must be unique, embedded content must match its descriptor, and the
package's own reader must accept the document.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from clowder_aimage.dialect import detect
from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.dialect.ollama import CARRIED_CONFIG, find_carried_config
from clowder_aimage.document import schema as schemas
from clowder_aimage.document.schema import (
    JSONPath,
    Violation,
    compute_line_column,
    find_json_positions,
    locate,
)
from clowder_aimage.document.strict_json import is_too_deep
from clowder_aimage.document.unicode_text import recode_file
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import (
    MAX_MANIFEST_SIZE,
    Descriptor,
    Digest,
    Manifest,
    Reference,
    mediatype,
    parse_document,
    read_json,
)

MAX_SIZE = 64 * 1024 * 1024  # bytes of a document
PICTURE_CONFIG = "picture-config"
# Shown instead of a schema's name.
SAFETENSORS = "safetensors"
AIMAGE_MANIFEST, AIMAGE_CONFIG, OCI_INDEX = "aimage-manifest", "aimage-config", "oci-index"
_MANIFESTS = {
    mediatype.OCI_MANIFEST: "oci-manifest",
    mediatype.DOCKER_MANIFEST: "docker-manifest",
    mediatype.AIMAGE_MANIFEST: AIMAGE_MANIFEST,
}
_INDEXES = {mediatype.OCI_INDEX: OCI_INDEX, mediatype.DOCKER_MANIFEST_LIST: "docker-manifest-list"}
_CONFIGS = {
    mediatype.AIMAGE_CONFIG: AIMAGE_CONFIG,
    mediatype.AIMAGE_PICTURE_CONFIG: PICTURE_CONFIG,
}
_SCHEMAS = _MANIFESTS | _INDEXES | _CONFIGS
# The schemas of documents with descriptors.
_GRAPH = {*_MANIFESTS.values(), *_INDEXES.values()}
_LAYOUT = (("oci-layout", "oci-layout"), ("index.json", OCI_INDEX))
_KEYS = (
    ("imageLayoutVersion", "oci-layout"),
    ("registries", "config"),
    ("models", "names"),
    ("rules", "trust"),
    ("components", AIMAGE_CONFIG),
    ("pictures", PICTURE_CONFIG),
)
# Bytes of the length before a safetensors header.
_LENGTH = 8
# Dialects that name the layers without the config
_SELF_CONTAINED = ("clowder", "custom", "ollama", "modelpack")


@dataclass(slots=True)
class CheckedDocument:
    """A document with its violations; for an unknown kind, a note and no schema name."""

    name: str
    schema: str
    violations: list[Violation] = field(default_factory=list)
    note: str = ""
    value: Any = None


def validate_file(path: pathlib.Path, schema: str = "") -> CheckedDocument:
    """Check a JSON or YAML document, or the header of a safetensors file.

    Raises:
        NotFoundError: the file does not exist.
        UsageError: the file cannot be read, or is of an unknown kind.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH + 1)
            length = int.from_bytes(start[:_LENGTH], "little")
            is_tensors = start[_LENGTH:] == b"{" and length <= size - _LENGTH
            if not schema and (path.suffix == ".safetensors" or is_tensors):
                from clowder_aimage.tensor.header import MAX_HEADER_SIZE, read_header

                raw = start + file.read(min(length, MAX_HEADER_SIZE + 1))
                violations = _call_reader(read_header, io.BytesIO(raw), size)
                return CheckedDocument(str(path), SAFETENSORS, violations)
            if schemas.is_yaml(path):
                return _validate_yaml(start + file.read(MAX_SIZE), str(path), schema)
            return validate_stream(file, str(path), schema, start)
    except FileNotFoundError:
        raise NotFoundError(f"file not found: {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def _validate_yaml(raw: bytes, name: str, schema: str) -> CheckedDocument:
    """Check a YAML document: a list is a desired state, an object with models has names.

    One with rules is a policy of signatures. All else is a configuration by default.
    """
    from clowder_aimage.document.yaml import read_yaml

    try:
        value, lines = read_yaml(recode_file(raw).decode("utf-8"), name)
    except (UnicodeDecodeError, FormatError) as error:
        wrong = Violation((), str(error).removeprefix(f"{name}, "))
        return CheckedDocument(name, schema or "config", [wrong])
    # A document of comments only is empty.
    value = {} if value is None else value
    schema = schema or _detect_yaml(value)
    violations = schemas.iter_violations(schema, value)
    located = [
        replace(violation, line=lines.get(violation.path, 0), column=1) for violation in violations
    ]
    return CheckedDocument(name, schema, sorted(located, key=lambda violation: violation.line))


def _detect_yaml(value: object) -> str:
    if isinstance(value, list):
        return "desired"
    if isinstance(value, dict) and "rules" in value:
        return "trust"
    return "names" if isinstance(value, dict) and "models" in value else "config"


def validate_stream(
    file: BinaryIO, name: str, schema: str = "", start: bytes = b""
) -> CheckedDocument:
    """Check the JSON document that consists of ``start`` and the remaining bytes of ``file``.

    Raises UsageError: the schema or the kind of document is unknown.
    """
    names = ", ".join(schemas.list_names())
    if schema and schema not in schemas.list_names():
        raise UsageError(f"schema not found: {schema}", hint=f"expected one of: {names}")
    raw = start + file.read(MAX_SIZE + 1)
    if len(raw) > MAX_SIZE:
        wrong = Violation((), f"too large for a document: more than {MAX_SIZE} bytes")
        return CheckedDocument(name, schema, [wrong])
    checked = check(name, raw, schema)
    if not checked.schema and not checked.violations:
        raise UsageError(
            f"{name} is JSON, but matches no known schema",
            remedy="choose_schema",
            names=names,
        )
    return checked


def validate_reference(layout: ImageLayout, reference: Reference) -> list[CheckedDocument]:
    """Check the manifest or index of ``reference`` and all below it. Raises NotFoundError."""
    descriptor = layout.resolve(reference)
    layout.find_path(descriptor)
    return _Walk(layout).run(_Step(descriptor, str(reference)))


def is_layout(path: pathlib.Path) -> bool:
    """Return True if a directory is an OCI image layout, even a broken one."""
    return any((path / name).is_file() for name, _ in _LAYOUT)


def validate_layout(path: pathlib.Path) -> list[CheckedDocument]:
    """Check ``oci-layout``, ``index.json`` and all documents below it. Raises UsageError."""
    walk = _Walk(ImageLayout(path), shows_paths=True)
    for name, schema in _LAYOUT:
        if (path / name).is_file():
            checked = validate_file(path / name, schema)
        else:
            missing = Violation((), "missing file, which an image layout requires")
            checked = CheckedDocument(str(path / name), schema, [missing])
        walk.add(checked)
    return walk.run()


def check(
    name: str, raw: bytes, schema: str = "", *, media_type: str = "", has_lines: bool = True
) -> CheckedDocument:
    """Check a JSON document, called ``name`` in the report.

    Without a ``schema`` the kind is detected, or taken from ``media_type``, that of the document's
    descriptor. With ``has_lines`` violations have their line and column.
    """
    value, violations = _read(raw)
    schema = schema or detect_schema(value) or _SCHEMAS.get(media_type, "")
    if value is None and violations:
        return CheckedDocument(name, schema, violations)
    if schema:
        violations += schemas.iter_violations(schema, value)
    if schema in _GRAPH and isinstance(value, dict):
        violations += _check_graph(schema, value, raw, {violation.path for violation in violations})
        # The reader stops at the first error, which the schema has reported.
        violations = violations or _check_reader(raw, media_type)
    if violations and has_lines:
        violations = locate(raw.decode(), violations)
    note = "" if schema else f"no schema for {media_type or 'it'}"
    return CheckedDocument(name, schema, violations, note, value)


def detect_schema(value: object) -> str:
    """Return the name of the schema for a document, or an empty string."""
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
        return "oci-manifest" if is_manifest else OCI_INDEX
    is_config = "schemaVersion" in value and "fsLayers" not in value
    unknown = AIMAGE_CONFIG if is_config else ""
    if value and value.keys() <= schemas.load("config")["properties"].keys():
        unknown = "config"
    return next((schema for key, schema in _KEYS if key in value), unknown)


def _read(raw: bytes) -> tuple[Any, list[Violation]]:
    """Return the value of a JSON text, and its duplicate keys. The last one of these counts."""
    try:
        return read_json(raw, "it", MAX_SIZE), []
    except FormatError as error:
        reason = error.message.removeprefix("it is ")
    if reason.startswith("too large"):
        return None, [Violation((), reason)]
    try:
        text = raw.decode()
        value = json.loads(text)
    except UnicodeDecodeError as error:
        text = raw[: error.start].decode()
        line, column = compute_line_column(text, len(text))
        return None, [Violation((), "not valid JSON: not UTF-8", line, column)]
    except json.JSONDecodeError as error:
        return None, [Violation((), f"not valid JSON: {error.msg}", error.lineno, error.colno)]
    except (ValueError, RecursionError):
        return None, [Violation((), reason)]
    duplicates = []
    # libyaml recurses without a limit.
    if not is_too_deep(value):
        duplicates = [
            path for path, positions in find_json_positions(text).items() if len(positions) > 1
        ]
    if not duplicates:
        return None, [Violation((), reason)]
    return value, [Violation(path, "duplicate key") for path in duplicates]


def _check_graph(
    schema: str, value: dict[str, Any], raw: bytes, wrong_paths: set[JSONPath]
) -> Iterator[Violation]:
    """Yield violations that a schema cannot express, except at ``wrong_paths`` wrong paths."""
    # An index.json may be larger than a manifest.
    if schema != OCI_INDEX and len(raw) > MAX_MANIFEST_SIZE:
        yield Violation((), f"{len(raw)} bytes, and registries accept at most {MAX_MANIFEST_SIZE}")
    names: dict[str, JSONPath] = {}
    for path, descriptor in _iter_descriptors(value):
        if (*path, "data") not in wrong_paths:
            yield from _check_data(path, descriptor)
        if path[0] != "layers" or not (layer_name := _find_layer_name(descriptor)):
            continue
        path, name = (*path, *layer_name[0]), layer_name[1]
        if path in wrong_paths:
            continue
        if name in names:
            pointer = schemas.format_pointer(names[name])
            yield Violation(path, f"duplicate layer name {name[:100]!r}, also at {pointer}")
        names.setdefault(name, path)
        try:
            check_name(name)
        except FormatError as error:
            yield Violation(path, error.message)


def _iter_descriptors(value: dict[str, Any]) -> Iterator[tuple[JSONPath, dict[str, Any]]]:
    for key in ("config", "subject"):
        if isinstance(value.get(key), dict):
            yield (key,), value[key]
    for key in ("layers", "manifests"):
        items = value.get(key)
        for position, item in enumerate(items if isinstance(items, list) else ()):
            if isinstance(item, dict):
                yield (key, position), item


def _find_layer_name(layer: dict[str, Any]) -> tuple[JSONPath, str] | None:
    """Return the name of a layer and its path in the descriptor, in either form."""
    annotations = layer.get("annotations")
    annotated = annotations.get(mediatype.NAME) if isinstance(annotations, dict) else None
    names = ((("annotations", mediatype.NAME), annotated), (("name",), layer.get("name")))
    return next(((path, name) for path, name in names if isinstance(name, str)), None)


def _check_data(path: JSONPath, descriptor: dict[str, Any]) -> Iterator[Violation]:
    """Compare embedded content with its descriptor (OCI image-spec, descriptor.md, "data")."""
    # These errors are violations of the schema, which are reported there.
    with suppress(KeyError, TypeError, ValueError, FormatError):
        content = base64.b64decode(descriptor["data"], validate=True)
        for name, message in _iter_differences(content, Descriptor.from_json(descriptor)):
            yield Violation((*path, "data"), f"{name} differs from the descriptor: {message}")
            break


def _check_reader(raw: bytes, media_type: str) -> list[Violation]:
    """Return the errors of the package's own reader."""
    try:
        document = parse_document(raw, media_type)
    except FormatError as error:
        return [Violation((), error.message)]
    with suppress(FormatError):
        if isinstance(document, Manifest) and detect(document).name in _SELF_CONTAINED:
            return _call_reader(detect(document).read, document, b"")
    return []


def _call_reader(read: Callable[..., object], *arguments: object) -> list[Violation]:
    """Return the error of a reader, if there is one."""
    try:
        read(*arguments)
    except FormatError as error:
        return [Violation((), error.message)]
    return []


@dataclass(frozen=True, slots=True)
class _Step:
    """A blob to be checked; the document with its descriptor, its bytes, the path in it."""

    descriptor: Descriptor
    name: str
    parent: CheckedDocument | None = None
    raw: bytes = b""
    path: JSONPath = ()


class _Walk:
    """A walk over the documents of a layout. Each is read once, malformed ones are skipped."""

    def __init__(self, layout: ImageLayout, *, shows_paths: bool = False) -> None:
        self._layout, self._shows_paths = layout, shows_paths
        self._documents: list[CheckedDocument] = []
        self._steps: list[_Step] = []

    def run(self, *steps: _Step) -> list[CheckedDocument]:
        """Check the blobs of ``steps``, and all below these and below the added documents."""
        self._steps += steps
        visited: set[tuple[Digest, int]] = set()
        # Steps are added to the list during the loop.
        for step in self._steps:
            key = step.descriptor.digest, step.descriptor.size
            if key not in visited:
                visited.add(key)
                self._check(step)
        return self._documents

    def add(self, checked: CheckedDocument, raw: bytes = b"") -> None:
        """Add a document to the report, and the documents that it lists to the walk."""
        self._documents.append(checked)
        value, checked.value = checked.value, None
        for path, descriptor in _iter_children(value):
            name = self._layout.locate(descriptor) if self._shows_paths else str(descriptor.digest)
            self._steps.append(_Step(descriptor, name, checked, raw, path))

    def _check(self, step: _Step) -> None:
        media_type = step.descriptor.media_type
        raw, note = None, "too large for a document"
        if step.descriptor.size <= MAX_SIZE:
            note = "not found in the store"
            with suppress(NotFoundError), self._layout.open(step.descriptor) as file:
                raw = file.read(MAX_SIZE + 1)
        if raw is None:
            self.add(CheckedDocument(step.name, _SCHEMAS.get(media_type, ""), note=note))
            return
        if step.path == ("config",) and media_type not in _CONFIGS:
            self._check_foreign_config(step, raw)
        else:
            checked = check(step.name, raw, media_type=media_type, has_lines=self._shows_paths)
            self.add(checked, raw)
        document = step.parent or self._documents[-1]
        for key, message in _iter_differences(raw, step.descriptor):
            document.violations.append(Violation((*step.path, key) if step.parent else (), message))

    def _check_foreign_config(self, step: _Step, raw: bytes) -> None:
        """Check the AImage config that is embedded in a config of another media type."""
        with suppress(FormatError):
            if (inner := find_carried_config(raw)) is not None:
                name = f"{CARRIED_CONFIG} in {step.name}"
                self.add(check(name, inner, AIMAGE_CONFIG, has_lines=False))
                if step.parent and not step.parent.violations:
                    # In these dialects the config names the layers.
                    manifest = Manifest.parse(step.raw)
                    step.parent.violations += _call_reader(
                        lambda: detect(manifest).read(manifest, raw)
                    )
                return
        kind = step.descriptor.media_type or "a config without a media type"
        self.add(CheckedDocument(step.name, "", note=f"no schema for {kind}"))


def _iter_children(value: Any) -> Iterator[tuple[JSONPath, Descriptor]]:
    """Yield the valid descriptors of a manifest's config, or of the manifests in an index."""
    if not isinstance(value, dict):
        return
    is_index = isinstance(value.get("manifests"), list)
    for path, item in _iter_descriptors(value):
        if path[0] == ("manifests" if is_index else "config"):
            with suppress(FormatError):
                descriptor = Descriptor.from_json(item)
                if not is_index or descriptor.media_type in _MANIFESTS | _INDEXES:
                    yield path, descriptor


def _iter_differences(raw: bytes, descriptor: Descriptor) -> Iterator[tuple[str, str]]:
    """Yield the different fields of a descriptor and that of ``raw``."""
    if len(raw) != descriptor.size:
        yield "size", f"size mismatch: expected {descriptor.size} bytes, got {len(raw)}"
    digest = Digest.of(raw, descriptor.digest.algorithm)
    if digest != descriptor.digest:
        yield "digest", f"digest mismatch: expected {descriptor.digest}, got {digest}"
