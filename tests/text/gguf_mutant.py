"""GGUF files that lie: each has one field of its header changed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

_NUMBERS = (0, 1, 2, 3, 7, 8, 255, 256, 1 << 15, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 40, -1)


def mutants(path: Path, count: int, seed: int = 0) -> Iterator[tuple[str, bytes]]:
    """Yield the name of the changed field and the bytes of the file, ``count`` times."""
    data, spans, draw = path.read_bytes(), _spans(path), random.Random(seed)
    by_field: dict[str, list[tuple[int, int]]] = {}
    for name, start, size in spans:
        by_field.setdefault(name, []).append((start, size))
    names = list(by_field)
    for _ in range(count):
        name = draw.choice(names)
        start, size = draw.choice(by_field[name][-6:] if draw.random() < 0.7 else by_field[name])
        changed = bytearray(data)
        old = data[start : start + size]
        changed[start : start + size] = _changed(old, draw)
        yield f"{name} at {start}: {old[:16].hex()}", bytes(changed)


def _spans(path: Path) -> list[tuple[str, int, int]]:
    """Return the name, place and size of each part of each field and tensor info."""
    reader = gguf.GGUFReader(path)
    base = reader.data.ctypes.data
    fields = [*reader.fields.values(), *(tensor.field for tensor in reader.tensors)]
    spans = []
    for field in fields:
        for part in field.parts:
            place = part.ctypes.data - base
            item = part.dtype.itemsize
            # the items of a list, such as the dimensions of a tensor, one by one
            spans += [(field.name, place + at * item, item) for at in range(min(part.size, 8))]
    return [span for span in spans if 0 <= span[1] < len(reader.data)]


def _changed(old: bytes, draw: random.Random) -> bytes:
    size = len(old)
    chance = draw.random()
    number = int.from_bytes(old, "little")
    if chance < 0.4:
        number = draw.choice(_NUMBERS)
    elif chance < 0.6:
        number += draw.choice((-1, 1, 2, 16, -16))
    elif chance < 0.7 and size in (4, 8):
        value = draw.choice((float("nan"), float("inf"), -1.0, 0.0, 1e30, 1e-30))
        return np.array(value, np.float32 if size == 4 else np.float64).tobytes()
    else:
        number ^= 1 << draw.randrange(8 * size)
    return (number % (1 << 8 * size)).to_bytes(size, "little")
