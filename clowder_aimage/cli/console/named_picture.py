"""The picture files that options name: read once, checked, and kept in the store when used."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clowder_aimage.cli.console.option import get_settings
from clowder_aimage.errors import UsageError, needs
from clowder_aimage.generation.request import ALPHA
from clowder_aimage.oci import Descriptor, Digest

if TYPE_CHECKING:
    from clowder_aimage.pictures.input_file import InputFile
    from clowder_aimage.pictures.input_source import InputSource

# A key in the meta of the command's context.
_KEY = "clowder_aimage.pictures"
# Characters of a name in an error.
_LONGEST = 200


@dataclass(slots=True)
class NamedPictures:
    """The picture files of a command by their digests, and by the names that were given."""

    data: dict[str, bytes] = field(default_factory=dict)
    files: dict[str, InputFile] = field(default_factory=dict)
    # Blobs that this command has added to the store.
    added: list[Descriptor] = field(default_factory=list)
    leases: contextlib.ExitStack | None = None
    # Inodes, sizes and times of the files when they were read.
    stamps: dict[str, object] = field(default_factory=dict)
    # Checked pairs of an image and a mask.
    fitting: set[tuple[str, str]] = field(default_factory=set)

    def read(self, name: str, option: str) -> InputFile:
        """Return the description of a file. It is read once, and again after a change.

        Raises UsageError, NotFoundError, and as ``InputSource.read``.
        """
        stamp = _stamp(name)
        if name not in self.files or self.stamps[name] != stamp:
            _check_name(name, option)
            with needs("reading a picture", "mlx"):
                from clowder_aimage.pictures.input import inspect
            data = create_input_source().read(name, option)
            file = inspect(data, f"{option}: {format_picture_label(name)}")
            self.files[name], self.stamps[name] = file, stamp
            self.data[str(file.descriptor.digest)] = data
        return self.files[name]

    def find(self, digest: str) -> tuple[str, InputFile]:
        """Return the name and the facts of a file that was read."""
        files = self.files.items()
        return next(pair for pair in files if str(pair[1].descriptor.digest) == digest)

    def read_mask(self, name: str, image: str) -> str:
        """Return the mask of an image: its digest, or ALPHA. Raises as ``read``.

        Raises UsageError: it does not fit the image, or nothing is painted by it.
        """
        from clowder_aimage.pictures.input import check_mask

        is_file, picture = name != ALPHA, self.read(image, "--image")
        mask = str(self.read(name, "--mask").descriptor.digest) if is_file else ALPHA
        digest = str(picture.descriptor.digest)
        if (digest, mask) not in self.fitting:
            try:
                check_mask(self.data[digest], self.data[mask] if is_file else None)
            except UsageError as error:
                label = format_picture_label(name if is_file else image)
                raise UsageError(f"--mask: {label}: {error.message}", hint=error.hint) from None
            self.fitting.add((digest, mask))
        return mask

    def keep(self, *digests: str | None) -> None:
        """Put files into the store, leased until the command ends."""
        from clowder_aimage.pictures.input import keep

        contents = [self.data[digest] for digest in digests if digest in self.data]
        if contents:
            layout = get_settings().layout
            context = click.get_current_context()
            self.leases = self.leases or context.with_resource(contextlib.ExitStack())
            lease = self.leases.enter_context(layout.lease())
            for data in contents:
                content = Descriptor("", Digest.of(data), len(data))
                self.added += [] if layout.exists(content) else [content]
                keep(layout, lease, data, "the picture")

    def discard(self) -> None:
        """Remove the files that this command has stored, after they were refused."""
        from clowder_aimage.layout.gc import Collector

        if self.leases is not None and self.added:
            self.leases.close()
            Collector(get_settings().layout, grace=0.0).remove(self.added)
            self.added.clear()


def _read_status(name: str) -> os.stat_result | None:
    """Return the status of a file; None for other names."""
    # A URL, or ~ of an unknown user.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        return Path(name).expanduser().stat()
    return None


def _stamp(name: str) -> tuple[int, ...]:
    status = _read_status(name)
    return () if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def _check_name(name: str, option: str) -> None:
    """Reject a name that is not that of a picture, as far as it says. Raises UsageError."""
    if not name:
        raise UsageError(f"{option} names no picture")
    status = _read_status(name)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise UsageError(f"{option}: {name} is a directory, not a picture")
    if name == "-" and sys.stdin is not None and sys.stdin.isatty():
        raise UsageError(f"{option}: stdin is a terminal", hint="name a file, or use a pipe")


def check_stdin(readers: Sequence[str]) -> None:
    """Reject several options that read stdin. Raises UsageError."""
    if len(readers) > 1:
        names = f"{', '.join(readers[:-1])} and {readers[-1]}"
        raise UsageError(f"{names} read stdin, which can be read only once", hint="name files")


def create_input_source() -> InputSource:
    """Return the reader of pictures for the user of this machine."""
    from clowder_aimage.pictures.input_source import InputSource

    stdin = sys.stdin.buffer if sys.stdin else None
    store, connect = get_settings().layout, get_settings().build_client_options
    return InputSource(store, connect, hosts=None, has_files=True, stdin=stdin)


def format_picture_label(name: str) -> str:
    """Return the name of a picture in messages."""
    if name == "-":
        return "the picture on stdin"
    return name if len(name) < _LONGEST else f"{name[:40]}..."


def get_named_pictures() -> NamedPictures:
    """Return the picture files of the command that runs."""
    meta = click.get_current_context().meta
    pictures: NamedPictures = meta.setdefault(_KEY, NamedPictures())
    return pictures
