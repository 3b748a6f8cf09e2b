"""Private metadata of a store: small JSON objects, each in a separate file.

Processes that write different keys do not interfere, with or without locks; one key is replaced
atomically. An unreadable file is an error, so that pinned content is never removed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from clowder_aimage.content.atomic_file import open_atomic, sync_directory, write_all
from clowder_aimage.content.file_system import read_again
from clowder_aimage.content.open_directory import unlink
from clowder_aimage.content.store import ContentStore
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.errors import AImageError, FormatError, StoreError
from clowder_aimage.layout.lock import (
    PRIVATE,
    check_own,
    make_directory,
    open_regular,
    share,
    translate_store_errors,
)
from clowder_aimage.oci import Descriptor, Manifest, mediatype, read_json

_MAX_SIZE = 1024 * 1024
_LISTING = "listing"
_UNKNOWN = {"size": None, "kind": "?", "family": None, "type": None, "created": None}
# Characters of a value from a config
_MAX_TEXT = 60


class MetadataFiles:
    """The files in ``.aimage/<kind>``: JSON objects with their key in ``key``."""

    def __init__(self, root: Path, kind: str) -> None:
        self._root, self._kind = root, kind
        self._directory = os.path.join(root, PRIVATE, kind)

    def list_names(self) -> set[str]:
        """Return the names of the files (see ``build_file_name``). Raises StoreError."""
        directory = check_own(self._root, self._kind)
        with translate_store_errors(self._root), contextlib.suppress(FileNotFoundError):
            return {name for name in os.listdir(directory) if "." not in name}
        return set()

    def iter_items(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield all keys and their values, in arbitrary order. Raises StoreError."""
        for name in self.list_names():
            if (value := self.read(name)) is not None:
                yield value["key"], value

    def get(self, key: str) -> dict[str, Any] | None:
        """Return the value of ``key``, or None. Raises StoreError."""
        check_own(self._root, self._kind)
        value = self.read(build_file_name(key))
        return value if value is not None and value["key"] == key else None

    def read(self, name: str) -> dict[str, Any] | None:
        """Return the value in a file; None if it is missing or damaged. Raises StoreError."""
        path = os.path.join(self._directory, name)
        with translate_store_errors(self._root):
            try:
                raw = read_again(functools.partial(_read_file, path))
            except FileNotFoundError:
                return None
            except OSError as error:
                error.filename = error.filename or path
                raise
        try:
            value = read_json(raw, name)
        except FormatError:
            return None
        return value if isinstance(value, dict) and isinstance(value.get("key"), str) else None

    def put(self, key: str, value: dict[str, Any], *, durable: bool) -> None:
        """Write the value of ``key``. Raises StoreError or NoSpaceError."""
        data = json.dumps({"key": key} | value).encode()
        with translate_store_errors(self._root):
            make_directory(self._root, PRIVATE, self._kind)
            write_shared(os.path.join(self._directory, build_file_name(key)), data, durable=durable)

    def restore(self, key: str, value: dict[str, Any] | None) -> None:
        """Write back the result of ``get``. Raises StoreError or NoSpaceError."""
        if value is None:
            self.remove(key)
        elif self.get(key) != value:
            self.put(key, value, durable=True)

    def remove(self, key: str) -> None:
        """Remove ``key``, durably. Raises StoreError."""
        check_own(self._root, self._kind)
        with translate_store_errors(self._root), contextlib.suppress(FileNotFoundError):
            unlink(os.path.join(self._directory, build_file_name(key)))
            sync_directory(self._directory)


def _read_file(path: str) -> bytes:
    with open(open_regular(path), "rb", buffering=0) as file:
        return file.read(_MAX_SIZE) or b""


@functools.lru_cache(maxsize=4096)
def build_file_name(key: str) -> str:
    """Return the name of the file of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def write_shared(
    path: str | Path, data: bytes, *, durable: bool = True, directory: Path | None = None
) -> None:
    """Replace a file of the store, shared with the directory's group. Raises OSError."""
    final = Path(path)
    prepare = functools.partial(share, directory=final.parent, mode=0o664)
    with open_atomic(
        final, mode=0o644, durable=durable, directory=directory, prepare=prepare
    ) as to:
        write_all(to.fileno(), data)


def read_summary(root: Path, store: ContentStore, descriptor: Descriptor) -> dict[str, Any]:
    """Return ``size`` (bytes of all blobs) and ``kind`` (a dialect, or ``index``) of a manifest.

    ``family``, ``type`` (quantization or dtype) and ``created`` are those in its config. They are
    None, and ``kind`` is ``?``, if the manifest is missing or malformed.
    """
    if descriptor.media_type in mediatype.INDEXES:
        return _UNKNOWN | {"kind": "index"}
    path = os.path.join(root, PRIVATE, _LISTING, descriptor.digest.encoded)
    with contextlib.suppress(OSError, FormatError, StoreError):
        check_own(root, _LISTING)
        with open(open_regular(path), "rb", buffering=0) as file:
            value = read_json(file.read(4096), "it")
        if isinstance(value, dict) and value.keys() == _UNKNOWN.keys():
            return value
    try:
        manifest = Manifest.parse(read_all(store.open(descriptor), descriptor))
        return remember(root, store, descriptor, manifest)
    except AImageError:
        # A listing shows the other names.
        return _UNKNOWN


def remember(
    root: Path, store: ContentStore, descriptor: Descriptor, manifest: Manifest
) -> dict[str, Any]:
    """Store the summary of a manifest, if possible. Raises FormatError: it is not an AImage."""
    from clowder_aimage.dialect import detect
    from clowder_aimage.layout.stored_aimage import interpret

    size = sum(blob.size for blob in manifest.children)
    value = _UNKNOWN | {"size": size, "kind": detect(manifest).name}
    # The config may be missing or malformed.
    with contextlib.suppress(AImageError, OSError):
        properties = interpret(store, descriptor, manifest).aimage.properties
        family = (
            properties.get("family") or properties.get("architecture") or properties.get("format")
        )
        fields = {
            "family": family,
            "type": find_weight_type(properties),
            "created": properties.get("created"),
        }
        value |= {key: _shorten(text) for key, text in fields.items()}
    with contextlib.suppress(OSError, AImageError):
        directory = make_directory(root, PRIVATE, _LISTING)
        path = os.path.join(directory, descriptor.digest.encoded)
        write_shared(path, json.dumps(value).encode(), durable=False)
    return value


def find_weight_type(properties: Mapping[str, Any]) -> object:
    """Return the quantization of the weights in a config, else their dtype."""
    if isinstance(name := properties.get("quantization"), str):
        return name
    components = properties.get("components")
    for component in components.values() if isinstance(components, dict) else ():
        quantization = component.get("quantization") if isinstance(component, dict) else None
        if isinstance(quantization, dict) and isinstance(quantization.get("type"), str):
            return quantization["type"]
    return properties.get("dtype")


def _shorten(text: object) -> str | None:
    return " ".join(text.split())[:_MAX_TEXT] if isinstance(text, str) and text else None
