"""The small files of an AImage: configurations, templates, vocabularies."""

from __future__ import annotations

from typing import Any

from clowder_aimage.content.store import ContentStore
from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, NotFoundError
from clowder_aimage.tensor.config_fields import parse_object

MAX_FILE = 256 * 1024 * 1024  # bytes; the largest vocabularies are about a tenth of it


def find(store: ContentStore, aimage: AImage, name: str) -> bytes | None:
    """Return the bytes of the file ``name`` (such as ``vae/config.json``), or None.

    Raises:
        ModelError: if it is too large.
        AccessError: when the AImage has it and the store does not.
    """
    try:
        descriptor = aimage.layer(name).descriptor
    except NotFoundError:
        return None
    if descriptor.size > MAX_FILE:
        raise ModelError(f"{name} is {descriptor.size} bytes long, over {MAX_FILE}")
    with store.open(descriptor) as file:
        return file.read()


def find_object(store: ContentStore, aimage: AImage, name: str) -> dict[str, Any] | None:
    """Return the JSON object in the file ``name``, or None. Raises as ``find`` does."""
    data = find(store, aimage, name)
    return None if data is None else parse_object(name, data)


def read_object(store: ContentStore, aimage: AImage, name: str) -> dict[str, Any]:
    """Return the JSON object in the file ``name``.

    Raises:
        ModelError: if it does not exist, or is not a JSON object.
    """
    value = find_object(store, aimage, name)
    if value is None:
        raise ModelError(f"the model has no {name}")
    return value
