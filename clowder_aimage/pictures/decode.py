"""Picture files of strangers, decoded by Pillow after their headers were checked."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.model.pixel import convert, crop_strip, list_strips
from clowder_aimage.pictures.colour_profile import convert_to_srgb
from clowder_aimage.pictures.file_parts import (
    PictureParts,
    build_animated_error,
    check_scans,
    read_parts,
)
from clowder_aimage.pictures.input_file import TYPES, build_too_large_error, check_dimensions

Picture = Image.Image
# The offset of the bits of a sample in a PNG file (11.2.1)
_PNG_DEPTH = 24


def decode(data: bytes, label: str) -> Picture:
    """Return a picture upright in sRGB, as RGB or RGBA.

    ``info["kind"]`` is its format, ``info["warnings"]`` are sentences about it.

    Raises:
        UsageError: It is not a PNG, JPEG or WebP file, is damaged, animated, too large or narrow,
            or has too many parts or scans.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = read_parts(data, label)
            kind, image = _read(parts, label)
            image = parts.metadata.turn(image)
            coloured, sentences = _convert_to_colour(image, parts.metadata.profile)
    except UsageError:
        raise
    except Image.DecompressionBombError:
        # Pillow's limit is above that of check_dimensions
        raise build_too_large_error(label) from None
    except Exception:
        # Pillow has no common class for the errors of damaged files
        raise UsageError(
            f"{label} is not a picture that can be read", hint="use a PNG, JPEG or WebP file"
        ) from None
    coloured.info = {"kind": kind, "warnings": sentences}
    return coloured


def _read(parts: PictureParts, label: str) -> tuple[str, Picture]:
    """Return the format of a file and a copy of its picture, which holds no decoder in memory."""
    with Image.open(io.BytesIO(parts.pixels), formats=list(TYPES)) as image:
        check_dimensions(*image.size, len(parts.pixels), label)
        check_scans(parts.scans, image.width * image.height, label)
        if getattr(image, "n_frames", 1) > 1:
            raise build_animated_error(label)
        kind = str(image.format)
        if kind == "PNG":
            _scale_transparent_colour(image, parts.pixels[_PNG_DEPTH])
        return kind, image.copy()


def _scale_transparent_colour(image: Picture, depth: int) -> None:
    """Scale the colour that is transparent as Pillow scales samples of ``depth`` bits."""
    colour = image.info.get("transparency")
    if isinstance(colour, tuple):
        image.info["transparency"] = tuple(
            sample >> 8 if depth == 16 else sample & 255 for sample in colour
        )
    elif image.mode == "L" and colour is not None:
        image.info["transparency"] = colour * 255 // ((1 << depth) - 1)


def _convert_to_colour(image: Picture, profile: bytes | None) -> tuple[Picture, tuple[str, ...]]:
    """Return a picture in sRGB, and a sentence about a profile that cannot be used."""
    image, sentences = _reduce_depth(image), tuple[str, ...]()
    if "transparency" in image.info:
        image = image.convert("LA" if image.mode in ("1", "L") else "RGBA")
    mode = "RGBA" if image.mode in ("RGBA", "LA") else "RGB"
    if profile is not None:
        try:
            image = convert_to_srgb(image, profile)
        except FormatError as error:
            sentences = (f"has a colour profile that {error.message}, and is ignored",)
    return convert(image, mode), sentences


def _reduce_depth(image: Picture) -> Picture:
    """Return a picture of 16 bits, or of 32 bits with the same range, with the high 8 of them."""
    if not image.mode.startswith("I"):
        return image
    grey = np.empty((image.height, image.width), np.uint8)
    opaque = np.empty_like(grey) if "transparency" in image.info else None
    # The values of the whole picture would take much memory
    for rows in list_strips(image.height):
        values = np.asarray(crop_strip(image, rows))
        grey[rows] = np.clip(values, 0, 65535) >> 8
        if opaque is not None:
            opaque[rows] = np.where(values == image.info["transparency"], 0, 255)
    reduced = Image.fromarray(grey)
    if opaque is not None:
        reduced.putalpha(Image.fromarray(opaque))
    return reduced
