"""The statements of a picture file about its origin: mark, signature, metadata."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

from clowder_aimage.errors import AImageError, FormatError, UsageError
from clowder_aimage.model.picture_mark import PictureMark, parse_mark
from clowder_aimage.model.picture_metadata import detect_kind, read_metadata
from clowder_aimage.pictures.file_parts import read_parts
from clowder_aimage.pictures.provenance.certificate_name import find_signer
from clowder_aimage.pictures.provenance.manifest_report import (
    ManifestReport,
    has_library,
    read_manifest,
)


@dataclass(frozen=True, slots=True)
class PictureReport:
    """The statements of a file, of a kind (png, jpeg, webp) and a size in pixels.

    ``signer`` is that in its manifest, empty without one; ``manifest`` is the checked one, None if
    it cannot be checked, for the reason in ``fault``.
    """

    kind: str
    width: int
    height: int
    mark: PictureMark | None
    metadata: Mapping[str, Any] = field(repr=False)
    has_manifest: bool = False
    signer: str = ""
    manifest: ManifestReport | None = None
    fault: str = ""

    @property
    def is_unmarked_on_purpose(self) -> bool:
        """Return True if the mark was turned off when the picture was made."""
        return self.mark is None and self.metadata.get("mark") is False


def read_report(data: bytes, name: str, roots: str = "") -> PictureReport:
    """Return the report about a file; ``name`` names it in errors.

    ``roots`` are as for ``read_manifest``. Raises UsageError: it is not a picture, or has too many
    parts.
    """
    kind = detect_kind(data)
    parts = read_parts(data, name)
    width, height = _read_size(parts.pixels, kind, name)
    metadata = parts.metadata
    try:
        facts = read_metadata(data)
    except FormatError:
        facts = {}
    signer, manifest, fault = "", None, ""
    if metadata.manifests > 1:
        fault = f"it has {metadata.manifests} manifests, of which none counts"
    elif metadata.manifests:
        signer, (manifest, fault) = find_signer(metadata.manifest), _check(data, kind, roots)
    mark, has_manifest = parse_mark(metadata.xmp), bool(metadata.manifests)
    return PictureReport(kind, width, height, mark, facts, has_manifest, signer, manifest, fault)


def _read_size(pixels: bytes, kind: str, name: str) -> tuple[int, int]:
    """Return width and height by the header. Raises UsageError."""
    try:
        with Image.open(io.BytesIO(pixels), formats=[kind.upper()] if kind else []) as image:
            return image.size
    except Exception:
        # Pillow has no common class for the errors of damaged files
        raise UsageError(f"{name} is not a valid PNG, JPEG or WebP file") from None


def _check(data: bytes, kind: str, roots: str) -> tuple[ManifestReport | None, str]:
    """Return the checked manifest of a file, or the reason why it cannot be checked."""
    try:
        return read_manifest(data, kind, roots), ""
    except FormatError as error:
        return None, error.message
    except UsageError as error:
        if has_library():
            raise
        return None, f"it is not checked: {error.message}"
    except AImageError as error:
        return None, f"it is not checked: {error.message}"
