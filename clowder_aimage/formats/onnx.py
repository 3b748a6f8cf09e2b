"""ONNX: a model with its external data files, or a directory of such models.

Formats: onnx/onnx, onnx/onnx.proto3 and docs/ExternalData.md. A location must be a path inside the
model's directory: more permissive readers could read any file (CVE-2022-25882, CVE-2024-5187) or
followed links (CVE-2024-27318).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.inventory import Inventory
from clowder_aimage.formats.model_tree import SourceFile, build_source_file
from clowder_aimage.formats.onnx_graph import OnnxModel, read_model
from clowder_aimage.oci import mediatype

FORMAT = "onnx"
ENDING = ".onnx"
_DRIVE = re.compile("[A-Za-z]:")


def take(path: Path) -> Inventory:
    """Return the model in a file, or the models in a directory, with their external data.

    Raises:
        FormatError: A file is not valid ONNX, or its external data are missing, too short, or
            outside the directory.
        ModelError: There is no model, or a file cannot be read.
    """
    with model_tree.reading(path):
        if path.is_dir():
            return _take_directory(path)
        files, model = _take_model(path.parent, path, None)
        return Inventory.of_files(FORMAT, files, _build_facts([model]), None)


def _take_directory(root: Path) -> Inventory:
    paths = model_tree.walk(root)
    models: list[OnnxModel] = []
    files: dict[str, SourceFile] = {}
    for path in paths:
        if path.suffix.lower() == ENDING:
            model_files, model = _take_model(root, path, root)
            models.append(model)
            files |= {file.name: file for file in model_files}
    if not models:
        raise ModelError(f"no ONNX file found in {root}")
    return Inventory.of_files(
        FORMAT, files.values(), _build_facts(models), model_tree.read_license(root)
    )


def _build_facts(models: Sequence[OnnxModel]) -> dict[str, object]:
    versions = {
        f"ir {model.ir_version}" + (f", opset {model.opset}" if model.opset else "")
        for model in models
    }
    return {"formatVersion": versions.pop() if len(versions) == 1 else None}


def _take_model(
    root: Path, path: Path, boundary: Path | None
) -> tuple[list[SourceFile], OnnxModel]:
    """Return the files of one model, named relative to ``root``.

    The links of the model are not restricted if ``boundary`` is None.
    """
    name = path.relative_to(root).as_posix()
    main = build_source_file(boundary, path, name, mediatype.AIMAGE_ONNX)
    with model_tree.naming(path):
        with path.open("rb") as file:
            model = read_model(file, main.size)
        files = {main.name: main}
        for location, extent in model.external.items():
            name = _resolve_name(location, extent.tensor)
            data_path = path.parent / name
            if not data_path.is_file():
                problem = "is missing" if not data_path.exists() else "is not a regular file"
                raise FormatError(
                    f"tensor {extent.tensor[:200]!r} is in {name}, which {problem}",
                    hint="download the external data files of the model into its directory",
                )
            file_name = data_path.relative_to(root).as_posix()
            files[file_name] = build_source_file(
                boundary or root, data_path, file_name, mediatype.AIMAGE_ONNX
            )
            if extent.end > files[file_name].size:
                raise FormatError(
                    f"tensor {extent.tensor[:200]!r} ends at byte {extent.end} of {file_name}, "
                    f"which has {files[file_name].size} bytes: truncated"
                )
    return list(files.values()), model


def _resolve_name(location: str, tensor: str) -> str:
    """Return a location as a path relative to the model's directory, valid on every system."""
    path = PurePosixPath(location)
    try:
        if path.is_absolute() or _DRIVE.match(location):
            raise FormatError("absolute")
        return check_name(path.as_posix())
    except FormatError:
        raise FormatError(
            f"tensor {tensor[:200]!r} is in {location[:200]!r}, outside the model directory",
            hint="the model may be malicious: do not load it with any tool",
        ) from None
