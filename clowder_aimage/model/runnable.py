"""AImages as they are run: unpacked, and with the properties of their model."""

from __future__ import annotations

import logging
from dataclasses import replace

from clowder_aimage.content.store import Lease
from clowder_aimage.dialect.packing import has_packed_layers
from clowder_aimage.errors import FormatError
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.completeness import open_complete
from clowder_aimage.layout.stored_aimage import StoredAImage, read_stored
from clowder_aimage.layout.unpacking import find_unpacked, needs_unpacking, unpack_layers
from clowder_aimage.model.arrangement import arrange
from clowder_aimage.oci import Descriptor, Reference

_log = logging.getLogger("aimage.worker")


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


def read_model(store: ImageLayout, root: Descriptor, *, unpacks: bool = False) -> StoredAImage:
    """Return an AImage with its config validated; its blobs may be missing.

    unpacks: it is unpacked now, if it is packed and complete. Raises NotFoundError, ContentError.
    """
    stored = read_stored(store, root)
    if unpacks and needs_unpacking(store, stored):
        _log.info("unpacking", extra={"digest": str(root.digest), "bytes": stored.size})
        with store.lease(root.digest) as lease:
            stored = prepare(store, stored, lease)
    else:
        stored = describe(store, stored)
    stored.aimage.validate()
    return stored
