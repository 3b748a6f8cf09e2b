"""The central directory of a zip archive, within limits. No member is unpacked.

The end records: APPNOTE.TXT 6.3.10, 4.3.16 and 4.3.14.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from typing import BinaryIO

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.model_tree import OTHER

MAGIC = b"PK\x03\x04"
MAX_DIRECTORY = 64 * 1024 * 1024  # bytes
_END, _END64 = b"PK\x05\x06", b"PK\x06\x06"
# Bytes of the end record, its comment and the ZIP64 records.
_TAIL = 22 + 0xFFFF + 76
# A placeholder: the number is in the ZIP64 record.
_FULL = 0xFFFFFFFF
# Raised by zipfile for a damaged archive, or for one of a newer version.
DAMAGED = (
    *(zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError),
    *(ValueError, OverflowError, RuntimeError),
)


def open_archive(file: BinaryIO) -> zipfile.ZipFile:
    """Open an archive with a limited directory: zipfile loads all of it.

    Raises:
        FormatError: It is not a zip archive, is truncated, or its directory is too large.
    """
    if file.read(len(MAGIC)) != MAGIC:
        raise FormatError("not a zip archive", hint=OTHER)
    file.seek(max(0, file.seek(0, 2) - _TAIL))
    tail = file.read(_TAIL)
    end, end64 = tail.rfind(_END), tail.rfind(_END64)
    try:
        sizes = [struct.unpack_from("<I", tail, end + 12)[0]] if end >= 0 else []
        if end64 >= 0:
            sizes.append(struct.unpack_from("<Q", tail, end64 + 40)[0])
        if any(MAX_DIRECTORY < size != _FULL for size in sizes):
            raise FormatError(f"the directory of the archive exceeds {MAX_DIRECTORY} bytes")
        return zipfile.ZipFile(file)
    except DAMAGED as error:
        raise FormatError(f"truncated or not a zip archive: {error}") from None
