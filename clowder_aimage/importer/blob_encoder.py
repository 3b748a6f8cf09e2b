"""Encoding of planned blobs, in order, in full buffers: copied, cast or quantized."""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from clowder_aimage.content.buffer import CHUNK_SIZE, new_buffer
from clowder_aimage.content.decompress import import_zstandard
from clowder_aimage.formats.prequantized import convert_factors
from clowder_aimage.importer import planned_layer
from clowder_aimage.importer.planned_layer import (
    CastChunk,
    Chunk,
    ComputedChunk,
    PlannedLayer,
    QuantizeChunk,
)
from clowder_aimage.importer.range_reader import RangeReader
from clowder_aimage.tensor import Quantization, compute_nbytes

if TYPE_CHECKING:
    from clowder_aimage.importer.quantizer import Quantizer

Sink = Callable[[memoryview], None]
QuantizedChunk = QuantizeChunk | ComputedChunk
ConvertedChunk = CastChunk | QuantizedChunk
# Bytes of a source that a thread quantizes at a time, and all threads together.
BLOCK = 4 * 1024 * 1024
BLOCKS = 32 * 1024 * 1024
# Bytes of a source that all threads together cast at a time.
CHUNKS = 8 * CHUNK_SIZE


class ChunkReader(Protocol):
    """A reader of values in chunks of bytes."""

    def iter_chunks(self, size: int, /) -> Iterator[memoryview]: ...


class BlobEncoder:
    """Encoder of blobs: the buffers and options of one of ``threads`` threads.

    A sink receives ``buffer``, filled except at the end; it is reused after the sink returns.
    """

    def __init__(
        self,
        size: int,
        stopped: threading.Event,
        quantizer: Quantizer | None = None,
        threads: int = 1,
    ) -> None:
        self.buffer = new_buffer(size)
        # Each thread needs several times the memory of the values that it casts.
        self._chunk = min(CHUNK_SIZE, CHUNKS // threads)
        self._block = min(BLOCK, BLOCKS // threads)
        self._stopped = stopped
        self._quantizer = quantizer
        self._filled = 0

    def encode(self, planned: PlannedLayer, sink: Sink) -> None:
        """Call ``sink`` with all bytes of the blob; an empty blob makes no call.

        Raises:
            ModelError: A file changed, a value does not fit its type, or values cannot be
                quantized.
            ParallelStoppedError: The write was cancelled.
        """
        self._filled = 0
        self._add(planned.prefix, sink)
        for chunk in planned.chunks:
            self._encode(chunk, sink)
        if self._filled:
            sink(self.buffer[: self._filled])

    def _encode(self, chunk: Chunk, sink: Sink) -> None:
        if isinstance(chunk, ComputedChunk):
            self._convert(chunk, MemoryReader(chunk.compute()), sink)
            return
        with RangeReader(chunk.file_range, self._stopped) as reader:
            match chunk:
                case planned_layer.CopyChunk():
                    self._copy(reader, sink)
                case QuantizeChunk() | CastChunk():
                    self._convert(chunk, reader, sink)
                case planned_layer.FactorChunk():
                    self._add(convert_factors(chunk.chunk, reader.read()), sink)
            reader.check_unchanged()

    def _add(self, data: bytes | memoryview, sink: Sink) -> None:
        view = memoryview(data)
        while len(view):
            count = min(len(view), len(self.buffer) - self._filled)
            self.buffer[self._filled : self._filled + count] = view[:count]
            view = view[count:]
            self._advance(count, sink)

    def _advance(self, count: int, sink: Sink) -> None:
        self._filled += count
        if self._filled == len(self.buffer):
            self._filled = 0
            sink(self.buffer)

    def _copy(self, reader: RangeReader, sink: Sink) -> None:
        while count := reader.readinto(self.buffer[self._filled :]):
            self._advance(count, sink)

    def _convert(self, chunk: ConvertedChunk, reader: ChunkReader, sink: Sink) -> None:
        if not isinstance(chunk, CastChunk) and chunk.quantization is not None:
            self._quantize(chunk, chunk.quantization, reader, sink)
            return
        for values in _cast(chunk, reader, self._chunk):
            self._add(memoryview(values).cast("B"), sink)

    def _quantize(
        self, chunk: QuantizedChunk, quantization: Quantization, reader: ChunkReader, sink: Sink
    ) -> None:
        """Quantize a matrix. Codes are written at once; scales and biases are buffered to the end.

        Groups are independent, so blocks divide even a very long row, unless it has one scale.
        """
        from clowder_aimage.importer import row_quantizer
        from clowder_aimage.importer.quantization_guard import QuantizationGuard

        guard = QuantizationGuard(chunk.name, chunk.target, quantization)
        columns = chunk.columns if quantization.is_by_row else quantization.group_size
        group = compute_nbytes(chunk.source, (columns,))
        # A blob has all codes first, then all scales, then all biases.
        buffers: list[list[bytes]] = [[], []]
        for values in _cast(chunk, reader, max(1, self._block // group) * group):
            values = guard.admit(values)
            if quantization.is_by_row:
                rows = values.reshape(-1, columns)
                codes, *scales_and_biases = row_quantizer.quantize_rows(rows, chunk.target)
            else:
                assert self._quantizer is not None  # noqa: S101
                codes, *scales_and_biases = self._quantizer.quantize(
                    values.reshape(1, -1), chunk.target, quantization
                )
            guard.count(
                values,
                codes,
                scales_and_biases[0],
                scales_and_biases[1] if len(scales_and_biases) > 1 else None,
            )
            self._add(codes, sink)
            for buffer, data in zip(buffers, scales_and_biases, strict=False):
                buffer.append(data)
        guard.check()
        for data in (*buffers[0], *buffers[1]):
            self._add(data, sink)


class MemoryReader:
    """A reader of computed values."""

    def __init__(self, values: Any) -> None:
        self._bytes = memoryview(values.reshape(-1)).cast("B")

    def iter_chunks(self, size: int) -> Iterator[memoryview]:
        """Yield the bytes, ``size`` at a time."""
        for start in range(0, len(self._bytes), size):
            yield self._bytes[start : start + size]


def _cast(chunk: ConvertedChunk, reader: ChunkReader, size: int) -> Iterator[Any]:
    """Yield the values of ``size`` bytes of the source at a time. Raises ModelError."""
    from clowder_aimage.importer import precision

    for data in reader.iter_chunks(size):
        values, lost = precision.cast(data, chunk.source, chunk.target)
        if lost:
            raise precision.build_overflow_error(chunk.name, lost, chunk.target)
        yield values


# Without a time and a name, so that equal contents have equal blobs (RFC 1952).
_GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_GZIP_LEVEL, _ZSTD_LEVEL = 6, 3


class Compressor(Protocol):
    """A streaming compressor."""

    def compress(self, data: memoryview, /) -> bytes: ...

    def flush(self) -> bytes: ...


def create_compressor(name: str, size: int) -> Compressor:
    """Return a compressor for ``size`` bytes, by its name in media types. Raises UsageError."""
    return _Gzip() if name == "gzip" else _create_zstd(size)


def check_compression(name: str) -> None:
    """Check that the package for a compression is installed. Raises UsageError."""
    if name == "zstd":
        import_zstandard()


class _Gzip:
    def __init__(self) -> None:
        self._deflate = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
        self._checksum = 0
        self._size = 0
        self._header = _GZIP_HEADER

    def compress(self, data: memoryview, /) -> bytes:
        self._checksum = zlib.crc32(data, self._checksum)
        self._size += len(data)
        header, self._header = self._header, b""
        return header + self._deflate.compress(data)

    def flush(self) -> bytes:
        end = struct.pack("<II", self._checksum, self._size & 0xFFFFFFFF)
        return self._header + self._deflate.flush() + end


def _create_zstd(size: int) -> Compressor:
    zstd: Compressor = import_zstandard().ZstdCompressor(level=_ZSTD_LEVEL).compressobj(size=size)
    return zstd
