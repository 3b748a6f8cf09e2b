"""The pictures of a request, and the parameters that apply to them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

from pydantic import Field

from clowder_aimage.api.parameter_field import ParameterBody, with_parameters
from clowder_aimage.api.picture.source import CONTROL, IMAGE, IMAGES, MASK
from clowder_aimage.api.picture.upload import KeptPictures
from clowder_aimage.api.request_body import wrong
from clowder_aimage.dialect import AImage
from clowder_aimage.generation.effect import ignored_parameters
from clowder_aimage.generation.request import Control, GenerateRequest, ImageInput, places
from clowder_aimage.pictures.input_file import reduction
from clowder_aimage.pictures.input_kind import assign_role, most_area, own_sized

# Fields that have no meaning without an image, a mask or a control picture
_OF_IMAGES = ("strength", "fine", "paste", "feather", "crop", "painted", "expand", "upscale")
_OF_MASKS = ("paste", "feather", "crop")
_OF_CONTROLS = ("controlnet", "control_strength")


@with_parameters(ImageInput, Control, without=("image", "mask", "references", "control"))
class PictureFields(ParameterBody):
    """The parameters of the pictures of a request."""

    painted: Literal["auto", "white", "transparent"] = Field(
        default="auto",
        description="What of the mask is painted. `auto`: what is transparent if anything is, else "
        "white.",
    )

    def check_given(self, names: Collection[str], *, has_size: bool) -> None:
        """Refuse fields that need other pictures than those with ``names``. Raises ApiError."""
        has_image = bool({IMAGE, IMAGES} & {*names})
        stated = {name for name, value in self.stated.items() if value not in (False, 0)}
        stated |= {"painted"} if self.painted != "auto" else set()
        for fields, has_one, what in (
            (_OF_IMAGES, has_image, "an image"),
            (_OF_MASKS, MASK in names, "a mask"),
            (_OF_CONTROLS, CONTROL in names, "a control picture"),
            (("fit",), has_image or CONTROL in names, "an image"),
        ):
            needing = [name for name in fields if name in stated]
            if needing and not has_one:
                raise wrong(needing[0], f"requires {what}")
        for name in ("expand", "upscale"):
            if MASK in names and name in stated:
                raise wrong(name, "cannot be combined with a mask")
        if "expand" in stated and has_size:
            raise wrong("expand", "determines the size: omit size, width and height")

    def request(
        self, prompt: str, pictures: KeptPictures | None, model: AImage | None, **more: Any
    ) -> GenerateRequest:
        """Return the request for a model, or a draft, with ``more`` parameters. Raises UsageError.

        Without a size it is that of the first image, or of the control picture.
        """
        stated = {name: value for name, value in self.stated.items() if name in places()}
        stated |= more if pictures is None else pictures.digests | more
        draft = GenerateRequest.draft(prompt, **stated)
        first = None if pictures is None else pictures.first
        if model is None:
            return own_sized(draft, first)
        return own_sized(assign_role(draft, model), first).for_model(model)

    def finished_size(self, request: GenerateRequest, pictures: KeptPictures | None) -> str:
        """Return the size of the result, such as 1024x768, which may not be the request's."""
        width, height = request.sampling.width, request.sampling.height
        if pictures is not None and pictures.images:
            image, own = pictures.images[0], request.input
            if own.expand is not None:
                left, top, right, bottom = own.expand
                width, height = left + image.width + right, top + image.height + bottom
            elif factor := own.upscale or own.crop:
                width, height = round(image.width * factor), round(image.height * factor)
        return f"{width}x{height}"

    def warnings(
        self, request: GenerateRequest, pictures: KeptPictures | None, *, has_size: bool
    ) -> list[str]:
        """Return sentences about fields without effect, and about a picture that is reduced."""
        warnings = ignored_parameters(request, self.stated)
        is_whole = has_size or any(map(self.stated.get, ("expand", "upscale", "crop")))
        if pictures is None or is_whole:
            return warnings
        if reduced := reduction(pictures.first, most_area(request.input.references)):
            name = IMAGE if pictures.images else CONTROL
            warnings.append(f"{name} {reduced}; size sets another size")
        return warnings
