"""The statements of a request's files about their origin: a mark, and a signature.

Both follow from the pictures that the request began with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.errors import AImageError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.model.picture_mark import COMPOSITE, GENERATED, PictureMark, parse_mark
from clowder_aimage.model.picture_metadata import detect_kind
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.pictures.file_parts import read_parts
from clowder_aimage.pictures.provenance.manifest_report import read_manifest
from clowder_aimage.pictures.provenance.marked_input import MarkedInput, Role
from clowder_aimage.pictures.provenance.signer import PictureSigner

# Bytes of a manifest that a result keeps: it grows with each edit
_MAX_KEPT = 4 << 20


@dataclass(frozen=True, slots=True)
class PictureMarking:
    """The mark of a request's files, the pictures that it began with, and the signer if any.

    Without a mark there is no signature. ``warnings`` are sentences about statements in those
    pictures that the results do not keep.
    """

    mark: PictureMark | None
    inputs: tuple[MarkedInput, ...] = ()
    signer: PictureSigner | None = None
    warnings: tuple[str, ...] = ()

    def sign(self, data: bytes, kind: str, facts: dict[str, Any] | None) -> bytes:
        """Return a file with a signature if there is a signer. Blocks; raises as ``PictureSigner``.

        ``facts`` are what the signature states about the generation, None for nothing.
        """
        if self.signer is None or self.mark is None:
            return data
        return self.signer.sign(data, kind, self.mark, self.inputs, facts)


def plan_marking(
    request: GenerateRequest,
    store: BlobFiles | None,
    signer: PictureSigner | None = None,
    *,
    is_marked: bool = True,
) -> PictureMarking:
    """Return the marking of a request whose pictures are in a store; without ``is_marked``, none.

    A result that shows a picture without the mark of a model is a composite.
    """
    signer = signer if is_marked else None
    inputs, warnings = list[MarkedInput](), list[str]()
    for role, path in _iter_files(request, store):
        try:
            entry, warning = _read_input(role, path, can_keep=signer is not None)
        except (AImageError, OSError):
            # Too many parts, or removed since the model has read it
            entry, warning = MarkedInput(role, path), ""
        inputs.append(entry)
        warnings += [warning] if warning else []
    shown = [entry.mark for entry in inputs if entry.is_part]
    is_generated = all(mark is not None and mark.is_generated for mark in shown)
    if not is_marked:
        warnings += [
            f"the {entry.role} has a mark of its origin, which the result does not keep"
            for entry in inputs
            if entry.is_part and entry.mark is not None
        ]
    mark = PictureMark(GENERATED if is_generated else COMPOSITE) if is_marked else None
    return PictureMarking(mark, tuple(inputs), signer, tuple(dict.fromkeys(warnings)))


def read_mark(data: bytes, name: str) -> PictureMark | None:
    """Return the mark of a picture file; None without one. Raises UsageError: too many parts."""
    return parse_mark(read_parts(data, name).metadata.xmp)


def _iter_files(request: GenerateRequest, store: BlobFiles | None) -> Iterator[tuple[Role, Path]]:
    named: list[tuple[Role, str | None]] = [
        ("image", request.input.image),
        *(("reference", digest) for digest in request.input.references),
        ("control", request.control.image),
    ]
    for role, digest in named:
        if digest is not None and store is not None:
            yield role, Path(store.find_path(Descriptor("", Digest.parse(digest), 0)))


def _read_input(role: Role, path: Path, *, can_keep: bool) -> tuple[MarkedInput, str]:
    """Return a picture of a request, and a sentence about what results do not keep of it."""
    data = path.read_bytes()
    metadata = read_parts(data, role).metadata
    mark = parse_mark(metadata.xmp)
    if not metadata.manifests:
        return MarkedInput(role, path, mark), ""
    warning = f"the {role} has a signed manifest (C2PA), which the result does not keep"
    if not can_keep:
        return MarkedInput(role, path, mark, has_manifest=True), f"{warning}: it is not signed"
    reason = ""
    if len(metadata.manifest) > _MAX_KEPT:
        reason = f"it has more than {_MAX_KEPT >> 20} MiB"
    else:
        try:
            read_manifest(data, detect_kind(data))
        except AImageError as error:
            reason = error.message
    entry = MarkedInput(role, path, mark, has_manifest=True, keeps_manifest=not reason)
    return entry, f"{warning}: {reason}" if reason else ""
