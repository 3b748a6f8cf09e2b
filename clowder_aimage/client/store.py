"""Stores in the Python interface."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clowder_aimage.client.registry import Name, Registry, connect, to_reference
from clowder_aimage.config.user_directory import list_default_stores, use_store_settings
from clowder_aimage.errors import UsageError
from clowder_aimage.layout import ImageLayout, LayeredStore
from clowder_aimage.oci import mediatype

if TYPE_CHECKING:
    from clowder_aimage.registry import ClientOptions


class Store:
    """A store of AImages: an OCI image layout in the directory ``path``.

    Args:
        path: The directory. The first write creates it. By default the store of the command line:
            the directories in AIMAGE_STORE, else that of the platform.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        path_to_write, *read_only = roots = list_default_stores() if path is None else (Path(path),)
        self.path = path_to_write
        use_store_settings()
        self._layout = LayeredStore(roots) if read_only else ImageLayout(path_to_write)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"

    def __contains__(self, name: Name) -> bool:
        return str(to_reference(name)) in self.names()

    def names(self) -> list[str]:
        """Return the names in the store, sorted."""
        return sorted(name for name, _ in self._layout.list_tags())

    def digest(self, name: Name) -> str:
        """Return the digest of a name. Raises NotFoundError."""
        return str(self._layout.resolve(to_reference(name)).digest)

    def show(self, name: Name) -> dict[str, Any]:
        """Return the output of ``aimage show --json``. Raises NotFoundError, FormatError."""
        from clowder_aimage.show import show

        return show(self._layout, to_reference(name)).to_json()

    def diff(self, a: Name, b: Name, *, registry: Registry | None = None) -> dict[str, Any]:
        """Return the output of ``aimage diff --json``: the differences of ``b`` from ``a``.

        A name that the store lacks is read from its registry, without its weights.

        Raises:
            NotFoundError: One is in neither. Also raises as ``pull``.
        """
        from clowder_aimage.diff import diff

        old, new = to_reference(a), to_reference(b)
        connection: ClientOptions = connect(new if old.registry is None else old, registry)
        return diff(old, new, self._layout, connection).to_json()

    def tag(self, name: Name, new: Name) -> None:
        """Give an AImage another name. Raises NotFoundError, StoreError."""
        target = to_reference(new)
        if target.digest is not None:
            raise UsageError(f"{target} names a digest: a tag is needed")
        with self._layout.keep():
            manifest = self._layout.resolve(to_reference(name))
            is_partial = manifest.annotations.get(mediatype.PARTIAL) == "true"
            self._layout.tag(manifest, target, is_partial=is_partial)

    def remove(self, name: Name) -> None:
        """Remove a name; its blobs stay until the next garbage collection. Raises NotFoundError."""
        self._layout.untag(to_reference(name))

    def export(self, name: Name, directory: str | os.PathLike[str]) -> Path:
        """Write an AImage as the directory that it was created from; return that directory.

        Raises:
            UsageError: The directory exists and is not empty.
            NotFoundError: The AImage is not in the store, or not all of it.
            FormatError, VerificationError, StoreError, NoSpaceError: It cannot be written.
        """
        from clowder_aimage.export import export

        export(self._layout, to_reference(name), Path(directory))
        return Path(directory)


def open_layout(store: Store | None) -> ImageLayout:
    """Return the layout of a store, by default of that of the command line."""
    return (store or Store())._layout  # noqa: SLF001 - not part of the public interface
