"""Any file or directory, packed unchanged: a layer for each file.

Only the first bytes are looked at, to find pickles.
"""

from __future__ import annotations

from pathlib import Path

from clowder_aimage.errors import ModelError
from clowder_aimage.formats import model_tree
from clowder_aimage.formats.file_content import identify
from clowder_aimage.formats.inventory import Inventory

FORMAT = "files"


def take(path: Path) -> Inventory:
    """Return the files at or below ``path``, except hidden ones.

    Raises:
        ModelError: There are no files or too many, or a file is outside of the directory, is not a
            regular file, or has an invalid name.
    """
    root, paths = (path, model_tree.walk(path)) if path.is_dir() else (path.parent, [path])
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    if not paths:
        raise ModelError(f"{path} contains no files")
    boundary = root if path.is_dir() else None
    files = [
        model_tree.build_source_file(boundary, p, p.relative_to(root).as_posix()) for p in paths
    ]
    facts = {"pickled": True} if any(identify(p).is_pickled for p in paths) else {}
    license_ = model_tree.read_license(path) if path.is_dir() else None
    return Inventory.of_files(FORMAT, files, facts, license_)
