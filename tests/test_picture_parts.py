"""Files that would occupy a decoder: many small parts, or many scans of the same pixels."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import pytest

pytest.importorskip("PIL")

from PIL import Image, ImageFile

from clowder_aimage.errors import UsageError
from clowder_aimage.pictures.decode import decode
from clowder_aimage.pictures.file_parts import check_scans, read_parts

MANY = (1 << 16) + 1


def write(kind: str, size: tuple[int, int] = (64, 64), **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "navy").save(file, kind, **options)
    return file.getvalue()


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def insert(data: bytes, before: bytes, part: bytes) -> bytes:
    """Return a file with a part before the first ``before``."""
    head, found, rest = data.partition(before)
    assert found
    return head + part + found + rest


def write_png(part: bytes, before: bytes = b"IDAT") -> bytes:
    """Return a PNG file with a part before a chunk."""
    data = write("PNG")
    position = data.index(before) - 4
    return data[:position] + part + data[position:]


def write_jpeg(part: bytes) -> bytes:
    return insert(write("JPEG"), b"\xff\xe0", part)


def write_webp(part: bytes) -> bytes:
    data = write("WEBP", exif=b"Exif\0\0II*\0\x08\0\0\0\0\0") + part
    return data[:4] + struct.pack("<I", len(data) - 8) + data[8:]


def repeat_scan(count: int, hidden: bytes = b"") -> bytes:
    """Return a progressive JPEG with ``count`` more scans of few bytes, and what hides them."""
    data = write("JPEG", progressive=True)
    scan = struct.pack(">BBHB", 0xFF, 0xDA, 8, 1) + bytes((1, 0, 1, 63, 0x10, 0))
    return data[:-2] + hidden + scan * count + data[-2:]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (repeat_scan(100), "scans; a picture of 4096 pixels may have 100"),
        (repeat_scan(20_000), "scans; a picture of 4096 pixels may have 100"),
        # A reserved mark has no length, and bytes between scans are ignored
        (repeat_scan(200, b"\xff\x02\xff\xff"), "scans"),
        (repeat_scan(200, b"\xff\xd0\xff\xff\xff"), "scans"),
        (repeat_scan(200, b"\xff\xfe\0\0"), "scans"),
        (repeat_scan(MANY), "parts"),
        (write_jpeg(b"\xff\xfe\0\2" * MANY), "parts"),
        (write_jpeg(b"\xff\xdd\0\4\0\0" * MANY), "parts"),
        (write_jpeg(b"\xff" * MANY), "parts"),
        (write_jpeg(b"\xff\xd0" * MANY), "parts"),
        (write_png(chunk(b"IDAT") * MANY), "parts"),
        (write_png(chunk(b"prVt") * MANY), "parts"),
        (write_png(chunk(b"tEXt", b"a\0b") * MANY, b"IEND"), "parts"),
        (write_webp(b"abcd\0\0\0\0" * MANY), "parts"),
        (write_webp(b"abcd\1\0\0\0xx" * MANY), "parts"),
    ],
)
def test_files_of_many_parts_are_refused_before_they_are_decoded(
    data: bytes, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    with pytest.raises(UsageError) as refused:
        decode(data, "it")
    assert words in refused.value.message and refused.value.hint


@pytest.mark.parametrize(
    "data",
    [
        write("JPEG"),
        write("JPEG", (512, 512), progressive=True),
        write("JPEG", restart_marker_blocks=1),
        # Previews in the metadata and behind the picture have scans of their own
        insert(write("JPEG"), b"\xff\xe0", b"\xff\xe1\xff\xff" + b"\xff\xda\0\2" * 16383 + b"\0"),
        write("JPEG") + repeat_scan(200),
        write_png(chunk(b"IDAT") * 1000),
        write("PNG") + bytes(MANY * 12),
        write("WEBP") + bytes(MANY * 8),
    ],
)
def test_ordinary_files_are_decoded(data: bytes) -> None:
    assert decode(data, "it").size in ((64, 64), (512, 512))


def test_large_pictures_have_fewer_scans() -> None:
    assert read_parts(write("JPEG", progressive=True), "it").scans == 10
    check_scans(32, 1 << 25, "it")
    with pytest.raises(UsageError, match="33554432 pixels may have 32"):
        check_scans(33, 1 << 25, "it")
