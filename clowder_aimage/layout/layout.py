"""The image layout as a content store."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from clowder_aimage.content.buffer import CHUNK_SIZE, new_buffer
from clowder_aimage.content.store import Body
from clowder_aimage.content.verify import read_all, readinto
from clowder_aimage.errors import FormatError, NotFoundError, UsageError
from clowder_aimage.layout.fault import store_errors
from clowder_aimage.layout.index import edit_index, read_index, sync_directory
from clowder_aimage.layout.ingest import FileIngest, blob_path, ingested
from clowder_aimage.oci import (
    Descriptor,
    Digest,
    Manifest,
    Reference,
    mediatype,
    parse_document,
)

_NAMES = (  # the best first: what containerd exports has the tag alone as ref.name
    mediatype.CONTAINERD_NAME,
    mediatype.CONTAINERD_NAME_MISSPELT,
    mediatype.REF_NAME,
)


class ImageLayout:
    """Content in ``root``: ``oci-layout``, ``index.json`` and ``blobs/<algorithm>/<encoded>``.

    What only we need (the lock, blobs on their way in) lies in ``root/.aimage``. The directory
    is made by the first write.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    # -- reading

    def resolve(self, reference: Reference, /) -> Descriptor:
        """The manifest that ``reference`` names; with a digest, any manifest of that digest.

        Raises:
            NotFoundError: there is none.
        """
        for name, descriptor in self._entries():
            if reference.digest is not None:
                if descriptor.digest == reference.digest:
                    return descriptor
            elif name == str(reference) or _same(name, reference):
                return descriptor
        raise NotFoundError(
            f"no {reference} in the store {self.root}",
            hint="'aimage ls' lists what is there; 'aimage pull' fetches from a registry",
        )

    def exists(self, content: Descriptor, /) -> bool:
        with store_errors(self.root):
            try:
                return os.stat(blob_path(self.root, content)).st_size == content.size
            except FileNotFoundError:
                return False

    def path(self, content: Descriptor, /) -> Path:
        path = Path(blob_path(self.root, content))
        if not path.is_file():
            raise NotFoundError(
                f"{content.digest} is not in the store {self.root}",
                hint="pull the AImage again to complete it",
            )
        return path

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> BinaryIO:
        with store_errors(self.root):
            file = self.path(content).open("rb", buffering=0)
            file.seek(offset)
        if length is None:
            return cast(BinaryIO, file)
        with file:
            return io.BytesIO(file.read(length) or b"")

    def tags(self) -> Iterator[tuple[str, Descriptor]]:
        """The names in index.json, as they stand there, and what they name."""
        return ((name, descriptor) for name, descriptor in self._entries() if name)

    def _entries(self) -> Iterator[tuple[str, Descriptor]]:
        for entry in read_index(self.root)["manifests"]:
            with contextlib.suppress(FormatError):  # a foreign entry that we cannot read
                descriptor = Descriptor.from_json(entry, "index.json")
                yield _name(descriptor.annotations), descriptor

    # -- writing

    def ingest(self, key: str, expected: Descriptor | None = None, /) -> FileIngest:
        """Begin to take a blob in. Raises IngestBusyError, StoreError or NoSpaceError."""
        return FileIngest(self.root, key, expected)

    def lacking(self, content: Descriptor, /) -> int:
        """The bytes that must still be written: what lies in an ingest has its place already."""
        return max(0, content.size - ingested(self.root, content))

    def free(self) -> int:
        """The bytes that an ordinary user may still write to the store's file system."""
        place = self.root
        while not place.exists() and place != place.parent:
            place = place.parent
        with store_errors(self.root):
            return shutil.disk_usage(place).free

    def push(self, content: Descriptor, body: Body, reference: Reference | None = None, /) -> None:
        if not self.exists(content):
            self._take_in(content, body)
        if reference is not None:
            self.tag(content, reference)

    def _take_in(self, content: Descriptor, body: Body) -> None:
        ingest = FileIngest(self.root, content.digest.encoded, content, wait=True)
        if self.exists(content):  # another process was at it, and has finished
            ingest.abort()
            return
        try:
            ingest.restart()
            buffer, offset = new_buffer(min(CHUNK_SIZE, content.size + 1)), 0
            with body() as source:
                while (count := readinto(source, buffer)) and offset <= content.size:
                    ingest.write_at(offset, buffer[:count])
                    offset += count
        except BaseException:
            ingest.abort()
            raise
        ingest.commit(content)

    def tag(self, content: Descriptor, reference: Reference, /) -> None:
        """Let ``reference`` name a manifest that is here, durably.

        The blobs' directories are synchronised first: the index never names what a power cut
        could take back.
        """
        document = parse_document(read_all(self.open(content), content), content.media_type)
        self._sync_blobs({content.digest, *(child.digest for child in document.children)})
        entry = document.descriptor.to_json() | {"digest": str(content.digest)}
        if isinstance(document, Manifest) and document.artifact_type:
            entry["artifactType"] = document.artifact_type
        name = _index_name(reference)
        entry["annotations"] = {mediatype.CONTAINERD_NAME: name, mediatype.REF_NAME: name}
        with edit_index(self.root) as index:
            _replace(index["manifests"], entry, name)

    def _sync_blobs(self, digests: set[Digest]) -> None:
        directories = {self.root / "blobs" / digest.algorithm for digest in digests}
        with store_errors(self.root):
            for directory in [*sorted(directories), self.root / "blobs"]:
                if directory.is_dir():
                    sync_directory(directory)

    def untag(self, reference: Reference, /) -> None:
        """Forget a name; the blobs stay until they are collected. Raises NotFoundError."""
        wanted = _index_name(reference)
        missing = NotFoundError(
            f"no {reference} in the store {self.root}", hint="'aimage ls' lists what is there"
        )
        if not any(_is_named(entry, wanted) for entry in read_index(self.root)["manifests"]):
            raise missing  # before a store is made just to look into it
        with edit_index(self.root) as index:
            kept = [entry for entry in index["manifests"] if not _is_named(entry, wanted)]
            if len(kept) == len(index["manifests"]):
                raise missing
            index["manifests"] = kept


def _name(annotations: Any) -> str:
    if not isinstance(annotations, dict):
        return ""
    return next((str(annotations[key]) for key in _NAMES if annotations.get(key)), "")


def _index_name(reference: Reference) -> str:
    """How index.json calls it: a tag wins over the digest, which the entry holds anyway."""
    if reference.tag and reference.digest:
        return str(Reference(reference.registry, reference.repository, reference.tag))
    return str(reference)


def _same(name: str, reference: Reference) -> bool:
    """Whether a foreign entry's name means ``reference`` (``model`` is ``model:latest``)."""
    try:
        return bool(name) and Reference.parse(name) == reference
    except UsageError:
        return False


def _is_named(entry: Any, name: str) -> bool:
    if not isinstance(entry, dict):
        return False
    found = _name(entry.get("annotations"))
    return found == name or _same(found, Reference.parse(name))


def _replace(entries: list[Any], entry: dict[str, Any], name: str) -> None:
    """Put ``entry`` where the entry of that name stands, keeping what others wrote on it."""
    for i, old in enumerate(entries):
        if _is_named(old, name):
            if old.get("digest") == entry["digest"]:
                entry["annotations"] = old["annotations"] | entry["annotations"]
                entry = old | entry
            entries[i] = entry
            return
    entries.append(entry)
