"""Text in picture files, as other programs read it."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image, PngImagePlugin

from clowder_aimage import __version__
from clowder_aimage.errors import FormatError, UsageError
from clowder_aimage.model.picture import (
    compare_pictures,
    encode_picture,
    read_picture,
    render_contact_sheet,
)
from clowder_aimage.model.picture_metadata import QUALITIES, read_metadata
from tests.picture_file import load_picture

PIXELS = np.zeros((16, 32, 3), np.uint8)
FACTS = {
    "reference": "localhost:5000/team/shapes:v1",
    "digest": "sha256:0123456789abcdef",
    "prompt": "two red circles,\nSteps: of stone",
    "negative": 'blue, "or" green',
    "steps": 8,
    "seed": 7,
    "guidance": 1.5,
    "guidance_end": 0.5,
    "cache_threshold": 0.1,
}
# stable-diffusion-webui, modules/infotext_utils.py: re_param
PAIR = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')


def texts(data: bytes) -> dict[str, str]:
    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return dict(getattr(image, "text", {}))


def test_parameters_are_read_as_by_the_web_ui(tmp_path: Path) -> None:
    data = encode_picture(PIXELS, FACTS)
    *lines, last = texts(data)["parameters"].split("\n")
    assert "\n".join(lines) == f"{FACTS['prompt']}\nNegative prompt: {FACTS['negative']}"
    assert dict(PAIR.findall(last)) == {
        "Steps": "8",
        "Sampler": "Euler",
        "CFG scale": "1.5",
        "Guidance end": "0.5",
        "Cache threshold": "0.1",
        "Seed": "7",
        "Size": "32x16",
        "Model hash": "0123456789",
        "Model": '"shapes:v1"',
        "Version": f"aimage {__version__}",
    }
    (tmp_path / "one.png").write_bytes(data)
    assert load_picture(tmp_path / "one.png")[1] == FACTS


def test_adapters_are_tags_and_hashes_as_of_the_web_ui(tmp_path: Path) -> None:
    names = [("styles/My Ink", 0.8), ("host:5000/team/x:v1", -1.0)]
    digest = "sha256:0123456789abcdef"
    loras = [{"model": name, "strength": strength, "digest": digest} for name, strength in names]
    data = encode_picture(PIXELS, FACTS | {"loras": loras})
    last = texts(data)["parameters"].rpartition("\n")[2]
    tags = "<lora:styles/My Ink:0.8> <lora:host:5000/team/x:v1:-1.0>"
    assert texts(data)["parameters"].startswith(f"{FACTS['prompt']} {tags}\n")
    hashes = json.loads(dict(PAIR.findall(last))["Lora hashes"])
    assert hashes == "styles/My Ink: 0123456789ab, host:5000/team/x:v1: 0123456789ab"
    (tmp_path / "one.png").write_bytes(data)
    assert load_picture(tmp_path / "one.png")[1]["loras"] == loras


def test_a_prompt_in_any_script_is_kept_and_defaults_are_left_out() -> None:
    usual = {"prompt": "二つの円", "negative": None, "guidance_end": 1.0, "cache_threshold": 0.0}
    said = texts(encode_picture(PIXELS, FACTS | usual))
    assert said["parameters"].startswith("二つの円\nSteps: 8, ")
    assert not re.search("Guidance end|Cache", said["parameters"])


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_jpeg_and_webp_have_the_parameters_where_the_web_ui_writes_them(kind: str) -> None:
    """It writes them with piexif: ``UserComment.dump(text, encoding="unicode")``."""
    data = encode_picture(PIXELS, FACTS | {"prompt": "二つの円"}, kind)
    with Image.open(io.BytesIO(data)) as image:
        assert image.format == kind.upper()
        exif = image.getexif()
    comment = exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.UserComment]
    assert comment[:8] == b"UNICODE\0"
    expected = texts(encode_picture(PIXELS, FACTS | {"prompt": "二つの円"}))["parameters"]
    assert comment[8:].decode("utf-16-be") == expected
    assert exif[ExifTags.Base.Software] == "aimage"


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_jpeg_and_webp_have_the_facts_and_their_quality(kind: str, tmp_path: Path) -> None:
    path, facts = tmp_path / "x", FACTS | {"prompt": "二つの円"}
    for quality, used in ((None, QUALITIES[kind]), (30, 30)):
        path.write_bytes(encode_picture(PIXELS, facts, kind, quality))
        assert load_picture(path)[1] == facts | {"quality": used}
    with Image.open(path) as image:  # other programs keep them
        image.save(tmp_path / "y", kind, exif=image.getexif())
    assert load_picture(tmp_path / "y")[1] == facts | {"quality": 30}


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_facts_too_long_for_a_jpeg_leave_the_picture_readable(kind: str) -> None:
    """The comment, in UTF-16, is left out first."""
    for length, has_comment, has_facts in ((40_000, False, True), (70_000, False, False)):
        facts = FACTS | {"prompt": "x" * length}
        data = encode_picture(PIXELS, facts, kind)
        assert bool(read_metadata(data)) == (has_facts or kind == "webp")
        with Image.open(io.BytesIO(data)) as image:
            assert image.size == (32, 16)
            comment = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment)
        assert bool(comment) == (has_comment or kind == "webp")


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_pictures_of_a_lossy_format_are_compared_as_files(kind: str) -> None:
    draw = np.random.default_rng(3)
    noise = draw.integers(0, 256, (32, 32, 3), np.uint8)
    read = read_picture(encode_picture(noise, FACTS, kind, 20), "it")
    assert np.abs(read.pixels.astype(int) - noise).mean() > 4
    same = compare_pictures(read.pixels, noise, kind, 20)
    assert same is not None and (same.is_equal, same.largest) == (True, 0)
    changed = noise.copy()
    changed[:16] = 0
    for other, quality in ((changed, 20), (noise, 95)):
        found = compare_pictures(read.pixels, other, kind, quality)
        assert found is not None and not found.is_equal
    near = compare_pictures(noise, np.clip(noise, 1, 254), "png")
    assert near is not None and (near.is_equal, near.largest) == (False, 1)
    assert compare_pictures(noise, noise[:16], "png") is None


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_damaged_exif_data_is_an_error_of_ours(kind: str) -> None:
    data = encode_picture(PIXELS, FACTS, kind)
    start = data.index(b"MM\0*")
    draw, damaged = random.Random(5), 0
    for _ in range(200):
        changed = bytearray(data)
        changed[start + draw.randrange(120)] = draw.randrange(256)
        try:
            read_metadata(bytes(changed))
        except FormatError as error:
            damaged += error.exit_code == 5
    assert damaged
    for end in range(start, start + 100, 7):
        with contextlib.suppress(FormatError):
            assert read_metadata(data[:end]) == {}


def test_compressed_facts_of_a_png_are_read() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("aimage", json.dumps(FACTS), "en", "facts", zip=True)
    bomb = PngImagePlugin.PngInfo()
    bomb.add_itxt("aimage", json.dumps({"x": "x" * (2 << 20)}), zip=True)
    for chunks, facts in ((info, FACTS), (bomb, {})):
        buffer = io.BytesIO()
        Image.fromarray(PIXELS).save(buffer, "PNG", pnginfo=chunks)
        assert read_metadata(buffer.getvalue()) == facts


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_pictures_without_facts_have_no_text(kind: str) -> None:
    data = encode_picture(PIXELS, None, kind)
    with Image.open(io.BytesIO(data)) as image:
        assert not texts(data) and not image.getexif()


def damaged(data: bytes, count: int) -> Iterator[bytes]:
    """Yield a PNG with bytes, lengths and chunks changed, by a fixed generator."""
    draw = random.Random(19)
    kinds = [
        b"iTXt",
        b"tEXt",
        b"zTXt",
        b"iCCP",
        b"pHYs",
        b"eXIf",
        b"tRNS",
        b"gAMA",
        b"acTL",
        b"fcTL",
    ]
    for _ in range(count):
        changed, at = bytearray(data), draw.randrange(8, len(data))
        kind = draw.choice(kinds)
        body = draw.randbytes(draw.randrange(40))
        chunk = struct.pack(">I", len(body)) + kind + body
        chunk += struct.pack(">I", zlib.crc32(kind + body))
        yield bytes(draw.choice([changed[:at], changed[:33] + chunk + changed[33:]]))
        changed[at] = draw.randrange(256)
        yield bytes(changed)


def test_a_damaged_picture_is_an_error_of_ours(tmp_path: Path) -> None:
    path, refused = tmp_path / "x.png", 0
    for data in damaged(encode_picture(PIXELS, FACTS), 300):
        path.write_bytes(data)
        try:
            load_picture(path)
        except UsageError:
            refused += 1
    assert refused


def test_a_picture_of_too_many_pixels_is_refused_without_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    data = bytearray(encode_picture(PIXELS, FACTS))
    for width, height in ((12_000, 14_000), (20_000, 20_000)):  # Pillow's warning, and its error
        data[16:24] = struct.pack(">II", width, height)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
        path.write_bytes(data)
        with pytest.raises(UsageError, match="more than 67108864 pixels"):
            load_picture(path)


def test_facts_with_a_number_of_400_digits_are_no_facts(tmp_path: Path) -> None:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("aimage", json.dumps(FACTS | {"guidance": 10**400}))
    Image.fromarray(PIXELS).save(tmp_path / "x.png", pnginfo=info)
    with pytest.raises(UsageError, match="no generation settings"):
        load_picture(tmp_path / "x.png")


def test_a_sheet_refuses_what_is_not_a_picture() -> None:
    data = encode_picture(np.zeros((8, 8, 3), np.uint8), None)
    assert render_contact_sheet([(1, data)]).startswith(b"\x89PNG")
    for damaged in (b"", b"GIF89a", data[:45]):
        with pytest.raises(FormatError, match="a picture is damaged"):
            render_contact_sheet([(1, data), (2, damaged)])
