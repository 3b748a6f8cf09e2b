"""Read the content of a layer, compressed or not, once and within bounds.

The media type names the compression: ``+gzip`` (RFC 1952) or ``+zstd`` (RFC 8878). The digest of
the blob is verified while it is read, and the digest of the content if the manifest has one.
Otherwise two bounds apply: MAX_PLAIN, and MAX_RATIO times the size of the blob. Deflate compresses
zeros by a factor of 1,032, weights by less than a hundred.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from clowder_aimage.content.buffer import CHUNK_SIZE
from clowder_aimage.content.store import BlobFiles, Reader, Source
from clowder_aimage.content.verified_reader import SourceReader, VerifyingReader
from clowder_aimage.errors import AImageError, FormatError, VerificationError, needs
from clowder_aimage.oci import Descriptor, mediatype

# Bytes that a layer of unknown content may unpack to
MAX_PLAIN = 1 << 40
MAX_RATIO = 200
# Bytes that a layer may unpack to before its ratio is checked
_MIN_UNPACKED = 64 * 1024 * 1024
# Bytes in one read, which may decompress to 1,032 times as many
_GZIP_READ = 16 * 1024
# Bytes in one read, which may decompress to 32,768 times as many
_ZSTD_READ = 4096
# Maximum bytes of a zstd window, as in the zstd tool
_WINDOW = 1 << 27
_DOCKER = "application/vnd.docker.image.rootfs."
_DOTTED = (".tar.gzip", ".tar.zstd")


def open_decompressed(
    store: BlobFiles | Source,
    layer: Descriptor,
    content: Descriptor | None,
    *,
    limit: int = MAX_PLAIN,
) -> SourceReader:
    """Open the content of ``layer``: its blob, decompressed by its media type.

    ``content`` describes the decompressed bytes, if the manifest does. They are verified once all
    of them have been read.

    Raises:
        NotFoundError: the blob is not in the store.
        UsageError: the layer is compressed with zstd, and the package for it is not installed.
        FormatError: ``content`` is larger than ``limit`` bytes; or, on reading, the blob is not in
            that compression, is truncated, or unpacks to too many bytes.
        VerificationError: on reading, the blob is damaged, or differs from ``content``.
    """
    compression = parse_compression(layer.media_type)
    if content is not None and content.size > limit:
        raise build_size_error(layer, limit)
    decoder = (
        {"gzip": _create_gzip_decoder, "zstd": _create_zstd_decoder}[compression]()
        if compression
        else None
    )
    source = VerifyingReader(store.open(layer), layer)
    if decoder is None:
        return source
    plain = _PlainReader(source, layer, decoder, content, limit)
    return plain if content is None else VerifyingReader(plain, content)


def parse_compression(media_type: str) -> str:
    """Return the compression of a layer, one of mediatype.COMPRESSIONS, or an empty string.

    Docker's types have a dot before it (Docker registry, "Image Manifest Version 2, Schema 2").
    """
    if media_type.startswith(_DOCKER) and media_type.endswith(_DOTTED):
        return media_type.rpartition(".")[2]
    return mediatype.split_compression(media_type)[1]


def build_size_error(layer: Descriptor, limit: int) -> FormatError:
    """Return the error for a layer that unpacks to more than ``limit`` bytes."""
    return FormatError(
        f"layer {layer.digest} of {layer.size} bytes decompresses to more than {limit} bytes",
        hint="if this is expected, decompress it with another tool",
    )


class _Decoder:
    """A decoder of consecutive frames (of gzip: members), optionally followed by ``padding``."""

    def __init__(
        self,
        name: str,
        begin: Callable[[], Any],
        failure: type[Exception],
        size: int,
        padding: bytes = b"",
    ) -> None:
        self._name, self._begin, self._failure = name, begin, failure
        self._size, self._padding = size, padding
        # At least one frame, which must be complete
        self._frame = begin()
        self._rest = b""

    def decode(self, read: Callable[[int], bytes]) -> bytes:
        """Return more bytes, or none at the end. Raises FormatError."""
        while packed := self._rest or read(self._size):
            plain = self._step(packed if self._frame else packed.lstrip(self._padding))
            if plain:
                return plain
        if self._frame:
            raise FormatError(f"is truncated: incomplete {self._name} data")
        return b""

    def _step(self, packed: bytes) -> bytes:
        self._rest = b""
        if not packed:
            return b""
        self._frame = self._frame or self._begin()
        try:
            plain: bytes = self._frame.decompress(packed)
        except self._failure as error:
            raise FormatError(f"is not valid {self._name}: {error}") from None
        if self._frame.eof:
            self._rest, self._frame = self._frame.unused_data, None
        return plain


def _create_gzip_decoder() -> _Decoder:
    """Return a decoder of gzip (RFC 1952, section 2.2)."""
    begin = partial(zlib.decompressobj, 16 + zlib.MAX_WBITS)
    return _Decoder("gzip", begin, zlib.error, _GZIP_READ, padding=b"\0")


def _create_zstd_decoder() -> _Decoder:
    """Return a decoder of zstd (RFC 8878, section 3). Raises UsageError."""
    zstandard = import_zstandard()
    limited = zstandard.ZstdDecompressor(max_window_size=_WINDOW)
    return _Decoder("zstd", limited.decompressobj, zstandard.ZstdError, _ZSTD_READ)


def import_zstandard() -> Any:
    """Import zstandard, since Python has no zstd before 3.14. Raises UsageError without it."""
    with needs("zstd", "zstd"):
        import zstandard
    return zstandard


class _PlainReader(SourceReader):
    """The decompressed bytes of ``source``."""

    def __init__(
        self,
        source: Reader,
        layer: Descriptor,
        decoder: _Decoder,
        content: Descriptor | None,
        limit: int,
    ) -> None:
        super().__init__(source)
        self._layer, self._decoder, self._content = layer, decoder, content
        self._limit = limit if content is None else content.size
        self._packed_count = self._plain_count = 0
        self._rest = memoryview(b"")

    @property
    def is_stored(self) -> bool:
        """False: the blob has its digest, and was packed with other content than is stated."""
        return False

    def _fill(self, view: memoryview) -> int:
        if not self._rest:
            self._rest = memoryview(self._decode())
            self._plain_count += len(self._rest)
            self._check()
        count = min(len(view), len(self._rest))
        view[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def _decode(self) -> bytes:
        try:
            return self._decoder.decode(self._read)
        except FormatError as error:
            self._drain()
            raise FormatError(f"layer {self._layer.digest} {error.message}") from None

    def _read(self, count: int) -> bytes:
        data = self._source.read(count)
        self._packed_count += len(data)
        return data

    def _drain(self) -> None:
        """Raise VerificationError if the blob is damaged: damage explains the decoding error."""
        try:
            while self._source.read(CHUNK_SIZE):
                pass
        except VerificationError:
            raise
        except AImageError:
            return

    def _check(self) -> None:
        limit = self._limit
        # If the manifest states the content, its size is the limit.
        if self._content is None:
            limit = min(limit, max(_MIN_UNPACKED, MAX_RATIO * self._packed_count))
        if self._plain_count <= limit:
            return
        if self._content is not None:
            raise VerificationError(
                f"layer {self._layer.digest} decompresses to more than the {limit} bytes "
                f"of {self._content.digest}"
            )
        raise build_size_error(self._layer, limit)
