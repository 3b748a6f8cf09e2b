"""bom: write the bill of materials of an AImage, and attach it in its registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from clowder_aimage.bom import cyclonedx, spdx
from clowder_aimage.bom.material import Material, read_material
from clowder_aimage.content import Overlay, Source, copy
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.oci.artifact import EMPTY, build_artifact
from clowder_aimage.registry import Repository


class BomFormat(StrEnum):
    """A form of bills of materials."""

    CYCLONEDX = "cyclonedx"
    SPDX = "spdx"


_ENCODERS: dict[BomFormat, Callable[[Material], bytes]] = {
    BomFormat.CYCLONEDX: cyclonedx.encode_cyclonedx,
    BomFormat.SPDX: spdx.encode_spdx,
}
_FILES = {
    BomFormat.CYCLONEDX: (cyclonedx.MEDIA_TYPE, cyclonedx.FILE_NAME),
    BomFormat.SPDX: (spdx.MEDIA_TYPE, spdx.FILE_NAME),
}


@dataclass(frozen=True, slots=True)
class Bill:
    """The bill of materials of the manifest ``subject``, as bytes of a ``form``."""

    subject: Descriptor
    form: BomFormat
    content: bytes


def write_bom(source: Source, reference: Reference, form: BomFormat) -> Bill:
    """Return the bill of an AImage in a store or a registry; no layer is read.

    The same AImage has the same bytes, whatever its name.

    Raises:
        NotFoundError: it is not there.
        FormatError, VerificationError: it is an index, not an AImage, or damaged.
        PolicyError: the policy does not accept it.
        UnauthorizedError, NetworkError, RegistryError, StoreError: it cannot be read.
    """
    subject = source.resolve(reference)
    if subject.media_type in mediatype.INDEXES:
        raise FormatError(
            f"{reference} is an index: each of its manifests has a bill of its own",
            hint="choose one of its manifests by its digest",
        )
    return Bill(subject, form, _ENCODERS[form](read_material(source, subject)))


def attach_bom(repository: Repository, reference: Reference, bill: Bill) -> Descriptor:
    """Attach a bill to its manifest in a registry; return the manifest of the artifact.

    Raises UnauthorizedError, NetworkError, RegistryError.
    """
    media_type, title = _FILES[bill.form]
    plain = Descriptor.of(media_type, bill.content)
    layer = Descriptor(plain.media_type, plain.digest, plain.size, {mediatype.TITLE: title})
    manifest = build_artifact(media_type, [layer], bill.subject, {})
    documents = {
        manifest.digest: manifest.raw,
        manifest.config.digest: EMPTY,
        layer.digest: bill.content,
    }
    name = reference.with_digest(manifest.digest)
    copy(Overlay(repository, manifest.descriptor, documents), name, repository)
    return manifest.descriptor
