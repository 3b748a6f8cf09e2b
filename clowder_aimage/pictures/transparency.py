"""Transparent pictures, as they look: on white, whatever colours their transparent parts have."""

from __future__ import annotations

from PIL import Image

from clowder_aimage.model.pixel import convert

# The share of a picture that is transparent if it is cut out, and not by accident
_LEAST_CLEAR = 0.01


def flatten(image: Image.Image, background: str = "white") -> Image.Image:
    """Return a picture in RGB, on a background if it is transparent."""
    if image.mode != "RGBA":
        return convert(image, "RGB")
    flat = Image.new("RGB", image.size, background)
    flat.paste(image, mask=image)
    return flat


def is_transparent(image: Image.Image) -> bool:
    """Return True if a part of a decoded picture is transparent, even a little."""
    return image.mode == "RGBA" and image.getchannel("A").getextrema() != (255, 255)


def is_cut_out(image: Image.Image) -> bool:
    """Return True if at least a hundredth of a decoded picture is transparent altogether."""
    if image.mode != "RGBA":
        return False
    clear = image.getchannel("A").histogram()[0]
    return clear >= _LEAST_CLEAR * image.width * image.height
