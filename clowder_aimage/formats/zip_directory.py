"""The directory of a zip archive: what it says is inside. Nothing is unpacked.

Format: PKWARE, APPNOTE.TXT 6.3.10, sections 4.3.7 (local headers), 4.3.12 (the directory), 4.3.14
to 4.3.16 (its end) and 4.5.3 (sizes of 64 bits). The standard library's reader loads the directory
before it looks at it, however large an archive says that it is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from clowder_aimage.errors import FormatError
from clowder_aimage.formats.format_result import OTHER

MAGIC = b"PK\x03\x04"
STORED, DEFLATED = 0, 8
MAX_ENTRIES = 200_000
MAX_DIRECTORY = 64 * 1024 * 1024  # bytes
_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENCRYPTED, _UTF8 = 1, 1 << 11
_FULL16, _FULL32 = 0xFFFF, 0xFFFFFFFF  # the true number is in a field of 64 bits
_ZIP64 = 1
_MAX_COMMENT = 0xFFFF


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """A member: ``offset`` of its local header, ``packed`` and ``size`` in bytes."""

    name: str
    method: int
    packed: int
    size: int
    offset: int


def read_directory(file: BinaryIO, size: int) -> list[ZipEntry]:
    """The members of an open archive of ``size`` bytes, in their order.

    Raises:
        FormatError: it is no zip archive, truncated, lies, or is one that readers see differently:
            members that overlap, names twice, names that lead elsewhere.
    """
    if _at(file, 0, len(MAGIC)) != MAGIC:
        raise FormatError("this is no zip archive", hint=OTHER)
    count, start, length, end = _end(file, size)
    if count > MAX_ENTRIES or length > MAX_DIRECTORY:
        raise FormatError(f"the archive has {count} members, in a directory of {length} bytes")
    # some readers believe where it begins, and others that it is right before its end
    if start + length != end or count * _ENTRY.size > length:
        raise FormatError(f"the directory of {length} bytes is not at byte {start}, as it says")
    entries = list(_entries(_at(file, start, length), count, start))
    _check_names(entries)
    _check_spans(entries, start)
    return entries


def read_member(file: BinaryIO, entry: ZipEntry, most: int) -> bytes:
    """The bytes of a member that is stored as it is: at most ``most``.

    Raises:
        FormatError: it is compressed or longer, or its local header does not agree.
    """
    if entry.method != STORED or entry.size > most:
        raise FormatError(f"{entry.name[:200]} is compressed, or longer than {most} bytes")
    magic, *_, name, extra = _LOCAL.unpack(_at(file, entry.offset, _LOCAL.size))
    if magic != MAGIC:
        raise FormatError(f"at byte {entry.offset}, {entry.name[:200]} is not where it should be")
    return _at(file, entry.offset + _LOCAL.size + name + extra, entry.size)


def _at(file: BinaryIO, position: int, count: int) -> bytes:
    file.seek(position)
    data = file.read(count)
    if len(data) < count:
        raise FormatError(f"truncated: {count} bytes at byte {position} are not there")
    return data


def _end(file: BinaryIO, size: int) -> tuple[int, int, int, int]:
    """How many members there are; where the directory is, its length, and what follows it: all
    three in bytes."""
    length = min(size, _END.size + _MAX_COMMENT)
    tail = _at(file, size - length, length)
    found = tail.rfind(b"PK\x05\x06")
    if found < 0 or found + _END.size > length:
        raise FormatError("truncated: the archive has no directory at its end")
    _, disk, first, here, count, span, start, comment = _END.unpack_from(tail, found)
    if found + _END.size + comment != length:
        raise FormatError("the archive does not end where its directory says")
    place = size - length + found
    wide = _end64(file, place)
    if wide is None:
        if disk or first or here != count:
            raise FormatError("the archive is in several parts")
        return count, start, span, place
    narrow = ((count, _FULL16), (start, _FULL32), (span, _FULL32))
    for (one, full), other in zip(narrow, wide, strict=False):
        if one not in (full, other):
            raise FormatError("the archive says two things of its directory")
    return wide


def _end64(file: BinaryIO, place: int) -> tuple[int, int, int, int] | None:
    """The same of an archive with numbers of 64 bits, whose end is at ``place``; None where it has
    none. torch writes them even where they are not needed."""
    at = place - _LOCATOR.size - _END64.size
    if at < 0:
        return None
    magic, _, position, _ = _LOCATOR.unpack(_at(file, place - _LOCATOR.size, _LOCATOR.size))
    if magic != b"PK\x06\x07":
        return None
    magic, *_, here, count, span, start = _END64.unpack(_at(file, at, _END64.size))
    if magic != b"PK\x06\x06" or position != at or here != count:
        raise FormatError("the archive does not say where its directory is")
    return count, start, span, at


def _entries(directory: bytes, count: int, start: int) -> Iterator[ZipEntry]:
    position = 0
    for _ in range(count):
        if position + _ENTRY.size > len(directory):
            raise FormatError(f"at byte {start + position}, the directory breaks off")
        fields = _ENTRY.unpack_from(directory, position)
        magic, _, _, flags, method, _, _, _, packed, size, named, extra, comment = fields[:13]
        after = position + _ENTRY.size + named
        following = after + extra + comment
        if magic != b"PK\x01\x02" or following > len(directory):
            raise FormatError(f"at byte {start + position}, the directory has no member")
        name = _name(directory[after - named : after], flags, start + position)
        if flags & _ENCRYPTED or method not in (STORED, DEFLATED):
            raise FormatError(f"{name[:200]} is encrypted, or compressed in an unusual way")
        wide = _wide(directory[after : after + extra], (size, packed, fields[16]), name)
        yield ZipEntry(name, method, wide[1], wide[0], wide[2])
        position = following
    if position != len(directory):
        raise FormatError(
            f"at byte {start + position}, the directory goes on after its last member"
        )


def _name(raw: bytes, flags: int, place: int) -> str:
    try:
        return raw.decode("utf-8" if flags & _UTF8 else "ascii")
    except UnicodeDecodeError:
        raise FormatError(f"at byte {place}, a name is not UTF-8") from None


def _wide(extra: bytes, narrow: tuple[int, int, int], name: str) -> tuple[int, int, int]:
    """Size, packed size and offset, those that do not fit into 32 bits from the extra field."""
    position, found = 0, b""
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, position)
        if kind == _ZIP64:
            found = extra[position + 4 : position + 4 + length]
            break
        position += 4 + length
    values, position = [], 0
    for value in narrow:
        if value == _FULL32:
            if position + 8 > len(found):
                raise FormatError(f"{name[:200]} does not say its size")
            (value,) = struct.unpack_from("<Q", found, position)
            position += 8
        values.append(value)
    return values[0], values[1], values[2]


def _check_names(entries: list[ZipEntry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        name = entry.name
        parts = name.removesuffix("/").split("/")
        if name in seen or "\\" in name or "\0" in name or {"", ".", ".."} & set(parts):
            raise FormatError(f"a member cannot be called that, or there are two: {name!r:.200}")
        seen.add(name)


def _check_spans(entries: list[ZipEntry], directory: int) -> None:
    """Every member must lie before the directory, and none in another."""
    end = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.method == STORED and entry.packed != entry.size:
            raise FormatError(f"{entry.name[:200]} is stored as it is, and says two sizes")
        if entry.offset < end:
            raise FormatError(f"{entry.name[:200]} begins inside another member")
        end = entry.offset + _LOCAL.size + len(entry.name.encode()) + entry.packed
        if end > directory:
            raise FormatError(f"{entry.name[:200]} ends at byte {end}, behind the members")
