"""The fields of a request that begins with a picture, or that a control picture guides."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from clowder_aimage.api.picture.picture_source import CONTROL, IMAGE, IMAGES, MASK
from clowder_aimage.api.picture.picture_upload import KeptPictures
from clowder_aimage.api.request_body import RequestBody, wrong
from clowder_aimage.dialect import AImage
from clowder_aimage.model.no_effect import without_effect
from clowder_aimage.model.pipeline import (
    MAX_CONTROL,
    MAX_EXPAND,
    MAX_FEATHER,
    MAX_UPSCALE,
    GenerateRequest,
)
from clowder_aimage.pictures.input_file import own_size, reduction
from clowder_aimage.pictures.picture_role import assign_role, most_area

MAX_PIXELS = 3840 * 2160
# Fields that have no meaning without an image, a mask or a control picture
_OF_IMAGES = ("strength", "fine", "paste", "feather", "crop", "painted", "expand", "upscale")
_OF_MASKS = ("paste", "feather", "crop")
_OF_CONTROLS = ("controlnet", "control_strength")
_SAME = ("strength", "fine", *_OF_MASKS, "expand", "upscale", *_OF_CONTROLS)  # names in both
_EXPAND = re.compile(r"[0-9]{1,5}(,[0-9]{1,5}){3}", re.ASCII)
_Side = Annotated[int, Field(ge=0, le=MAX_EXPAND)]


def _sides(value: object) -> object:
    """Parse ``left,top,right,bottom``, or return a list as a tuple."""
    if isinstance(value, str) and _EXPAND.fullmatch(value):
        return tuple(map(int, value.split(",")))
    if isinstance(value, list) and len(value) == 4:
        return tuple(value)
    raise ValueError('must be "LEFT,TOP,RIGHT,BOTTOM" in pixels, such as "0,0,256,0"')


class PictureFields(RequestBody):
    """The parameters of the pictures of a request; None and False are the defaults."""

    strength: float | None = Field(None, gt=0, le=1, allow_inf_nan=False)
    fine: bool = False
    fit: Literal["crop", "pad", "stretch"] | None = None
    paste: bool = False
    feather: int = Field(0, ge=0, le=MAX_FEATHER)
    crop: bool = False
    painted: Literal["auto", "white", "transparent"] = "auto"
    expand: Annotated[tuple[_Side, _Side, _Side, _Side], BeforeValidator(_sides)] | None = None
    upscale: float | None = Field(None, ge=1, le=MAX_UPSCALE, allow_inf_nan=False)
    controlnet: str | None = Field(None, min_length=1, max_length=1024)
    control_strength: float | None = Field(None, ge=0, le=MAX_CONTROL, allow_inf_nan=False)

    def check_given(self, names: Collection[str], *, has_size: bool) -> None:
        """Refuse fields that need other pictures than those with ``names``. Raises ApiError."""
        has_image = bool({IMAGE, IMAGES} & {*names})
        for fields, has_one, what in (
            (_OF_IMAGES, has_image, "an image"),
            (_OF_MASKS, MASK in names, "a mask"),
            (_OF_CONTROLS, CONTROL in names, "a control picture"),
            (("fit",), has_image or CONTROL in names, "an image"),
        ):
            given = [name for name in fields if getattr(self, name) not in (None, False, "auto")]
            if given and not has_one:
                raise wrong(given[0], f"requires {what}")
        for name in ("expand", "upscale"):
            if MASK in names and getattr(self, name) is not None:
                raise wrong(name, "cannot be combined with a mask")
        if self.expand is not None and has_size:
            raise wrong("expand", "determines the size: omit size, width and height")

    def of_pictures(
        self, pictures: KeptPictures | None, model: AImage | None, *, has_size: bool
    ) -> dict[str, Any]:
        """Return the parameters of a request with pictures, in their roles if the model is known.

        Without a size it is the ``own_size`` of the first image, or of the control picture; if the
        image is enlarged, it is that of the tiles, and left to the model. Raises ApiError, and
        UsageError for what does not apply to the model.
        """
        if pictures is None:
            return {}
        found = pictures.digests | {name: getattr(self, name) for name in ("fit", *_SAME)}
        found = found if model is None else assign_role(model, found)
        if self.upscale is not None:
            check_pixels("upscale", **self.finished_size(pictures))
            return found
        if has_size:
            return found
        size = own_size(pictures.first, self.expand or (), most_area(found["references"]))
        check_pixels("size" if self.expand is None else "expand", **size)
        # Stretched by less than a multiple
        return found | size | ({} if found["references"] else {"fit": self.fit or "stretch"})

    def finished_size(self, pictures: KeptPictures | None) -> dict[str, Any]:
        """Return the sides of the result if they are not those of the request."""
        if pictures is None or not pictures.images:
            return {}
        image = pictures.images[0]
        if self.expand is not None:
            left, top, right, bottom = self.expand
            return {"width": left + image.width + right, "height": top + image.height + bottom}
        if self.upscale is not None or self.crop:
            factor = self.upscale or 1
            return {"width": round(image.width * factor), "height": round(image.height * factor)}
        return {}

    def warnings(
        self, request: GenerateRequest, pictures: KeptPictures | None, *, has_size: bool
    ) -> list[str]:
        """Return sentences about fields without effect, and about a picture that is reduced."""
        found = without_effect(request, self.model_fields_set)
        is_whole = has_size or self.expand or self.upscale or self.crop
        if pictures is None or is_whole:
            return found
        if reduced := reduction(pictures.first, most_area(request.references)):
            name = IMAGE if pictures.images else CONTROL
            found.append(f"{name} {reduced}; size sets another size")
        return found


def check_pixels(param: str, width: int, height: int) -> None:
    """Raise ApiError if a picture exceeds the maximum size."""
    if width * height > MAX_PIXELS:
        given = f"{width}x{height} has {width * height}"
        raise wrong(param, f"exceeds the maximum of {MAX_PIXELS} pixels: {given}")
