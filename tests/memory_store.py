"""A store in memory."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from clowder_aimage.content.copy import push_blobs
from clowder_aimage.content.copy_option import CopyOptions
from clowder_aimage.content.store import Body, OnWritten, Reader, Source, Target
from clowder_aimage.content.verified_reader import VerifyingReader, check
from clowder_aimage.errors import NotFoundError, VerificationError
from clowder_aimage.oci import Descriptor, Digest, Reference


class MemoryStore(Target):
    """Blobs and tags in dictionaries, verified on the way in."""

    def __init__(self) -> None:
        self._blobs: dict[Digest, bytes] = {}
        self._tags: dict[Reference, Descriptor] = {}
        self._lock = threading.Lock()

    def resolve(self, reference: Reference, /) -> Descriptor:
        with self._lock:
            for name, content in self._tags.items():
                if name == reference or content.digest == reference.digest:
                    return content
        raise NotFoundError(f"no {reference} in memory")

    def exists(self, content: Descriptor, /) -> bool:
        data = self._blobs.get(content.digest)
        return data is not None and len(data) == content.size

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        data = self._blobs.get(content.digest)
        if data is None:
            raise NotFoundError(f"no {content.digest} in memory")
        return io.BytesIO(data[offset : None if length is None else offset + length])

    def push(self, content: Descriptor, body: Body, reference: Reference | None = None, /) -> None:
        with VerifyingReader(body(), content) as reader:
            data = reader.readall()
        with self._lock:
            self._blobs[content.digest] = data or b""
        if reference is not None:
            self.tag(content, reference)

    def tag(self, content: Descriptor, reference: Reference, /) -> None:
        if not self.exists(content):
            raise NotFoundError(f"no {content.digest} in memory to tag as {reference}")
        with self._lock:
            self._tags[reference] = content

    def receive(self, source: Source, blobs: Sequence[Descriptor], options: CopyOptions) -> None:
        push_blobs(source, self, blobs, options)

    def ingest(self, _: str, expected: Descriptor | None = None, /) -> MemoryIngest:
        return MemoryIngest(self._blobs, expected)

    def begin_batch(self) -> AbstractContextManager[None]:
        return nullcontext()


class MemoryIngest:
    """An ingest that commits into ``blobs``."""

    def __init__(self, blobs: dict[Digest, bytes], expected: Descriptor | None) -> None:
        self._blobs = blobs
        self._size = expected.size if expected else 0
        self._data = bytearray()
        self._written: list[tuple[int, int]] = []

    def list_missing(self) -> list[tuple[int, int]]:
        spans, offset = [], 0
        for start, end in sorted(self._written):
            if start > offset:
                spans.append((offset, start))
            offset = max(offset, end)
        return [*spans, (offset, self._size)] if offset < self._size else spans

    def write_at(
        self,
        offset: int,
        data: bytes | bytearray | memoryview,
        /,
        on_written: OnWritten | None = None,
    ) -> None:
        end = offset + len(data)
        self._data.extend(bytes(max(0, end - len(self._data))))
        self._data[offset:end] = data
        self._written.append((offset, end))
        if on_written is not None:
            on_written(None)

    def checkpoint(self) -> None:
        pass

    def digest(self, algorithm: str = "sha256") -> Digest:
        return Digest.of(self._data, algorithm)

    def commit(self, expected: Descriptor, /) -> None:
        if self.list_missing():
            raise VerificationError(f"{expected.digest} is not complete")
        check(expected, len(self._data), self.digest(expected.digest.algorithm).encoded)
        self._blobs[expected.digest] = bytes(self._data)

    def suspend(self) -> None:
        self.abort()

    def abort(self) -> None:
        self._data.clear()
        self._written.clear()
