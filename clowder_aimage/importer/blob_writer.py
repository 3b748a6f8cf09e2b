"""Writer of a plan: each source is read once and hashed while it is written.

A blob that fits into a thread's buffer is hashed there, and stored only if it is new. A larger
blob is streamed; if the store already has a blob of the same size, it is hashed first, since the
two are probably the same. Quantized and computed blobs are always streamed: encoding them twice
would take too long.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from clowder_aimage.content import ContentStore, Lease, build_bytes_body
from clowder_aimage.content.buffer import CHUNK_SIZE
from clowder_aimage.content.parallel import run_parallel
from clowder_aimage.content.store import Ingest
from clowder_aimage.content.verified_reader import verify
from clowder_aimage.dialect import AImage, Dialect, Layer
from clowder_aimage.errors import VerificationError
from clowder_aimage.formats.left_out import LeftOut
from clowder_aimage.importer.blob_encoder import BlobEncoder, create_compressor
from clowder_aimage.importer.decision import WeightReport
from clowder_aimage.importer.plan import CreatePlan
from clowder_aimage.importer.planned_layer import PlannedLayer
from clowder_aimage.importer.range_reader import THREADS, build_changed_error
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.gc import remove_partials
from clowder_aimage.oci import Descriptor, Digest, Manifest, Reference
from clowder_aimage.oci.digest import create_hasher
from clowder_aimage.trust.lineage import Derivation, keep_derivation

# Bytes of a thread's buffer, their minimum, and the limit for all threads together.
BUFFER = 4 * 1024 * 1024
MIN_BUFFER = CHUNK_SIZE
BUFFERS = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class WrittenLayer:
    """A stored layer; ``existed`` is True if the store had it before."""

    layer: Layer
    existed: bool


OnWritten = Callable[[WrittenLayer], None]


def write_layers(
    plan: CreatePlan, store: ContentStore, lease: Lease, *, threads: int, on_written: OnWritten
) -> list[WrittenLayer]:
    """Store the plan's blobs, ``threads`` at a time, and protect them by ``lease``.

    Raises:
        ModelError: A file changed while it was read, a value does not fit its type, or values
            cannot be quantized.
        VerificationError: A stored source blob is damaged.
        StoreError, NoSpaceError: The store cannot be written.
    """
    with ExitStack() as stack:
        writer = _Writer(plan, store, lease, min(threads, len(plan.layers)), stack)
        written: dict[str, WrittenLayer] = {}

        def write(planned: PlannedLayer) -> None:
            written[planned.name] = writer.write(planned)
            on_written(written[planned.name])

        # Quantized layers first, since they take the longest; then the largest first, so that the
        # threads end together.
        order = sorted(plan.layers, key=lambda layer: (not layer.is_quantizing, -layer.size))
        run_parallel([partial(write, planned) for planned in order], threads, writer.stopped.set)
    return [written[planned.name] for planned in plan.layers]


class Encoders:
    """The encoders of ``threads`` threads for some layers, and what they share, until ``stack``."""

    def __init__(self, layers: Sequence[PlannedLayer], threads: int, stack: ExitStack) -> None:
        self.stopped = threading.Event()
        self._local = threading.local()
        self._threads = max(1, threads)
        self.size = max(MIN_BUFFER, min(BUFFER, BUFFERS // self._threads))
        self._quantizer = None
        quantizations = {q for layer in layers for q in layer.quantizations}
        if any(not quantization.is_by_row for quantization in quantizations):
            from clowder_aimage.importer.quantizer import Quantizer

            self._quantizer = stack.enter_context(Quantizer(self._threads))

    @property
    def current(self) -> BlobEncoder:
        """Return the encoder of the calling thread."""
        if not hasattr(self._local, "encoder"):
            self._local.encoder = BlobEncoder(
                self.size, self.stopped, self._quantizer, self._threads
            )
        encoder: BlobEncoder = self._local.encoder
        return encoder


class _Writer:
    """State shared by the threads of one create."""

    def __init__(
        self, plan: CreatePlan, store: ContentStore, lease: Lease, threads: int, stack: ExitStack
    ) -> None:
        self._encoders = Encoders(plan.layers, threads, stack)
        self.stopped, self._size = self._encoders.stopped, self._encoders.size
        self._algorithm = plan.algorithm
        self._store = store
        self._lease = lease
        self._lock = threading.Lock()
        self._claimed: set[Digest] = set()
        self._sizes: frozenset[int] = frozenset()
        if isinstance(store, ImageLayout) and any(layer.size > self._size for layer in plan.layers):
            # Partial blobs of killed processes would take the space of the new ones.
            remove_partials(store.root, 0.0, dry_run=False)
            self._sizes = _scan_sizes(store, plan.algorithm)

    def write(self, planned: PlannedLayer) -> WrittenLayer:
        if planned.existing is not None:
            return WrittenLayer(planned.existing, True)
        for origin in planned.origins:
            with self._store.open(origin) as file:
                verify(file, origin)
        if planned.size <= self._size and not planned.compression:
            return self._push(planned)
        is_cheap = not (planned.is_quantizing or planned.is_computed)
        is_probable = planned.size in self._sizes and is_cheap
        if not is_probable or planned.compression:
            return self._ingest(planned)
        layer = planned.build_layer(self._digest(planned))
        if self._exists(layer):
            return WrittenLayer(layer, True)
        return self._ingest(planned, layer)

    @property
    def _encoder(self) -> BlobEncoder:
        return self._encoders.current

    def _exists(self, layer: Layer) -> bool:
        # The lease comes first: a garbage collection could delete the blob after the check.
        self._lease.add(layer.descriptor.digest)
        return self._store.exists(layer.descriptor)

    def _push(self, planned: PlannedLayer) -> WrittenLayer:
        chunks: list[memoryview] = []
        self._encoder.encode(planned, chunks.append)
        data = chunks[0] if chunks else memoryview(b"")
        layer = planned.build_layer(Digest.of(data, self._algorithm))
        existed = self._exists(layer)
        if not existed:
            self._store.push(layer.descriptor, build_bytes_body(bytes(data)))
        return WrittenLayer(layer, existed)

    def _digest(self, planned: PlannedLayer) -> Digest:
        hasher = create_hasher(self._algorithm)
        self._encoder.encode(planned, hasher.update)
        return Digest(self._algorithm, hasher.hexdigest())

    def _ingest(self, planned: PlannedLayer, expected: Layer | None = None) -> WrittenLayer:
        """Stream a blob to the store and return its layer; it must match ``expected``."""
        ingest = self._store.ingest("create")
        try:
            encode = self._encode_compressed if planned.compression else self._encode
            layer = encode(planned, ingest)
            if expected is not None and layer != expected:
                raise build_changed_error(planned.path)
            existed = self._claim(layer.descriptor.digest) or self._exists(layer)
        except BaseException:
            ingest.abort()
            raise
        if existed:
            ingest.abort()
            return WrittenLayer(layer, True)
        try:
            ingest.commit(layer.descriptor)
        except VerificationError:
            raise build_changed_error(planned.path) from None
        return WrittenLayer(layer, False)

    def _encode(self, planned: PlannedLayer, ingest: Ingest) -> Layer:
        ingest.digest(self._algorithm)
        offset = 0

        def write(view: memoryview) -> None:
            nonlocal offset
            ingest.write_at(offset, view)
            offset += len(view)

        self._encoder.encode(planned, write)
        return planned.build_layer(ingest.digest(self._algorithm))

    def _encode_compressed(self, planned: PlannedLayer, ingest: Ingest) -> Layer:
        packer = create_compressor(planned.compression, planned.size)
        plain, packed = create_hasher(self._algorithm), create_hasher(self._algorithm)
        size = 0

        def write(data: bytes) -> None:
            nonlocal size
            if data:
                packed.update(data)
                ingest.write_at(size, memoryview(data))
                size += len(data)

        def add(view: memoryview) -> None:
            plain.update(view)
            write(packer.compress(view))

        self._encoder.encode(planned, add)
        write(packer.flush())
        content = Digest(self._algorithm, plain.hexdigest())
        return replace(
            planned.build_layer(Digest(self._algorithm, packed.hexdigest()), size),
            content=Descriptor(planned.media_type, content, planned.size),
        )

    def _claim(self, digest: Digest) -> bool:
        """Claim a blob for the calling thread; return True if another thread has claimed it."""
        with self._lock:
            was_claimed = digest in self._claimed
            self._claimed.add(digest)
        return was_claimed


def _scan_sizes(store: ImageLayout, algorithm: str) -> frozenset[int]:
    sizes: set[int] = set()
    for root in store.roots:
        try:
            with os.scandir(root / "blobs" / algorithm) as entries:
                sizes |= {entry.stat(follow_symlinks=False).st_size for entry in entries}
        except OSError:
            # It may not exist yet; other errors occur again when a blob is read.
            continue
    return frozenset(sizes)


@dataclass(frozen=True, slots=True)
class PackedModel:
    """The new AImage, its written layers, the report on its weights and the files left out."""

    descriptor: Descriptor
    manifest: Manifest
    aimage: AImage
    layers: tuple[WrittenLayer, ...]
    report: WeightReport
    left_out: tuple[LeftOut, ...] = ()


def check_config(plan: CreatePlan) -> None:
    """Check the config against its schema. Raises FormatError."""
    AImage(plan.config, ()).validate()


def pack(
    plan: CreatePlan,
    store: ContentStore,
    lease: Lease,
    reference: Reference,
    dialect: Dialect,
    *,
    threads: int | None,
    on_written: OnWritten,
    derive: Callable[[AImage], Derivation | None] = lambda _: None,
) -> PackedModel:
    """Store all blobs of the plan and tag the AImage as ``reference``.

    The statement of the derivation that ``derive`` returns is attached to the AImage, whose digest
    does not change.

    Raises:
        ModelError, VerificationError, StoreError, NoSpaceError: As ``write_layers``; complete
            blobs remain in the store, without a tag.
    """
    with store.begin_batch():
        written = write_layers(
            plan, store, lease, threads=threads or THREADS, on_written=on_written
        )
    aimage = AImage(plan.config, tuple(layer.layer for layer in written), plan.subject)
    manifest, config = dialect.write(aimage)
    lease.add(manifest.config.digest, manifest.digest)
    store.push(manifest.config, build_bytes_body(config))
    store.push(manifest.descriptor, build_bytes_body(manifest.raw))
    if (derivation := derive(aimage)) is not None:
        # Before the name: a derived AImage with a name has its statement.
        keep_derivation(store, lease, manifest.descriptor, derivation)
    store.tag(manifest.descriptor, reference)
    return PackedModel(
        manifest.descriptor, manifest, aimage, tuple(written), plan.report, plan.left_out
    )
