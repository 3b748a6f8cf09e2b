"""The statements of a picture file about its origin, as annotations of its layer."""

from __future__ import annotations

from clowder_aimage.errors import UsageError
from clowder_aimage.model.picture_mark import parse_mark
from clowder_aimage.oci import mediatype
from clowder_aimage.pictures.file_parts import read_parts
from clowder_aimage.pictures.provenance.certificate_name import find_signer


def describe_origin(data: bytes) -> dict[str, str]:
    """Return the annotations of a picture file: its mark, and its signer, who is not checked."""
    try:
        metadata = read_parts(data, "the picture").metadata
    except UsageError:
        return {}
    annotations = dict[str, str]()
    if (mark := parse_mark(metadata.xmp)) is not None:
        annotations[mediatype.SOURCE_TYPE] = mark.source_type
        annotations |= {mediatype.SOFTWARE_AGENT: mark.agent} if mark.agent else {}
    if signer := find_signer(metadata.manifest):
        annotations[mediatype.SIGNER] = signer
    return annotations
