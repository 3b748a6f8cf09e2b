"""The memory of pictures: at most four times that of the decoded pictures, whatever they are."""

from __future__ import annotations

import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image

from clowder_aimage.pictures.decode import decode
from clowder_aimage.pictures.fit import fit
from tests.picture_memory import NARROW, encode, turned
from tests.process import run

# Beside the pictures: modules, tables, blocks of the allocator
_REST = 16 << 20
# Large blocks are returned to the system at once
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}


@pytest.mark.skipif(sys.platform != "linux", reason="the most memory is measured on Linux")
def test_a_picture_takes_four_times_its_decoded_size_at_most(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.picture_memory", str(tmp_path)]
    environment = {**os.environ, **_ALLOCATOR}
    done = run(program, env=environment, stderr=None, check=True)
    measured = json.loads(done.stdout)
    assert len(measured) > 40
    too_much = {
        name: f"{used / decoded:.1f}"
        for name, (used, decoded) in measured.items()
        if used > 4 * decoded + _REST
    }
    assert not too_much


@pytest.mark.parametrize("mode", ["crop", "pad", "stretch"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((60, 40), (32, 32)),
        ((31, 124), (64, 48)),
        (NARROW, (512, 512)),
        (NARROW, (4096, 64)),
        (NARROW[::-1], (64, 4096)),
        ((1, 64), (512, 512)),
        ((64, 1), (512, 512)),
        ((2, 30_000), (64, 64)),
    ],
)
def test_no_picture_on_the_way_is_larger_than_source_and_target(
    source: tuple[int, int], target: tuple[int, int], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list[int]()
    resize = Image.Image.resize

    def record(image: Image.Image, size: tuple[int, int], *more: object) -> Image.Image:
        # The first of two passes makes rows of the new width; with a box, few of them
        sizes.extend([size[0] * size[1], *([] if more[1:] else [size[0] * image.height])])
        return resize(image, size, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Image.Image, "resize", record)
    assert fit(Image.new("RGB", source), target, mode).size == target
    assert max(sizes, default=0) <= source[0] * source[1] + target[0] * target[1]


@pytest.mark.parametrize(
    ("source", "target"), [((80, 300), (256, 128)), ((300, 80), (128, 256)), ((31, 124), (64, 64))]
)
def test_cropping_without_the_whole_differs_by_two_levels_at_most(
    source: tuple[int, int], target: tuple[int, int]
) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (source[1] // 8, source[0] // 8, 3), np.uint8)
    image = Image.fromarray(noise).resize(source, Image.Resampling.BICUBIC)
    factor = max(target[0] / source[0], target[1] / source[1])
    whole = image.resize(
        (round(source[0] * factor), round(source[1] * factor)), Image.Resampling.LANCZOS
    )
    left, top = (-((part - size) // 2) for part, size in zip(target, whole.size, strict=True))
    expected = np.asarray(whole.crop((left, top, left + target[0], top + target[1])), np.int16)
    assert np.abs(np.asarray(fit(image, target, "crop")) - expected).max() <= 2


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_picture_is_turned_without_its_decoder(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # That of WebP has two pictures of its own in memory
    opened, left = list[weakref.ref[Image.Image]](), list[object]()
    read, turn = Image.open, Image.Image.transpose

    def note(*given: Any, **options: Any) -> Image.Image:
        image = read(*given, **options)
        opened.append(weakref.ref(image))
        return image

    def check(image: Image.Image, method: Image.Transpose) -> Image.Image:
        left.extend(each() for each in opened)
        return turn(image, method)

    monkeypatch.setattr(Image, "open", note)
    monkeypatch.setattr(Image.Image, "transpose", check)
    data = encode(Image.new("RGB", (6, 4)), kind, exif=turned(8))
    assert decode(data, "it").size == (4, 6)
    assert left == [None]
