"""Checks of the files in a model directory."""

from __future__ import annotations

from pathlib import Path

from clowder_aimage.errors import ModelError

_LFS_POINTER = b"version https://git-lfs"


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
