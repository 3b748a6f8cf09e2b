"""Text in picture files, as other programs read it."""

from __future__ import annotations

import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import ExifTags, Image

from clowder_aimage import __version__
from clowder_aimage.model.picture import encode_picture, load_picture

PIXELS = np.zeros((16, 32, 3), np.uint8)
FACTS = {
    "reference": "localhost:5000/team/shapes:v1",
    "digest": "sha256:0123456789abcdef",
    "prompt": "two red circles,\nSteps: of stone",
    "negative": 'blue, "or" green',
    "steps": 8,
    "seed": 7,
    "guidance": 1.5,
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
        "Seed": "7",
        "Size": "32x16",
        "Model hash": "0123456789",
        "Model": '"shapes:v1"',
        "Version": f"aimage {__version__}",
    }
    (tmp_path / "one.png").write_bytes(data)
    assert load_picture(tmp_path / "one.png")[1] == FACTS


def test_a_prompt_in_any_script_is_kept_and_an_absent_negative_left_out() -> None:
    said = texts(encode_picture(PIXELS, FACTS | {"prompt": "二つの円", "negative": None}))
    assert said["parameters"].startswith("二つの円\nSteps: 8, ")


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
def test_a_prompt_too_long_for_a_jpeg_leaves_the_picture_readable(kind: str) -> None:
    data = encode_picture(PIXELS, FACTS | {"prompt": "x" * 40_000}, kind)
    with Image.open(io.BytesIO(data)) as image:
        assert image.size == (32, 16) and not image.getexif()


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_pictures_without_facts_have_no_text(kind: str) -> None:
    data = encode_picture(PIXELS, None, kind)
    with Image.open(io.BytesIO(data)) as image:
        assert not texts(data) and not image.getexif()
