"""Checks of the files in a model directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from clowder_aimage.errors import ModelError
from clowder_aimage.oci import mediatype

_LFS_POINTER = b"version https://git-lfs"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that becomes a layer as it is.

    ``size`` in bytes; ``modified`` is when it was last written, in nanoseconds.
    """

    name: str
    path: Path
    size: int
    modified: int
    media_type: str = mediatype.AIMAGE_FILE


def home(root: Path) -> Path:
    """Return the directory that files of ``root`` may not lie outside of.

    Itself, or the snapshot in a Hugging Face cache that it is part of (huggingface_hub, "Understand
    caching").
    """
    for directory in root.absolute().parents:
        cache = directory.parent.parent
        if directory.parent.name == "snapshots" and (cache / "blobs").is_dir():
            return directory
    return root


def list_directory(root: Path, directory: Path, refused: tuple[str, ...]) -> list[Path]:
    """Return the files right in ``directory``, sorted by name.

    Raises:
        ModelError: one of them is pickled, or leads out of ``root``.
    """
    check_inside(root, directory)
    paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    for path in paths:
        if path.suffix.lower() in refused:
            raise ModelError(
                f"{path} is pickled: loading it could run any code, so it is not packed",
                hint="convert the weights to safetensors and remove the pickled file",
            )
    files = [path for path in paths if not path.is_dir()]
    for path in files:
        check_inside(root, path)
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file", hint="remove it")
    return files


def check_not_pointer(path: Path, start: bytes) -> None:
    """Refuse what a clone without Git LFS leaves in a file's place (git-lfs, "The Pointer")."""
    if start.startswith(_LFS_POINTER):
        raise ModelError(
            f"{path} is a Git LFS pointer, not the file itself",
            hint="fetch the files with 'git lfs pull'",
        )


def check_inside(root: Path, path: Path) -> None:
    """Refuse a path that a symbolic link leads out of the model directory.

    A Hugging Face snapshot consists of links into its own cache's ``blobs/``; those are its
    files (huggingface_hub, "Understand caching").

    Raises:
        ModelError: it leads elsewhere, or nowhere.
    """
    top = root.resolve()
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):  # a loop of links is a RuntimeError before Python 3.13
        raise ModelError(
            f"{path} is a link to nothing", hint="download the model again, in full"
        ) from None
    if target.is_relative_to(top):
        return
    if top.parent.name == "snapshots" and target.parent == top.parent.parent / "blobs":
        return
    raise ModelError(
        f"{path} is a link that leaves the model directory (to {target})",
        hint="copy the file into the model directory",
    )


CARD, ADAPTERS = "README.md", "adapters"
_LICENSE = re.compile(r"[A-Za-z0-9(]([A-Za-z0-9.+() -]*[A-Za-z0-9.+)])?")
_BARE = re.compile(rb"---\nlicense: [A-Za-z0-9.+() -]+\n---\n")
_LONGEST = 4096  # bytes of a card that says so little


def card(license_: object) -> bytes | None:
    """Return a card that says this licence; None where it is no word that one could say."""
    if not isinstance(license_, str) or not _LICENSE.fullmatch(license_):
        return None
    made = f"---\nlicense: {license_}\n---\n".encode()
    return made if len(made) <= _LONGEST else None


def is_bare(path: Path) -> bool:
    """Return whether a file is a card that says nothing but the licence."""
    if path.name != CARD or path.stat().st_size > _LONGEST:
        return False
    return _BARE.fullmatch(path.read_bytes()) is not None


def sole(root: Path) -> Path | None:
    """Return the only file in a directory, but for a card and adapters beside it.

    Hidden ones do not count. Raises ModelError where it is a link that leads out.
    """
    beside = (CARD, ADAPTERS)
    paths = [p for p in root.iterdir() if not p.name.startswith(".") and p.name not in beside]
    if len(paths) != 1 or not paths[0].is_file():
        return None
    check_inside(home(root), paths[0])
    return paths[0]
