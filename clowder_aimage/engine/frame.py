"""Frames between a worker and its model processes: JSON followed by bytes.

A frame is the lengths of the JSON and of the bytes (two unsigned 32-bit numbers, little-endian),
the JSON object, and the bytes. Nothing is pickled, so a frame cannot execute code.
"""

from __future__ import annotations

import json
import struct
from asyncio import IncompleteReadError, StreamReader
from typing import Any, BinaryIO

_LENGTHS = struct.Struct("<II")
_MAX_FRAME = 512 * 1024 * 1024  # bytes

Message = dict[str, Any]


def encode(message: Message, data: bytes = b"") -> bytes:
    """Encode a frame."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return _LENGTHS.pack(len(text), len(data)) + text + data


def read(file: BinaryIO) -> tuple[Message, bytes] | None:
    """Read the next frame of a file; return None at its end."""
    head = file.read(_LENGTHS.size)
    if len(head) < _LENGTHS.size:
        return None
    length, size = _unpack_lengths(head)
    text, data = file.read(length), file.read(size)
    if len(text) < length or len(data) < size:
        return None
    return json.loads(text), data


async def receive(stream: StreamReader) -> tuple[Message, bytes] | None:
    """Read the next frame of a stream; return None at its end."""
    try:
        length, size = _unpack_lengths(await stream.readexactly(_LENGTHS.size))
        text = await stream.readexactly(length)
        return json.loads(text), await stream.readexactly(size) if size else b""
    except IncompleteReadError:
        return None


def _unpack_lengths(head: bytes) -> tuple[int, int]:
    length, size = _LENGTHS.unpack(head)
    if length + size > _MAX_FRAME:
        raise ValueError(f"{length + size} bytes, more than {_MAX_FRAME}")
    return length, size
