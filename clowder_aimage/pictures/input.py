"""Pictures that requests begin with: checked, kept in the store, and fitted to a request's size.

A request names its pictures by the digests of their files, which are blobs in the store. Pillow
decodes them, after their type and size were checked from the header.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageChops, ImageFilter

from clowder_aimage.content import ContentStore, Lease, build_bytes_body
from clowder_aimage.content.store import BlobFiles
from clowder_aimage.errors import NotFoundError, TooLargeError, UsageError
from clowder_aimage.generation.request import ALPHA, GenerateRequest
from clowder_aimage.model.picture_tile import TileGrid, keep_shapes, mix, new_area
from clowder_aimage.model.pipeline import PictureInput
from clowder_aimage.model.pixel import Pixels, build_pixels, convert, to_pixels
from clowder_aimage.oci import Descriptor, Digest
from clowder_aimage.pictures.decode import Picture, decode
from clowder_aimage.pictures.fit import fit, resize
from clowder_aimage.pictures.input_file import (
    MAX_BYTES,
    TYPES,
    InputFile,
    compute_enlarged_size,
    compute_expanded_size,
)
from clowder_aimage.pictures.transparency import flatten, is_cut_out, is_transparent

# The least value of a mask that is painted
_PAINTED = 128
# A multiple of the sides of most models
EXPANDED_MULTIPLE = 64
# The margin around a mask's box, as a share of its sides, if only the box is painted
_MARGIN = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class PreparedPicture:
    """The input of a pipeline, and a function from its output to the result."""

    inputs: PictureInput
    finish: Callable[[Pixels], Pixels]


def inspect(data: bytes, label: str) -> InputFile:
    """Return the properties of a picture file; ``label`` names it in errors. Raises UsageError."""
    if len(data) > MAX_BYTES:
        raise TooLargeError(f"{label} has {len(data)} bytes; pictures may have {MAX_BYTES}")
    image = decode(data, label)
    kind = TYPES[str(image.info["kind"])]
    return InputFile(
        Descriptor(kind, Digest.of(data), len(data)),
        *image.size,
        warnings=image.info["warnings"],
        is_transparent=is_transparent(image),
        is_cut_out=is_cut_out(image),
    )


def keep(store: ContentStore, lease: Lease, data: bytes, label: str) -> InputFile:
    """Check a picture file and put it into the store, leased. Raises as ``inspect``."""
    file = inspect(data, label)
    lease.add(file.descriptor.digest)
    store.push(file.descriptor, build_bytes_body(data))
    return file


def encode_array(pixels: object, label: str) -> bytes:
    """Return an array of bytes, or of a mask's truth values, as a PNG file. Raises UsageError."""
    values, file = np.asarray(pixels), io.BytesIO()
    if values.dtype == np.bool_:
        values = values.astype(np.uint8) * np.uint8(255)
    try:
        Image.fromarray(values).save(file, "PNG")
    except (TypeError, OSError, ValueError):
        shape, kind = values.shape, values.dtype
        raise UsageError(f"{label} is not a picture: an array of {kind}, {shape}") from None
    return file.getvalue()


def whiten_mask(data: bytes, label: str, painted: str) -> bytes:
    """Return a mask with the painted parts white: a PNG file if it used transparency, else itself.

    painted: white, transparent, or auto for transparent parts if there are any. Raises UsageError.
    """
    image = decode(data, label)
    has_alpha = image.mode == "RGBA"
    if painted == "transparent" and not has_alpha:
        raise UsageError(f"{label} has no transparency")
    alpha = image.getchannel("A") if has_alpha else Image.new("L", (1, 1), 255)
    if painted == "white" or (painted == "auto" and alpha.getextrema() == (255, 255)):
        return data
    file = io.BytesIO()
    ImageChops.invert(alpha).save(file, "PNG")
    return file.getvalue()


def check_mask(image: bytes, mask: bytes | None) -> None:
    """Reject a mask that does not fit an image, or is empty; None: the image's transparency."""
    decoded = None if mask is None else decode(mask, "the mask")
    _build_mask(decode(image, "the image"), decoded)


def _build_mask(image: Picture, mask: Picture | None) -> Picture:
    """Return a mask in grey whose white is painted. Raises as ``check_mask``."""
    if mask is None:
        if image.mode != "RGBA":
            raise UsageError("the image has no transparency to use as a mask")
        mask = ImageChops.invert(image.getchannel("A"))
    if mask.size != image.size:
        raise _build_size_error("mask", mask, image)
    # Strokes on a transparent layer are the mask, not what is around them
    mask = convert(mask if mask.mode == "L" else flatten(mask, "black"), "L")
    if not any(mask.histogram()[_PAINTED:]):
        raise UsageError("the mask is empty: white is painted, and it has none")
    return mask


@dataclass(frozen=True, slots=True, eq=False)
class TiledPicture:
    """The tiles of an enlarged picture, and a function that joins the results."""

    parts: tuple[PictureInput, ...]
    finish: Callable[[Sequence[Pixels]], Pixels]


class PictureInputs:
    """The pictures of requests, from the files of a store."""

    def __init__(self, store: BlobFiles) -> None:
        self.store = store

    def open(self, request: GenerateRequest) -> PreparedPicture | TiledPicture | None:
        """Return the picture of a request at its size or in tiles, or None if it has none.

        Raises:
            UsageError: A file is not a picture, or the mask does not fit it or is empty.
            NotFoundError: A file is not in the store.
        """
        if request.input.references:
            read = (
                flatten(self._read(reference, "reference"))
                for reference in request.input.references
            )
            pictures = PictureInput(references=tuple(map(to_pixels, read)))
            return PreparedPicture(pictures, lambda generated: generated)
        if request.input.image is None and request.control.image is None:
            return None
        control = (
            None if request.control.image is None else self._read(request.control.image, "control")
        )
        if request.input.image is None:
            return PreparedPicture(
                PictureInput(control=_fit_to_request(request, control)), lambda it: it
            )
        image = self._read(request.input.image, "image")
        if request.input.upscale:
            return enlarge(request, image, control)
        mask = None
        if request.input.mask is not None:
            drawn_mask = (
                None if request.input.mask == ALPHA else self._read(request.input.mask, "mask")
            )
            mask = _build_mask(image, drawn_mask)
        if control is not None and request.input.crop and control.size != image.size:
            raise _build_size_error("control picture", control, image)
        return prepare(request, image, mask, control)

    def _read(self, digest: str, label: str) -> Picture:
        try:
            path = Path(self.store.find_path(Descriptor("", Digest.parse(digest), 0)))
            return decode(path.read_bytes(), label)
        except (NotFoundError, OSError):
            raise NotFoundError(f"the {label} {digest} is not in the store") from None


def _build_size_error(label: str, picture: Picture, image: Picture) -> UsageError:
    return UsageError(
        f"the {label} has {picture.width} x {picture.height} pixels, the image has "
        f"{image.width} x {image.height}"
    )


def _fit_to_request(request: GenerateRequest, picture: Picture | None) -> Pixels | None:
    """Return a picture in RGB, fitted to the request."""
    if picture is None:
        return None
    size = request.sampling.width, request.sampling.height
    return to_pixels(fit(flatten(picture), size, request.input.fit))


def prepare(
    request: GenerateRequest,
    image: Picture,
    mask: Picture | None,
    control: Picture | None = None,
) -> PreparedPicture:
    """Return a picture and its mask, fitted to the request. Raises UsageError."""
    picture = flatten(image)
    if request.input.expand is not None:
        return _expand_picture(request, request.input.expand, picture, control)
    size = request.sampling.width, request.sampling.height
    if mask is not None and request.input.crop:
        return _crop_to_mask(request, picture, mask, control)
    pixels = to_pixels(fit(picture, size, request.input.fit))
    cells = None if mask is None else to_pixels(fit(mask, size, request.input.fit))
    inputs = PictureInput(pixels, cells, _fit_to_request(request, control))
    if cells is None or not request.input.paste:
        return PreparedPicture(inputs, lambda generated: generated)
    return PreparedPicture(
        inputs, lambda generated: paste(generated, pixels, cells, request.input.feather)
    )


def _crop_to_mask(
    request: GenerateRequest, image: Picture, mask: Picture, control: Picture | None
) -> PreparedPicture:
    """Return the part of a picture around its mask; the result is put back into the whole."""
    original, painted = to_pixels(image), to_pixels(mask)
    size = request.sampling.width, request.sampling.height
    left, top, right, bottom = box = compute_mask_box(painted >= _PAINTED, size[0] / size[1])
    inputs = PictureInput(
        to_pixels(resize(image.crop(box), size)),
        to_pixels(resize(mask.crop(box), size)),
        _fit_to_request(request, control.crop(box)) if control is not None else None,
    )

    def finish(generated: Pixels) -> Pixels:
        patch = resize(Image.fromarray(generated), (right - left, bottom - top))
        result = original.copy()
        result[top:bottom, left:right] = to_pixels(patch)
        return paste(result, original, painted, request.input.feather)

    return PreparedPicture(inputs, finish)


def _expand_picture(
    request: GenerateRequest, expand: Sequence[int], image: Picture, control: Picture | None
) -> PreparedPicture:
    """Return a picture with the new area around it; the result has the exact size.

    Raises UsageError: the request's size is not that, rounded up.
    """
    left, top, right, bottom = expand
    width, height = image.width + left + right, image.height + top + bottom
    down, across = request.sampling.height - height, request.sampling.width - width
    if not 0 <= min(down, across) <= max(down, across) < EXPANDED_MULTIPLE:
        wide, high = compute_expanded_size(*image.size, expand, EXPANDED_MULTIPLE)
        raise UsageError(
            f"the expanded picture has {width} x {height} pixels, which the size "
            f"{request.sampling.width}x{request.sampling.height} does not fit",
            hint=f"use {wide}x{high}",
        )
    sides = [(top, bottom + down), (left, right + across), (0, 0)]
    pixels = np.pad(to_pixels(image), sides, mode="edge")
    share = new_area(*image.size, expand)
    mask = np.full(pixels.shape[:2], 255, np.uint8)
    mask[:height, :width] *= share > 0
    # A control picture of another size is one of the whole result
    guide = _fit_to_request(request, control)
    if control is not None and control.size == image.size:
        guide = np.pad(to_pixels(flatten(control)), sides, mode="edge")
    original = pixels[:height, :width]
    return PreparedPicture(
        PictureInput(pixels, mask, guide),
        lambda generated: mix(generated[:height, :width], original, share),
    )


def enlarge(
    request: GenerateRequest, image: Picture, control: Picture | None = None
) -> TiledPicture:
    """Return the tiles of a picture that is enlarged by Lanczos, and of its control picture.

    Raises UsageError: too large.
    """
    assert request.input.upscale is not None  # noqa: S101 - the caller's condition
    width, height = compute_enlarged_size(*image.size, request.input.upscale)
    grid = TileGrid.cover(width, height, (request.sampling.width, request.sampling.height))
    resized = to_pixels(resize(flatten(image), (width, height)))
    tiles = grid.cut(resized)
    guides: Sequence[Pixels | None] = [None] * len(tiles)
    if control is not None:
        fitted = fit(flatten(control), (width, height), request.input.fit)
        guides = grid.cut(to_pixels(fitted))
    pairs = zip(tiles, guides, strict=True)
    parts = tuple(PictureInput(tile, control=guide) for tile, guide in pairs)
    # Changes within two pixels of the original are details
    cell = 2 * request.input.upscale

    def finish(generated: Sequence[Pixels]) -> Pixels:
        return keep_shapes(grid.join(generated), resized, cell)

    return TiledPicture(parts, finish)


def compute_mask_box(mask: npt.NDArray[np.bool_], aspect: float) -> tuple[int, int, int, int]:
    """Return a box (left, top, right, bottom) around a mask with a margin, inside the picture.

    Its proportions are ``aspect``, width by height, if the picture has room.
    """
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    height, width = mask.shape
    top, bottom = int(rows[0]), int(rows[-1]) + 1
    left, right = int(columns[0]), int(columns[-1]) + 1
    down = (bottom - top) * (1 + 2 * _MARGIN)
    across = (right - left) * (1 + 2 * _MARGIN)
    across, down = max(across, down * aspect), max(down, across / aspect)
    factor = min(1.0, width / across, height / down)
    wide = min(width, max(round(across * factor), right - left))
    high = min(height, max(round(down * factor), bottom - top))
    left = min(max(0, (left + right - wide) // 2), width - wide)
    top = min(max(0, (top + bottom - high) // 2), height - high)
    return left, top, left + wide, top + high


def paste(generated: Pixels, original: Pixels, mask: Pixels, feather: int) -> Pixels:
    """Paste white parts of the mask into the original; mix ``feather`` pixels."""
    share = (mask >= _PAINTED).astype(np.uint8) * 255
    if feather:
        blurred = Image.fromarray(share).filter(ImageFilter.GaussianBlur(feather / 2))
        share = np.asarray(blurred)

    def compute(rows: slice) -> npt.NDArray[np.float32]:
        weight = share[rows, :, None].astype(np.float32) / 255
        return np.asarray(generated[rows] * weight + original[rows] * (1 - weight), np.float32)

    return build_pixels(original, compute)
