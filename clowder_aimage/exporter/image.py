"""Mountable images of an AImage: its files as tars that are streamed from the store's blobs.

A component is a layer, so that images share what their models share. The bytes of a tar follow from
the AImage alone: no owner, no time, sorted names.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from clowder_aimage.content import ContentStore, Source
from clowder_aimage.content.parallel import run_parallel
from clowder_aimage.content.parts import OpenPart, PartsReader, build_bytes_part
from clowder_aimage.content.store import Reader, WrappedSource
from clowder_aimage.content.tar import build_tar_header
from clowder_aimage.content.verified_reader import read_all
from clowder_aimage.dialect.license import join_licenses, list_stated_licenses
from clowder_aimage.dialect.mountable import ROOT, Extent, Origin, Parts, write_index
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.exporter.file_segment import Segment, list_segments, read_verified
from clowder_aimage.exporter.layer_store import LayerStore, is_ours
from clowder_aimage.exporter.plan import ExportPlan, ExportPlanner
from clowder_aimage.formats.weight_file import SHARD
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.oci import Descriptor, Digest, Reference, mediatype

_THREADS = 8
# Bytes of a blob that are in no file, such as the header of a tensor.
_MAX_REST = 1 << 20


@dataclass(slots=True)
class _Tar:
    """The layer of a component: its segments, and the offset of each."""

    component: str
    segments: list[Segment] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    size: int = 0

    def add(self, segment: Segment) -> None:
        self.segments.append(segment)
        self.offsets.append(self.size)
        self.size += segment.size

    def pad(self, block: int) -> None:
        self.add(Segment.of(bytes(-self.size % block)))

    def describe(self, blobs: LayerStore) -> Descriptor:
        """Return the descriptor of the layer. All its bytes are read, and verified."""
        hasher = hashlib.sha256()
        read_verified(blobs, self.segments, hasher.update)
        return Descriptor(mediatype.OCI_LAYER_TAR, Digest("sha256", hasher.hexdigest()), self.size)


class ImageSource(WrappedSource):
    """The mountable image of an AImage in ``store``, as its only content; names resolve to it."""

    def __init__(self, store: ContentStore, stored: StoredAImage, reference: Reference) -> None:
        """Read and hash the files of the AImage; ``reference`` names it in errors.

        Raises:
            UsageError: another tool packed its files into tars or compressed them.
            FormatError: it has too many blobs, or is damaged.
            NotFoundError, VerificationError: the store lacks a blob, or has a damaged one.
        """
        super().__init__(store)
        blobs = LayerStore(store)
        plan = ExportPlanner(blobs, stored.aimage, SHARD, is_ours(stored)).plan()
        if plan.tars or plan.packed:
            raise UsageError(
                f"the files of {reference} are packed by another tool, and cannot be mounted",
                hint="export it, create an AImage from the directory, and push that",
            )
        self._tars: dict[Descriptor, _Tar] = {}

        def add(tar: _Tar) -> None:
            self._tars[tar.describe(blobs)] = tar

        run_parallel([partial(add, tar) for tar in _build_tars(plan)], _THREADS, lambda: None)
        layers = sorted(self._tars, key=lambda layer: self._tars[layer].component)
        config = read_all(store.open(stored.manifest.config), stored.manifest.config)
        licenses = join_licenses(list_stated_licenses(stored.manifest, config))
        origin = Origin(stored.manifest, _locate(store, stored, self._tars))
        self._index, self._documents = write_index(layers, origin, licenses)

    def resolve(self, _: Reference, /) -> Descriptor:
        return self._index

    def exists(self, content: Descriptor, /) -> bool:
        return content.digest in self._documents or content in self._tars

    def open(self, content: Descriptor, offset: int = 0, length: int | None = None, /) -> Reader:
        if (data := self._documents.get(content.digest)) is not None:
            return PartsReader([build_bytes_part(data)], offset, length)
        tar = self._tars[content]
        return PartsReader([self._build_part(x) for x in tar.segments], offset, length)

    def _build_part(self, segment: Segment) -> tuple[int, OpenPart]:
        blob = segment.blob
        if blob is None:
            return build_bytes_part(segment.data)
        return segment.size, lambda offset, length: self._source.open(
            blob, segment.start + offset, length
        )


def _build_tars(plan: ExportPlan) -> list[_Tar]:
    """Return the layers: that of the files beside the components, and one for each component."""
    files = list_segments(plan) | {
        layer.name: [Segment(layer.descriptor.size, blob=layer.descriptor)]
        for layer in plan.whole_layers
    }
    components: dict[str, list[str]] = {}
    for name in sorted(files):
        components.setdefault(name.partition("/")[0] if "/" in name else "", []).append(name)
    tars = []
    for component, names in components.items():
        tar, directories = _Tar(component), set[str]()
        for name in names:
            path = f"{ROOT}/{name}"
            for parent in _list_parents(path):
                if parent not in directories:
                    directories.add(parent)
                    header = build_tar_header(f"{parent}/", type=tarfile.DIRTYPE, mode=0o755)
                    tar.add(Segment.of(header))
            size = sum(segment.size for segment in files[name])
            tar.add(Segment.of(build_tar_header(path, size=size, mode=0o644)))
            for segment in files[name]:
                tar.add(segment)
            tar.pad(tarfile.BLOCKSIZE)
        # Two blocks of zeros end a tar.
        tar.add(Segment.of(bytes(2 * tarfile.BLOCKSIZE)))
        tars.append(tar)
    return tars


def _list_parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _locate(
    store: Source, stored: StoredAImage, tars: Mapping[Descriptor, _Tar]
) -> dict[Digest, Parts]:
    """Return the parts of each blob of the AImage in the layers. Raises FormatError."""
    extents: dict[Digest, list[tuple[int, Extent]]] = {}
    for layer, tar in tars.items():
        for segment, offset in zip(tar.segments, tar.offsets, strict=True):
            if segment.blob is not None:
                extent = Extent(layer, offset, segment.size)
                extents.setdefault(segment.blob.digest, []).append((segment.start, extent))
    return {
        blob.digest: _fill_gaps(store, blob, extents.get(blob.digest, []))
        for blob in stored.manifest.children
    }


def _fill_gaps(
    store: Source, blob: Descriptor, extents: Sequence[tuple[int, Extent]]
) -> list[Extent | bytes]:
    """Return the parts of a blob; bytes that no layer has are read from the store."""
    # A blob may be in several files.
    ordered = [
        following
        for previous, following in pairwise([(-1, None), *sorted(extents, key=lambda x: x[0])])
        if following[0] != previous[0]
    ]
    if not ordered and blob.size <= _MAX_REST:
        return [read_all(store.open(blob), blob)]
    gaps = blob.size - sum(extent.size for _, extent in ordered if extent)
    if gaps > _MAX_REST:
        raise FormatError(f"{gaps} bytes of {blob.digest} are in no file of an export")
    parts: list[Extent | bytes] = []
    position = 0
    for start, extent in [*ordered, (blob.size, None)]:
        if start > position:
            with store.open(blob, position, start - position) as file:
                parts.append(file.read(start - position))
        position = start
        if extent is not None:
            parts.append(extent)
            position += extent.size
    return parts
