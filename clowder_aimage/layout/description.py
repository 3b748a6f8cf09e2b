"""Descriptions of manifests, kept in the store by digest: each is derived once.

Content never changes, so a description holds until another version of the program derives it. That
there is nothing to describe is kept, too. Other programs may write these files: who reads a
description checks its form, and derives it again if that is another.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Container, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from clowder_aimage import __version__
from clowder_aimage.content.atomic_file import build_temporary_name, write_all
from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.errors import AImageError, FormatError, StoreError
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_own,
    is_shared,
    make_directory,
    share,
)
from clowder_aimage.oci import Digest, read_json

LISTING, MODEL = "listing", "described"
# Of the manifests of unpacked files
UNPACKED = "unpacked"
# The memory of models
MEASURED = "measured"
# Of the artifacts that are attached to manifests
ATTACHED = "attached"
# Those that garbage collection removes with their manifests
KINDS = (LISTING, MODEL, UNPACKED, MEASURED, ATTACHED)
# Bytes of a file
_MAX_SIZE = 64 * 1024
_PACK = "pack"
_HEAD = json.dumps({"version": __version__}).encode()
# Bytes of a pack
_MAX_PACK = 64 * 1024 * 1024
# A pack is written for that many descriptions, and this part of those in it.
_MIN_PACKED, _MAX_SHARE = 32, 8


def read_description(root: Path, kind: str, manifest: Digest) -> dict[str, Any] | None:
    """Return the description of a manifest, unchecked; None without one of this version."""
    with DescriptionFiles(root, kind) as files:
        return files.read(manifest)


def keep_description(root: Path, kind: str, manifest: Digest, value: dict[str, Any]) -> bool:
    """Write the description of a manifest; return False if it is too long to be kept.

    A store that cannot be written stays as it is.
    """
    with DescriptionFiles(root, kind) as files:
        return files.write(manifest, value)


class DescriptionFiles:
    """The descriptions of one kind in a store, whose directory is opened once, until it is closed.

    Each is a file. Many that are read or written together become lines of one file, the pack:
    opening a file takes longer than parsing it, and creating one longer than deriving a
    description. A store that cannot be read has none, and one that cannot be written stays as it
    is.
    """

    def __init__(self, root: Path, kind: str) -> None:
        self._root, self._kind = root, kind
        self._directory: OpenDirectory | None = None
        self._is_shared: bool | None = None
        self._pack: dict[bytes, bytes] | None = None
        self._unpacked: dict[bytes, bytes] = {}
        self._added: dict[Digest, dict[str, Any]] = {}
        with contextlib.suppress(OSError, StoreError):
            self._directory = OpenDirectory(check_own(root, kind))

    def __enter__(self) -> DescriptionFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        try:
            self._write_added()
        finally:
            if self._directory is not None:
                os.close(self._directory.fd)
                self._directory = None

    def read(self, manifest: Digest) -> dict[str, Any] | None:
        """Return the description of a manifest, unchecked; None without one of this version."""
        if manifest in self._added or self._directory is None:
            return self._added.get(manifest)
        if self._pack is None:
            self._pack = self._read_pack(self._directory)
        key = manifest.encoded.encode()
        packed = self._pack.get(key)
        if packed is not None:
            with contextlib.suppress(FormatError):
                value = read_json(packed, "it")
                return value if isinstance(value, dict) else None
        with contextlib.suppress(OSError, FormatError):
            value = read_json(self._directory.read(manifest.encoded, _MAX_SIZE), "it")
            if isinstance(value, dict) and value.pop("version", None) == __version__:
                self._unpacked[key] = json.dumps(value).encode()
                return value
        return None

    def write(self, manifest: Digest, value: dict[str, Any]) -> bool:
        """Write the description of a manifest; return False if it is too long to be kept."""
        data = json.dumps({"version": __version__} | value).encode()
        if len(data) >= _MAX_SIZE:
            return False
        self._replace(manifest.encoded, data)
        return True

    def add(self, manifest: Digest, value: dict[str, Any]) -> None:
        """Write the description of a manifest when this is closed."""
        self._added[manifest] = value

    def _write_added(self) -> None:
        pack = self._pack or {}
        added = {
            manifest.encoded.encode(): json.dumps(value).encode()
            for manifest, value in self._added.items()
        }
        lines = self._unpacked | added
        # One that is in the pack already is not a description there
        is_packed = not pack.keys().isdisjoint(added)
        if not is_packed and len(lines) < max(_MIN_PACKED, len(pack) // _MAX_SHARE):
            for manifest, value in self._added.items():
                self.write(manifest, value)
            return
        with contextlib.suppress(OSError, AImageError):
            # Another process may have written it since it was read
            self._write_pack(self._read_pack(self._create_directory()) | lines)

    def retain(self, manifests: Container[str]) -> None:
        """Remove the descriptions of all other manifests; ignore errors."""
        if self._directory is None:
            return
        with contextlib.suppress(OSError):
            for name in self._directory.list_names():
                if "." not in name and name != _PACK and name not in manifests:
                    self._directory.remove(name)
        pack = self._read_pack(self._directory)
        lines = {key: line for key, line in pack.items() if key.decode() in manifests}
        if len(lines) < len(pack):
            self._write_pack(lines)

    def _read_pack(self, directory: OpenDirectory) -> dict[bytes, bytes]:
        """Return the lines of the pack by their manifests; none of another version."""
        with contextlib.suppress(OSError, ValueError):
            size = min(directory.stat(_PACK).st_size, _MAX_PACK)
            head, *lines = directory.read(_PACK, size).splitlines()
            if head == _HEAD:
                return {key: text for key, _, text in (line.partition(b" ") for line in lines)}
        return {}

    def _write_pack(self, lines: Mapping[bytes, bytes]) -> None:
        texts = [b"%s %s\n" % item for item in lines.items() if len(item[1]) < _MAX_SIZE]
        data = b"".join([_HEAD, b"\n", *texts])
        if len(data) <= _MAX_PACK:
            self._replace(_PACK, data)

    def _replace(self, name: str, data: bytes) -> None:
        with contextlib.suppress(OSError, AImageError):
            directory = self._create_directory()
            temporary = build_temporary_name(Path(name))
            fd = directory.create(temporary, 0o644)
            try:
                if self._is_shared:
                    share(fd, directory.path, 0o664)
                write_all(fd, data)
                directory.rename(os.fstat(fd), temporary, name)
            except BaseException:
                directory.remove(temporary)
                raise
            finally:
                os.close(fd)

    def _create_directory(self) -> OpenDirectory:
        if self._directory is None:
            self._directory = OpenDirectory(make_directory(self._root, PRIVATE, self._kind))
        if self._is_shared is None:
            self._is_shared = is_shared(os.fstat(self._directory.fd))
        return self._directory
