"""Unpacking of tar layers of other packaging tools, only below the output directory.

Each name is checked before a file is created, by the rules of Python's ``tarfile.data_filter`` and
stricter ones: no absolute names, no ``..``, no devices or pipes, no setuid, no links that lead out,
no duplicates, and no two names that differ only in case.
"""

from __future__ import annotations

import os
import stat
import tarfile

from clowder_aimage.content.atomic_file import write_all
from clowder_aimage.content.buffer import new_buffer
from clowder_aimage.content.open_directory import OpenDirectory
from clowder_aimage.content.store import Reader
from clowder_aimage.content.tar import TarReader
from clowder_aimage.dialect.aimage import check_name
from clowder_aimage.errors import FormatError
from clowder_aimage.exporter.directory import DIRECTORY_MODE, FILE_MODE, new_file
from clowder_aimage.exporter.file_name import FileNames

# Bytes of a link target on every system.
_TARGET = 1023
_PROGRAM = 0o755


class TarExtractor:
    """Extractor of the tar in ``source``, the layer ``layer``, to ``root``.

    ``files`` counts the files written, ``size`` their bytes; ``limit`` limits the bytes.
    """

    def __init__(
        self, source: Reader, layer: str, root: OpenDirectory, names: FileNames, limit: int
    ) -> None:
        self._source = source
        self._tar = TarReader(source.readinto, layer)
        self._layer = layer
        self._root = root
        self._names = names
        self._limit = limit
        self._buffer = new_buffer()
        self.files = self.size = 0

    def run(self) -> None:
        """Unpack the tar; ``source`` is read to its end.

        Raises:
            FormatError: It is not a tar, is truncated, or has unsupported entries.
            OSError: It cannot be written.
        """
        self._names.fold()
        for member in self._tar.iter_members():
            self._unpack(member)
        # The digest is verified at the end of the source, after the end of the tar.
        while self._source.readinto(self._buffer):
            pass

    def _unpack(self, member: tarfile.TarInfo) -> None:
        name = self._name(member.name)
        if member.isdir():
            if name:
                self._names.add_directory(name)
                self._root.make(name, DIRECTORY_MODE)
        elif not name:
            raise self._build_error(member.name, "the file has no name")
        elif member.issparse():
            raise self._build_error(name, "sparse files are not supported")
        elif member.isreg():
            self._write(member, name)
        elif member.issym() or member.islnk():
            self._link(member, name)
        else:
            raise self._build_error(name, "not a file, directory or link")

    def _name(self, path: str) -> str:
        """Return a name below the directory; empty for the directory itself. Raises FormatError."""
        components = [component for component in path.split("/") if component not in ("", ".")]
        if path.startswith("/") or ".." in components:
            raise self._build_error(path, "the path is outside the directory")
        return check_name("/".join(components)) if components else ""

    def _add_file(self, name: str) -> str:
        self._names.add_file(name)
        self._root.make(name.rpartition("/")[0], DIRECTORY_MODE)
        return name

    def _write(self, member: tarfile.TarInfo, name: str) -> None:
        if member.size < 0 or self.size + member.size > self._limit:
            limit = self._limit - self.size
            raise self._build_error(name, f"it has {member.size} bytes; the limit is {limit}")
        mode = _PROGRAM if member.mode & 0o100 else FILE_MODE
        with new_file(self._root, self._add_file(name), mode) as file:
            remaining = member.size
            while remaining:
                view = self._buffer[: min(remaining, len(self._buffer))]
                self._tar.read_exactly(view)
                write_all(file, view)
                remaining -= len(view)
        self.files += 1
        self.size += member.size

    def _link(self, member: tarfile.TarInfo, name: str) -> None:
        """Create a symbolic link to a path inside, or a hard link to an earlier file."""
        if member.islnk():
            source = self._name(member.linkname)
            if not self._names.is_file(source) or stat.S_ISLNK(self._root.stat(source).st_mode):
                raise self._build_error(
                    name, f"link to {source[:200]!r}, not a file in the archive"
                )
            self._root.link(source, self._add_file(name))
        else:
            target = member.linkname
            self._check_target(name, target)
            self._root.symlink(target, self._add_file(name))
        self.files += 1

    def _check_target(self, name: str, target: str) -> None:
        """Check that a link's target stays inside. Raises FormatError."""
        # Leading ``..`` can be counted lexically: no member is created below a link.
        components = [component for component in target.split("/") if component not in ("", ".")]
        climbs = next(
            (i for i, component in enumerate(components) if component != ".."), len(components)
        )
        if (
            target.startswith("/")
            or not components
            or ".." in components[climbs:]
            or climbs > name.count("/")
            or not target.isprintable()
        ):
            raise self._build_error(name, f"link to {target[:200]!r}, outside the directory")
        if len(os.fsencode(target)) > _TARGET:
            raise self._build_error(name, f"the link target has more than {_TARGET} bytes")

    def _build_error(self, name: str, reason: str) -> FormatError:
        return FormatError(f"{self._layer}: cannot unpack {name[:200]!r}: {reason}")
