"""The protocols of stores of content.

A *Source* is read, a *Target* is also written, a *ContentStore* keeps its content in files of this
machine. The layout, a repository in a registry and the memory store of the tests pass one contract
suite (tests/contract); a tar is a target that is written once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

from clowder_aimage.content.copy_option import CopyOptions
from clowder_aimage.errors import AccessError
from clowder_aimage.oci import Descriptor, Digest, Reference

LAYOUT_FILE = b'{"imageLayoutVersion":"1.0.0"}'  # oci-layout (OCI image-spec, image-layout.md)


class Body(Protocol):
    """The bytes of a blob, opened again from any offset for a retry or a resume."""

    def __call__(self, offset: int = 0, /) -> BinaryIO: ...


class Source(Protocol):
    """Content that can be read."""

    def resolve(self, reference: Reference, /) -> Descriptor:
        """Return the descriptor of the manifest that ``reference`` names.

        Raises NotFoundError: there is none; AccessError: it is not known (no answer, no
        permission, an error of the server).
        """

    def exists(self, content: Descriptor, /) -> bool:
        """Return whether the content is here in full. Raises AccessError when it is not known."""

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> BinaryIO:
        """Open ``length`` bytes at ``offset``, not yet verified. Raises NotFoundError."""

    @property
    def alignment(self) -> int:
        """Return the bytes that the source reads at once; ranges are best cut at multiples."""
        return 1

    def supports_ranges(self, content: Descriptor, /) -> bool:  # noqa: ARG002 - a default
        """Return False once the source has sent all of the content for a range of it."""
        return True

    def distrust(self, content: Descriptor, /) -> bool:  # noqa: ARG002 - a default
        """Note wrong bytes of ``content``; return whether another place may have the right ones."""
        return False


class WrappedSource(Source):
    """A source over another one. Subclasses override what differs."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def resolve(self, reference: Reference, /) -> Descriptor:
        return self._source.resolve(reference)

    def exists(self, content: Descriptor, /) -> bool:
        return self._source.exists(content)

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> BinaryIO:
        return self._source.open(content, offset, length)

    @property
    def alignment(self) -> int:
        return self._source.alignment

    def supports_ranges(self, content: Descriptor, /) -> bool:
        return self._source.supports_ranges(content)

    def distrust(self, content: Descriptor, /) -> bool:
        return self._source.distrust(content)


class Overlay(WrappedSource):
    """A source with a few documents laid over another source; every name means ``root``."""

    def __init__(self, source: Source, root: Descriptor, documents: dict[Digest, bytes]) -> None:
        super().__init__(source)
        self._root = root
        self._documents = documents

    def resolve(self, _: Reference, /) -> Descriptor:
        return self._root

    def exists(self, content: Descriptor, /) -> bool:
        return content.digest in self._documents or super().exists(content)

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> BinaryIO:
        data = self._documents.get(content.digest)
        if data is None:
            return super().open(content, offset, length)
        return io.BytesIO(data[offset : None if length is None else offset + length])


class Lease(AbstractContextManager["Lease"], Protocol):
    """Content that no collection removes while the lease is held."""

    def add(self, *digests: Digest) -> None:
        """Keep these too. Whether they are here is known only afterwards. Raises AccessError."""


class NullLease(Lease):
    """The lease of a store that has no collection."""

    def add(self, *digests: Digest) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Target(Source, Protocol):
    """Content that can also be written."""

    def push(self, content: Descriptor, body: Body, reference: Reference | None = None, /) -> None:
        """Store a blob or a manifest, and name a manifest in the same step.

        It is here in full and verified, or not at all. Raises VerificationError: ``body`` differs
        from ``content``; AccessError: it cannot be kept here.
        """

    def tag(self, content: Descriptor, reference: Reference, /) -> None:
        """Let ``reference`` name a manifest that is here."""

    def lease(self, *digests: Digest) -> Lease:  # noqa: ARG002 - a default
        """Keep these, here or not, until the lease ends. Raises AccessError."""
        return NullLease()

    def receive(self, source: Source, blobs: Sequence[Descriptor], options: CopyOptions) -> None:
        """Copy those of ``blobs`` that are not here. Raises ContentError, AccessError."""


class IngestBusyError(AccessError):
    """Another process is writing that blob now."""


class Ingest(Protocol):
    """A blob on its way in. Ranges may arrive in any order; nothing is visible until commit."""

    def missing(self) -> list[tuple[int, int]]:
        """Return the spans [start, end) of the expected size that have not been written yet."""

    def write_at(self, offset: int, data: bytes | bytearray | memoryview, /) -> None:
        """Write ``data`` at ``offset``."""

    def checkpoint(self) -> None:
        """Make what was written so far survive a crash."""

    def digest(self, algorithm: str = "sha256") -> Digest:
        """Return the digest of the bytes so far, when they were written in order."""

    def commit(self, expected: Descriptor, /) -> None:
        """Verify, make durable and name the blob. Raises VerificationError; the ingest is gone."""

    def suspend(self) -> None:
        """Leave what was written to a later ingest of the same key."""

    def abort(self) -> None:
        """Remove everything written so far."""


class BlobFiles(Protocol):
    """Blobs that are files of this machine. The methods raise NotFoundError."""

    def open(self, content: Descriptor, /) -> BinaryIO: ...

    def path(self, content: Descriptor, /) -> Path: ...


class ContentStore(Target, BlobFiles, Protocol):
    """Content kept on this machine, in files that other programs can map."""

    def tags(self) -> Iterator[tuple[str, Descriptor]]:
        """Yield the names, and the manifests that they name."""

    def tag(
        self, content: Descriptor, reference: Reference, /, *, is_partial: bool = False
    ) -> None:
        """Let ``reference`` name a manifest that is here, marked when blobs of it are missing."""

    def untag(self, reference: Reference, /) -> None:
        """Remove a name. Raises NotFoundError."""

    def batch(self) -> AbstractContextManager[None]:
        """Make small content durable together at the end of the block, or raise AccessError."""

    def use(self, content: Descriptor) -> None:
        """Note that a manifest is used now."""

    def ingest(self, key: str, expected: Descriptor | None = None, /) -> Ingest:
        """Begin to write a blob, or go on with what an earlier ingest of ``key`` left.

        Without ``expected``, it is not known yet which blob it will be, and the ingest is new.
        Raises IngestBusyError: another process is writing it.
        """

    def missing_size(self, content: Descriptor, /) -> int:
        """Return the bytes that must still be written for the content to be here in full."""

    def free(self) -> int:
        """Return the bytes that more content may take."""


def bytes_body(data: bytes) -> Body:
    """Return a body over bytes in memory."""

    def body(offset: int = 0, /) -> BinaryIO:
        return io.BytesIO(data[offset:] if offset else data)

    return body


def file_body(path: Path) -> Body:
    """Return a body over a file."""

    def body(offset: int = 0, /) -> BinaryIO:
        file = path.open("rb")
        file.seek(offset)
        return file

    return body
