"""The pictures of a request, and the parameters that apply to them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from clowder_aimage.api.field_rule import FieldRule, excludes, requires
from clowder_aimage.api.parameter_field import ParameterBody, with_parameters
from clowder_aimage.api.picture.source import CONTROL, IMAGE, IMAGES, MASK
from clowder_aimage.api.picture.upload import StoredPictures
from clowder_aimage.dialect import AImage
from clowder_aimage.generation.effect import describe_ignored_parameters
from clowder_aimage.generation.request import (
    OF_IMAGES,
    OF_MASKS,
    Control,
    GenerateRequest,
    ImageInput,
    map_parameter_locations,
)
from clowder_aimage.pictures.input_file import describe_reduction
from clowder_aimage.pictures.input_kind import assign_role, get_max_area, own_sized

# Edits may have a mask in the transparency of their image
MASKED = requires(OF_MASKS, MASK, words="a mask")
# Fields that expand determines
_SIZE = ("size", "width", "height")


@with_parameters(ImageInput, Control, without=("image", "mask", "references", "control"))
class PictureFields(ParameterBody):
    """The parameters of the pictures of a request."""

    RULES: ClassVar[tuple[FieldRule, ...]] = (
        requires((*OF_IMAGES, "painted"), IMAGE, IMAGES, words="an image"),
        MASKED,
        requires("feather", "paste", "crop", words="paste or crop: it is the width of their seam"),
        requires(("controlnet", "control_strength"), CONTROL, words="a control picture"),
        requires("fit", IMAGE, IMAGES, CONTROL, words="an image"),
        excludes(IMAGES, IMAGE),
        excludes("upscale", "expand", MASK),
        excludes("expand", MASK, *_SIZE),
    )

    painted: Literal["auto", "white", "transparent"] = Field(
        default="auto",
        description="What of the mask is painted. `auto`: what is transparent if anything is, else "
        "white.",
    )

    def request(
        self, prompt: str, pictures: StoredPictures | None, model: AImage | None, **parameters: Any
    ) -> GenerateRequest:
        """Return the request for a model, or a draft, with more parameters. Raises UsageError.

        Without a size it is that of the first image, or of the control picture.
        """
        locations = map_parameter_locations()
        stated = {name: value for name, value in self.stated.items() if name in locations}
        stated |= parameters if pictures is None else pictures.list_digests(model) | parameters
        draft = GenerateRequest.draft(prompt, **stated)
        first_picture = None if pictures is None else pictures.first
        if model is None:
            return own_sized(draft, first_picture)
        return own_sized(assign_role(draft, model), first_picture).apply_defaults(model)

    def compute_final_size(self, request: GenerateRequest, pictures: StoredPictures | None) -> str:
        """Return the size of the result, such as 1024x768. It may differ from the request's."""
        width, height = request.sampling.width, request.sampling.height
        if pictures is not None and pictures.images:
            image, inputs = pictures.images[0], request.input
            if inputs.expand is not None:
                left, top, right, bottom = inputs.expand
                width, height = left + image.width + right, top + image.height + bottom
            elif factor := inputs.upscale or inputs.crop:
                width, height = round(image.width * factor), round(image.height * factor)
        return f"{width}x{height}"

    def list_warnings(
        self, request: GenerateRequest, pictures: StoredPictures | None, *, has_size: bool
    ) -> list[str]:
        """Return sentences about fields without effect, and about the pictures."""
        warnings = describe_ignored_parameters(request, self.stated)
        warnings += [] if pictures is None else pictures.list_warnings(request)
        is_whole = has_size or any(map(self.stated.get, ("expand", "upscale", "crop")))
        if pictures is None or is_whole:
            return warnings
        if reduced := describe_reduction(pictures.first, get_max_area(request.input.references)):
            name = IMAGE if pictures.images else CONTROL
            warnings.append(f"{name} {reduced}; size sets another size")
        return warnings
