"""The parts of a picture file, counted before it is decoded: each costs the decoder time.

A JPEG's scan of a few bytes goes over all pixels, and chunks may be empty. The marks of a JPEG are
read as libjpeg reads them (ITU T.81, B.1.1), so that none is hidden from the count.
"""

from __future__ import annotations

import re
from typing import Literal

from clowder_aimage.errors import UsageError
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


def count_scans(data: bytes, label: str) -> int:
    """Return how often a file goes over its pixels. Raises UsageError for too many parts."""
    if data.startswith(_JPEG):
        return _count_segments(data, label)
    if data.startswith(_PNG):
        _count_chunks(data, label, len(_PNG), len(data), "big")
    elif data.startswith(_RIFF):
        end = min(len(data), 8 + int.from_bytes(data[4:8], "little"))
        _count_chunks(data, label, 12, end, "little")
    return 1


def check_scans(scans: int, pixels: int, label: str) -> None:
    """Refuse a picture of too many scans for its ``pixels``. Raises UsageError."""
    limit = min(_MAX_SCANS, _MAX_SCANNED // max(1, pixels))
    if scans > limit:
        message = f"{label} has {scans} scans; a picture of {pixels} pixels may have {limit}"
        raise UsageError(message, hint="save it as a PNG file, or as a JPEG without progression")


def _count_segments(data: bytes, label: str) -> int:
    position, parts, scans = len(_JPEG), 0, 0
    while (mark := _find_mark(data, position)) is not None and data[mark + 1] != _END:
        # Pillow reads the bytes that fill the room before a segment one after the other
        parts += 1 if scans else 1 + mark - position
        scans += data[mark + 1] == _SCAN
        _check_parts(parts, label)
        position = mark + 2 + max(2, int.from_bytes(data[mark + 2 : mark + 4], "big"))
    return scans


def _find_mark(data: bytes, position: int) -> int | None:
    for start in range(position, len(data), _WINDOW):
        if mark := _MARK.search(data, start, start + _WINDOW + 1):
            return mark.start()
    return None


def _count_chunks(
    data: bytes, label: str, position: int, end: int, order: Literal["big", "little"]
) -> None:
    """Count the chunks of a PNG file, or those of WebP: little-endian, of even lengths."""
    parts, is_png = 0, order == "big"
    while position < end:
        parts += 1
        _check_parts(parts, label)
        fields = data[position : position + 4], data[position + 4 : position + 8]
        length, name = fields if is_png else fields[::-1]
        if is_png and name == b"IEND":
            return
        size = int.from_bytes(length, order)
        # A chunk of PNG has a checksum at its end
        position += 12 + size if is_png else 8 + size + size % 2


def _check_parts(parts: int, label: str) -> None:
    if parts > _MAX_PARTS:
        message = f"{label} has more than {_MAX_PARTS} parts"
        raise UsageError(message, hint="save it again, without its metadata")
