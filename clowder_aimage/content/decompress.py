"""The content of a layer, compressed or not: read once, from the front, within bounds.

The media type says the compression: ``+gzip`` (RFC 1952) or ``+zstd`` (RFC 8878). The digest of the
blob is verified while it is read, and the digest of the content where the manifest has one. Without
one, two bounds hold: MAX_PLAIN, and MAX_RATIO times the size of the blob. Deflate packs zeros
1,032 times smaller; weights do not shrink to a hundredth.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol, cast

from clowder_aimage.content.buffer import CHUNK_SIZE
from clowder_aimage.content.store import BlobFiles
from clowder_aimage.content.verified_reader import VerifyingReader
from clowder_aimage.errors import AImageError, FormatError, UsageError, VerificationError
from clowder_aimage.oci import Descriptor, mediatype

MAX_PLAIN = 1 << 40  # bytes that a layer of unknown content may unpack to
MAX_RATIO = 200
_ROOM = 64 * 1024 * 1024  # bytes that a layer may unpack to before its ratio is checked
_READ = 64 * 1024  # bytes of gzip in one read
_FEED = 4096  # bytes of zstd in one read: they can become 32,768 times as many
_WINDOW = 1 << 27  # bytes of a zstd window: the limit of its own tool
_DOCKER = "application/vnd.docker.image.rootfs."
_DOTTED = (".tar.gzip", ".tar.zstd")
_GZIP_WINDOW = 16 + zlib.MAX_WBITS


def open_plain(
    store: BlobFiles, layer: Descriptor, content: Descriptor | None, *, limit: int = MAX_PLAIN
) -> BinaryIO:
    """Open the content of ``layer``: its blob, decompressed as the media type says.

    ``content`` describes the decompressed bytes, where the manifest does. They are verified once
    all of them have been read. Opening raises the first three errors, reading the others.

    Raises:
        NotFoundError: the blob is not in the store.
        UsageError: it is compressed with zstd, and the package for that is not installed.
        FormatError: ``content`` has more than ``limit`` bytes.
        FormatError: it is not compressed in that way, breaks off, or unpacks to too many bytes.
        VerificationError: the blob is damaged, or its content differs from ``content``.
    """
    compression = compression_of(layer.media_type)
    if content is not None and content.size > limit:
        raise too_large(layer, limit)
    decoder = _DECODERS[compression]() if compression else None
    source = VerifyingReader(store.open(layer), layer)
    if decoder is None:
        return cast(BinaryIO, source)
    plain = cast(BinaryIO, _PlainReader(source, layer, decoder, content, limit))
    return plain if content is None else cast(BinaryIO, VerifyingReader(plain, content))


def compression_of(media_type: str) -> str:
    """Return the compression of a layer, a word of mediatype.COMPRESSIONS, or an empty string.

    Docker's layers have a dot before it (Docker registry, "Image Manifest Version 2, Schema 2").
    """
    if media_type.startswith(_DOCKER) and media_type.endswith(_DOTTED):
        return media_type.rpartition(".")[2]
    return mediatype.split_compression(media_type)[1]


def too_large(layer: Descriptor, limit: int) -> FormatError:
    """Return the error for a layer that unpacks to more than ``limit`` bytes."""
    return FormatError(
        f"layer {layer.digest} has {layer.size} bytes and unpacks to more than {limit}: "
        "it is not unpacked",
        hint="if that is meant, unpack it with a tool of its own",
    )


class _Decoder(Protocol):
    """A decompressor that returns a bounded number of bytes at a time."""

    def decode(self, read: Callable[[int], bytes], /) -> bytes:
        """Return more bytes; none at the end. ``read`` returns compressed ones.

        Raises:
            FormatError: they break off, or are not compressed in this way.
        """
        ...


class _PlainReader(io.RawIOBase):
    """The decompressed bytes of ``source``."""

    def __init__(
        self,
        source: VerifyingReader,
        layer: Descriptor,
        decoder: _Decoder,
        content: Descriptor | None,
        limit: int,
    ) -> None:
        self._source = source
        self._layer = layer
        self._decoder = decoder
        self._content = content
        self._limit = limit if content is None else content.size
        self._taken = self._given = 0
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._rest:
            self._rest = memoryview(self._decode())
            self._given += len(self._rest)
            self._check()
        view = memoryview(buffer)
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
        data = self._source.read(count) or b""
        self._taken += len(data)
        return data

    def _drain(self) -> None:
        """Raise VerificationError where the blob itself is damaged, which is the cause then."""
        try:
            while self._source.read(CHUNK_SIZE):
                pass
        except VerificationError:
            raise
        except AImageError:
            return

    def _check(self) -> None:
        most = self._limit
        if self._content is None:  # else the size is known
            most = min(most, max(_ROOM, MAX_RATIO * self._taken))
        if self._given <= most:
            return
        if self._content is not None:
            raise VerificationError(
                f"layer {self._layer.digest} unpacks to more than {most} bytes, which is all that "
                f"{self._content.digest} has"
            )
        raise too_large(self._layer, most)

    def close(self) -> None:
        self._source.close()
        super().close()


class _Gzip:
    """Members one after the other, as RFC 1952, section 2.2 has them; zeros may follow."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(_GZIP_WINDOW)
        self._packed = b""
        self._is_within = True  # a member, which then must end; a file has at least one

    def decode(self, read: Callable[[int], bytes], /) -> bytes:
        while packed := self._packed or read(_READ):
            self._packed = packed if self._is_within else packed.lstrip(b"\0")
            self._is_within = bool(self._packed) or self._is_within
            if self._packed and (plain := self._step()):
                return plain
        if self._is_within:
            raise FormatError("breaks off: it is no whole gzip")
        return b""

    def _step(self) -> bytes:
        try:
            plain = self._inflate.decompress(self._packed, CHUNK_SIZE)
        except zlib.error as error:
            raise FormatError(f"is no gzip: {error}") from None
        self._packed = self._inflate.unconsumed_tail
        if self._inflate.eof:
            self._packed = self._inflate.unused_data
            self._inflate = zlib.decompressobj(_GZIP_WINDOW)
            self._is_within = False
        return plain


class _Zstd:
    """Frames one after the other, as RFC 8878, section 3 has them."""

    def __init__(self) -> None:
        self._zstandard = zstandard_package()
        self._frame: Any = None
        self._packed = b""
        self._is_within = True

    def decode(self, read: Callable[[int], bytes], /) -> bytes:
        while packed := self._packed or read(_FEED):
            if plain := self._step(packed):
                return plain
        if self._is_within:
            raise FormatError("breaks off: it is no whole zstd")
        return b""

    def _step(self, packed: bytes) -> bytes:
        if self._frame is None:
            limited = self._zstandard.ZstdDecompressor(max_window_size=_WINDOW)
            self._frame, self._is_within = limited.decompressobj(), True
        try:
            plain: bytes = self._frame.decompress(packed)
        except self._zstandard.ZstdError as error:
            raise FormatError(f"is no zstd, or wants too much memory: {error}") from None
        self._packed = b""
        if self._frame.eof:
            self._packed = self._frame.unused_data
            self._frame, self._is_within = None, False
        return plain


def zstandard_package() -> Any:
    """Import zstandard, since Python has no zstd before 3.14. Raises UsageError without it."""
    try:
        import zstandard
    except ImportError:
        raise UsageError(
            "zstd needs the package zstandard, which is not installed",
            hint="pip install 'clowder-aimage[zstd]'",
        ) from None
    return zstandard


_DECODERS: dict[str, Callable[[], _Decoder]] = {"gzip": _Gzip, "zstd": _Zstd}
