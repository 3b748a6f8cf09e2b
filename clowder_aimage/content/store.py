"""The small interfaces that every store of content has.

A *Source* is read, a *Target* is also written, a *ContentStore* keeps its content on this
machine. The layout, a repository in a registry and the memory store of the tests implement
them and pass one contract suite (tests/contract).
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Protocol, runtime_checkable

from clowder_aimage.errors import AccessError
from clowder_aimage.oci import Descriptor, Digest, Reference


class Body(Protocol):
    """The bytes of a blob, opened anew from any offset: a retry sends true bytes again."""

    def __call__(self, offset: int = 0, /) -> BinaryIO: ...


class Source(Protocol):
    """Content that can be read."""

    def resolve(self, reference: Reference, /) -> Descriptor:
        """The descriptor of the manifest that ``reference`` names.

        Raises:
            NotFoundError: there is none.
            AccessError: it cannot be told (no answer, no permission, a server's error).
        """
        ...

    def exists(self, content: Descriptor, /) -> bool:
        """Whether the content is here in full. Raises AccessError where it cannot be told."""
        ...

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> BinaryIO:
        """The bytes of the content from ``offset`` on, ``length`` of them, not yet verified.

        Raises:
            NotFoundError: it is not here.
        """
        ...


@runtime_checkable
class MultiSource(Protocol):
    """A source that has content from several places, and can leave out one that was wrong."""

    def distrust(self, content: Descriptor, /) -> bool:
        """What came for ``content`` was not it; whether another place may be asked now."""
        ...


class Target(Source, Protocol):
    """Content that can also be written."""

    def push(self, content: Descriptor, body: Body, reference: Reference | None = None, /) -> None:
        """Store a blob or manifest, and name a manifest in the same breath where a reference is
        given. It is here in full and verified, or not at all.

        Raises:
            VerificationError: ``body`` is not what ``content`` says.
            AccessError: it cannot be kept here.
        """
        ...

    def tag(self, content: Descriptor, reference: Reference, /) -> None:
        """Let ``reference`` name a manifest that is here."""
        ...


class IngestBusyError(AccessError):
    """Somebody else is taking that blob in at this moment."""


class Ingest(Protocol):
    """A blob on its way in. Ranges may arrive in any order; nothing is visible until commit."""

    def missing(self) -> list[tuple[int, int]]:
        """The spans [start, end) of the expected size that have not been written yet."""
        ...

    def write_at(self, offset: int, data: bytes | bytearray | memoryview, /) -> None:
        """Write ``data`` at ``offset``."""
        ...

    def checkpoint(self) -> None:
        """Make what was written so far survive a crash."""
        ...

    def digest(self, algorithm: str = "sha256") -> Digest:
        """What the bytes written so far hash to, when they came from the front on."""
        ...

    def commit(self, expected: Descriptor, /) -> None:
        """Verify size and digest, make it durable, and give it its final name.

        Raises:
            VerificationError: and the ingest is gone.
        """
        ...

    def suspend(self) -> None:
        """Leave what is there to a later ingest of the same key."""
        ...

    def abort(self) -> None:
        """Forget everything written so far."""
        ...


class Lease(Protocol):
    """Content that nobody may take away while the lease is held."""

    def add(self, *digests: Digest) -> None:
        """Keep these too; ask only then whether they are there. Raises AccessError."""
        ...

    def __enter__(self) -> Lease: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@runtime_checkable
class ContentStore(Target, Protocol):
    """Content kept on this machine, where other programs can map it."""

    def path(self, content: Descriptor, /) -> Path:
        """The file that holds the content. Raises NotFoundError."""
        ...

    def tags(self) -> Iterator[tuple[str, Descriptor]]:
        """The names and the manifests they name."""
        ...

    def untag(self, reference: Reference, /) -> None:
        """Forget a name. Raises NotFoundError."""
        ...

    def lease(self, *digests: Digest) -> Lease:
        """Keep these, there or not, until the lease ends. Raises AccessError."""
        ...

    def batch(self) -> AbstractContextManager[None]:
        """While it lasts, small content may wait for more, to be made durable together. All is here
        when it ends. Raises AccessError."""
        ...

    def use(self, content: Descriptor) -> None:
        """Note that a manifest is used now."""
        ...

    def ingest(self, key: str, expected: Descriptor | None = None, /) -> Ingest:
        """Begin to take a blob in, or go on with what an earlier ingest of ``key`` left.

        Without ``expected`` nobody knows yet what it will be: then it is a new one.

        Raises:
            IngestBusyError: somebody else is at work on it.
        """
        ...

    def missing_size(self, content: Descriptor, /) -> int:
        """Return the bytes that must still be written for the content to be here in full."""
        ...

    def free(self) -> int:
        """The bytes that more content may take."""
        ...


def bytes_body(data: bytes) -> Body:
    """A body over bytes in memory."""

    def body(offset: int = 0, /) -> BinaryIO:
        return io.BytesIO(data[offset:] if offset else data)

    return body


def file_body(path: Path) -> Body:
    """A body over a file."""

    def body(offset: int = 0, /) -> BinaryIO:
        file = path.open("rb")
        file.seek(offset)
        return file

    return body
