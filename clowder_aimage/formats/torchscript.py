"""TorchScript: an archive of a program and its weights. Its directory is read, nothing unpickled.

Format: pytorch/pytorch, torch/csrc/jit/docs/serialization.md and
caffe2/serialize/inline_container.cc: a zip archive with one directory in it, that holds
``version``, ``constants.pkl``, ``data.pkl`` and ``code/``. What ``torch.save`` writes is such an
archive without ``code/``, or a pickle.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats.format_result import (
    FormatResult,
    naming,
    reading,
    source_file,
    start_of,
    taken,
)
from clowder_aimage.formats.zip_directory import ZipEntry, read_directory, read_member
from clowder_aimage.oci import mediatype

FORMAT = "torchscript"
ENDINGS = (".pt", ".pth", ".ts", ".torchscript")
CONVERT = "convert the weights to safetensors, or the model to TorchScript with torch.jit.save"
_NEEDED = ("data.pkl", "constants.pkl")
_VERSIONS = (".data/version", "version")  # the first that there is counts
_MAX_VERSION = 64  # bytes
_PICKLED = 0x80  # the opcode PROTO (Python, pickletools); its argument is the protocol
_PROTOCOLS = range(2, 6)


def take(path: Path) -> FormatResult:
    """The archive, which says that loading it runs code.

    Raises:
        FormatError: it is no TorchScript archive, truncated, or lies.
        ModelError: it is a pickled checkpoint, or cannot be read.
    """
    with reading(path):
        if path.is_dir():
            raise ModelError(
                f"{path} is a directory, and a TorchScript model is one file",
                hint="name the file itself",
            )
        file = source_file(None, path, path.name, mediatype.AIMAGE_TORCHSCRIPT)
        if is_pickle(start_of(path)):
            raise pickled(path)
        with naming(path), path.open("rb") as opened:
            entries = read_directory(opened, file.size)
            version = _version(opened, _records(path, entries))
    return taken(FORMAT, [file], {"pickled": True, "formatVersion": version})


def is_pickle(start: bytes) -> bool:
    """Whether a file begins as a pickle does, of any protocol that is written today."""
    return len(start) > 1 and start[0] == _PICKLED and start[1] in _PROTOCOLS


def pickled(path: Path) -> ModelError:
    """That a file holds a pickled checkpoint."""
    return ModelError(
        f"{path} is a pickled checkpoint: loading it could run any code, so it is not packed",
        hint=CONVERT,
    )


def is_archive(file: BinaryIO, size: int) -> bool:
    """Whether a zip archive holds a program of TorchScript."""
    try:
        entries = read_directory(file, size)
    except FormatError:
        return False
    return any(_inner(entry.name).startswith("code/") for entry in entries)


def _inner(name: str) -> str:
    """A member's name in the one directory that an archive has."""
    return name.partition("/")[2]


def _records(path: Path, entries: Iterable[ZipEntry]) -> dict[str, ZipEntry]:
    """The members, called as they are in the archive's one directory."""
    entries = list(entries)
    records = {_inner(entry.name): entry for entry in entries}
    is_program = any(name.startswith("code/") for name in records)
    if "data.pkl" in records and not is_program:
        raise pickled(path)
    if not is_program:
        raise FormatError("this zip archive holds no program of TorchScript", hint=CONVERT)
    if len({entry.name.partition("/")[0] for entry in entries}) > 1 or "" in records:
        raise FormatError("the archive's members are not in one directory")
    for name in _NEEDED:
        if name not in records:
            raise FormatError(f"the archive has no {name}")
    return records


def _version(file: BinaryIO, records: dict[str, ZipEntry]) -> str:
    for name in _VERSIONS:
        if name in records:
            word = read_member(file, records[name], _MAX_VERSION).strip()
            if not word.isdigit():
                raise FormatError(f"the archive's version is no number: {word[:20]!r}")
            return word.decode()
    raise FormatError("the archive does not say its version")
