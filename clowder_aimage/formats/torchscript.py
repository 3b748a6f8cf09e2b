"""TorchScript: an archive of a program and its weights. Only its central directory is read.

Nothing is unpickled. Format: pytorch/pytorch, torch/csrc/jit/docs/serialization.md and
caffe2/serialize/inline_container.cc: a zip archive of a single directory with ``version``,
``constants.pkl``, ``data.pkl`` and ``code/``. ``torch.save`` writes such an archive without
``code/``, or a pickle.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import BinaryIO

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.formats.pickle_stream import is_pickle
from clowder_aimage.formats.zip_directory import DAMAGED, open_archive
from clowder_aimage.oci import mediatype

FORMAT = "torchscript"
ENDINGS = (".pt", ".pth", ".ts", ".torchscript")
CONVERT = "convert the weights to safetensors, or the model to TorchScript with torch.jit.save"
_NEEDED = ("data.pkl", "constants.pkl")
# Names of the version record, in the order of PyTorch's reader.
_VERSIONS = (".data/version", "version")
_MAX_VERSION = 64  # bytes


def take(path: Path) -> Inventory:
    """Return the archive as one file, marked as pickled: loading it executes code.

    Raises:
        FormatError: It is not a TorchScript archive, or it is truncated.
        ModelError: It is a pickled checkpoint, or cannot be read.
    """
    with model_tree.reading(path):
        if path.is_dir():
            raise ModelError(
                f"{path} is a directory; a TorchScript model is a single file",
                hint="pass the file itself",
            )
        file = model_tree.build_source_file(None, path, path.name, mediatype.AIMAGE_TORCHSCRIPT)
        if is_pickle(model_tree.read_start(path), is_whole=False):
            raise model_tree.build_pickle_error(path, CONVERT)
        with model_tree.naming(path), path.open("rb") as opened:
            version = _read_version(*_open(opened, path))
    facts = {"pickled": True, "formatVersion": version}
    return Inventory.of_files(FORMAT, [file], facts, None)


def _open(file: BinaryIO, path: Path) -> tuple[zipfile.ZipFile, dict[str, zipfile.ZipInfo]]:
    archive = open_archive(file)
    members = archive.infolist()
    records = {member.filename.partition("/")[2]: member for member in members}
    is_program = any(name.startswith("code/") for name in records)
    if "data.pkl" in records and not is_program:
        raise model_tree.build_pickle_error(path, CONVERT)
    if not is_program:
        raise FormatError("the zip archive contains no TorchScript program", hint=CONVERT)
    if len({member.filename.partition("/")[0] for member in members}) > 1 or "" in records:
        raise FormatError("the archive's members are not in a single directory")
    if len(records) < len(members):
        raise FormatError("the archive contains duplicate member names")
    for name in _NEEDED:
        if name not in records:
            raise FormatError(f"{name} not found in the archive")
    return archive, records


def _read_version(archive: zipfile.ZipFile, records: dict[str, zipfile.ZipInfo]) -> str:
    name = next((name for name in _VERSIONS if name in records), None)
    if name is None:
        raise FormatError("the archive has no version")
    try:
        with archive.open(records[name]) as member:
            word = member.read(_MAX_VERSION + 1).strip()
    except DAMAGED as error:
        raise FormatError(f"the archive's version cannot be read: {error}") from None
    if not word.isdigit() or len(word) > _MAX_VERSION:
        raise FormatError(f"the archive's version is not a number: {word[:20]!r}")
    return word.decode()
