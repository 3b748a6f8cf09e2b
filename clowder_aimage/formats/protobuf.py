"""A streaming reader of the protocol buffers wire format. Contents are skipped, not loaded.

Format: protobuf.dev, "Encoding". Groups, which are deprecated, are rejected.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from clowder_aimage.errors import FormatError

VARINT, BYTES = 0, 2
# Byte counts of the fixed-size wire types.
_FIXED = {1: 8, 5: 4}
# Fields of all messages in a file, which take seconds; large graphs have half a million.
MAX_FIELDS = 4_000_000
MAX_NUMBER = (1 << 29) - 1
_MAX_TEXT = 4096  # bytes
# Bytes of a varint of 64 bits.
_MAX_VARINT = 10
# Bytes that are read at a time.
_WINDOW = 1 << 16


class WireField(NamedTuple):
    """A field at ``offset``: a varint of ``value``, or the bytes from ``start`` to ``end``.

    All positions are in bytes from the start of the file.
    """

    number: int
    wire: int
    value: int
    offset: int
    start: int
    end: int

    def expect(self, wire: int) -> None:
        """Check the wire type. Raises FormatError."""
        if self.wire != wire:
            raise FormatError(
                f"at byte {self.offset}, field {self.number} has wire type {self.wire}, "
                f"expected {wire}"
            )

    def decode_int64(self) -> int:
        """Return the value of a varint. Raises FormatError."""
        self.expect(VARINT)
        return _to_signed(self.value)


class WireReader:
    """An open file of ``size`` bytes, read through a window."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size
        self._base, self._window = 0, b""
        self._seen = 0

    def iter_fields(self, start: int, end: int) -> Iterator[WireField]:
        """Yield the fields of the message from ``start`` to ``end``. Raises FormatError."""
        offset = start
        while offset < end:
            self._seen += 1
            if self._seen > MAX_FIELDS:
                raise FormatError(f"at byte {offset}, more than {MAX_FIELDS} fields")
            tag, position = self._read_varint(offset, end)
            number, wire = tag >> 3, tag & 7
            if not 1 <= number <= MAX_NUMBER:
                raise FormatError(f"at byte {offset}, invalid field number {number}")
            wire_field = self._read_field(number, wire, offset, position, end)
            yield wire_field
            offset = wire_field.end

    def _read_field(
        self, number: int, wire: int, offset: int, position: int, end: int
    ) -> WireField:
        if wire == VARINT:
            value, after = self._read_varint(position, end)
            return WireField(number, wire, value, offset, position, after)
        if wire == BYTES:
            length, position = self._read_varint(position, end)
        elif wire in _FIXED:
            length = _FIXED[wire]
        else:
            raise FormatError(f"at byte {offset}, unsupported wire type {wire}")
        if length > end - position:
            raise FormatError(
                f"at byte {offset}, a field takes {length} bytes, but {end - position} are left"
            )
        return WireField(number, wire, 0, offset, position, position + length)

    def read_int64s(self, field: WireField, limit: int) -> list[int]:
        """Return the numbers of a repeated field, packed or unpacked.

        Raises:
            FormatError: They are not varints, or there are more than ``limit``.
        """
        if field.wire == VARINT:
            return [field.decode_int64()]
        field.expect(BYTES)
        numbers: list[int] = []
        position = field.start
        while position < field.end:
            if len(numbers) == limit:
                raise FormatError(f"at byte {field.offset}, more than {limit} numbers")
            number, position = self._read_varint(position, field.end)
            numbers.append(_to_signed(number))
        return numbers

    def read_text(self, field: WireField) -> str:
        """Return a string. Raises FormatError."""
        field.expect(BYTES)
        length = field.end - field.start
        if length > _MAX_TEXT:
            raise FormatError(
                f"at byte {field.offset}, a string has {length} bytes; the limit is {_MAX_TEXT}"
            )
        try:
            return self._read_at(field.start, length).decode()
        except UnicodeDecodeError:
            raise FormatError(f"at byte {field.offset}, a string is not UTF-8") from None

    def _read_varint(self, position: int, end: int) -> tuple[int, int]:
        index = position - self._base
        # Nearly all tags and lengths are one byte in the window: this path makes the reader fast.
        if 0 <= index < len(self._window) and position < end and self._window[index] < 0x80:
            return self._window[index], position + 1
        value = shift = 0
        for byte in self._read_at(position, min(_MAX_VARINT, end - position)):
            value |= (byte & 0x7F) << shift
            position += 1
            if byte < 0x80:
                if value >> 64:
                    break
                return value, position
            shift += 7
        raise FormatError(f"before byte {position}, a varint is unterminated or exceeds 64 bits")

    def _read_at(self, position: int, count: int) -> bytes:
        index = position - self._base
        if index < 0 or index + count > len(self._window):
            self._file.seek(position)
            self._window = self._file.read(max(count, _WINDOW))
            self._base, index = position, 0
            if len(self._window) < count:
                raise FormatError(f"truncated: the file ends early, after byte {position}")
        return self._window[index : index + count]


def _to_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
