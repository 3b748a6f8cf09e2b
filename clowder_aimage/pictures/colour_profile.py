"""Conversion of pictures from the colours of their ICC profile to sRGB, by littleCMS.

A profile is a program of a stranger: it is checked before, and small parts of a picture are
converted at a time, so that other threads run between them.
"""

from __future__ import annotations

import io
import itertools

import numpy as np
from PIL import Image, ImageCms

from clowder_aimage.errors import FormatError
from clowder_aimage.model.pixel import convert, crop_strip, list_strips
from clowder_aimage.pictures.file_metadata import MAX_PROFILE

# ICC.1:2022, 7.2.5: of input, display and output devices, and of colour spaces
_CLASSES = (b"scnr", b"mntr", b"prtr", b"spac")
_HEADER, _ENTRY, _MAX_TAGS = 128, 12, 100
# Lists of operations of any length (9.2.17 and later): each of a table's colours would pass all
_OPERATIONS = (b"D2B", b"B2D")
# Levels of 255 by which a profile that is meant as sRGB differs from it
_ROUNDING = 2
_STEPS = np.linspace(0, 255, 9).astype(np.uint8)
# By the colour space of the profile, the modes of pictures that have it
_MODES = {
    b"RGB ": {"RGB": "RGB", "P": "RGB", "L": "RGB", "1": "RGB"},
    b"GRAY": {"L": "L", "1": "L"},
    b"CMYK": {"CMYK": "CMYK"},
}


def convert_to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Return a picture in sRGB, or itself if its profile is that of sRGB.

    Raises FormatError: the profile is not one of the picture's colours.
    """
    if image.mode not in ("LA", "RGBA"):
        return _convert(image, profile)
    colours = image.convert(image.mode[:-1])
    converted = _convert(colours, profile)
    if converted is colours:
        return image
    converted.putalpha(image.getchannel("A"))
    return converted


def _convert(image: Image.Image, profile: bytes) -> Image.Image:
    """Return a picture without transparency in sRGB, or itself. Raises FormatError."""
    space = _check(profile)
    mode = _MODES.get(space, {}).get(image.mode)
    if mode is None:
        raise FormatError("is for pictures of another kind")
    try:
        transform = ImageCms.buildTransform(
            ImageCms.ImageCmsProfile(io.BytesIO(profile)),
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.PERCEPTUAL,
        )
    except (ImageCms.PyCMSError, OSError, TypeError, ValueError):
        raise FormatError("is invalid") from None
    except ImportError:
        raise FormatError("needs Pillow with littleCMS") from None
    if mode != "CMYK" and _keeps_colours(transform, mode):
        return image
    image = convert(image, mode)
    converted = Image.new("RGB", image.size)
    for rows in list_strips(image.height):
        converted.paste(transform.apply(crop_strip(image, rows)), (0, rows.start))
    return converted


def _check(profile: bytes) -> bytes:
    """Return the colour space of a profile (ICC.1:2022, 7.2). Raises FormatError."""
    if len(profile) > MAX_PROFILE:
        raise FormatError(f"has more than {MAX_PROFILE >> 20} MiB")
    count = int.from_bytes(profile[_HEADER : _HEADER + 4], "big")
    starts = range(_HEADER + 4, _HEADER + 4 + _ENTRY * min(count, _MAX_TAGS), _ENTRY)
    is_known = profile[36:40] == b"acsp" and profile[12:16] in _CLASSES and count <= _MAX_TAGS
    if not is_known or any(profile[start : start + 3] in _OPERATIONS for start in starts):
        raise FormatError("is invalid")
    return profile[16:20]


def _keeps_colours(transform: ImageCms.ImageCmsTransform, mode: str) -> bool:
    """Return True if a transformation changes no colour by more than rounding."""
    grid = np.array(list(itertools.product(_STEPS, repeat=3)), np.uint8)
    colours = Image.fromarray((np.arange(256, dtype=np.uint8) if mode == "L" else grid)[None])
    before = np.asarray(colours.convert("RGB"), np.int16)
    after = np.asarray(transform.apply(colours), np.int16)
    return bool(np.abs(after - before).max() <= _ROUNDING)
