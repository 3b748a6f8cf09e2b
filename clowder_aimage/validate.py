"""validate: documents against their schemas: a file, an image layout, or what a name names."""

from __future__ import annotations

import os
import pathlib
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from clowder_aimage.dialect import detect
from clowder_aimage.dialect.ollama import CARRIED_CONFIG, carried_config
from clowder_aimage.document import (
    MAX_SIZE,
    SCHEMAS,
    CheckedDocument,
    DocumentViolation,
    check,
    check_tensors,
)
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.oci.position import Path, pointer
from clowder_aimage.schema import names
from clowder_aimage.tensor.header import MAX_HEADER_SIZE

_CONFIG: Path = ("config",)
_LENGTH = 8  # bytes before a safetensors header
_LAYOUT = (("oci-layout", "oci-layout"), ("index.json", "oci-index"))


@dataclass(slots=True)
class ValidationReport:
    """What was looked at, the document that was asked for first."""

    documents: list[CheckedDocument] = field(default_factory=list)

    @property
    def is_valid(self) -> bool:
        return not any(one.violations for one in self.documents)


def validate_file(path: pathlib.Path, schema: str = "") -> ValidationReport:
    """Check a JSON document, or the header of a safetensors file.

    Raises:
        NotFoundError: there is no such file.
        UsageError: it cannot be read, or nobody knows what it should be.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(_LENGTH + 1)
            if not schema and (path.suffix == ".safetensors" or _is_tensors(start, size)):
                header = int.from_bytes(start[:_LENGTH], "little")
                start += file.read(min(header, MAX_HEADER_SIZE + 1))
                return ValidationReport([check_tensors(str(path), start, size)])
            return validate_stream(file, str(path), schema, start)
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def _is_tensors(start: bytes, size: int) -> bool:
    return start[_LENGTH:] == b"{" and int.from_bytes(start[:_LENGTH], "little") <= size - _LENGTH


def validate_stream(
    file: BinaryIO, name: str, schema: str = "", start: bytes = b""
) -> ValidationReport:
    """Check the JSON document that comes out of ``file``. Raises UsageError."""
    if schema and schema not in names():
        raise UsageError(f"there is no schema {schema}", hint=f"there are {', '.join(names())}")
    raw = start + file.read(MAX_SIZE + 1)
    if len(raw) > MAX_SIZE:
        wrong = DocumentViolation("", f"more than {MAX_SIZE} bytes: no document is as large")
        return ValidationReport([CheckedDocument(name, schema, [wrong])])
    checked = check(name, raw, schema)
    if not checked.schema and not checked.violations:
        raise UsageError(
            f"{name} is JSON, and none of the documents that have a schema here",
            hint=f"--schema NAME says what it should be: {', '.join(names())}",
        )
    return ValidationReport([checked])


def validate_reference(layout: ImageLayout, reference: Reference) -> ValidationReport:
    """Check what a name in the store names: a manifest or an index, and all documents under it.

    Raises:
        NotFoundError: there is nothing of that name, or its manifest is not there.
    """
    descriptor = layout.resolve(reference)
    layout.path(descriptor)
    walk = _Walk(layout)
    walk.begin(descriptor, str(reference))
    return walk.finish()


def is_layout(path: pathlib.Path) -> bool:
    """Whether a directory is an OCI image layout, if a broken one."""
    return any((path / name).is_file() for name, _ in _LAYOUT)


def validate_layout(path: pathlib.Path) -> ValidationReport:
    """Check the documents of an OCI image layout: ``oci-layout``, ``index.json``, and every
    manifest and AImage config that it leads to. Raises UsageError."""
    walk = _Walk(ImageLayout(path), shows_paths=True)
    for name, schema in _LAYOUT:
        if (path / name).is_file():
            (checked,) = validate_file(path / name, schema).documents
        else:
            missing = DocumentViolation("", "there is no such file, and every image layout has it")
            checked = CheckedDocument(str(path / name), schema, [missing])
        walk.add(checked)
    return walk.finish()


@dataclass(frozen=True, slots=True)
class _Step:
    """A blob to be looked at; the document that names it, its bytes, and the place in it."""

    descriptor: Descriptor
    name: str
    parent: CheckedDocument | None = None
    raw: bytes = b""
    place: Path = ()


class _Walk:
    """From a document to those that it names, each once."""

    def __init__(self, layout: ImageLayout, *, shows_paths: bool = False) -> None:
        self._layout = layout
        self._shows_paths = shows_paths
        self._report = ValidationReport()
        self._steps: deque[_Step] = deque()
        self._seen: set[tuple[Digest, int]] = set()

    def begin(self, descriptor: Descriptor, name: str) -> None:
        self._steps.append(_Step(descriptor, name))

    def finish(self) -> ValidationReport:
        while self._steps:
            step = self._steps.popleft()
            key = step.descriptor.digest, step.descriptor.size
            if key not in self._seen:
                self._seen.add(key)
                self._look(step)
        return self._report

    def add(self, checked: CheckedDocument, raw: bytes = b"") -> CheckedDocument:
        """Take a document into the report; what it names is next."""
        self._report.documents.append(checked)
        value, checked.value = checked.value, None
        for place, found in _named(value):
            name = self._layout.place(found) if self._shows_paths else str(found.digest)
            self._steps.append(_Step(found, name, checked, raw, place))
        return checked

    def _look(self, step: _Step) -> None:
        """Read a blob, compare it with what names it, and check what is in it."""
        descriptor, schema = step.descriptor, SCHEMAS.get(step.descriptor.media_type, "")
        if descriptor.size > MAX_SIZE:
            self.add(CheckedDocument(step.name, schema, note="it is too large for a document"))
            return
        try:
            with self._layout.open(descriptor) as file:
                raw = file.read(MAX_SIZE + 1)
        except NotFoundError:
            self.add(CheckedDocument(step.name, schema, note="it is not in the store"))
            return
        if step.place == _CONFIG:
            self._config(step, raw)
        else:
            kind = descriptor.media_type
            lines = self._shows_paths
            self.add(check(step.name, raw, media_type=kind, has_lines=lines), raw)
        where = step.parent or self._report.documents[-1]
        for field_name, message in _differences(raw, descriptor):
            place = (*step.place, field_name) if step.parent else ()
            where.violations.append(DocumentViolation(pointer(place), message))

    def _config(self, step: _Step, raw: bytes) -> None:
        """The config of a manifest: an AImage's own, or one in which an AImage's travels."""
        if step.descriptor.media_type == mediatype.AIMAGE_CONFIG:
            self.add(check(step.name, raw, "aimage-config", has_lines=self._shows_paths))
            return
        with suppress(FormatError):
            if (inner := carried_config(raw)) is not None:
                name = f"{CARRIED_CONFIG} in {step.name}"
                self.add(check(name, inner, "aimage-config", has_lines=False))
                _read_carried(step, raw)
                return
        kind = step.descriptor.media_type or "a config without a media type"
        self.add(CheckedDocument(step.name, "", note=f"no schema is known for {kind}"))


def _named(value: Any) -> Iterator[tuple[Path, Descriptor]]:
    """The descriptors of a document's config, or of the manifests in an index."""
    if not isinstance(value, dict):
        return
    entries = value.get("manifests")
    if not isinstance(entries, list):
        with suppress(FormatError):  # what is no descriptor has been told
            yield _CONFIG, Descriptor.from_json(value.get("config"))
        return
    for position, entry in enumerate(entries):
        with suppress(FormatError):
            found = Descriptor.from_json(entry)
            if found.media_type in mediatype.MANIFESTS | mediatype.INDEXES:
                yield ("manifests", position), found


def _differences(raw: bytes, descriptor: Descriptor) -> Iterator[tuple[str, str]]:
    """In which of its fields a descriptor is not that of the bytes."""
    if len(raw) != descriptor.size:
        yield "size", f"the content has {len(raw)} bytes, and not {descriptor.size}"
    found = Digest.of(raw, descriptor.digest.algorithm)
    if found != descriptor.digest:
        yield "digest", f"the content hashes to {found}, and not to {descriptor.digest}"


def _read_carried(step: _Step, raw: bytes) -> None:
    """Read the AImage as ``run`` does: in these dialects the config says what the layers are."""
    if step.parent is None or step.parent.violations:
        return
    try:
        manifest = Manifest.parse(step.raw)
        detect(manifest).read(manifest, raw)
    except FormatError as error:
        step.parent.violations.append(DocumentViolation("", error.message))
