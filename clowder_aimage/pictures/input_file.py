"""The properties of a picture file, and its limits, without numpy."""

from __future__ import annotations

import binascii
import math
from collections.abc import Sequence
from dataclasses import dataclass

from clowder_aimage.errors import TooLargeError, UsageError
from clowder_aimage.generation.check import build_parameter_error
from clowder_aimage.generation.request import ALPHA, MAX_SIDE, check_area
from clowder_aimage.oci import Descriptor

TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
# Those that a picture may be declared as; clients may not know the type, or name it differently
DECLARED_TYPES = (*TYPES.values(), "image/jpg", "application/octet-stream", "")
# The limit of a picture file
MAX_BYTES = 64 << 20
# For example 8192 by 4096: 128 MiB when it is decoded
MAX_PIXELS = 1 << 25
# Resampling needs memory in proportion to the sides
MAX_PICTURE_SIDE = 1 << 15
# The largest ratio of the sides
_RATIO = 64
# Bytes of a file without its metadata: of each pixel without compression, and of the rest
_DEPTH, _MAX_REST = 8, 4 << 20
# With or without padding and lines, in both alphabets
BASE64 = r"[A-Za-z0-9+/_=\s-]*"
_SPACE, _URL_SAFE = b" \t\r\n\v\f", bytes.maketrans(b"-_", b"+/")
# Characters of three bytes
_GROUP = 4
# Characters that are decoded at once
_CHUNK = 1 << 20
# Pixels, of the sides of most models
MULTIPLE = 16
# Pixels that are made of a larger picture, unless a size is given
MAX_AREA = 2048 * 2048


@dataclass(frozen=True, slots=True)
class InputFile:
    """A picture file: its digest, type, and size in pixels after rotation.

    ``warnings`` are sentences about it. ``is_cut_out``: much of it is transparent altogether.
    """

    descriptor: Descriptor
    width: int
    height: int
    warnings: tuple[str, ...] = ()
    is_transparent: bool = False
    is_cut_out: bool = False

    def list_warnings(self, mask: str | None = None, *, hint: str = "") -> list[str]:
        """Return sentences about it as the image of a request, without its name.

        ``hint`` says how its transparent parts are painted.
        """
        if not self.is_transparent or mask == ALPHA:
            return [*self.warnings]
        advice = f"; {hint}" if hint else ""
        return [*self.warnings, f"has transparent parts, which are white for the model{advice}"]


def build_too_large_error(label: str) -> TooLargeError:
    """Return the error for a picture with too many pixels."""
    return TooLargeError(f"{label} has more than {MAX_PIXELS} pixels")


def check_dimensions(width: int, height: int, length: int, label: str) -> None:
    """Refuse a file by its header, before it is decoded; ``length`` is that without metadata.

    Raises UsageError.
    """
    if width * height > MAX_PIXELS:
        raise build_too_large_error(label)
    limit = ""
    if max(width, height) > MAX_PICTURE_SIDE:
        limit = f"a side may have at most {MAX_PICTURE_SIDE}"
    elif max(width, height) > _RATIO * min(width, height):
        limit = f"one side may be at most {_RATIO} times the other"
    if limit:
        raise UsageError(f"{label} has {width} x {height} pixels: {limit}", hint="crop it")
    if length > _DEPTH * width * height + _MAX_REST:
        message = f"{label} has {length} bytes for {width} x {height} pixels"
        raise UsageError(message, hint="save it again")


def decode_base64(text: bytes) -> bytes:
    """Return the bytes of a text in base64 (RFC 4648, 4 and 5). Raises ValueError.

    White space and padding are optional. It is decoded in chunks, so that other threads run between
    them.
    """
    data, rest = bytearray(), b""
    for start in range(0, len(text), _CHUNK):
        rest += text[start : start + _CHUNK].translate(_URL_SAFE, _SPACE)
        whole = len(rest.rstrip(b"=")) // _GROUP * _GROUP
        if b"=" in rest[:whole]:
            raise ValueError("padding before the end")
        data += _decode(rest[:whole])
        rest = rest[whole:]
        if len(rest) > 2 * _GROUP:
            raise ValueError("too much padding")
    last = rest.rstrip(b"=")
    return bytes(data + _decode(last + b"=" * (-len(last) % _GROUP)))


def _decode(text: bytes) -> bytes:
    return binascii.a2b_base64(text, strict_mode=True)


def own_size(
    picture: InputFile, expand: Sequence[int] = (), most: int = MAX_AREA
) -> dict[str, int]:
    """Return the sides of a request for a picture: rounded down, or up if it is expanded.

    Larger ones are reduced in proportion, to an area of ``most`` pixels, unless it is expanded.
    Raises UsageError: an expanded one is too large.
    """
    width, height = picture.width, picture.height
    if expand:
        width, height = compute_expanded_size(width, height, expand, MULTIPLE)
        if max(width, height) > MAX_SIDE:
            raise build_parameter_error("expand", f"makes a side of more than {MAX_SIDE} pixels")
        check_area("expand", width, height)
    elif (factor := math.sqrt(most / (width * height))) < 1:
        width, height = int(width * factor), int(height * factor)
    sides = (max(MULTIPLE, side - side % MULTIPLE) for side in (width, height))
    return dict(zip(("width", "height"), sides, strict=True))


def compute_enlarged_size(width: int, height: int, factor: float) -> tuple[int, int]:
    """Return the width and height of an enlarged picture. Raises UsageError: too large."""
    width, height = round(width * factor), round(height * factor)
    check_area("upscale", width, height)
    return width, height


def describe_reduction(picture: InputFile, most: int = MAX_AREA) -> str:
    """Return a sentence about the reduction of a picture; empty without one."""
    if picture.width * picture.height <= most:
        return ""
    size = own_size(picture, most=most)
    return (
        f"has {picture.width} x {picture.height} pixels, and is reduced to "
        f"{size['width']}x{size['height']}"
    )


def compute_expanded_size(
    width: int, height: int, expand: Sequence[int], multiple: int
) -> tuple[int, int]:
    """Return the width and height of an expanded picture, rounded up to multiples."""
    left, top, right, bottom = expand
    across, down = left + width + right, top + height + bottom
    return -(-across // multiple) * multiple, -(-down // multiple) * multiple
