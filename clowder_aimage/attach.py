"""attach: push files for a manifest in a registry, and fetch them.

OCI image-spec, "Guidelines for Artifact Usage".

A signature or a bill of materials becomes a separate artifact, whose ``subject`` is the manifest
that it describes. That manifest does not change.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from clowder_aimage.content import OnEvent, Overlay, Source, copy
from clowder_aimage.content.atomic_file import DISK_FULL, open_atomic, write_all
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.copy_option import CopyEvent, ignore
from clowder_aimage.content.file_system import ADVICE
from clowder_aimage.content.store import EmptySource, Reader, build_file_body
from clowder_aimage.content.verified_reader import VerifyingReader, read_all
from clowder_aimage.errors import (
    FormatError,
    ModelError,
    NoSpaceError,
    NotFoundError,
    StoreError,
    UsageError,
)
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference, mediatype
from clowder_aimage.oci.artifact import EMPTY, build_artifact
from clowder_aimage.registry import ClientOptions, Repository

_LAYER = "application/octet-stream"
# The grammar of a media type's parts: RFC 6838, 4.2.
_NAME = r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}"
_MEDIA_TYPE = re.compile(rf"{_NAME}/{_NAME}")


class AttachedArtifact(NamedTuple):
    """An artifact whose subject is another; ``level`` counts the subjects above the direct one."""

    level: int
    subject: Digest
    descriptor: Descriptor

    def to_json(self, root: Reference, *, has_subject: bool) -> dict[str, Any]:
        """Return the artifact, attached to ``root``, for programs."""
        value = {"reference": str(root.with_digest(self.descriptor.digest))}
        value |= self.descriptor.to_json()
        return value | ({"subject": str(self.subject)} if has_subject else {})


def list_attached(
    reference: Reference,
    connection: ClientOptions,
    artifact_type: str = "",
    *,
    is_recursive: bool = False,
) -> list[AttachedArtifact]:
    """Return the artifacts of a type whose subject is ``reference``; there may be none.

    Raises NotFoundError, UnauthorizedError, NetworkError, RegistryError.
    """
    with Repository(reference, connection) as repository:
        # A digest needs no request, and its manifest may be missing: referrers may come before it.
        subject = reference.digest or repository.resolve(reference).digest
        if not is_recursive:
            direct = repository.list_referrers(subject, artifact_type)
            return [AttachedArtifact(0, subject, descriptor) for descriptor in direct]
        return [
            AttachedArtifact(*entry)
            for entry in repository.iter_referrers(subject)
            if artifact_type in ("", entry[2].extra.get("artifactType"))
        ]


def attach(
    reference: Reference,
    files: Sequence[Path],
    connection: ClientOptions,
    *,
    artifact_type: str,
    annotations: Mapping[str, str] | None = None,
    on_event: OnEvent = ignore,
) -> tuple[Descriptor, Descriptor]:
    """Push ``files`` as one artifact whose subject is the manifest of ``reference``.

    The same files with the same type and annotations give the same artifact.

    Returns:
        the descriptors of the new manifest and of its subject.

    Raises:
        UsageError: an invalid media type, two files of one name, a directory, or no registry host.
        NotFoundError, UnauthorizedError, NetworkError, RegistryError: it cannot be sent.
    """
    if _MEDIA_TYPE.fullmatch(artifact_type) is None:
        raise UsageError(f"invalid media type {artifact_type!r}", remedy="attach_type")
    for title, count in Counter(file.name for file in files).items():
        if count > 1:
            raise UsageError(f"two files have the name {title}")
    layers = [_build_descriptor(file) for file in files]
    with Repository(reference, connection) as repository:
        subject = repository.resolve(reference)
        manifest = build_artifact(artifact_type, layers, subject, annotations or {})
        source = Overlay.of(manifest, EMPTY, source=_Files(layers, files))
        name, connections = (
            reference.with_digest(manifest.digest),
            connection.compute_connections(reference.registry),
        )
        copy(source, name, repository, concurrency=connections, on_event=on_event)
    return manifest.descriptor, subject


def fetch_files(
    reference: Reference,
    directory: Path,
    connection: ClientOptions,
    *,
    on_event: OnEvent = ignore,
) -> list[Path]:
    """Write the files of the artifact ``reference``, under their titles, to ``directory``.

    Layers without a title are left out. No file is replaced. After an error the written files are
    removed.

    Raises:
        UsageError: the artifact has no files, or one of them exists already.
        FormatError: a title is not the name of a file, or occurs twice.
        NotFoundError, UnauthorizedError, NetworkError, RegistryError: it cannot be fetched.
        VerificationError: the bytes differ from their digest.
        StoreError, NoSpaceError: a file cannot be written.
    """
    with Repository(reference, connection) as repository:
        content = repository.resolve(reference)
        raw = read_all(repository.open(content), content)
        layers = Manifest.parse(raw, content.media_type).layers
        titled = [layer for layer in layers if mediatype.TITLE in layer.annotations]
        files = [(directory / _parse_title(layer), layer) for layer in titled]
        paths = [path for path, _ in files]
        if not paths:
            raise UsageError(f"{reference} has no files with names", remedy="list_attached")
        if len(set(paths)) < len(paths):
            raise FormatError(f"two files of {reference} have the same name")
        for path in paths:
            if path.exists() or path.is_symlink():
                raise UsageError(f"{path} exists", hint="choose another directory, or move it away")
        on_event(CopyEvent("plan", content, sum(layer.size for layer in titled), len(files)))
        # The callbacks remove the written files after an error. Without one they are dropped.
        with contextlib.ExitStack() as stack:
            for path, layer in files:
                _write(repository, layer, path, on_event)
                stack.callback(path.unlink, missing_ok=True)
            stack.pop_all()
    return paths


def _parse_title(layer: Descriptor) -> str:
    """Return the title of a layer, a file name without directories. Raises FormatError."""
    title = layer.annotations[mediatype.TITLE]
    if title in ("", "..") or title != Path(title).name or not title.isprintable():
        raise FormatError(f"the title {title[:100]!r} is not the name of a file")
    return title


def _write(source: Source, layer: Descriptor, path: Path, on_event: OnEvent) -> None:
    """Write a layer to a new file, verified. Raises AImageError."""
    on_event(CopyEvent("start", layer, layer.size))
    buffer = new_buffer()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            open_atomic(path) as file,
            VerifyingReader(source.open(layer), layer) as reader,
        ):
            while count := reader.readinto(buffer):
                write_all(file.fileno(), buffer[:count])
                on_event(CopyEvent("progress", layer, count))
    except OSError as error:
        kind = NoSpaceError if error.errno in DISK_FULL else StoreError
        advice = ADVICE.get(error.errno or 0)
        raise kind(f"cannot write {path}: {error.strerror or error}", hint=advice) from None
    on_event(CopyEvent("done", layer, layer.size))


def _build_descriptor(file: Path) -> Descriptor:
    """Return the descriptor of a file, titled with its name without the directories."""
    try:
        with file.open("rb") as opened:
            encoded = hashlib.file_digest(opened, "sha256").hexdigest()
            size = opened.tell()
    except FileNotFoundError:
        raise NotFoundError(f"file not found: {file}") from None
    except IsADirectoryError:
        raise UsageError(f"{file} is a directory, not a file") from None
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error.strerror}") from error
    return Descriptor(_LAYER, Digest("sha256", encoded), size, {mediatype.TITLE: file.name})


class _Files(EmptySource):
    """Local files, as a source to copy from."""

    def __init__(self, layers: Sequence[Descriptor], files: Sequence[Path]) -> None:
        self._paths = {layer.digest: file for layer, file in zip(layers, files, strict=True)}

    def exists(self, content: Descriptor, /) -> bool:
        return content.digest in self._paths

    def open(self, content: Descriptor, offset: int = 0, _: int | None = None, /) -> Reader:
        return build_file_body(self._paths[content.digest])(offset)
