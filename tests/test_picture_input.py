"""Picture files of requests: what is refused, how they are turned, fitted and pasted."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image, ImageFile

from clowder_aimage.errors import UsageError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.pictures.decode import decode
from clowder_aimage.pictures.fit import fit
from clowder_aimage.pictures.input import (
    check_mask,
    compute_mask_box,
    inspect,
    paste,
    prepare,
)

FILE = f"sha256:{'0' * 64}"


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def gradient(width: int = 6, height: int = 4) -> Image.Image:
    values = np.arange(width * height * 3, dtype=np.uint8).reshape(height, width, 3) * 3
    return Image.fromarray(values)


def png_header(width: int, height: int) -> bytes:
    """Return a PNG file that states a size and has no picture."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 64)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_the_types_that_are_read(kind: str) -> None:
    found = inspect(file_of(gradient(), kind), "it")
    assert (found.width, found.height) == (6, 4)
    assert found.descriptor.media_type == f"image/{kind.lower()}"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it is not a picture that can be read"),
        (b"a text, and not a picture", "it is not a picture that can be read"),
        (file_of(gradient(), "GIF"), "it is not a picture that can be read"),
        (file_of(gradient(), "BMP"), "it is not a picture that can be read"),
        (file_of(Image.effect_noise((64, 64), 90))[:2000], "it is not a picture that can be read"),
        (png_header(100_000, 100_000), "it has more than 33554432 pixels"),
        (png_header(8193, 8192), "it has more than 33554432 pixels"),
        (png_header(1, 30_000_000), "it has 1 x 30000000 pixels: a side may have at most 32768"),
        (png_header(40_000, 800), "it has 40000 x 800 pixels: a side may have at most 32768"),
        (png_header(32_768, 400), "pixels: one side may be at most 64 times the other"),
        (png_header(1, 65), "pixels: one side may be at most 64 times the other"),
        (
            png_header(6, 4)[:-12] + b"\0\x50\0\0NOPE" + bytes(5 << 20),
            "bytes for 6 x 4 pixels; save it again",
        ),
        (png_header(0, 5), "it is not a picture that can be read"),
        (
            file_of(gradient(), "PNG", save_all=True, append_images=[gradient().rotate(180)]),
            "it is animated",
        ),
        (
            file_of(gradient(), "WEBP", save_all=True, append_images=[gradient().rotate(180)]),
            "it is animated",
        ),
    ],
)
def test_what_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        inspect(data, "it")
    assert message in f"{refused.value.message}; {refused.value.hint}"


def test_a_file_that_is_too_large_is_refused() -> None:
    with pytest.raises(UsageError, match="pictures may have"):
        inspect(b"\0" * ((64 << 20) + 1), "it")


def test_a_picture_with_another_file_behind_it_is_the_picture() -> None:
    data = file_of(gradient(), "PNG") + b"PK\x03\x04<script>alert(1)</script>"
    assert (np.asarray(decode(data, "it")) == np.asarray(gradient())).all()


def test_a_rotated_picture_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees clockwise
    found = decode(file_of(gradient(), "PNG", exif=exif), "it")
    assert found.size == (4, 6)
    assert (np.asarray(found) == np.rot90(np.asarray(gradient()), -1)).all()


@pytest.mark.parametrize(
    ("image", "mode", "pixel"),
    [
        (Image.new("L", (4, 4), 200), "RGB", (200, 200, 200)),
        (Image.new("1", (4, 4), 1), "RGB", (255, 255, 255)),
        (Image.new("LA", (4, 4), (10, 128)), "RGBA", (10, 10, 10, 128)),
        (Image.new("RGBA", (4, 4), (1, 2, 3, 4)), "RGBA", (1, 2, 3, 4)),
        (Image.fromarray(np.full((4, 4), 51400, np.uint16)), "RGB", (200, 200, 200)),
    ],
    ids=lambda value: getattr(value, "mode", None),
)
def test_modes(image: Image.Image, mode: str, pixel: tuple[int, ...]) -> None:
    found = decode(file_of(image), "it")
    assert found.mode == mode
    assert found.getpixel((1, 1)) == pixel


def test_a_cmyk_picture_and_a_palette() -> None:
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = decode(file_of(cmyk, "JPEG", quality=100), "it").getpixel((4, 4))
    assert isinstance(red, tuple)
    assert red[0] > 240
    assert max(red[1:3]) < 20
    palette = gradient().quantize(8)
    assert decode(file_of(palette), "it").mode == "RGB"
    assert decode(file_of(palette, transparency=0), "it").mode == "RGBA"


def test_a_size_is_refused_before_the_picture_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda _: pytest.fail("it was decoded"))
    for size in (1, 30_000_000), (8193, 8192), (100, 6401):
        with pytest.raises(UsageError, match="pixels"):
            decode(png_header(*size), "it")


@pytest.mark.parametrize("how", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("size", [(32, 32), (16, 48), (96, 16), (6, 4)])
def test_fits_have_the_size(how: str, size: tuple[int, int]) -> None:
    assert fit(gradient(), size, how).size == size


def test_cropping_keeps_the_middle_and_padding_everything() -> None:
    values = np.zeros((10, 30, 3), np.uint8)
    values[:, 10:20] = 255
    image = Image.fromarray(values)
    assert (np.asarray(fit(image, (10, 10), "crop")) == 255).all()
    padded = np.asarray(fit(image, (30, 30), "pad"))
    assert (padded[:, 12:18] == 255).all()
    assert (padded[:, :8] == 0).all()
    mask = np.asarray(fit(image.convert("L"), (30, 30), "pad"))
    assert (mask[:9] == 255).all()  # what is added is painted
    assert (mask[12:18, :8] == 0).all()


@pytest.mark.parametrize(
    ("place", "aspect", "expected"),
    [
        ((slice(40, 60), slice(40, 60)), 1.0, (35, 35, 65, 65)),
        ((slice(0, 20), slice(0, 20)), 1.0, (0, 0, 30, 30)),
        ((slice(40, 60), slice(40, 60)), 2.0, (20, 35, 80, 65)),
        ((slice(0, 100), slice(0, 100)), 1.0, (0, 0, 100, 100)),
        ((slice(0, 100), slice(50, 51)), 4.0, (0, 0, 100, 100)),
    ],
)
def test_the_box_around_a_mask(
    place: tuple[slice, slice], aspect: float, expected: tuple[int, int, int, int]
) -> None:
    mask = np.zeros((100, 100), np.bool_)
    mask[place] = True
    assert compute_mask_box(mask, aspect) == expected


def test_pasting_keeps_the_original_and_mixes_at_the_edge() -> None:
    original, made = np.zeros((20, 20, 3), np.uint8), np.full((20, 20, 3), 200, np.uint8)
    mask = np.zeros((20, 20), np.uint8)
    mask[:, 10:] = 255
    hard = paste(made, original, mask, 0)
    assert (hard[:, :10] == 0).all()
    assert (hard[:, 10:] == 200).all()
    soft = paste(made, original, mask, 6)
    row = soft[10, :, 0].astype(int)
    assert (np.diff(row) >= 0).all()
    assert len(set(row.tolist())) > 3
    assert (row[0], row[-1]) == (0, 200)


def request_of(**changes: Any) -> GenerateRequest:
    return GenerateRequest.of("x", width=32, height=32, **{"image": FILE, "mask": FILE, **changes})


def test_a_cropped_request_changes_only_its_surroundings() -> None:
    image = gradient(64, 64)
    mask = Image.new("L", (64, 64), 0)
    mask.paste(255, (8, 8, 16, 16))
    prepared = prepare(request_of(crop=True), image, mask)
    assert prepared.inputs.pixels is not None
    assert prepared.inputs.pixels.shape == (32, 32, 3)
    assert prepared.inputs.mask is not None
    result = prepared.finish(np.full((32, 32, 3), 9, np.uint8))
    painted = np.asarray(mask) >= 128
    assert result.shape == (64, 64, 3)
    assert (result[painted] == 9).all()
    assert (result[~painted] == np.asarray(image)[~painted]).all()


def test_masks_that_do_not_fit_are_refused() -> None:
    def file(*of: Any) -> bytes:
        return file_of(Image.new(*of))

    image = file("RGB", (6, 4), 9)
    check_mask(image, file("L", (6, 4), 128))
    check_mask(file("RGBA", (6, 4), (1, 1, 1, 0)), None)
    for given, mask, words in (
        (image, file("L", (6, 4), 127), "the mask is empty"),
        (image, file("L", (4, 6), 255), "4 x 6 pixels, the image has 6 x 4"),
        (image, None, "no transparency"),
        (file("RGBA", (6, 4), (1, 1, 1, 255)), None, "the mask is empty"),
    ):
        with pytest.raises(UsageError, match=words):
            check_mask(given, mask)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": None}, "mask requires an image"),
        ({"image": None, "mask": None, "strength": 0.5}, "strength requires an image"),
        ({"strength": 0.0}, "strength must be a number above 0"),
        ({"strength": 1.5}, "strength must be a number above 0, up to 1"),
        ({"fit": "wide"}, "fit must be one of crop, pad, stretch"),
        ({"feather": 300, "paste": True}, "feather must be a whole number"),
        ({"mask": None, "paste": True}, "paste requires a mask"),
        ({"feather": 8}, "feather requires paste or crop"),
        ({"image": "sha256:x"}, "image must be the digest of a picture"),
    ],
)
def test_parameters_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        request_of(**changes)


def test_a_photograph_with_previews_behind_it_is_read() -> None:
    data = io.BytesIO()
    gradient(64, 64).save(data, "MPO", save_all=True, append_images=[gradient(8, 8)])
    found = inspect(data.getvalue(), "it")
    assert (found.descriptor.media_type, found.width) == ("image/jpeg", 64)
