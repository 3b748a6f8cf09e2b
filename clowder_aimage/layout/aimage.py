"""From a name in a layout to the AImage behind it."""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from typing import BinaryIO, cast

from clowder_aimage.content.buffer import CHUNK_SIZE
from clowder_aimage.content.store import Body, ContentStore
from clowder_aimage.content.verify import read_all
from clowder_aimage.dialect import AImage, Dialect, detect
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Manifest, Reference, mediatype

MAX_CONFIG_SIZE = 64 * 1024 * 1024
_GZIPPED = (
    mediatype.OCI_LAYER_TAR_GZIP,
    "application/vnd.docker.image.rootfs.diff.tar.gzip",
)


@dataclass(frozen=True, slots=True)
class Stored:
    """An AImage in a store: its manifest as it lies there, and what that means."""

    descriptor: Descriptor
    manifest: Manifest
    dialect: Dialect
    aimage: AImage


def read_manifest(store: ContentStore, descriptor: Descriptor) -> Manifest:
    """The manifest, verified. Raises NotFoundError, ContentError."""
    return Manifest.parse(read_all(store.open(descriptor), descriptor), descriptor.media_type)


def read_aimage(store: ContentStore, reference: Reference) -> Stored:
    """The AImage that ``reference`` names in ``store``.

    Raises:
        NotFoundError: there is none, or its config is missing.
        ContentError: it is not an AImage, or not intact.
    """
    descriptor = store.resolve(reference)
    manifest = read_manifest(store, descriptor)
    dialect = detect(manifest)
    config = read_all(store.open(manifest.config), manifest.config, MAX_CONFIG_SIZE)
    return Stored(descriptor, manifest, dialect, dialect.read(manifest, config))


def inflate(store: ContentStore, stored: Stored) -> None:
    """Bring back the blobs that another tool compressed on the way; the rest is left alone, and so
    is what an AImage that is here in part lacks.

    The result is verified against the diff_id, and can be no larger than the AImage says.

    Raises:
        FormatError: a compression that we do not read.
        VerificationError: it does not unpack to what it stands for.
    """
    for layer, wanted in zip(stored.manifest.layers, stored.aimage.layers, strict=True):
        plain = wanted.descriptor
        if layer.digest == plain.digest or store.exists(plain) or not store.exists(layer):
            continue
        if layer.media_type not in _GZIPPED:
            raise FormatError(
                f"layer {layer.digest} ({layer.media_type}) is compressed in a way we do not read",
                hint="copy the AImage again without compression, or with gzip",
            )
        store.push(plain, _gunzip(store, layer))


def _gunzip(store: ContentStore, layer: Descriptor) -> Body:
    def body(offset: int = 0, /) -> BinaryIO:
        reader = _GunzipReader(store.open(layer), layer)
        while offset and (passed := len(reader.read(min(offset, CHUNK_SIZE)))):
            offset -= passed
        return cast(BinaryIO, reader)

    return body


class _GunzipReader(io.RawIOBase):
    """What a gzipped blob unpacks to."""

    def __init__(self, source: BinaryIO, layer: Descriptor) -> None:
        self._source = source
        self._layer = layer
        self._plain = gzip.GzipFile(fileobj=source)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            return self._plain.readinto(buffer)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise FormatError(f"layer {self._layer.digest} is not gzip: {error}") from None

    def close(self) -> None:
        self._source.close()
        super().close()
