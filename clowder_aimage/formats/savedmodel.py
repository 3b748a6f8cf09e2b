"""SavedModel: TensorFlow's directory of graphs, variables and assets.

Format: tensorflow/tensorflow, tensorflow/python/saved_model/README.md,
tensorflow/core/protobuf/saved_model.proto and meta_graph.proto (the field numbers below); the names
of the variables' files: tensorflow/core/util/tensor_bundle/naming.cc.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats.diffusers import read_license
from clowder_aimage.formats.format_result import (
    FormatResult,
    naming,
    reading,
    source_file,
    taken,
    text,
    walk,
)
from clowder_aimage.formats.protobuf import BYTES, VARINT, WireField, WireReader, expect
from clowder_aimage.oci import mediatype

FORMAT = "savedmodel"
BINARY, TEXT = "saved_model.pb", "saved_model.pbtxt"
VARIABLES = "variables"
_INDEX = "variables.index"
_SHARD = re.compile(r"variables\.data-(\d{5})-of-(\d{5})")
_SCHEMA = 1  # the only version of the schema that there is
_MAX_GRAPHS = 1000
_MAX_TEXT = 4096  # bytes
_MAX_LOOK = 1 << 20  # bytes of a text that are looked at
_TEXT_GRAPHS = re.compile(r"^\s*meta_graphs\s*:?\s*[{<]", re.MULTILINE)
_TEXT_VERSION = re.compile(r'\btensorflow_version\s*:\s*"([^"\\\n]{1,100})"')
_AGAIN = "download the model again, in full"


@dataclass(slots=True)
class _Said:
    """What a SavedModel says of itself."""

    graphs: int = 0
    version: str = ""
    has_saver: bool = False


def take(path: Path) -> FormatResult:
    """A directory, whole: every file in it becomes a layer.

    Raises:
        FormatError: it is no SavedModel, or files of its variables are missing.
        ModelError: it is no directory, or cannot be read.
    """
    with reading(path):
        if not path.is_dir():
            raise ModelError(
                f"{path} is not a directory, as a SavedModel is",
                hint=f"name the directory that holds {BINARY}",
            )
        files = [
            source_file(path, file, file.relative_to(path).as_posix(), mediatype.AIMAGE_SAVEDMODEL)
            for file in walk(path)
        ]
        names = [file.name for file in files]
        said = _read(path, names)
        _check_variables(path, names, said)
    return taken(FORMAT, files, {"formatVersion": text(said.version)}, read_license(path))


def _read(root: Path, names: Sequence[str]) -> _Said:
    name = next((name for name in (BINARY, TEXT) if name in names), None)
    if name is None:
        raise FormatError(
            f"{root} is no SavedModel: it has no {BINARY}",
            hint="name the directory that holds it",
        )
    path = root / name
    with naming(path):
        said = _read_binary(path) if name == BINARY else _read_text(path)
        if not said.graphs:
            raise FormatError("this is no SavedModel: it holds no graph")
    return said


def _read_binary(path: Path) -> _Said:
    said = _Said()
    with path.open("rb") as file:
        wire = WireReader(file, path.stat().st_size)
        for one in wire.fields(0, wire.size):
            if one.number == 1:
                expect(one, VARINT)
                if one.value > _SCHEMA:
                    raise FormatError(f"version {one.value} of SavedModel, of which 1 is known")
            elif one.number == 2:
                expect(one, BYTES)
                _read_graph(wire, one, said)
    return said


def _read_graph(wire: WireReader, message: WireField, said: _Said) -> None:
    """A MetaGraphDef: the version of TensorFlow that wrote it, and whether it has variables."""
    said.graphs += 1
    if said.graphs > _MAX_GRAPHS:
        raise FormatError(f"at byte {message.place}, there are over {_MAX_GRAPHS} graphs")
    for one in wire.fields(message.start, message.end):
        if one.number == 1:
            expect(one, BYTES)
            for info in wire.fields(one.start, one.end):
                if info.number == 5:  # MetaInfoDef.tensorflow_version
                    said.version = wire.text(info, _MAX_TEXT)
        elif one.number == 3:  # saver_def: how variables are restored
            expect(one, BYTES)
            said.has_saver |= one.end > one.start


def _read_text(path: Path) -> _Said:
    """The same of a text, as far as it is looked at; whether it has variables is not known then."""
    with path.open("rb") as file:
        raw = file.read(_MAX_LOOK)
    words = raw.decode(errors="replace")
    if "\0" in words or not _TEXT_GRAPHS.search(words):
        raise FormatError("this is no SavedModel: it holds no graph")
    version = _TEXT_VERSION.search(words)
    return _Said(1, version[1] if version else "")


def _check_variables(root: Path, names: Sequence[str], said: _Said) -> None:
    """The index of the variables and all of their shards must be there, or none of them."""
    inside = [name.removeprefix(f"{VARIABLES}/") for name in names if _is_variable(name)]
    shards = [match for name in inside if (match := _SHARD.fullmatch(name))]
    if not inside and not said.has_saver:
        return
    if _INDEX not in inside or not shards:
        missing = f"{VARIABLES}/{_INDEX}" if _INDEX not in inside else "the shards"
        raise FormatError(f"{root}: {missing} of the variables missing", hint=_AGAIN)
    totals = {int(match[2]) for match in shards}
    if len(totals) > 1:
        raise FormatError(f"{root / VARIABLES} holds shards of two sets of variables", hint=_AGAIN)
    total, there = totals.pop(), {int(match[1]) for match in shards}
    if there != set(range(total)):
        lacks = f"has {len(there)} of {total} shards, or others than their number says"
        raise FormatError(f"{root / VARIABLES} {lacks}", hint=_AGAIN)


def _is_variable(name: str) -> bool:
    return name.startswith(f"{VARIABLES}/{VARIABLES}.")
