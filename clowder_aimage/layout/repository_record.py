"""Records of repositories: the blobs that each has, and its manifests that lost a tag.

The repositories of a registry share the blobs of its store. ``.aimage/repositories`` has a
directory for each repository that was written to. Each record is a separate file, created and
removed by one call of the system: several processes may serve a store, and a crash leaves no
partial record.

- ``name``: the name of the repository, once it has had a manifest.
- ``blobs/``: an empty file for each blob that was uploaded or mounted, and not deleted since.
- ``untagged/``: the descriptor of each manifest that lost a tag over the API. Collections keep it
  for the grace after the time of the file.
- ``dropped/``: the same for commands, without a grace.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from clowder_aimage.content.atomic_file import sync_directory
from clowder_aimage.content.open_directory import unlink
from clowder_aimage.errors import AImageError
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_own,
    make_directory,
    open_regular,
    open_shared,
    sanitize_time,
    translate_store_errors,
)
from clowder_aimage.layout.metadata import build_file_name, write_shared
from clowder_aimage.oci import Descriptor, Digest, read_json

_KIND, _NAME, _BLOBS = "repositories", "name", "blobs"
_UNTAGGED, _DROPPED = "untagged", "dropped"
# Bytes of a record: a descriptor, or a name
_MAX_SIZE = 64 * 1024


class RepositoryRecords:
    """The records of the store at ``root``. Methods raise StoreError or NoSpaceError."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._directory = os.path.join(root, PRIVATE, _KIND)

    def begin(self) -> None:
        """Begin the records of a store that a registry serves; a missing store stays so."""
        if self._root.is_dir():
            with translate_store_errors(self._root):
                make_directory(self._root, PRIVATE, _KIND)

    def list_repositories(self) -> list[str]:
        """Return the repositories that have or had a manifest."""
        paths = (os.path.join(directory, _NAME) for directory in _list_paths(self._directory))
        return [raw.decode() for raw in map(self._read, paths) if raw]

    def is_known(self, repository: str) -> bool:
        """Return True if the repository has or had a manifest."""
        return os.path.exists(self._locate(repository, _NAME))

    def add_repository(self, repository: str) -> None:
        """Record that the repository has a manifest, durably."""
        if not self.is_known(repository):
            self._write(self._locate(repository, _NAME), repository.encode())

    def has_blob(self, repository: str, digest: Digest) -> bool:
        """Return True if the blob was added to the repository and not removed since."""
        return os.path.exists(self._locate(repository, _BLOBS, digest))

    def has_blob_anywhere(self, digest: Digest) -> bool:
        """Return True if a repository has the blob."""
        file_name = _build_record_name(digest)
        directories = _list_paths(self._directory)
        return any(os.path.exists(os.path.join(path, _BLOBS, file_name)) for path in directories)

    def add_blob(self, repository: str, digest: Digest) -> None:
        """Record a blob. Hold the collection lock, and add it after its content is stored."""
        path = self._locate(repository, _BLOBS, digest)
        with translate_store_errors(self._root):
            try:
                fd = open_shared(path)
            except FileNotFoundError:
                self._make_parent(path)
                fd = open_shared(path)
            os.close(fd)

    def remove_blob(self, repository: str, digest: Digest) -> None:
        """Remove the record of a blob, durably."""
        self._remove(self._locate(repository, _BLOBS, digest))

    def add_untagged(self, repository: str, manifest: Descriptor) -> None:
        """Record that a manifest loses a tag now, durably: call this before it does."""
        self._add_manifest(repository, _UNTAGGED, manifest)

    def add_dropped(self, repository: str, manifest: Descriptor) -> None:
        """Record that a command removed a tag, if a registry serves the store or did so."""
        untagged = self._locate(repository, _UNTAGGED, manifest.digest)
        if os.path.isdir(self._directory) and not os.path.exists(untagged):
            self.add_repository(repository)
            self._add_manifest(repository, _DROPPED, manifest)

    def list_untagged(self, repository: str) -> list[Descriptor]:
        """Return the manifests that lost a tag; a collection may have removed them."""
        manifests = []
        for kind in (_UNTAGGED, _DROPPED):
            for path in _list_paths(self._locate(repository, kind)):
                if (raw := self._read(path)) is not None:
                    with contextlib.suppress(AImageError):
                        manifests.append(Descriptor.from_json(read_json(raw, path), path))
        return manifests

    def remove_untagged(self, repository: str, digest: Digest) -> None:
        """Remove the records of a manifest, durably."""
        for kind in (_UNTAGGED, _DROPPED):
            self._remove(self._locate(repository, kind, digest))

    def _add_manifest(self, repository: str, kind: str, manifest: Descriptor) -> None:
        # Without the annotations of its entry in index.json, which have the name
        content = Descriptor(manifest.media_type, manifest.digest, manifest.size)
        path = self._locate(repository, kind, manifest.digest)
        self._write(path, json.dumps(content.to_json()).encode())

    def find_recent(self, earliest: float, current: float) -> set[Digest]:
        """Return the manifests that lost a tag over the API after ``earliest``."""
        digests = set()
        for path in self._list_records(_UNTAGGED):
            with contextlib.suppress(FileNotFoundError, AImageError, TypeError):
                if sanitize_time(os.lstat(path).st_mtime, current) > earliest:
                    digests.add(_parse_record_name(path))
        return digests

    def prune(self, is_stored: Callable[[Digest], bool]) -> None:
        """Remove the records of content that is not stored. Hold the collection lock."""
        check_own(self._root, _KIND)
        for path in self._list_records(_BLOBS, _UNTAGGED, _DROPPED):
            # Of a file server's own files (.nfs...) the name is no digest
            with contextlib.suppress(OSError, AImageError, TypeError):
                if not is_stored(_parse_record_name(path)):
                    unlink(path)

    def _list_records(self, *kinds: str) -> Iterator[str]:
        for directory in _list_paths(self._directory):
            for kind in kinds:
                yield from _list_paths(os.path.join(directory, kind))

    def _locate(self, repository: str, kind: str, digest: Digest | None = None) -> str:
        path = os.path.join(self._directory, build_file_name(repository), kind)
        return path if digest is None else os.path.join(path, _build_record_name(digest))

    def _make_parent(self, path: str) -> None:
        names = os.path.relpath(os.path.dirname(path), self._root).split(os.sep)
        make_directory(self._root, *names)

    def _read(self, path: str) -> bytes | None:
        with (
            translate_store_errors(self._root),
            contextlib.suppress(FileNotFoundError),
            open(open_regular(path), "rb", buffering=0) as file,
        ):
            return file.read(_MAX_SIZE)
        return None

    def _write(self, path: str, data: bytes) -> None:
        with translate_store_errors(self._root):
            self._make_parent(path)
            # The temporary file is where collections remove those of killed processes
            write_shared(path, (data,), directory=self._root / PRIVATE)

    def _remove(self, path: str) -> None:
        check_own(self._root, _KIND)
        with translate_store_errors(self._root), contextlib.suppress(FileNotFoundError):
            unlink(path)
            sync_directory(os.path.dirname(path))


def _list_paths(directory: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return [os.path.join(directory, name) for name in os.listdir(directory)]
    return []


def _build_record_name(digest: Digest) -> str:
    """Return the name of a record's file; file servers of Windows refuse a colon."""
    return f"{digest.algorithm}-{digest.encoded}"


def _parse_record_name(path: str) -> Digest:
    return Digest(*os.path.basename(path).split("-", 1))
