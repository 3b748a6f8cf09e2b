"""Protocols of content stores.

A *Source* is read, a *Target* is also written, a *ContentStore* keeps its content in local files.
The layout, a repository in a registry and the memory store of the tests pass one contract suite
(tests/contract); a tar is a write-once target.
"""

from __future__ import annotations

import contextlib
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from clowder_aimage.content.copy_option import CopyOptions
from clowder_aimage.errors import AccessError, NotFoundError
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference

# The content of the file oci-layout (OCI image-spec, image-layout.md).
LAYOUT_FILE = b'{"imageLayoutVersion":"1.0.0"}'


class Reader(AbstractContextManager["Reader"], Protocol):
    """A stream of bytes. A read may return fewer than requested, and none at the end only."""

    def read(self, size: int = -1, /) -> bytes: ...
    def readinto(self, buffer: memoryview, /) -> int: ...
    def close(self) -> None: ...


NO_BLOBS: Mapping[Digest, bytes] = MappingProxyType({})
# Free bytes of a store that does not know them: no content is larger.
UNKNOWN_SIZE = 2**63 - 1


class FileStream(ABC):
    """A stream over a file that the kernel may send; ``record_sent`` gets the bytes sent."""

    # Not a protocol: isinstance takes longer for one than all else of a small body.

    @abstractmethod
    def fileno(self) -> int: ...
    @abstractmethod
    def record_sent(self, count: int, /) -> None: ...


class WrittenStream(ABC):
    """A stream that others read where its bytes are written.

    ``record_written`` is called, by one thread at a time, with the bytes that have been written
    since the last call. Every byte is written before the stream is closed, unless a write fails.
    """

    @abstractmethod
    def record_written(self, count: int, /) -> None: ...


class StoredFile(io.FileIO):
    """The file of a blob in a store. If its bytes are wrong, the store is damaged.

    Errors of its reads name ``path``, which the system does not know of a descriptor.
    """

    def __init__(self, fd: int, path: str) -> None:
        super().__init__(fd)
        self._path = path

    def read(self, size: int | None = -1) -> bytes:
        with self._naming():
            return super().read(-1 if size is None else size)

    def readinto(self, buffer: Any) -> int:
        with self._naming():
            return super().readinto(buffer)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._path
            raise


class Body(Protocol):
    """The bytes of a blob. They can be reopened at any offset for a retry or a resume."""

    def __call__(self, offset: int = 0, /) -> Reader: ...


class Source(Protocol):
    """Content that can be read."""

    def resolve(self, reference: Reference, /) -> Descriptor:
        """Return the descriptor of the manifest that ``reference`` names.

        Raises NotFoundError if there is none, AccessError if that is unknown (no response, no
        permission, a server error).
        """

    def exists(self, content: Descriptor, /) -> bool:
        """Return True if the content is stored in full. Raises AccessError if that is unknown."""

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        """Open ``length`` bytes at ``offset``, not yet verified. Raises NotFoundError."""

    @property
    def alignment(self) -> int:
        """Return the block size of the source; ranges are best split at its multiples."""
        return 1

    def supports_ranges(self, content: Descriptor, /) -> bool:  # noqa: ARG002 - a default
        """Return False once the source has answered a range request with the whole content."""
        return True

    def refuses_ranges(self, content: Descriptor, /) -> bool:  # noqa: ARG002 - a default
        """Return True once it has done so, and will again: not a cache that still receives it."""
        return False

    def invalidate(self, content: Descriptor, /) -> bool:  # noqa: ARG002 - a default
        """Record that ``content`` was wrong; return True if another origin can supply it."""
        return False


class WrappedSource(Source):
    """A source over another one. Subclasses override methods."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def resolve(self, reference: Reference, /) -> Descriptor:
        return self._source.resolve(reference)

    def exists(self, content: Descriptor, /) -> bool:
        return self._source.exists(content)

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        return self._source.open(content, offset, length)

    @property
    def alignment(self) -> int:
        return self._source.alignment

    def supports_ranges(self, content: Descriptor, /) -> bool:
        return self._source.supports_ranges(content)

    def refuses_ranges(self, content: Descriptor, /) -> bool:
        return self._source.refuses_ranges(content)

    def invalidate(self, content: Descriptor, /) -> bool:
        return self._source.invalidate(content)


class EmptySource(Source):
    """A source without content."""

    def resolve(self, reference: Reference, /) -> Descriptor:
        raise NotFoundError(f"{reference} not found")

    def exists(self, _: Descriptor, /) -> bool:
        return False

    def open(self, content: Descriptor, _: int = 0, __: int | None = None, /) -> Reader:
        raise NotFoundError(f"{content.digest} not found")


class Overlay(WrappedSource):
    """A source that adds a few documents to another source; every name resolves to ``root``."""

    def __init__(self, source: Source, root: Descriptor, documents: Mapping[Digest, bytes]) -> None:
        super().__init__(source)
        self._root = root
        self._documents = documents

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        config: bytes,
        blobs: Mapping[Digest, bytes] = NO_BLOBS,
        source: Source | None = None,
    ) -> Overlay:
        """Return an artifact that is in memory, over the source of its other blobs."""
        documents = {manifest.digest: manifest.raw, manifest.config.digest: config, **blobs}
        return cls(source or EmptySource(), manifest.descriptor, documents)

    def resolve(self, _: Reference, /) -> Descriptor:
        return self._root

    def exists(self, content: Descriptor, /) -> bool:
        return content.digest in self._documents or super().exists(content)

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        data = self._documents.get(content.digest)
        if data is None:
            return super().open(content, offset, length)
        return io.BytesIO(data[offset : None if length is None else offset + length])


class Lease(AbstractContextManager["Lease"], Protocol):
    """Protection of content from garbage collection, while it is held."""

    def add(self, *digests: Digest) -> None:
        """Add digests. Check their existence only afterwards. Raises AccessError."""


class NullLease(Lease):
    """The lease of a store without garbage collection."""

    def add(self, *digests: Digest) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class Target(Source, Protocol):
    """Content that can also be written."""

    def push(self, content: Descriptor, body: Body, reference: Reference | None = None, /) -> None:
        """Store a blob or a manifest, and tag a manifest in the same step.

        The content is stored in full and verified, or not at all. Raises VerificationError if
        ``body`` differs from ``content``, AccessError if it cannot be stored.
        """

    def tag(self, content: Descriptor, reference: Reference, /) -> None:
        """Tag a stored manifest as ``reference``."""

    def lease(self, *digests: Digest) -> Lease:  # noqa: ARG002 - a default
        """Lease content, existing or not. Raises AccessError."""
        return NullLease()

    def lacks(self, content: Descriptor, /) -> bool:
        """Return True if a blob must be pushed, or if only its push shows that it exists."""
        return not self.exists(content)

    def receive(self, source: Source, blobs: Sequence[Descriptor], options: CopyOptions) -> None:
        """Copy the ``blobs`` that are missing. Raises ContentError, AccessError."""


class IngestBusyError(AccessError):
    """Another process is writing the blob."""


OnWritten = Callable[[BaseException | None], None]


class Ingest(Protocol):
    """A blob being written. Ranges may arrive in any order; commit makes the blob visible."""

    def list_missing(self) -> list[tuple[int, int]]:
        """Return the ranges [start, end) of the expected size that have not been written yet."""

    def write_at(
        self,
        offset: int,
        data: bytes | bytearray | memoryview,
        /,
        on_written: OnWritten | None = None,
    ) -> None:
        """Write ``data`` at ``offset``.

        With ``on_written``, the data may be written later; it must not change until then. That is
        called once, perhaps in another thread, with the error if there was one.
        """

    def checkpoint(self) -> None:
        """Keep the bytes written so far, if the process is killed; make them durable at times."""

    def digest(self, algorithm: str = "sha256") -> Digest:
        """Return the digest of the bytes so far, if they were written in order."""

    def commit(self, expected: Descriptor, /) -> None:
        """Verify and store the blob durably. Raises VerificationError and removes the ingest."""

    def suspend(self) -> None:
        """Keep the written bytes for a later ingest of the same key."""

    def abort(self) -> None:
        """Remove the written bytes."""


class BlobFiles(Protocol):
    """Blobs in local files. The methods raise NotFoundError."""

    def open(self, content: Descriptor, /) -> Reader: ...

    def find_path(self, content: Descriptor, /) -> Path: ...


class ContentStore(Target, BlobFiles, Protocol):
    """Content in local files that other programs can map."""

    def list_tags(self) -> Iterator[tuple[str, Descriptor]]:
        """Yield all names and the manifests that they refer to."""

    def tag(
        self, content: Descriptor, reference: Reference, /, *, is_partial: bool = False
    ) -> None:
        """Tag a stored manifest as ``reference``, marked as partial if its blobs are missing."""

    def untag(self, reference: Reference, /) -> None:
        """Remove a name. Raises NotFoundError."""

    def begin_batch(self) -> AbstractContextManager[None]:
        """Make small content durable together at the end of the block, or raise AccessError."""

    def is_durable(self, content: Descriptor, /) -> bool:
        """Return True if the content is stored in full, and a read waits for no batch."""

    def use(self, content: Descriptor) -> None:
        """Record the use of a manifest."""

    def ingest(self, key: str, expected: Descriptor | None = None, /) -> Ingest:
        """Begin to write a blob, or continue an earlier ingest of ``key``.

        Without ``expected`` the digest is not known yet, and the ingest is new. Raises
        IngestBusyError if another process is writing the blob.
        """

    def compute_missing_size(self, content: Descriptor, /) -> int:
        """Return the number of bytes that must still be written to complete the content."""

    def measure_free(self) -> int:
        """Return the number of bytes available for more content, UNKNOWN_SIZE without a limit."""


def build_bytes_body(data: bytes) -> Body:
    """Return a body over bytes in memory."""
    return lambda offset=0: io.BytesIO(data[offset:] if offset else data)


def build_file_body(path: Path) -> Body:
    """Return a body over a file."""

    def open_at(offset: int = 0, /) -> Reader:
        file = path.open("rb")
        file.seek(offset)
        return file

    return open_at
