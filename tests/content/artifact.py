"""Small artifacts for stores, and faulty stores."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from typing import Any

from clowder_aimage.content import build_bytes_body
from clowder_aimage.oci import Descriptor, Index, Manifest, Reference, mediatype, parse_document
from tests.memory_store import MemoryStore

BLOB = "application/vnd.example.blob"
CONFIG = "application/vnd.example.config"


def blob(data: bytes, media_type: str = BLOB, **fields: Any) -> Descriptor:
    """Return the descriptor of ``data``."""
    return Descriptor.of(media_type, data, **fields)


def manifest(config: Descriptor, layers: Iterable[Descriptor], **fields: Any) -> Manifest:
    """Return a manifest over these blobs."""
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_MANIFEST,
        "config": config.to_json(),
        "layers": [layer.to_json() for layer in layers],
        **fields,
    }
    return Manifest.parse(json.dumps(document).encode())


def index(children: Iterable[Descriptor], **fields: Any) -> Index:
    """Return an index over these manifests."""
    document = {
        "schemaVersion": 2,
        "mediaType": mediatype.OCI_INDEX,
        "manifests": [child.to_json() for child in children],
        **fields,
    }
    found = parse_document(json.dumps(document).encode())
    assert isinstance(found, Index)
    return found


def put(store: Any, data: bytes, media_type: str = BLOB) -> Descriptor:
    """Push ``data``."""
    descriptor = blob(data, media_type)
    store.push(descriptor, build_bytes_body(data))
    return descriptor


def put_artifact(store: Any, name: str, *layers: bytes, **fields: Any) -> Manifest:
    """Push an artifact of those layers and tag it."""
    config = put(store, b'{"name":"%s"}' % name.encode(), CONFIG)
    made = manifest(config, [put(store, layer) for layer in layers], **fields)
    store.push(made.descriptor, build_bytes_body(made.raw), Reference.parse(name))
    return made


class Recorder(MemoryStore):
    """Records the order of pushes."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed: list[Descriptor] = []

    def push(self, content: Descriptor, body: Any, reference: Reference | None = None, /) -> None:
        super().push(content, body, reference)
        self.pushed.append(content)


class Broken(io.RawIOBase):
    """Returns ``data`` and then fails."""

    def __init__(self, data: bytes, error: Exception) -> None:
        self._data = io.BytesIO(data)
        self._error = error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._data.readinto(buffer)
        if not count:
            raise self._error
        return count


def broken_body(data: bytes, error: Exception) -> Any:
    """Return a body that fails after ``data``."""

    def body(offset: int = 0, /) -> io.BufferedReader:
        return io.BufferedReader(Broken(data[offset:], error))

    return body
