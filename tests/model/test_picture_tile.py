"""The areas and tiles of pictures that are larger than what is generated at once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.generate import RunnableModel
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout.stored_aimage import StoredAImage
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.picture_tile import TileGrid, keep_shapes, mix, new_area
from clowder_aimage.model.pipeline import Image as Made
from clowder_aimage.model.pipeline import PictureInput, Step
from clowder_aimage.pictures.input import (
    PictureInputs,
    PreparedPicture,
    TiledPicture,
    enlarge,
    prepare,
)
from tests.model.model_blobs import FolderStore

IMAGE = f"sha256:{'1' * 64}"


def noise(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (height, width, 3), dtype=np.uint8)


def test_the_new_area_falls_to_nothing_in_the_picture() -> None:
    share = new_area(256, 128, (16, 0, 0, 8))
    assert share.shape == (136, 272)
    assert (share[:, :16] == 1).all() and (share[128:] == 1).all()
    assert np.allclose(share[0, 16:48], 1 - (np.arange(32) + 0.5) / 32)
    assert (share[:96, 48:] == 0).all()
    assert np.allclose(share[96:128, 200], (np.arange(32) + 0.5) / 32)


def test_a_small_picture_keeps_its_middle() -> None:
    share = new_area(16, 16, (8, 8, 8, 8))
    assert (share[8 + 4 : 24 - 4, 8 + 4 : 24 - 4] == 0).all()


def test_mix_is_linear() -> None:
    made, original = np.full((1, 3, 3), 200, np.uint8), np.full((1, 3, 3), 100, np.uint8)
    mixed = mix(made, original, np.array([[0, 0.5, 1]], np.float32))
    assert mixed[0, :, 0].tolist() == [100, 150, 200]


@pytest.mark.parametrize(
    ("width", "height", "tile", "count"),
    [
        (300, 200, (128, 128), 6),
        (128, 64, (128, 64), 1),
        (129, 64, (128, 64), 2),
        (40, 20, (64, 64), 1),
    ],
)
def test_tiles_that_are_not_changed_give_the_picture(
    width: int, height: int, tile: tuple[int, int], count: int
) -> None:
    grid, picture = TileGrid.cover(width, height, tile), noise(width, height)
    parts = grid.cut(picture)
    assert len(parts) == count
    assert {part.shape for part in parts} == {(tile[1], tile[0], 3)}
    assert np.array_equal(grid.join(parts), picture)


def test_tiles_are_no_larger_than_the_picture_needs() -> None:
    assert TileGrid.cover(100, 700, (1024, 512)).tile == (128, 512)


def test_seams_are_mixed_linearly() -> None:
    grid = TileGrid.cover(192, 64, (128, 64))
    assert grid.origins == ((0, 0), (64, 0))
    dark, light = (np.full((64, 128, 3), value, np.uint8) for value in (0, 240))
    row = grid.join([dark, light])[32, :, 0].astype(int)
    assert (row[:64] == 0).all() and (row[128:] == 240).all()
    steps = np.diff(row)
    assert steps.min() >= 0 and steps.max() <= 8  # no step is seen


def test_what_is_made_keeps_the_shapes_of_the_picture_and_its_own_details() -> None:
    shape = np.full((64, 96, 3), 60, np.uint8)
    shape[16:48, 16:48] = 180
    shape[:, 64:] = np.where(np.indices((64, 32)).sum(0) % 2, 100, 20)[..., None]
    detail = np.where(np.indices((64, 96))[1] % 2, 10, -10)[..., None]
    made = keep_shapes((120 + detail).repeat(3, 2).astype(np.uint8), shape, 4)
    inner = (slice(28, 36), slice(28, 36))  # flat: less than the detail
    assert np.abs(made[inner] - (180 + 0.4 * detail[inner])).max() <= 1
    change = made[:, 70:90].astype(int) - shape[:, 70:90]
    assert change.max() == 24 and change.min() == -24  # 4, and half of the deviation 40
    assert np.array_equal(keep_shapes(shape, shape, 6), shape)


def test_neighbours_overlap_by_a_quarter_at_least() -> None:
    starts = sorted({x for x, _ in TileGrid.cover(1000, 64, (256, 64)).origins})
    assert starts[0] == 0 and starts[-1] == 1000 - 256
    assert max(np.diff(starts)) <= 256 * 3 / 4


def test_an_enlarged_picture_has_a_limit() -> None:
    request = GenerateRequest.of("a fox", width=1024, height=1024, image=IMAGE, upscale=4)
    found = enlarge(request, Image.new("RGB", (64, 32))).parts[0].pixels
    assert found is not None and found.shape == (128, 256, 3)
    with pytest.raises(UsageError, match="maximum of 16777216 pixels: 4100x4100"):
        enlarge(request, Image.new("RGB", (1025, 1025)))


def test_an_expanded_picture_states_its_size() -> None:
    request = GenerateRequest.of(
        "a fox", width=1024, height=1024, image=IMAGE, expand=(0, 0, 20, 0)
    )
    with pytest.raises(UsageError, match="120 x 50 pixels, which the size 1024x1024") as said:
        prepare(request, Image.new("RGB", (100, 50)), None)
    assert "128x64" in str(said.value.hint)


def test_a_control_picture_is_enlarged_and_cut_like_the_image() -> None:
    request = GenerateRequest.of(
        "a fox", width=64, height=64, image=IMAGE, control=IMAGE, upscale=2
    )
    picture, other = Image.fromarray(noise(50, 40)), Image.new("RGB", (25, 20), "white")
    for control, same in (picture, True), (other, False):
        parts = enlarge(request, picture, control).parts
        assert len(parts) == 4
        pairs = [(np.asarray(one.pixels), np.asarray(one.control)) for one in parts]
        assert all(np.array_equal(*pair) is same for pair in pairs)
        assert {guide.shape for _, guide in pairs} == {(64, 64, 3)}


def test_a_control_picture_of_the_image_is_expanded_and_one_of_the_result_is_not() -> None:
    request = GenerateRequest.of(
        "x", width=128, height=64, image=IMAGE, control=IMAGE, expand=(8, 0, 20, 0)
    )
    picture, whole = Image.fromarray(noise(100, 60)), Image.fromarray(noise(128, 64))
    small = prepare(request, picture, None, picture).inputs
    assert np.array_equal(np.asarray(small.pixels), np.asarray(small.control))
    found = prepare(request, picture, None, whole).inputs.control
    assert np.array_equal(np.asarray(found), np.asarray(whole))


def test_an_expanded_picture_is_painted_outside_only() -> None:
    picture = noise(100, 60)
    request = GenerateRequest.of("a fox", width=128, height=64, image=IMAGE, expand=(0, 0, 20, 0))
    prepared = prepare(request, Image.fromarray(picture), None)
    assert prepared.inputs.pixels is not None
    assert prepared.inputs.pixels.shape == (64, 128, 3)
    assert prepared.inputs.mask is not None
    assert (prepared.inputs.mask[:60, :70] == 0).all() and (
        prepared.inputs.mask[:, 100:] == 255
    ).all()
    assert (prepared.inputs.mask[60:] == 255).all()  # rounded up, and cut off again
    made = prepared.finish(np.zeros((64, 128, 3), np.uint8))
    assert made.shape == (60, 120, 3)
    assert np.array_equal(made[:, :70], picture[:, :70]) and not made[:, 100:].any()


def test_references_are_opened_in_their_order_at_their_size(tmp_path: Path) -> None:
    files = {"1": noise(20, 8), "2": noise(8, 30)}
    for name, pixels in files.items():
        Image.fromarray(pixels).save(tmp_path / f"{name * 64}.png")
    store = SimpleNamespace(find_path=lambda layer: tmp_path / f"{layer.digest.encoded}.png")
    request = GenerateRequest.of("a fox", references=(f"sha256:{'2' * 64}", IMAGE))
    opened = PictureInputs(cast(Any, store)).open(request)
    assert isinstance(opened, PreparedPicture) and opened.inputs.pixels is None
    first, second = opened.inputs.references
    assert np.array_equal(first, files["2"]) and np.array_equal(second, files["1"])
    missing = GenerateRequest.of("a fox", references=(f"sha256:{'3' * 64}",))
    with pytest.raises(NotFoundError, match="the reference sha256:333"):
        PictureInputs(cast(Any, store)).open(missing)


@pytest.mark.parametrize(
    ("mask", "text"),
    [
        (np.full((32, 64), 255, np.uint8), "64 x 32"),
        (np.zeros((64, 64), np.uint8), "the mask is empty"),
        (b"not a picture", "mask"),
    ],
    ids=["size", "empty", "format"],
)
def test_a_mask_is_checked_before_texts_are_encoded(tmp_path: Path, mask: Any, text: str) -> None:
    """A model process prepares the request that waits for it, before weights are read."""
    files = {digit: tmp_path / digit for digit in "12"}
    Image.fromarray(noise(64, 64)).save(files["1"], "png")
    if isinstance(mask, bytes):
        files["2"].write_bytes(mask)
    else:
        Image.fromarray(mask).save(files["2"], "png")
    store: Any = SimpleNamespace(find_path=lambda layer: files[layer.digest.encoded[0]])
    prepared: list[object] = []
    pipeline: Any = SimpleNamespace(check=lambda *_: None, prepare=prepared.append)
    stored = StoredAImage.__new__(StoredAImage)
    model = RunnableModel(stored, pipeline, pictures=PictureInputs(store))
    request = GenerateRequest.of(
        "a fox", width=64, height=64, image=IMAGE, mask=f"sha256:{'2' * 64}", strength=0.5
    )
    with pytest.raises(UsageError, match=text):
        model.prepare(request)
    assert not prepared
    Image.fromarray(np.full((64, 64), 255, np.uint8)).save(files["2"], "png")
    model.prepare(request)
    assert prepared == [request]


def test_the_tiles_of_each_picture_are_its_steps(
    pipeline: FlowPipeline, tiny: tuple[FolderStore, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiled = TiledPicture((PictureInput(noise(64, 32)),) * 3, lambda made: np.vstack(made))
    monkeypatch.setattr(PictureInputs, "open", lambda *_: tiled)
    stored = StoredAImage.__new__(StoredAImage)
    model = RunnableModel(stored, pipeline, pictures=PictureInputs(tiny[0]))
    request = GenerateRequest.of(
        "a fox", width=64, height=64, steps=4, seed=5, image=IMAGE, strength=0.5, upscale=2, n=2
    )
    events = list(model.generate(request))
    steps = [(one.index, one.total, one.picture) for one in events if isinstance(one, Step)]
    assert steps == [(index, 6, picture) for picture in (0, 1) for index in range(1, 7)]
    made = [one for one in events if isinstance(one, Made)]
    assert [(one.seed, one.picture, one.pixels.shape) for one in made] == [
        (5, 0, (96, 64, 3)),
        (6, 1, (96, 64, 3)),
    ]
    assert not np.array_equal(made[0].pixels, made[1].pixels)
