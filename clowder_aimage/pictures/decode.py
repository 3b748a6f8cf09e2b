"""Picture files of strangers, decoded by Pillow after their headers were checked."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps

from clowder_aimage.errors import UsageError
from clowder_aimage.model.pixel import convert, crop_strip, list_strips
from clowder_aimage.pictures.file_parts import check_scans, count_scans
from clowder_aimage.pictures.input_file import TYPES, build_too_large_error, check_dimensions

Picture = Image.Image


def decode(data: bytes, label: str) -> Picture:
    """Return a picture upright, as RGB or RGBA; ``info["kind"]`` is its format.

    Raises:
        UsageError: It is not a PNG, JPEG or WebP file, is damaged, animated, too large or narrow,
            or has too many parts or scans.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kind, image = _read(data, label)
            ImageOps.exif_transpose(image, in_place=True)
            coloured = _convert_to_colour(image)
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
    coloured.info = {"kind": kind}
    return coloured


def _read(data: bytes, label: str) -> tuple[str, Picture]:
    """Return the format of a file and a copy of its picture, which holds no decoder in memory."""
    scans = count_scans(data, label)
    with Image.open(io.BytesIO(data), formats=list(TYPES)) as image:
        check_dimensions(*image.size, len(data), label)
        check_scans(scans, image.width * image.height, label)
        kind = str(image.format)
        # A JPEG with previews behind it, as some cameras write
        if kind == "MPO":
            kind = "JPEG"
        elif getattr(image, "n_frames", 1) > 1:
            raise UsageError(f"{label} is animated", hint="use one of its pictures")
        return kind, image.copy()


def _convert_to_colour(image: Picture) -> Picture:
    # 16 bits, or 32 bits with the same range
    if image.mode.startswith("I"):
        grey = np.empty((image.height, image.width), np.uint8)
        # The values of the whole picture would take much memory
        for rows in list_strips(image.height):
            grey[rows] = np.clip(np.asarray(crop_strip(image, rows)), 0, 65535) // 257
        image = Image.fromarray(grey)
    has_alpha = image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info
    return convert(image, "RGBA" if has_alpha else "RGB")
