"""The role of a request's pictures: a model begins with one, or edits several as references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import UsageError
from clowder_aimage.formats.diffusers import most_references
from clowder_aimage.generation.check import wrong
from clowder_aimage.generation.request import REFERENCE_PIXELS
from clowder_aimage.pictures.input_file import MAX_AREA

# Parameters of a picture that a model begins with
OF_IMAGES = ("mask", "strength", "fine", "fit", "paste", "feather", "crop", "expand", "upscale")


def max_images(properties: Mapping[str, Any]) -> int:
    """Return how many pictures a request of a model with this config may have, at most."""
    return most_references(properties) or 1


def _check_count(model: AImage, count: int) -> None:
    if count > max_images(model.properties):
        is_edit = bool(most_references(model.properties))
        which = f"at most {max_images(model.properties)} pictures" if is_edit else "one picture"
        does = "edits them" if is_edit else "begins with one"
        raise UsageError(f"images must be {which}, not {count}: {_kind(model)} {does}")


def assign_role(model: AImage, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters of a request whose pictures have the role that they have for a model.

    They are its ``image``, or ``references`` if there are several.

    Raises:
        UsageError: There are too many, or a parameter does not apply to a model that edits.
    """
    image = parameters.get("image")
    images = (image,) if image else tuple(parameters.get("references") or ())
    _check_count(model, len(images))
    if not most_references(model.properties):
        return {**parameters, "image": images[0] if images else None, "references": ()}
    for name in (*OF_IMAGES, "control"):
        if parameters.get(name):
            raise wrong(name, f"cannot be used: {_kind(model)} only edits pictures")
    return {**parameters, "image": None, "references": images}


def most_area(references: Sequence[str]) -> int:
    """Return the most pixels of a result that has the size of its first picture."""
    return REFERENCE_PIXELS if references else MAX_AREA


def _kind(model: AImage) -> str:
    return str(model.properties.get("pipeline") or "this model")[:80]
