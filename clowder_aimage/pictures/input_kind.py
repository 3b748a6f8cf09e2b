"""The role of a request's pictures: a model begins with one, or edits several as references."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import UsageError
from clowder_aimage.formats.diffusers import find_reference_limit
from clowder_aimage.generation.check import build_parameter_error
from clowder_aimage.generation.request import REFERENCE_PIXELS, GenerateRequest, ImageInput
from clowder_aimage.pictures.input_file import MAX_AREA, InputFile, compute_enlarged_size, own_size

# Parameters of a picture that a model begins with
OF_IMAGES = ("mask", "strength", "fine", "fit", "paste", "feather", "crop", "expand", "upscale")


def get_max_images(properties: Mapping[str, Any]) -> int:
    """Return the most pictures of a request for a model with this config."""
    return find_reference_limit(properties) or 1


def check_role(model: AImage, count: int, names: Iterable[str]) -> None:
    """Refuse too many pictures, and parameters (``names``) that a model does not take.

    Raises UsageError.
    """
    is_edit = bool(find_reference_limit(model.properties))
    if count > (most := get_max_images(model.properties)):
        which = f"at most {most} pictures" if is_edit else "one picture"
        does = "edits them" if is_edit else "begins with one"
        raise UsageError(f"images must be {which}, not {count}: {_get_pipeline(model)} {does}")
    for name in (*OF_IMAGES, "control") if is_edit else ():
        if name in names:
            raise build_parameter_error(
                name, f"cannot be used: {_get_pipeline(model)} only edits pictures"
            )


def assign_role(draft: GenerateRequest, model: AImage) -> GenerateRequest:
    """Return a draft whose images have the role that they have for a model.

    They are its ``image``, or ``references`` if the model edits. Raises as ``check_role``.
    """
    images = draft.input.images
    check_role(
        model,
        len(images),
        [name for name, stated in draft.collect_stated_values().items() if stated],
    )
    if not (images and find_reference_limit(model.properties)):
        return draft
    return replace(draft, input=ImageInput(references=images))


def own_sized(draft: GenerateRequest, picture: InputFile | None) -> GenerateRequest:
    """Return a draft with the ``own_size`` of its first picture, unless it states a size.

    If the picture is enlarged, the size is that of the tiles, and left to the model. Raises
    UsageError: the result is too large.
    """
    stated = draft.input
    if picture is not None and stated.upscale:
        compute_enlarged_size(picture.width, picture.height, stated.upscale)
    if picture is None or stated.upscale or draft.has_size:
        return draft
    size = own_size(picture, stated.expand or (), get_max_area(stated.references))
    # Stretched by less than 16 pixels, as diffusers
    is_fitted = stated.references or draft.is_stated("fit")
    return draft.change(**size, **({} if is_fitted else {"fit": "stretch"}))


def get_max_area(references: Sequence[str]) -> int:
    """Return the most pixels of a result that has the size of its first picture."""
    return REFERENCE_PIXELS if references else MAX_AREA


def _get_pipeline(model: AImage) -> str:
    return str(model.properties.get("pipeline") or "this model")[:80]
