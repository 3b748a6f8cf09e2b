"""AImages of files on disk, without a layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from clowder_aimage.content.store import BlobFiles, Reader
from clowder_aimage.dialect.aimage import AImage, Layer
from clowder_aimage.errors import NotFoundError
from clowder_aimage.oci import Descriptor, Digest, mediatype


class Files(BlobFiles):
    """Blobs by digest."""

    def __init__(self) -> None:
        self.paths: dict[Digest, Path] = {}

    def open(self, content: Descriptor, /) -> Reader:
        return self.find_path(content).open("rb")

    def find_path(self, content: Descriptor, /) -> Path:
        if content.digest not in self.paths:
            raise NotFoundError(f"no {content.digest}")
        return self.paths[content.digest]


def gguf_aimage(
    *paths: Path,
    types: dict[str, str] | None = None,
    names: dict[str, str] | None = None,
    **config: Any,
) -> tuple[Files, AImage]:
    """Return an AImage whose layers are these files, and its blobs.

    types: the media types of files by name, those of GGUF models otherwise. names: of layers, by
    those of files.
    """
    files, layers = Files(), []
    for path in paths:
        data = path.read_bytes()
        default = mediatype.AIMAGE_GGUF if path.suffix == ".gguf" else mediatype.AIMAGE_FILE
        kind = (types or {}).get(path.name, default)
        descriptor = Descriptor(kind, Digest.of(data), len(data))
        files.paths[descriptor.digest] = path
        layers.append(Layer(descriptor, (names or {}).get(path.name, path.name)))
    value = {"schemaVersion": 1, "components": {}, "format": "gguf"} | config
    return files, AImage(json.dumps(value).encode(), tuple(layers))
