"""The licences that a manifest and its config state, in all dialects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from clowder_aimage.dialect import detect
from clowder_aimage.dialect.aimage import parse_config
from clowder_aimage.dialect.vendor import get_nested
from clowder_aimage.errors import FormatError
from clowder_aimage.oci import Manifest, mediatype, read_json

# SPDX's words for a licence that is not stated
_NONE = ("none", "noassertion")


def list_stated_licenses(manifest: Manifest, config: bytes) -> tuple[str, ...]:
    """Return the licences of an AImage, each once: all of them apply.

    They are in its config, in an annotation of its manifest, and in the list of a ModelPack.
    """
    stated = [manifest.annotations.get(mediatype.LICENSES)]
    try:
        properties = parse_config(detect(manifest).read_config(manifest, config))
        stated = [properties.get("license"), *stated]
    except FormatError:
        pass
    try:
        listed = get_nested(read_json(config, "the config"), "descriptor", "licenses")
        stated += listed if isinstance(listed, list) else ()
    except FormatError:
        pass
    return clean_licenses(stated)


def clean_licenses(stated: Iterable[object]) -> tuple[str, ...]:
    """Return the texts that state a licence, each once."""
    texts = dict.fromkeys(text.strip() for text in stated if isinstance(text, str))
    return tuple(text for text in texts if text and text.lower() not in _NONE)


def join_licenses(licenses: Sequence[str]) -> str:
    """Return one expression for licences that all apply."""
    return licenses[0] if len(licenses) == 1 else " AND ".join(f"({text})" for text in licenses)
