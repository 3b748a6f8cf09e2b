"""Picture files with generation settings (``picture_metadata``)."""

from __future__ import annotations

import contextlib
import io
import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image, ImageDraw, ImageFont, PngImagePlugin

from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.generation.encoding import FORMATS
from clowder_aimage.model.picture_mark import XMP_KEYWORD, PictureMark
from clowder_aimage.model.picture_metadata import (
    KEY,
    QUALITIES,
    add_quality,
    detect_kind,
    encode_maker_note,
    format_parameters,
    read_metadata,
)

Pixels = npt.NDArray[np.uint8]
# A segment of a JPEG file has a length of 16 bits
_LARGEST_EXIF = 65_533
# Pixels of a sheet
_THUMBNAIL, _MARGIN, _CAPTION = 256, 8, 18
_PAPER, _INK = (246, 246, 244), (40, 40, 40)
# Levels of 255: the mean difference of equal pictures in a lossy format
_TOLERANCE = 4.0
# 8192 by 8192, more than pictures that are made
_MAX_PIXELS = 1 << 26


def encode_picture(
    pixels: Pixels,
    metadata: Mapping[str, Any] | None,
    kind: str = "png",
    quality: int | None = None,
    mark: PictureMark | None = None,
) -> bytes:
    """Encode ``pixels`` (height, width, 3) as a file of ``encoding.FORMATS``.

    The file stores ``metadata``, and the XMP of a ``mark``; ``quality`` (0 to 100, the best)
    applies to JPEG and WebP.
    """
    options: dict[str, Any] = {}
    xmp = "" if mark is None else mark.encode()
    if kind in QUALITIES:
        options["quality"] = QUALITIES[kind] if quality is None else quality
    if metadata is not None:
        height, width, *_ = pixels.shape
        stated, text = (
            add_quality(metadata, kind, quality),
            format_parameters(metadata, width, height),
        )
        if kind == "png":
            options["pnginfo"] = _build_chunks(stated, text)
        else:
            limit = _LARGEST_EXIF if kind == "jpeg" else math.inf
            options["exif"] = _encode_exif(stated, text, limit)
    if xmp and kind == "png":
        options.setdefault("pnginfo", PngImagePlugin.PngInfo()).add_itxt(XMP_KEYWORD, xmp)
    elif xmp:
        options["xmp"] = xmp.encode()
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=kind.upper(), **options)
    return buffer.getvalue()


def render_contact_sheet(
    pictures: Sequence[tuple[int, bytes]], mark: PictureMark | None = None
) -> bytes:
    """Return a PNG file with the pictures of seeds, reduced, above the seeds, in rows.

    It has the ``mark`` of the pictures. Raises FormatError: one is not a picture.
    """
    thumbnails = [_create_thumbnail(data) for _, data in pictures]
    columns = math.ceil(math.sqrt(len(pictures)))
    across = max(small.width for small in thumbnails) + _MARGIN
    down = max(small.height for small in thumbnails) + _CAPTION + _MARGIN
    rows = -(-len(pictures) // columns)
    sheet = Image.new("RGB", (columns * across + _MARGIN, rows * down + _MARGIN), _PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for index, ((seed, _), thumbnail) in enumerate(zip(pictures, thumbnails, strict=True)):
        left, top = _MARGIN + index % columns * across, _MARGIN + index // columns * down
        sheet.paste(thumbnail, (left, top))
        pen.text((left, top + thumbnail.height + 1), str(seed), fill=_INK, font=font)
    marks = PngImagePlugin.PngInfo()
    if mark is not None:
        marks.add_itxt(XMP_KEYWORD, mark.encode())
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG", pnginfo=marks)
    return buffer.getvalue()


@contextlib.contextmanager
def _open_picture(data: bytes) -> Iterator[Image.Image]:
    """Open a picture file. Raises Pillow's errors, also for too many pixels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data), formats=[kind.upper() for kind in FORMATS]) as image:
            if math.prod(image.size) > _MAX_PIXELS:
                raise Image.DecompressionBombError
            yield image


def _create_thumbnail(data: bytes) -> Image.Image:
    try:
        with _open_picture(data) as image:
            image.thumbnail((_THUMBNAIL, _THUMBNAIL))
            return image.convert("RGB")
    except Exception:
        # Pillow has no common class for the errors of damaged files
        raise FormatError("a picture is damaged, or too large for the sheet") from None


def _build_chunks(metadata: Mapping[str, Any], text: str) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_itxt(KEY, json.dumps(metadata, ensure_ascii=False))
    info.add_itxt("Description", str(metadata.get("prompt", "")))
    info.add_text("parameters", text)
    info.add_text("Software", "aimage")
    return info


def _encode_exif(metadata: Mapping[str, Any], text: str, limit: float) -> bytes:
    """Return Exif data with metadata and a comment (Exif 2.3, 4.6.5).

    Within a limit, without the comment if both are too long, and none if the metadata are.
    """
    comment = b"UNICODE\0" + text.encode("utf-16-be", "replace")
    note = (int(ExifTags.Base.MakerNote), encode_maker_note(metadata))
    for tags in ([note, (int(ExifTags.Base.UserComment), comment)], [note]):
        exif = Image.Exif()
        # Programs read the UTF-16 of the comment in this order
        exif.endian = ">"
        exif[ExifTags.Base.Software] = "aimage"
        exif.get_ifd(ExifTags.IFD.Exif).update(tags)
        if len(data := exif.tobytes()) <= limit:
            return data
    return b""


@dataclass(frozen=True, slots=True, eq=False)
class StoredPicture:
    """The pixels (height, width, 3) of a file in a format, and its metadata, empty without any."""

    pixels: Pixels
    kind: str
    metadata: dict[str, Any]


def read_picture(data: bytes, name: str) -> StoredPicture:
    """Return the picture in a file.

    Raises:
        UsageError: It is not a picture; ``name`` names it.
        FormatError: Its Exif data is damaged.
    """
    try:
        with _open_picture(data) as image:
            pixels = np.asarray(image.convert("RGB"))
    except Image.DecompressionBombError:
        raise UsageError(f"{name} has more than {_MAX_PIXELS} pixels") from None
    except Exception:
        # Pillow has no common class for the errors of damaged files
        raise UsageError(f"{name} is not a valid PNG, JPEG or WebP file") from None
    try:
        return StoredPicture(pixels, detect_kind(data), read_metadata(data))
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None


def build_metadata_error(name: str) -> UsageError:
    """Return the error for a picture without metadata."""
    return UsageError(
        f"{name} has no generation settings",
        hint="only pictures that this program wrote can be replayed, if they were not edited",
    )


@dataclass(frozen=True, slots=True)
class PictureDifference:
    """The largest and the mean difference of values from 0 to 255, and the share that differs."""

    largest: int
    mean: float
    share: float
    is_equal: bool


def compare_pictures(
    pixels: Pixels, generated: Pixels, kind: str, quality: object = None
) -> PictureDifference | None:
    """Compare the pixels of a file with generated pixels; None if the sizes differ.

    In a lossy format they are compared as files of the same quality, and may differ by _TOLERANCE:
    other versions of its encoder round differently.
    """
    if pixels.shape != generated.shape:
        return None
    if kind in QUALITIES:
        checked_quality = quality if type(quality) is int and 0 <= quality <= 100 else None
        generated = read_picture(
            encode_picture(generated, None, kind, checked_quality), "it"
        ).pixels
    difference = np.abs(generated.astype(np.int16) - pixels.astype(np.int16))
    largest, mean = int(difference.max()), float(difference.mean())
    is_equal = mean <= _TOLERANCE if kind in QUALITIES else not largest
    return PictureDifference(largest, mean, float((difference > 0).mean()), is_equal)
