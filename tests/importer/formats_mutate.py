"""Derive faulty files from valid ones: truncated anywhere, or with changed bytes.

Each must be parsed or raise one of the package's errors.
"""

from __future__ import annotations

import contextlib
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats.inventory import Inventory

MEMORY = 16 * 1024 * 1024  # bytes allowed for reading a small file
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)


def cuts(good: bytes) -> Iterator[bytes]:
    """Yield all prefixes of a short file, many of a long one."""
    step = max(1, len(good) // 150)
    for length in range(0, len(good), step):
        yield good[:length]


def mutants(good: bytes, count: int) -> Iterator[bytes]:
    """Yield ``count`` files with one to three faults, reproducibly."""
    for seed in range(count):
        rng = random.Random(seed)
        raw = bytearray(good)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            damage(rng, raw)
        yield bytes(raw)


def damage(rng: random.Random, raw: bytearray) -> None:
    # most faults are at the front, in the headers
    at = rng.randrange(len(raw) if rng.random() < 0.3 else min(len(raw), 600)) if raw else 0
    match rng.randrange(8):
        case 0 | 1 if raw:
            raw[at] ^= 1 << rng.randrange(8)
        case 2 if raw:
            raw[at] = rng.randrange(256)
        case 3:
            form = rng.choice(("<H", "<I", "<Q"))
            size = struct.calcsize(form)
            value = rng.choice(NUMBERS) & ((1 << 8 * size) - 1)
            raw[at : at + size] = struct.pack(form, value)
        case 4:
            del raw[at : at + rng.randrange(1, 9)]
        case 5:
            raw[at:at] = rng.randbytes(rng.randrange(1, 9))
        case 6:
            raw[at:at] = raw[at : at + rng.randrange(1, 60)]
        case _:
            del raw[at:]


def survives(
    take: Callable[[Path], Inventory], path: Path, raws: Iterator[bytes]
) -> tuple[int, int]:
    """Return how many files were accepted, and how many were refused."""
    took = refused = 0
    for raw in raws:
        path.write_bytes(raw)
        try:
            take(path)
            took += 1
        except (FormatError, ModelError) as error:
            assert str(path.parent) in error.message
            refused += 1
    return took, refused


def memory_of(take: Callable[[Path], Inventory], path: Path) -> int:
    """Return the peak memory of Python's objects while a file is refused."""
    with contextlib.suppress(FormatError, ModelError):
        take(path)  # modules that this imports are not counted
    tracemalloc.start()
    try:
        take(path)
    except (FormatError, ModelError):
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    raise AssertionError(f"{path} was taken")
