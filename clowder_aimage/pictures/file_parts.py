"""The parts of a picture file: its pixels, and the metadata that decide their look.

Only the pixels are decoded, so that no other metadata matters, large or damaged. The parts are
counted before: each costs the decoder time, as a JPEG's scan of a few bytes goes over all pixels,
and chunks may be empty. The marks of a JPEG are read as libjpeg reads them (ITU T.81, B.1.1), so
that none is hidden from the count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from clowder_aimage.errors import UsageError
from clowder_aimage.pictures.file_metadata import FileMetadata
from clowder_aimage.pictures.input_file import MAX_PIXELS

# Chunks of a PNG or WebP file, segments of a JPEG
_MAX_PARTS = 1 << 16
# Encoders write about ten, and optimisers of files some more
_MAX_SCANS = 100
# Pixels of all scans
_MAX_SCANNED = 32 * MAX_PIXELS
_PNG, _JPEG, _RIFF = b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"RIFF"
_SCAN, _END = 0xDA, 0xD9
# A mark, but not those without a segment: within the pixels, reserved, or the file's begin
_MARK = re.compile(rb"\xff[\xc0-\xcf\xd9-\xfe]")
# Bytes that are searched at a time, so that other threads run between them
_WINDOW = 1 << 20
# Segments for programs, whose content libjpeg may read in two cases: they state the colour space
_APP, _COMMENT = range(0xE0, 0xF0), 0xFE
_COLOURS = {0xE0: (b"JFIF\0", 14), 0xEE: (b"Adobe", 12)}
_WEBP_PIXELS = (b"VP8X", b"VP8 ", b"VP8L", b"ALPH", b"ANIM", b"ANMF")
# Bits of VP8X that announce a profile, Exif and XMP (RFC 9649, 2.7)
_WEBP_METADATA = 0x2C


@dataclass(frozen=True, slots=True, eq=False)
class PictureParts:
    """A file with its pixels alone, how often it goes over them, and its metadata."""

    pixels: bytes
    scans: int = 1
    metadata: FileMetadata = field(default_factory=FileMetadata)


def read_parts(data: bytes, label: str) -> PictureParts:
    """Return the parts of a picture file, unchanged if it is of another format.

    Raises UsageError: it has too many parts, or it is an animated PNG.
    """
    if data.startswith(_JPEG):
        return _read_jpeg(data, label)
    if data.startswith(_PNG):
        return _read_png(data, label)
    return _read_webp(data, label) if data.startswith(_RIFF) else PictureParts(data)


def check_scans(scans: int, pixels: int, label: str) -> None:
    """Refuse a picture of too many scans for its ``pixels``. Raises UsageError."""
    limit = min(_MAX_SCANS, _MAX_SCANNED // max(1, pixels))
    if scans > limit:
        message = f"{label} has {scans} scans; a picture of {pixels} pixels may have {limit}"
        raise UsageError(message, hint="save it as a PNG file, or as a JPEG without progression")


def _read_jpeg(data: bytes, label: str) -> PictureParts:
    """Return the parts of a JPEG file, without what is behind it."""
    view, metadata = memoryview(data), FileMetadata()
    kept, position, parts, scans = [view[: len(_JPEG)]], len(_JPEG), 0, 0
    first, end = len(data), len(data)
    while (mark := _find_mark(data, position)) is not None:
        kind = data[mark + 1]
        if kind == _END:
            end = mark + 2
            break
        # Pillow reads the bytes that fill the room before a segment one after the other
        parts += 1 if scans else 1 + mark - position
        _check_parts(parts, label)
        position = mark + 2 + max(2, int.from_bytes(data[mark + 2 : mark + 4], "big"))
        if kind == _SCAN:
            first = first if scans else mark
            scans += 1
        elif not scans and _is_metadata(kind, view[mark + 4 : position]):
            metadata.add_segment(kind, view[mark + 4 : position])
        elif not scans:
            kept.append(view[mark:position])
    return PictureParts(_join(data, [*kept, view[first:end]]), scans, metadata)


def _is_metadata(kind: int, body: memoryview) -> bool:
    start, least = _COLOURS.get(kind, (b"", 0))
    if start and len(body) >= least and body[: len(start)] == start:
        return False
    return kind in _APP or kind == _COMMENT


def _find_mark(data: bytes, position: int) -> int | None:
    for start in range(position, len(data), _WINDOW):
        if mark := _MARK.search(data, start, start + _WINDOW + 1):
            return mark.start()
    return None


def _read_png(data: bytes, label: str) -> PictureParts:
    """Return the parts of a PNG file: chunks that all decoders need (5.4), and transparency."""
    view, metadata = memoryview(data), FileMetadata()
    kept, is_animation = [view[: len(_PNG)]], False
    for name, start, end in _iter_chunks(data, label, len(_PNG), len(data), "big"):
        is_animation = is_animation or (name == b"acTL" and len(kept) == 2)
        if name == b"fdAT" and is_animation:
            raise build_animated_error(label)
        # A lower-case letter: decoders may ignore it
        if name[:1].islower() and name != b"tRNS":
            metadata.add_chunk(name, view[start + 8 : end - 4])
        else:
            kept.append(view[start:end])
    return PictureParts(_join(data, kept), metadata=metadata)


def build_animated_error(label: str) -> UsageError:
    """Return the error for a file of several pictures."""
    return UsageError(f"{label} is animated", hint="use one of its pictures")


def _read_webp(data: bytes, label: str) -> PictureParts:
    view, metadata = memoryview(data), FileMetadata()
    kept: list[bytes | memoryview] = []
    until = min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    for name, start, end in _iter_chunks(data, label, 12, until, "little"):
        size = int.from_bytes(data[start + 4 : start + 8], "little")
        if name not in _WEBP_PIXELS:
            metadata.add_chunk(name, view[start + 8 : start + 8 + size])
        elif name == b"VP8X":
            flags = bytes(flag & ~_WEBP_METADATA for flag in data[start + 8 : start + 9])
            kept += [view[start : start + 8], flags, view[start + 9 : end]]
        else:
            kept.append(view[start:end])
    size = 4 + sum(map(len, kept))
    head = _RIFF + size.to_bytes(4, "little") + data[8:12]
    return PictureParts(_join(data, [head, *kept]), metadata=metadata)


def _join(data: bytes, kept: list[memoryview] | list[bytes | memoryview]) -> bytes:
    """Return the parts that are kept, without a copy if they are the whole file."""
    return data if sum(map(len, kept)) == len(data) else b"".join(kept)


def _iter_chunks(
    data: bytes, label: str, position: int, end: int, order: Literal["big", "little"]
) -> Iterator[tuple[bytes, int, int]]:
    """Yield the names of the chunks of a PNG file, or of WebP, and where they start and end.

    Those of WebP are little-endian, of even lengths. Raises UsageError for too many.
    """
    parts, is_png = 0, order == "big"
    while position < end:
        parts += 1
        _check_parts(parts, label)
        fields = data[position : position + 4], data[position + 4 : position + 8]
        length, name = fields if is_png else fields[::-1]
        size = int.from_bytes(length, order)
        # A chunk of PNG has a checksum at its end
        after = position + (12 + size if is_png else 8 + size + size % 2)
        yield name, position, after
        if is_png and name == b"IEND":
            return
        position = after


def _check_parts(parts: int, label: str) -> None:
    if parts > _MAX_PARTS:
        message = f"{label} has more than {_MAX_PARTS} parts"
        raise UsageError(message, hint="save it again, without its metadata")
