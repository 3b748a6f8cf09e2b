"""The file format of pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from clowder_aimage.generation.check import check_fields
from clowder_aimage.generation.parameter import Words

FORMATS = ("png", "jpeg", "webp")
Format = Literal["png", "jpeg", "webp"]


@dataclass(frozen=True, slots=True)
class PictureEncoding:
    """The file format of pictures."""

    kind: Annotated[Format, Words("The format of the pictures.", field="output_format")] = "png"
    quality: Annotated[
        int | None,
        Ge(0),
        Le(100),
        Words("The quality of JPEG and WebP.", "75 and 80", field="output_compression"),
    ] = None
    has_facts: Annotated[
        bool, Words("Store the parameters in the file.", "the worker's", field="png_facts")
    ] = True

    def __post_init__(self) -> None:
        check_fields(self)
