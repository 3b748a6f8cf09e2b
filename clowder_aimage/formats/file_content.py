"""The kind of a file, by its bytes and never by its name. Nothing is unpickled or unpacked.

Formats: numpy, lib/format.py; TensorFlow Lite and ONNX Runtime, file identifiers of FlatBuffers;
OpenNMT/CTranslate2, src/models/model.cc; Keras 3, saving_lib.py; the tar of PyTorch before 0.1.10,
torch/serialization.py (``legacy_load``).
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

from clowder_aimage.errors import FormatError
from clowder_aimage.formats import gguf_header, zip_directory
from clowder_aimage.formats.onnx_graph import is_model
from clowder_aimage.formats.pickle_stream import is_pickle
from clowder_aimage.tensor.header import MAX_HEADER_SIZE

GGUF, ONNX, SAFETENSORS, TORCHSCRIPT = "GGUF", "ONNX", "safetensors", "TorchScript"
PICKLE = "pickle"
_GGUFS = (gguf_header.MAGIC, gguf_header.BIG_ENDIAN, *gguf_header.OLDER)
# The identifier of a FlatBuffer is after the offset of its root.
_FLAT = {b"TFL3": "TensorFlow Lite", b"ORTM": "ONNX Runtime"}
_HDF5, _NUMPY = b"\x89HDF\r\n\x1a\n", b"\x93NUMPY"
# The version, then the name of the model's specification with its length.
_CTRANSLATE2 = re.compile(rb"[\x01-\x1f]\0\0\0(?P<length>.)\0(?P<name>\w{3,60})\0", re.DOTALL)
# The type "object" of an array, or of a field of a record.
_OBJECTS = re.compile(rb"(?:'descr':|,)\s*['\"][|<>=]?O\d*['\"]")
# Names of pickles in archives.
_PICKLES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib")
_KERAS = {"config.json", "model.weights.h5"}
# Bytes that are read of a file, and that are unpacked of them.
_START = 64 * 1024
# bzip2 unpacks blocks of 900,000 bytes.
_BLOCK = 1024 * 1024
# Members of an archive that are looked at.
_MAX_MEMBERS = 256
_BZIP2, _XZ, _LZMA = b"BZh", b"\xfd7zXZ\0", b"]\0\0"
_MAX_UNPACKER = 64 * 1024 * 1024


class FileContent(NamedTuple):
    """The format of a model in a file, empty for other files. Loading a pickled one runs code."""

    kind: str = ""
    is_pickled: bool = False


@dataclass(frozen=True, slots=True)
class _Start:
    """An open file and its first bytes."""

    file: BinaryIO
    data: bytes
    size: int


def identify(path: Path) -> FileContent:
    """Return the kind of a file; a few of its bytes are read. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(_START)
        start = _Start(file, data, os.fstat(file.fileno()).st_size)
        return next(filter(None, (test(start) for test in _TESTS)), None) or FileContent()


def _test_magic(start: _Start) -> FileContent | None:
    data = start.data
    if data.startswith(_GGUFS):
        return FileContent(GGUF)
    if data.startswith(_HDF5):
        return FileContent("HDF5")
    if data[4:8] in _FLAT:
        return FileContent(_FLAT[data[4:8]])
    match = _CTRANSLATE2.match(data)
    # The length includes the final zero.
    is_stated = match is not None and match["length"][0] == len(match["name"]) + 1
    return FileContent("CTranslate2") if is_stated else None


def _test_numpy(start: _Start) -> FileContent | None:
    if not start.data.startswith(_NUMPY):
        return None
    return FileContent(PICKLE, True) if _OBJECTS.search(start.data[:4096]) else FileContent()


def _test_zip(start: _Start) -> FileContent | None:
    if not start.data.startswith(zip_directory.MAGIC):
        return None
    start.file.seek(0)
    try:
        archive = zip_directory.open_archive(start.file)
    except FormatError:
        # Of a truncated archive, the name of the first member remains.
        length = int.from_bytes(start.data[26:28], "little")
        name = start.data[30 : 30 + length].decode("utf-8", "replace")
        return FileContent(PICKLE, True) if _is_pickled([name]) else FileContent()
    names = archive.namelist()
    if any(name.partition("/")[2].startswith("code/") for name in names):
        return FileContent(TORCHSCRIPT, True)
    if _is_pickled(names) or _has_objects(archive.open, names):
        return FileContent(PICKLE, True)
    return FileContent("Keras") if set(names) >= _KERAS else FileContent()


def _is_pickled(names: Iterable[str]) -> bool:
    return any(name.lower().endswith(_PICKLES) for name in names)


def _has_objects(open_member: Callable[[str], object], names: Iterable[str]) -> bool:
    """Return True if an array in an archive of numpy has objects."""
    arrays = [name for name in names if name.endswith(".npy")]
    for name in arrays[:_MAX_MEMBERS]:
        try:
            with open_member(name) as member:  # type: ignore[attr-defined]
                if _OBJECTS.search(member.read(1024)):
                    return True
        except zip_directory.DAMAGED:
            continue
    return False


def _test_tar(start: _Start) -> FileContent | None:
    names = list(_iter_members(start.file))
    if not names:
        return None
    is_torch = {"pickle", "storages"} <= {name.removeprefix("./") for name in names}
    return FileContent(PICKLE, True) if is_torch or _is_pickled(names) else FileContent()


def _iter_members(file: BinaryIO) -> Iterator[str]:
    """Yield the names in a tar (POSIX, pax: "ustar Interchange Format")."""
    offset = 0
    for _ in range(_MAX_MEMBERS):
        file.seek(offset)
        block = file.read(512)
        size = block[124:136].strip(b"\0 ")
        if block[257:262] != b"ustar" or not re.fullmatch(rb"[0-7]*", size):
            return
        yield block[:100].rstrip(b"\0").decode("utf-8", "replace")
        offset += 512 + -(-int(size or b"0", 8) // 512) * 512


def _test_packed(start: _Start) -> FileContent | None:
    """Look into a compressed file, as joblib and users write them."""
    plain = _unpack(start)
    if not plain:
        return None
    inner = _Start(BytesIO(plain), plain, len(plain) + 1)
    return _test_tar(inner) or _test_pickle(inner) or FileContent()


def _unpack(start: _Start) -> bytes:
    """Return the first bytes of a compressed file; none if it is not compressed."""
    import bz2
    import lzma

    data = start.data
    try:
        if data.startswith(_BZIP2):
            start.file.seek(0)
            return bz2.BZ2Decompressor().decompress(start.file.read(_BLOCK), _START)
        if data.startswith((_XZ, _LZMA)):
            unpacker = lzma.LZMADecompressor(memlimit=_MAX_UNPACKER)
            return unpacker.decompress(data, _START)
        # 32 is added to the size of the window for the headers of gzip and zlib.
        return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(data, _START)
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError, MemoryError):
        return b""


def _test_pickle(start: _Start) -> FileContent | None:
    is_whole = start.size == len(start.data)
    return FileContent(PICKLE, True) if is_pickle(start.data, is_whole=is_whole) else None


def _test_safetensors(start: _Start) -> FileContent | None:
    # The length of the header in 8 bytes, then JSON.
    length = int.from_bytes(start.data[:8], "little")
    is_header = start.data[8:9] == b"{" and 2 <= length <= min(MAX_HEADER_SIZE, start.size - 8)
    return FileContent(SAFETENSORS) if is_header else None


def _test_onnx(start: _Start) -> FileContent | None:
    return FileContent(ONNX) if is_model(start.file, start.size) else None


_TESTS: tuple[Callable[[_Start], FileContent | None], ...] = (
    *(_test_magic, _test_numpy, _test_zip, _test_tar, _test_pickle, _test_safetensors),
    *(_test_onnx, _test_packed),
)
