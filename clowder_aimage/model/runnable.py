"""AImages as they are run: unpacked, and with the properties of their model."""

from __future__ import annotations

from dataclasses import replace

from clowder_aimage.content.store import Lease
from clowder_aimage.dialect.packing import has_packed_layers
from clowder_aimage.errors import FormatError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import open_complete
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.layout.unpacking import find_unpacked, unpack_layers
from clowder_aimage.model.arrangement import arrange
from clowder_aimage.oci import Reference


def open_runnable(store: ImageLayout, reference: Reference, lease: Lease) -> StoredAImage:
    """Return an AImage that is complete in the store, leased, and record its use.

    Raises NotFoundError, FormatError, and as ``prepare``.
    """
    stored = open_complete(store, reference, lease)
    try:
        stored = prepare(store, stored, lease)
    except FormatError as error:
        error.remedy, error.facts["reference"] = "export_to_pack", str(reference)
        raise
    stored.aimage.validate()
    store.use(stored.descriptor)
    return stored


def prepare(store: ImageLayout, stored: StoredAImage, lease: Lease) -> StoredAImage:
    """Return a complete AImage as it is run. Raises as ``unpack_layers`` and ``arrange``."""
    aimage = arrange(store, unpack_layers(store, stored, lease))
    return stored if aimage is stored.aimage else replace(stored, aimage=aimage)


def describe(store: ImageLayout, stored: StoredAImage) -> StoredAImage:
    """Return an AImage as it is run, without unpacking it now. Raises as ``arrange``."""
    aimage = stored.aimage
    if has_packed_layers(aimage):
        aimage = find_unpacked(store, stored, None) or aimage
    aimage = arrange(store, aimage)
    return stored if aimage is stored.aimage else replace(stored, aimage=aimage)
