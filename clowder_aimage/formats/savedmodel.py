"""SavedModel: TensorFlow's directory of graphs, variables and assets.

Format: tensorflow/tensorflow, tensorflow/python/saved_model/README.md,
tensorflow/core/protobuf/saved_model.proto; names of the variable files:
tensorflow/core/util/tensor_bundle/naming.cc.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.oci import mediatype

FORMAT = "savedmodel"
BINARY, TEXT = "saved_model.pb", "saved_model.pbtxt"
VARIABLES = "variables"
_INDEX = "variables.index"
_SHARD = re.compile(r"variables\.data-(\d{5})-of-(\d{5})")
# Bytes of a text file that are searched for a graph.
_MAX_LOOK = 1 << 20
# The first field of an encoded SavedModel: saved_model_schema_version = 1, or meta_graphs.
_GRAPHS = (b"\x08\x01", b"\x12")
_TEXT_GRAPHS = re.compile(rb"^\s*meta_graphs\s*:?\s*[{<]", re.MULTILINE)


def take(path: Path) -> Inventory:
    """Return a whole directory; each file in it becomes a layer.

    Raises:
        FormatError: It is not a SavedModel, or variable files are missing.
        ModelError: It is not a directory, or cannot be read.
    """
    with model_tree.reading(path):
        if not path.is_dir():
            raise ModelError(
                f"{path} is not a SavedModel directory",
                hint=f"pass the directory that contains {BINARY}",
            )
        paths = {file.relative_to(path).as_posix(): file for file in model_tree.walk(path)}
        kind, names = mediatype.AIMAGE_SAVEDMODEL, list(paths)
        files = [
            model_tree.build_source_file(path, file, name, kind) for name, file in paths.items()
        ]
        _check_graph(path, names)
        _check_variables(path, names)
    return Inventory.of_files(FORMAT, files, {}, model_tree.read_license(path))


def _check_graph(root: Path, names: Sequence[str]) -> None:
    """Check that the graph file exists and begins with a graph. Graphs are not parsed."""
    name = next((name for name in (BINARY, TEXT) if name in names), None)
    if name is None:
        raise FormatError(
            f"{root} is not a SavedModel: it has no {BINARY}",
            hint="pass the directory that contains it",
        )
    with (root / name).open("rb") as file:
        start = file.read(_MAX_LOOK)
    is_graph = _TEXT_GRAPHS.search(start) if name == TEXT else start.startswith(_GRAPHS)
    if not is_graph:
        raise FormatError(
            f"{root / name} is not a SavedModel, or contains no graph", hint=model_tree.MODEL_AGAIN
        )


def _check_variables(root: Path, names: Sequence[str]) -> None:
    prefix = f"{VARIABLES}/"
    inside = [
        name.removeprefix(prefix) for name in names if name.startswith(f"{prefix}{VARIABLES}.")
    ]
    shards = [match for name in inside if (match := _SHARD.fullmatch(name))]
    if not inside:
        return
    if _INDEX not in inside or not shards:
        missing = f"{VARIABLES}/{_INDEX} is" if _INDEX not in inside else "variable shards are"
        raise FormatError(f"{root}: {missing} missing", hint=model_tree.MODEL_AGAIN)
    totals = {int(match[2]) for match in shards}
    if len(totals) > 1:
        raise FormatError(
            f"{root / VARIABLES} contains shards of several sets", hint=model_tree.MODEL_AGAIN
        )
    total, numbers = totals.pop(), {int(match[1]) for match in shards}
    if numbers != set(range(total)):
        problem = f"shards are missing or misnumbered: {len(numbers)} found, {total} expected"
        raise FormatError(f"{root / VARIABLES}: {problem}", hint=model_tree.MODEL_AGAIN)
