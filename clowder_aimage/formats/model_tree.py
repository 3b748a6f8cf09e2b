"""Files of a model directory: safe access, their JSON, and the licence in a model card."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.document import strict_json
from clowder_aimage.document.license_expression import build_reference
from clowder_aimage.errors import FormatError, ModelError
from clowder_aimage.oci import mediatype

AGAIN = "download the complete file again"
MODEL_AGAIN = "download the complete model again"
OTHER = f"{AGAIN}, or omit the format to have it detected"
CARD, ADAPTERS = "README.md", "adapters"
# Files of a model: a manifest of the largest accepted size has no room for more layers.
MAX_FILES = 8000
# A file that marks the shared blobs/ of a cache (huggingface_hub 2).
_SHARED_BLOBS = ".huggingface-shared-blobs"
# Bytes that identify a file's type.
_START = 64
# Bytes of a JSON file; tokenizers and indexes of shards are the largest.
MAX_JSON = 64 * 1024 * 1024
# Bytes of a card that are read.
MAX_CARD = 1024 * 1024
# Bytes of a card with only the licence.
_MAX_BARE_CARD = 4096
_LFS_POINTER = b"version https://git-lfs"
_LICENSE = re.compile(r"[A-Za-z0-9(]([A-Za-z0-9.+() -]*[A-Za-z0-9.+)])?")
_BARE_CARD = re.compile(rb"---\nlicense: [A-Za-z0-9.+() -]+\n---\n")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that is stored unchanged as a layer.

    ``size`` is in bytes, ``modified`` the modification time in nanoseconds. ``data`` is the content
    of a file in memory.
    """

    name: str
    path: Path
    size: int
    modified: int
    media_type: str = mediatype.AIMAGE_FILE
    data: bytes | None = None

    @classmethod
    def from_bytes(cls, name: str, data: bytes) -> SourceFile:
        """Return a file in memory."""
        return cls(name, Path(name), len(data), 0, data=data)


def build_source_file(
    root: Path | None, path: Path, name: str, media_type: str = mediatype.AIMAGE_FILE
) -> SourceFile:
    """Return a file that is stored as the layer ``name``.

    The file must be inside ``root``. Without a ``root``, links may lead anywhere.

    Raises:
        ModelError: It is not a regular file, is outside ``root``, is a Git LFS pointer, or its name
            is not a valid layer name.
    """
    check_file(path)
    if root is not None:
        check_inside(find_boundary(root), path)
    try:
        check_name(name)
    except FormatError:
        raise ModelError(
            f"unsupported file name: {str(path)!r:.300}",
            hint="rename it: a name has printable characters and no backslash",
        ) from None
    check_not_pointer(path, read_start(path))
    status = path.stat()
    return SourceFile(name, path, status.st_size, status.st_mtime_ns, media_type)


def read_start(path: Path) -> bytes:
    """Return the first bytes of a file."""
    with path.open("rb") as file:
        return file.read(_START)


def find_boundary(root: Path) -> Path:
    """Return the directory that no link in ``root`` may leave.

    It is the snapshot of a Hugging Face cache that contains ``root`` (huggingface_hub, "Understand
    caching"), else ``root`` itself.
    """
    for directory in root.absolute().parents:
        cache = directory.parent.parent
        if directory.parent.name == "snapshots" and (cache / "blobs").is_dir():
            return directory
    return root


def list_directory(root: Path, directory: Path) -> list[Path]:
    """Return the files directly in ``directory``, sorted by name.

    Raises ModelError: A file is a link out of ``root``, or is not a regular file.
    """
    check_inside(root, directory)
    files = sorted(path for path in _list_visible(directory) if not path.is_dir())
    for path in files:
        check_inside(root, path)
        check_file(path)
    return files


def walk(root: Path) -> list[Path]:
    """Return all files below ``root``, sorted, except hidden ones and those of a store.

    Raises:
        ModelError: A link leads out of it, a directory is a link, a file is not a regular file, or
            there are too many files.
    """
    files: list[Path] = []
    directories = [root]
    while directories:
        for path in sorted(_list_visible(directories.pop())):
            check_inside(find_boundary(root), path)
            if not path.is_dir():
                check_file(path)
                files.append(path)
            elif path.is_symlink():
                # It could lead to a parent directory, and files would have several names.
                raise ModelError(
                    f"{path} is a link to a directory", hint="replace it with the directory itself"
                )
            elif not is_store(path):
                directories.append(path)
        check_count(root, len(files) + len(directories))
    return sorted(files)


def is_store(directory: Path) -> bool:
    """Return True for an image layout (OCI image-spec, image-layout.md)."""
    return (directory / "oci-layout").is_file()


def check_count(root: Path, count: int) -> None:
    """Raise ModelError: There are too many files for a manifest."""
    if count > MAX_FILES:
        raise ModelError(
            f"{root} contains more than {MAX_FILES} files",
            hint="pass a directory that contains only the model",
        )


def _list_visible(directory: Path) -> Iterator[Path]:
    return (path for path in directory.iterdir() if not path.name.startswith("."))


def check_file(path: Path) -> None:
    """Raise ModelError: It is a broken link, or not a regular file."""
    if path.is_file():
        return
    if not path.exists():
        problem = "is a broken link" if path.is_symlink() else "does not exist"
        raise ModelError(f"{path} {problem}", hint="pass the file or directory of the model")
    raise ModelError(f"{path} is not a regular file", hint="pass the file of the model")


def check_not_pointer(path: Path, start: bytes) -> None:
    """Reject a Git LFS pointer, left by a clone without Git LFS (git-lfs, "The Pointer")."""
    if start.startswith(_LFS_POINTER):
        raise ModelError(
            f"{path} is a Git LFS pointer, not the file itself",
            hint="fetch the files with 'git lfs pull'",
        )


def check_inside(root: Path, path: Path) -> None:
    """Reject a symbolic link that leads out of the model directory.

    A Hugging Face snapshot consists of links into the ``blobs/`` of its repository, which may be
    links into the ``blobs/`` of the cache; these are accepted (huggingface_hub, "Understand
    caching").

    Raises:
        ModelError: It leads out, or does not exist.
    """
    top = root.resolve()
    try:
        target = path.resolve(strict=True)
    except (OSError, RuntimeError):
        # A loop of links is a RuntimeError before Python 3.13.
        raise ModelError(f"{path} is a broken link", hint=MODEL_AGAIN) from None
    if target.is_relative_to(top):
        return
    if top.parent.name == "snapshots" and _is_cached(top.parent.parent, target):
        return
    raise ModelError(
        f"{path} is a link to {target}, outside the model directory",
        hint="copy the file into the model directory",
    )


def _is_cached(repository: Path, target: Path) -> bool:
    """Return True if a file is a blob of a cached repository, or a blob shared by several."""
    shared = repository.parent / "blobs"
    return target.parent == repository / "blobs" or (
        target.parent.parent == shared and (shared / _SHARED_BLOBS).is_file()
    )


def build_pickle_error(path: Path, hint: str) -> ModelError:
    """Return the error for a pickled file."""
    return build_whole_files_error(describe_pickle(path), hint)


def describe_pickle(path: Path) -> str:
    """Return the reason to refuse a pickled file."""
    return f"{path} is pickled: loading it can execute arbitrary code, so it is not packed"


def build_whole_files_error(message: str, hint: str) -> ModelError:
    """Return the error for a model that can only be packed as whole files.

    The remedy is an option of the verb; the hint is for other callers.
    """
    return ModelError(message, hint=hint, remedy="whole_files", other=hint)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into ModelError."""
    try:
        yield
    except OSError as error:
        raise ModelError(f"cannot read {error.filename or path}: {error.strerror}") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file name to a FormatError."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error}", hint=error.hint or AGAIN) from None


def read_json(root: Path, path: Path) -> object:
    """Return the value in a JSON file of the model directory ``root``.

    Raises:
        ModelError: It is missing, too large, outside ``root``, or a Git LFS pointer.
        FormatError: It is not JSON.
    """
    if not path.is_file():
        raise ModelError(f"{path} is missing", hint=MODEL_AGAIN)
    check_inside(root, path)
    if path.stat().st_size > MAX_JSON:
        raise ModelError(f"{path} is too large for a JSON file")
    raw = path.read_bytes()
    check_not_pointer(path, raw)
    try:
        return strict_json.read_json(raw, str(path), MAX_JSON)
    except FormatError as error:
        raise FormatError(error.message, hint=AGAIN) from None


def read_object(root: Path, path: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file. Raises as ``read_json``, and if it is not an object."""
    value = read_json(root, path)
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def read_license(root: Path) -> str | None:
    """Return the licence in the front matter of the model card.

    Source: Hugging Face hub, "Model Cards". One that the hub does not list is ``other`` there, with
    a name: it is returned as ``LicenseRef-`` with that name.
    """
    path = root / CARD
    if not path.is_file():
        return None
    check_inside(root, path)
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        lines = file.read(MAX_CARD).splitlines()
    if not lines or lines[0].strip() != "---":
        return None
    # The licence is one line of the YAML front matter: a YAML parser is not needed.
    found: dict[str, str] = {}
    for line in lines[1:]:
        key, colon, value = line.partition(":")
        if line.strip() == "---":
            break
        if key in ("license", "license_name") and colon:
            found.setdefault(key, value.partition(" #")[0].strip().strip("\"'"))
    return name_license(found.get("license"), found.get("license_name"))


def name_license(license_: str | None, name: str | None) -> str | None:
    """Return a licence that is stated as ``other`` with its name by that, others unchanged."""
    is_other = license_ is not None and license_.lower() == "other"
    return build_reference(name) if is_other and name else license_ or None


def build_card(license_: object) -> bytes | None:
    """Return a model card with only this licence, or None if it is not valid in a card."""
    if not isinstance(license_, str) or not _LICENSE.fullmatch(license_):
        return None
    content = f"---\nlicense: {license_}\n---\n".encode()
    return content if len(content) <= _MAX_BARE_CARD else None


def is_bare(path: Path) -> bool:
    """Return True if a file is a card with only the licence."""
    if path.name != CARD or path.stat().st_size > _MAX_BARE_CARD:
        return False
    return _BARE_CARD.fullmatch(path.read_bytes()) is not None
