"""The small files of a model in a store, without a library of arrays."""

from __future__ import annotations

from typing import Any

from clowder_aimage.content.store import BlobFiles
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, NotFoundError
from clowder_aimage.formats.model_tree import MAX_JSON
from clowder_aimage.tensor.config_fields import parse_object

# Bytes of a file; the largest vocabularies take about a tenth
_MAX_FILE = 256 * 1024 * 1024


def find(store: BlobFiles, aimage: AImage, name: str) -> bytes | None:
    """Return the bytes of the file ``name`` (such as ``vae/config.json``), or None.

    Raises:
        ModelError: It is too large.
        AccessError: It is in the AImage but not in the store.
    """
    try:
        descriptor = aimage.get_layer(name).descriptor
    except NotFoundError:
        return None
    if descriptor.size > _MAX_FILE:
        raise ModelError(f"{name} has {descriptor.size} bytes; the limit is {_MAX_FILE}")
    with store.open(descriptor) as file:
        return file.read()


def find_object(store: BlobFiles, aimage: AImage, name: str) -> dict[str, Any] | None:
    """Return the JSON object in the file ``name``, or None. Raises as ``find`` does."""
    data = find(store, aimage, name)
    return None if data is None else parse_object(name, data, MAX_JSON)


def read_object(store: BlobFiles, aimage: AImage, name: str) -> dict[str, Any]:
    """Return the JSON object in the file ``name``.

    Raises:
        ModelError: It does not exist, or is not a JSON object.
    """
    value = find_object(store, aimage, name)
    if value is None:
        raise ModelError(f"{name} not found in the model")
    return value
