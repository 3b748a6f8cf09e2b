"""What a worker and the processes of its models say to each other: JSON, and bytes behind it.

A frame is the length of the JSON and of the bytes (two unsigned 32-bit numbers, little-endian),
the JSON object, the bytes. Nothing is pickled, so neither end can be made to run anything.
"""

from __future__ import annotations

import json
import struct
from asyncio import IncompleteReadError, StreamReader
from typing import Any, BinaryIO

_LENGTHS = struct.Struct("<II")
_LARGEST = 512 * 1024 * 1024  # bytes of a frame: no picture comes near

Message = dict[str, Any]


def encode(message: Message, data: bytes = b"") -> bytes:
    """A whole frame."""
    text = json.dumps(message, ensure_ascii=False, separators=(",", ":")).encode(
        "utf-8", "surrogatepass"
    )
    return _LENGTHS.pack(len(text), len(data)) + text + data


def read(file: BinaryIO) -> tuple[Message, bytes] | None:
    """The next frame of a file; None where it has ended."""
    head = file.read(_LENGTHS.size)
    if len(head) < _LENGTHS.size:
        return None
    length, size = _lengths(head)
    text, data = file.read(length), file.read(size)
    if len(text) < length or len(data) < size:
        return None
    return _decode(text), data


async def receive(stream: StreamReader) -> tuple[Message, bytes] | None:
    """The next frame of a stream; None where it has ended."""
    try:
        length, size = _lengths(await stream.readexactly(_LENGTHS.size))
        text = await stream.readexactly(length)
        return _decode(text), await stream.readexactly(size)
    except IncompleteReadError:
        return None


def _lengths(head: bytes) -> tuple[int, int]:
    length, size = _LENGTHS.unpack(head)
    if length + size > _LARGEST:
        raise ValueError(f"a frame of {length + size} bytes")
    return length, size


def _decode(text: bytes) -> Message:
    message: Message = json.loads(text.decode("utf-8", "surrogatepass"))
    return message
