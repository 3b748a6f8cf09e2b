"""Comparison of a plan with the layers of an AImage: its blobs are encoded again, and not stored.

What needs no weights is compared first: the names, types and shapes of the layers, and the digests
of those that the plan reuses. Each other blob is encoded as the writer does it, in its buffers, and
hashed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from clowder_aimage.content.buffer import CHUNK_SIZE, new_buffer
from clowder_aimage.content.parallel import run_parallel
from clowder_aimage.content.store import ContentStore, Reader
from clowder_aimage.content.verified_reader import verify
from clowder_aimage.dialect import AImage, Layer
from clowder_aimage.errors import NoMemoryError, VerificationError
from clowder_aimage.importer.blob_writer import Encoders
from clowder_aimage.importer.planned_layer import PlannedLayer
from clowder_aimage.importer.range_reader import THREADS
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.oci.digest import create_hasher

OnCompared = Callable[[int], None]  # bytes


@dataclass(frozen=True, slots=True)
class LayerDifference:
    """The first layer that differs, and how. ``changed`` counts bytes of ``size``, if known."""

    layer: str
    reason: str
    changed: int | None = None
    size: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the difference for programs."""
        value: dict[str, Any] = {"layer": self.layer, "reason": self.reason}
        counts = {"changed": self.changed, "size": self.size}
        return value | ({} if self.changed is None else counts)


def list_computed(layers: Sequence[PlannedLayer]) -> list[PlannedLayer]:
    """Return the layers that are encoded, and not reused."""
    return [planned for planned in layers if planned.existing is None]


def find_structural_difference(
    layers: Sequence[PlannedLayer], aimage: AImage
) -> LayerDifference | None:
    """Compare what needs no weights. Return the first difference."""
    actual = {layer.name: layer for layer in aimage.layers}
    planned = {layer.name: layer for layer in layers}
    for name in sorted(actual.keys() | planned.keys()):
        if name not in planned:
            return LayerDifference(name, "the recipe gives no such layer")
        if name not in actual:
            return LayerDifference(name, "it is missing")
        if reason := _describe_difference(planned[name], actual[name]):
            return LayerDifference(name, reason)
    return None


def _describe_difference(planned: PlannedLayer, actual: Layer) -> str:
    """Return how a layer differs without its bytes; nothing if it does not."""
    # The digest is not known yet: that of the actual one stands for it.
    expected = planned.build_layer(actual.descriptor.digest)
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        return f"it is {_format(actual)}, the recipe gives {_format(expected)}"
    if expected.descriptor.size != actual.descriptor.size:
        sizes = f"{actual.descriptor.size} bytes, the recipe gives {expected.descriptor.size}"
        return f"it has {sizes}"
    if expected.descriptor.digest != actual.descriptor.digest:
        return "it is another blob than that of the parent, which the recipe does not change"
    if expected.descriptor.media_type != actual.descriptor.media_type:
        return f"it is of the media type {actual.descriptor.media_type[:100]}"
    return ""


def _format(layer: Layer) -> str:
    shape = "" if layer.shape is None else f" {list(layer.shape)!r:.60}"
    return f"{layer.dtype or 'a file'!s:.40}{shape}"


def find_blob_difference(
    layers: Sequence[PlannedLayer],
    aimage: AImage,
    store: ContentStore,
    sources: Mapping[str, Sequence[Descriptor]],
    *,
    threads: int | None = None,
    reads_stored: bool = True,
    on_compared: OnCompared = lambda _: None,
) -> LayerDifference | None:
    """Encode ``layers``, and return the first in their order whose blob in ``aimage`` differs.

    Blobs of ``aimage`` that the store has are compared byte by byte, the others by their digests,
    and all without ``reads_stored``.
    ``sources`` are the blobs that a layer is computed from, which are verified before.

    Raises:
        VerificationError: A source is damaged.
        ModelError: A value does not fit its type.
        NoMemoryError: A tensor does not fit in memory.
    """
    with ExitStack() as stack:
        count = min(threads or THREADS, max(1, len(layers)))
        encoders = Encoders(layers, count, stack)
        comparison = _Comparison(aimage, store, sources, encoders, reads_stored)

        def compare(index: int, planned: PlannedLayer) -> None:
            comparison.compare(index, planned)
            on_compared(planned.size)

        # As the writer orders them
        order = sorted(
            enumerate(layers), key=lambda item: (not item[1].is_quantizing, -item[1].size)
        )
        run_parallel([partial(compare, *item) for item in order], count, comparison.stop)
        return comparison.first


class _Comparison:
    """The state shared by the threads of one comparison."""

    def __init__(
        self,
        aimage: AImage,
        store: ContentStore,
        sources: Mapping[str, Sequence[Descriptor]],
        encoders: Encoders,
        reads_stored: bool,
    ) -> None:
        self._reads_stored = reads_stored
        self._layers = {layer.name: layer for layer in aimage.layers}
        self._store, self._sources, self._encoders = store, sources, encoders
        self._lock = threading.Lock()
        self._index: int | None = None
        self.first: LayerDifference | None = None

    def stop(self) -> None:
        self._encoders.stopped.set()

    def compare(self, index: int, planned: PlannedLayer) -> None:
        # The layers before the first difference are compared, so that it is the first.
        if self._index is not None and index > self._index:
            return
        try:
            self._verify_sources(planned)
            difference = self._find_difference(planned)
        except MemoryError:
            raise NoMemoryError(
                f"{planned.name[:200]} does not fit in memory",
                remedy="fewer_jobs",
            ) from None
        if difference is not None:
            with self._lock:
                if self._index is None or index < self._index:
                    self._index, self.first = index, difference

    def _verify_sources(self, planned: PlannedLayer) -> None:
        for source in planned.origins or self._sources.get(planned.name, ()):
            try:
                with self._store.open(source) as file:
                    verify(file, source)
            except VerificationError as error:
                raise VerificationError(
                    f"the parent's blob of {planned.name[:200]} is damaged: {error.message}",
                    remedy="repair",
                ) from None

    def _find_difference(self, planned: PlannedLayer) -> LayerDifference | None:
        layer = self._layers[planned.name]
        content = layer.descriptor
        is_stored = self._reads_stored and self._store.exists(content)
        with closing(self._store.open(content)) if is_stored else nullcontext() as stored:
            sink = _Sink(content.digest, stored)
            self._encoders.current.encode(planned, sink.add)
            is_same = sink.digest == content.digest
        if is_same and not sink.changed:
            return None
        if is_same:
            return LayerDifference(
                planned.name, "its blob in the store is damaged", sink.changed, sink.size
            )
        if stored is None:
            return LayerDifference(planned.name, "it has another digest than the computed tensor")
        # A blob that matches the computed one by bytes differs from its own digest.
        what = "values" if layer.is_tensor else "bytes"
        reason = f"its {what} differ" if sink.changed else "its blob is not that of the manifest"
        return LayerDifference(planned.name, reason, sink.changed, sink.size)


class _Sink:
    """A sink that hashes what is encoded, and compares it with a stored blob."""

    def __init__(self, expected: Digest, stored: Reader | None) -> None:
        self._algorithm, self._hasher = expected.algorithm, create_hasher(expected.algorithm)
        self._stored = stored
        self._buffer = new_buffer(0 if stored is None else CHUNK_SIZE)
        self.size = self.changed = 0

    @property
    def digest(self) -> Digest:
        """Return the digest of what was encoded."""
        return Digest(self._algorithm, self._hasher.hexdigest())

    def add(self, view: memoryview) -> None:
        self._hasher.update(view)
        self.size += len(view)
        if self._stored is not None:
            for start in range(0, len(view), CHUNK_SIZE):
                self._compare(self._stored, view[start : start + CHUNK_SIZE])

    def _compare(self, stored: Reader, view: memoryview) -> None:
        other, filled = self._buffer[: len(view)], 0
        while filled < len(other) and (count := stored.readinto(other[filled:])):
            filled += count
        self.changed += len(view) - filled + _count_changed(other[:filled], view[:filled])


def _count_changed(first: memoryview, second: memoryview) -> int:
    """Count the bytes that differ between two views of one length."""
    # Views are compared an element at a time, which takes ten times as long as copies do.
    mine, others = bytes(first), bytes(second)
    if mine == others:
        return 0
    different = int.from_bytes(mine, "little") ^ int.from_bytes(others, "little")
    return len(mine) - different.to_bytes(len(mine), "little").count(0)
