"""Picture files that look the same give the same pixels; metadata never decide whether they do."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import ExifTags, Image, ImageCms
from PIL.PngImagePlugin import PngInfo

from clowder_aimage.errors import UsageError
from clowder_aimage.pictures.decode import decode
from clowder_aimage.pictures.file_metadata import MAX_PROFILE
from clowder_aimage.pictures.input import inspect
from clowder_aimage.pictures.transparency import flatten

ORIENTATION = int(ExifTags.Base.Orientation)
SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
BIG = 2_000_000


def encode(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def chunk(name: bytes, data: bytes, *, is_damaged: bool = False) -> bytes:
    checksum = zlib.crc32(name + data) ^ is_damaged
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", checksum)


def write_png(depth: int, kind: int, rows: bytes, *chunks: bytes, size: tuple[int, int]) -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", *size, depth, kind, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(rows))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(chunks) + pixels + chunk(b"IEND", b"")


def insert_chunk(part: bytes, data: bytes | None = None) -> bytes:
    """Return a PNG file with a part behind its head."""
    data = data or encode(draw())
    return data[:33] + part + data[33:]


def insert_segment(number: int, body: bytes, data: bytes | None = None) -> bytes:
    """Return a JPEG file with a segment at its begin."""
    data = data or encode(draw(), "JPEG", quality=95)
    segment = bytes((0xFF, number)) + struct.pack(">H", len(body) + 2) + body
    return data[:2] + segment + data[2:]


def append_riff(name: bytes, body: bytes, data: bytes | None = None) -> bytes:
    """Return a WebP file with a chunk at its end, which is announced."""
    data = data or encode(draw(), "WEBP", lossless=True, exif=b"Exif\0\0II*\0\x08\0\0\0\0\0")
    data += name + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)
    data = data[:4] + struct.pack("<I", len(data) - 8) + data[8:]
    return data[:20] + bytes((data[20] | 0x2C,)) + data[21:]


def draw() -> Image.Image:
    values = np.arange(16 * 24 * 3, dtype=np.uint32).reshape(16, 24, 3) * 7 % 251
    return Image.fromarray(values.astype(np.uint8))


def look(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(flatten(decode(data, "it")))


def write_texts(**options: Any) -> bytes:
    info = PngInfo()
    info.add_text("workflow", "x" * BIG, **options)
    return encode(draw(), pnginfo=info)


def write_long_text() -> bytes:
    info = PngInfo()
    info.add_itxt("workflow", "x" * BIG, zip=True)
    return encode(draw(), pnginfo=info)


def tiff(orientation: bytes, kind: int = 2, count: int | None = None) -> bytes:
    """Return Exif data of one tag, whose value has a type."""
    value = struct.pack("<HHI", ORIENTATION, kind, count or len(orientation))
    return b"II*\0\x08\0\0\0\1\0" + value + orientation.ljust(4, b"\0")[:4] + bytes(4)


PNG, JPEG = draw(), Image.open(io.BytesIO(encode(draw(), "JPEG", quality=95)))
# Files with metadata that are large, damaged or unknown, and the picture that they have
METADATA: dict[str, tuple[Callable[[], bytes], Image.Image]] = {
    "zTXt": (lambda: write_texts(zip=True), PNG),
    "iTXt": (write_long_text, PNG),
    "iCCP of zeros": (lambda: encode(draw(), icc_profile=bytes(BIG)), PNG),
    "iCCP that grows": (lambda: encode(draw(), icc_profile=bytes(20 * BIG)), PNG),
    "iCCP of another method": (lambda: insert_chunk(chunk(b"iCCP", b"a\0\1abc")), PNG),
    "iCCP cut off": (lambda: insert_chunk(chunk(b"iCCP", b"a")), PNG),
    "iCCP empty": (lambda: insert_chunk(chunk(b"iCCP", b"")), PNG),
    "text of a wrong checksum": (
        lambda: insert_chunk(chunk(b"tEXt", b"a\0b", is_damaged=True)),
        PNG,
    ),
    "zTXt of another method": (lambda: insert_chunk(chunk(b"zTXt", b"a\0\7b")), PNG),
    "short chunks": (
        lambda: insert_chunk(
            b"".join(chunk(name, b"") for name in (b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"acTL"))
        ),
        PNG,
    ),
    "eXIf": (lambda: insert_chunk(chunk(b"eXIf", b"II*\0\xff\xff\xff\xff")), PNG),
    "Exif in digits": (
        lambda: insert_chunk(chunk(b"tEXt", b"Raw profile type exif\0\n\n\nxyz")),
        PNG,
    ),
    "animation of a picture": (
        lambda: insert_chunk(
            chunk(b"acTL", struct.pack(">II", 1, 0))
            + chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 24, 16, 0, 0, 1, 1, 0, 0))
        ),
        PNG,
    ),
    "animation that is broken": (
        lambda: insert_chunk(chunk(b"acTL", b"") + chunk(b"fcTL", b"x" * 26)),
        PNG,
    ),
    "10 MiB of text": (lambda: insert_chunk(chunk(b"tEXt", b"a\0" + bytes(10 << 20))), PNG),
    "JFIF cut off": (lambda: insert_segment(0xE0, b"JFIF\0"), JPEG),
    "Adobe cut off": (lambda: insert_segment(0xEE, b"Adobe"), JPEG),
    "Exif of zeros": (lambda: insert_segment(0xE1, b"Exif\0\0" + bytes(60_000)), JPEG),
    "MPF": (lambda: insert_segment(0xE2, b"MPF\0" + b"\xff" * 90), JPEG),
    "Photoshop": (lambda: insert_segment(0xED, b"Photoshop 3.0\x008BIM\xff\xff\xff"), JPEG),
    "a part of a profile": (lambda: insert_segment(0xE2, b"ICC_PROFILE\0\1\2abc"), JPEG),
    "WebP unknown": (lambda: append_riff(b"junk", b"abc"), PNG),
    "WebP Exif": (lambda: append_riff(b"EXIF", b"xx"), PNG),
    "WebP profile": (lambda: append_riff(b"ICCP", b"abc"), PNG),
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_that_are_not_needed_do_not_matter(name: str) -> None:
    build, picture = METADATA[name]
    assert (look(build()) == np.asarray(picture)).all()


@pytest.mark.parametrize(
    "data",
    [
        insert_chunk(chunk(b"tRNS", b"\0\1\0\2\0\3", is_damaged=True)),
        encode(draw())[:-30],
        encode(draw()).replace(b"IDAT", b"IDAU"),
        encode(draw(), "JPEG")[:300],
        encode(draw(), "WEBP", lossless=True)[:-40],
        insert_chunk(b"\xff\xff\xff\xfftEXt"),
    ],
)
def test_damage_of_pixels_is_refused(data: bytes) -> None:
    with pytest.raises(UsageError, match="not a picture that can be read"):
        decode(data, "it")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (b"6", 2),
        (b"6\0", 2),
        (b"\6", 1),
        (b"\6\0", 3),
        (b"\6\0\0\0", 4),
        (b"\6", 7),
        (b"6", 7),
        (b"\6", 6),
        (b"\6\0", 8),
        (b"\6\0\0\0", 9),
        (struct.pack("<f", 6), 11),
    ],
)
def test_an_orientation_of_any_type_turns_a_picture(value: bytes, kind: int) -> None:
    sizes = {3: 2, 4: 4, 8: 2, 9: 4, 11: 4}
    exif = tiff(value, kind, len(value) // sizes.get(kind, 1))
    for data in (
        insert_chunk(chunk(b"eXIf", exif)),
        insert_segment(0xE1, b"Exif\0\0" + exif, encode(draw(), "JPEG", quality=95)),
        append_riff(b"EXIF", exif, encode(draw(), "WEBP", lossless=True, icc_profile=SRGB)),
    ):
        assert decode(data, "it").size == (16, 24)


@pytest.mark.parametrize("value", [b"66", b"9", b"x", b"0", b"", b"\xff"])
def test_an_orientation_that_is_not_clear_is_ignored(value: bytes) -> None:
    assert decode(insert_chunk(chunk(b"eXIf", tiff(value))), "it").size == (24, 16)


def test_an_orientation_in_xmp_or_in_digits() -> None:
    xmp = b'<x tiff:Orientation="6"/>'
    digits = b"\nexif\n   1\n" + tiff(b"6").hex().encode()
    for part in (
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + xmp),
        chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(xmp)),
        chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(digits)),
    ):
        assert decode(insert_chunk(part), "it").size == (16, 24)
    segment = insert_segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + xmp)
    assert decode(segment, "it").size == (16, 24)


# Two rows of four pixels: opaque, half transparent and transparent ones
LOOK = [(200, 60, 40, 255), (9, 90, 250, 255), (10, 20, 30, 128), (0, 0, 0, 0)] * 2


def draw_look(hidden: tuple[int, int, int]) -> Image.Image:
    pixels = [pixel if pixel[3] else (*hidden, 0) for pixel in LOOK]
    return Image.fromarray(np.array(pixels, np.uint8).reshape(2, 4, 4))


def write_palette() -> bytes:
    colours = bytes(value for pixel in LOOK[:4] for value in pixel[:3])
    alphas = bytes(pixel[3] for pixel in LOOK[:4])
    rows = b"\0\0\1\2\3" * 2
    chunks = chunk(b"PLTE", colours), chunk(b"tRNS", alphas)
    return write_png(8, 3, rows, *chunks, size=(4, 2))


def write_deep() -> bytes:
    row = b"\0" + b"".join(struct.pack(">4H", *(value * 257 for value in p)) for p in LOOK[:4])
    return write_png(16, 6, row * 2, size=(4, 2))


@pytest.mark.parametrize(
    "data",
    [
        *(encode(draw_look(hidden)) for hidden in ((0, 0, 0), (0, 255, 0), (255, 255, 255))),
        encode(draw_look((3, 4, 5)), "WEBP", lossless=True, exact=True),
        encode(draw_look((3, 4, 5)), icc_profile=SRGB),
        write_palette(),
        write_deep(),
    ],
    ids=["black", "green", "white", "webp", "profile", "palette", "16 bits"],
)
def test_files_of_the_same_look_are_equal(data: bytes) -> None:
    assert (look(data) == look(encode(draw_look((0, 0, 0))))).all()


GREYS = {
    "1 bit": write_png(1, 0, b"\0\x80", chunk(b"tRNS", b"\0\0"), size=(2, 1)),
    "2 bits": write_png(2, 0, b"\0\xc0", chunk(b"tRNS", b"\0\0"), size=(2, 1)),
    "4 bits": write_png(4, 0, b"\0\xf0", chunk(b"tRNS", b"\0\0"), size=(2, 1)),
    "4 bits, white": write_png(4, 0, b"\0\xf0", chunk(b"tRNS", b"\0\x0f"), size=(2, 1)),
    "8 bits": write_png(8, 0, b"\0\xff\0", chunk(b"tRNS", b"\0\0"), size=(2, 1)),
    "16 bits": write_png(16, 0, b"\0\xff\xff\0\1", chunk(b"tRNS", b"\0\1"), size=(2, 1)),
    "grey with alpha": write_png(8, 4, b"\0\xff\xff\0\0", size=(2, 1)),
    "16 bits with alpha": write_png(16, 4, b"\0\xff\xff\xff\xff\0\7\0\0", size=(2, 1)),
    "colour": write_png(
        8, 2, b"\0\xff\xff\xff\1\2\3", chunk(b"tRNS", b"\0\1\0\2\0\3"), size=(2, 1)
    ),
    "deep colour": write_png(
        16, 2, b"\0" + b"\xff" * 6 + b"\1\2" * 3, chunk(b"tRNS", b"\1\2" * 3), size=(2, 1)
    ),
}


@pytest.mark.parametrize("name", GREYS)
def test_a_colour_that_is_transparent_is_found_at_any_depth(name: str) -> None:
    alpha = np.asarray(decode(GREYS[name], "it").getchannel("A"))
    assert alpha.tolist() == ([[0, 255]] if "white" in name else [[255, 0]])


def test_16_bits_of_grey_and_of_colour_are_equal() -> None:
    values = [0x0000, 0x8001, 0x80FF, 0xFEFF, 0xFFFF]
    grey = b"\0" + struct.pack(">5H", *values)
    colour = b"\0" + b"".join(struct.pack(">3H", *[value] * 3) for value in values)
    pictures = [write_png(16, kind, rows, size=(5, 1)) for kind, rows in ((0, grey), (2, colour))]
    assert (look(pictures[0]) == look(pictures[1])).all()


def build_profile(space: bytes, tags: dict[bytes, bytes]) -> bytes:
    """Return a profile of a display, of version 2 (ICC.1:2001-04)."""
    place, table, data = 132 + 12 * len(tags), b"", b""
    for name, body in tags.items():
        table += name + struct.pack(">II", place + len(data), len(body))
        data += body + bytes(-len(body) % 4)
    size = place + len(data)
    head = struct.pack(">I", size) + b"lcms\2\x40\0\0mntr" + space + b"XYZ " + bytes(12) + b"acsp"
    head += bytes(28) + struct.pack(">III", 63190, 65536, 54061)
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + data


def curve(gamma: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))


def xyz(*values: float) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(value * 65536) for value in values))


WHITE = {b"wtpt": xyz(0.9642, 1, 0.8249)}
# Adobe RGB (1998), whose red, green and blue have this gamma and these colorants at D50
WIDE = build_profile(
    b"RGB ",
    {
        **WHITE,
        b"rXYZ": xyz(0.60974, 0.31111, 0.01947),
        b"gXYZ": xyz(0.20528, 0.62567, 0.06087),
        b"bXYZ": xyz(0.14919, 0.06322, 0.74457),
        **dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve(563 / 256)),
    },
)
LINEAR_GREY = build_profile(b"GRAY", {**WHITE, b"kTRC": curve(1)})


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1")]
    + [("JPEG", "RGB"), ("JPEG", "L"), ("WEBP", "RGB"), ("WEBP", "RGBA")],
)
def test_a_profile_of_srgb_changes_nothing(kind: str, mode: str) -> None:
    image = draw().convert(mode)
    plain, tagged = encode(image, kind), encode(image, kind, icc_profile=SRGB)
    assert (look(plain) == look(tagged)).all()
    assert decode(tagged, "it").info["warnings"] == ()


@pytest.mark.parametrize(
    ("image", "profile", "expected"),
    [
        # By the formulas of Adobe RGB (1998) and IEC 61966-2-1
        (Image.new("RGB", (4, 4), (100, 150, 100)), WIDE, (64, 151, 98)),
        (Image.new("RGBA", (4, 4), (100, 150, 100, 255)), WIDE, (64, 151, 98)),
        (Image.new("RGB", (4, 4), (128, 128, 128)), WIDE, (127, 127, 127)),
        # Of the light of white, 55 / 255
        (Image.new("L", (4, 4), 55), LINEAR_GREY, (128, 128, 128)),
        (Image.new("LA", (4, 4), (55, 255)), LINEAR_GREY, (128, 128, 128)),
    ],
)
def test_colours_of_a_profile_become_srgb(
    image: Image.Image, profile: bytes, expected: tuple[int, int, int]
) -> None:
    seen = look(encode(image, icc_profile=profile))
    assert np.abs(seen.astype(int) - expected).max() <= 2


def build_ink_profile() -> bytes:
    """Return a profile of a printer whose inks are neutral: black is L* = 0, paper L* = 100."""
    corners = ((c, m, y, k) for c in (0, 1) for m in (0, 1) for y in (0, 1) for k in (0, 1))
    grid = bytes(
        value
        for c, m, y, k in corners
        for value in (round(255 * (1 - k) * (1 - (c + m + y) / 3)), 128, 128)
    )
    unity = struct.pack(
        ">9i", *(65536 * (row == column) for row in range(3) for column in range(3))
    )
    line = bytes(range(256))
    table = b"mft1" + bytes(4) + bytes((4, 3, 2, 0)) + unity + line * 4 + grid + line * 3
    profile = build_profile(b"CMYK", {**WHITE, b"A2B0": table, b"A2B1": table})
    return profile.replace(b"mntr", b"prtr", 1).replace(b"CMYKXYZ ", b"CMYKLab ", 1)


@pytest.mark.parametrize(("black", "grey"), [(0, 255), (255, 0), (128, 118), (51, 198)])
def test_inks_become_srgb(black: int, grey: int) -> None:
    # The grey of L* = 49.8 and 80 is 118 and 198 (CIE 15, IEC 61966-2-1)
    image = Image.new("CMYK", (16, 16), (0, 0, 0, black))
    seen = look(encode(image, "JPEG", quality=100, icc_profile=build_ink_profile()))
    assert np.abs(seen.astype(int) - grey).max() <= 2
    paper = Image.new("CMYK", (16, 16), (0, 0, 0, 128))
    assert look(encode(paper, "JPEG", quality=100))[0, 0].tolist() == [127, 127, 127]


def test_a_profile_in_several_parts_of_a_jpeg() -> None:
    image, half = Image.new("RGB", (16, 16), (100, 150, 100)), len(WIDE) // 2
    plain = encode(image, "JPEG", quality=100, subsampling=0)
    first, second = b"ICC_PROFILE\0\1\2" + WIDE[:half], b"ICC_PROFILE\0\2\2" + WIDE[half:]
    for parts in ((first, second), (second, first)):
        data = plain
        for part in parts:
            data = insert_segment(0xE2, part, data)
        assert np.abs(look(data).astype(int) - (64, 151, 98)).max() <= 3


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        (b"abc", "is invalid"),
        (WIDE[:200], "is invalid"),
        (WIDE[:36] + b"xxxx" + WIDE[40:], "is invalid"),
        (WIDE.replace(b"mntr", b"link"), "is invalid"),
        (build_profile(b"RGB ", {**WHITE, b"D2B0": bytes(64)}), "is invalid"),
        (bytes(MAX_PROFILE + 1), "has more than 4 MiB"),
        (LINEAR_GREY, "is for pictures of another kind"),
    ],
)
def test_a_profile_that_cannot_be_used_is_ignored_with_a_warning(
    profile: bytes, words: str
) -> None:
    data = encode(draw(), icc_profile=profile)
    assert (look(data) == np.asarray(draw())).all()
    assert [*inspect(data, "it").warnings] == [f"has a colour profile that {words}, and is ignored"]


def test_a_transparent_picture_is_on_white_with_a_warning() -> None:
    data = encode(draw_look((0, 255, 0)))
    file = inspect(data, "it")
    assert (file.is_transparent, file.is_cut_out) == (True, True)
    assert look(data)[0, 3].tolist() == [255, 255, 255]
    assert look(data)[0, 2].tolist() == [132, 137, 142]
    assert file.list_warnings() == ["has transparent parts, which are white for the model"]
    assert file.list_warnings("alpha") == []
    opaque = inspect(encode(Image.new("RGBA", (4, 4), (1, 2, 3, 255))), "it")
    assert (opaque.is_transparent, opaque.list_warnings()) == (False, [])
