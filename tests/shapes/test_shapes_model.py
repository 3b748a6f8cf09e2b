"""The trained model of examples/shapes does as it is told, in every precision."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from composing import held_out_scenes
from judge import look
from PIL import Image
from score import score

from benchmarks import quality
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.backend import mx, tree_flatten
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.pipeline import Image as Made
from clowder_aimage.pictures.input import enlarge
from clowder_aimage.tensor import read_header

MODEL = Path(__file__).parents[2] / "examples" / "shapes" / "model"
usual = functools.cache(held_out_scenes)
SAMPLE = range(0, 300, 30)  # seeds, and the scenes that go with them
FILE = f"sha256:{'0' * 64}"  # of an image; the pipeline is given the picture itself
BFLOAT16 = 0.97  # correlation with float32, at least, for each picture; all 300 keep it

Load = Callable[[str], FlowPipeline]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Return ``load(precision)``: the model, loaded once."""
    store = ImageLayout(tmp_path_factory.mktemp("store"))
    loaded: dict[str, FlowPipeline] = {}

    def load(precision: str) -> FlowPipeline:
        if precision not in loaded:
            loaded[precision], _ = quality.load(MODEL, precision, store)
        return loaded[precision]

    return load


def pictures(pipeline: FlowPipeline, seeds: range) -> list[quality.Pixels]:
    return [quality.picture(pipeline, quality.request(usual()[seed], seed)) for seed in seeds]


@pytest.fixture(scope="module")
def exact(load: Load) -> list[quality.Pixels]:
    return pictures(load("float32"), SAMPLE)


# -- what it was asked


@pytest.mark.parametrize(
    "step",
    [pytest.param(5, marks=pytest.mark.integration), pytest.param(1, marks=pytest.mark.slow)],
)
def test_held_out_scenes(load: Load, step: int) -> None:
    """Generate every fifth scene, or all 300, with its number as the seed; drop none."""
    seeds = range(0, 300, step)
    found = quality.judged([usual()[seed] for seed in seeds], pictures(load("float32"), seeds))
    assert found["colour"]["of"] == found["shape"]["of"] == len(seeds)
    assert found["both_left_out"]["of"] >= len(seeds) // 5
    goals = {
        "colour": 0.95,
        "shape": 0.90,
        "both_trained": 0.97,
        "left_right": 0.80,
        "count": 0.80,
    }
    spare = 0 if step == 1 else 1  # pictures: the goals are those of all 300 scenes
    missed = {
        name: found[name]
        for name, goal in goals.items()
        if found[name]["share"] * found[name]["of"] + spare < goal * found[name]["of"]
    }
    assert missed == {}


@pytest.mark.integration
def test_a_red_circle_becomes_a_blue_square_in_place(load: Load) -> None:
    scenes = quality.repaintings(6)
    made = [one.paint(load("float32"), seed, 1.0) for seed, one in enumerate(scenes)]
    right = [one.is_in_place(pixels) for one, pixels in zip(scenes, made, strict=True)]
    assert sum(right) >= 5
    drawn = [one.is_in_place(one.drawing) for one in scenes]
    assert not any(drawn)


@pytest.mark.integration
def test_an_enlarged_scene_stays_as_it_is(load: Load) -> None:
    """Each tile is a quarter of the scene, and is made with the caption of the whole."""
    for seed in (1, 7, 15):
        caption = usual()[seed].caption
        request = GenerateRequest.of(
            caption, width=64, height=64, steps=8, seed=seed, image=FILE, upscale=2
        )
        small = quality.picture(load("float32"), quality.request(usual()[seed], seed))
        tiles = enlarge(request, Image.fromarray(small))
        double = 2 * small.shape[1], 2 * small.shape[0]
        plain = np.asarray(Image.fromarray(small).resize(double, Image.Resampling.LANCZOS))
        tile, made = request.change(upscale=None), []
        for part in tiles.parts:
            events = load("float32").generate(tile, part)
            made += [event.pixels for event in events if isinstance(event, Made)]
        large = tiles.finish(made)
        assert score(usual()[seed], look(large)) == score(usual()[seed], look(plain)), caption
        assert 0.1 < np.abs(large.astype(int) - plain).mean() < 3


@pytest.mark.integration
def test_another_caption_is_another_picture(exact: list[quality.Pixels]) -> None:
    """The judge is not pleased by whatever it is shown: the pictures of other scenes fail."""
    scenes = [usual()[seed] for seed in SAMPLE]
    verdicts = [
        score(scene, look(picture))
        for scene, picture in zip(scenes, exact[1:] + exact[:1], strict=True)
    ]
    assert sum(verdict.both for verdict in verdicts) <= len(verdicts) // 10


# -- the checklist: loading


OF_MLX = [name for name in quality.PRECISIONS if name != quality.COMPUTED]


@pytest.mark.parametrize("precision", OF_MLX)
def test_loads_in_each_precision(load: Load, precision: str) -> None:
    parameters = dict(tree_flatten(load(precision).networks.transformer.get().parameters()))
    norms = {name: value for name, value in parameters.items() if "norm" in name}
    assert len(norms) >= 20
    for norm in norms.values():
        assert np.abs(np.array(norm.astype(mx.float32))).min() > 0
    assert all(mx.isfinite(value).all().item() for value in parameters.values())


@pytest.mark.parametrize("precision", OF_MLX)
def test_embeddings(load: Load, precision: str) -> None:
    pipeline = load(precision)
    red, blue = (pipeline.prompts.encode(f"a {colour} circle") for colour in ("red", "blue"))
    for values in (red, red - blue):
        assert np.abs(np.array(values.astype(mx.float32))).max() > 0.1


@pytest.mark.integration
def test_weights_stored_as_float16(load: Load, exact: list[quality.Pixels], tmp_path: Path) -> None:
    """A copy of the model in F16 loads, and its pictures are like those of BF16."""
    copy = tmp_path / "model"
    for path in MODEL.rglob("*"):
        target = copy / path.relative_to(MODEL)
        if path.is_dir():
            target.mkdir(parents=True)
        elif path.suffix == ".safetensors":
            loaded = mx.load(str(path))
            assert isinstance(loaded, dict)
            weights = {name: value.astype(mx.float16) for name, value in loaded.items()}
            mx.save_safetensors(str(target), weights)
        else:
            target.write_bytes(path.read_bytes())
    pipeline, _ = quality.load(copy, "float32", ImageLayout(tmp_path / "store"))
    half = pictures(pipeline, SAMPLE)
    assert min(quality.correlations(half, exact)) > 0.99


# -- the checklist: pictures


@pytest.mark.integration
def test_int8_is_like_float32(load: Load, exact: list[quality.Pixels]) -> None:
    """A shape on the verge may tip over: of 300 pictures the least is 0.91."""
    found = np.array(quality.correlations(pictures(load("int8"), SAMPLE), exact))
    assert found.mean() > 0.99
    assert (found > 0.99).mean() >= 0.95


@pytest.mark.integration
def test_bfloat16_stays_near_float32(load: Load, exact: list[quality.Pixels]) -> None:
    found = quality.correlations(pictures(load("bfloat16"), SAMPLE[::3]), exact[::3])
    assert min(found) > BFLOAT16


def test_flat_areas_are_flat(load: Load) -> None:
    """No pattern where nothing is drawn: neighbours differ by less than 3 of 255 on average."""
    request = GenerateRequest.of(
        "a small red circle in the top left corner", width=128, height=128, steps=8, seed=3
    )
    made = quality.picture(load("float32"), request).astype(float)
    corner = made[72:, 72:]
    rough = np.abs(np.diff(corner, axis=0)).mean() + np.abs(np.diff(corner, axis=1)).mean()
    assert rough < 3


def test_a_seed_is_a_picture(load: Load, tmp_path: Path) -> None:
    request = GenerateRequest.of("two blue squares", width=96, height=96, steps=8, seed=7)
    one = quality.picture(load("float32"), request)
    store = ImageLayout(tmp_path)
    other, _ = quality.load(MODEL, "float32", store)
    assert np.array_equal(one, quality.picture(other, request))
    later = GenerateRequest.of("two blue squares", width=96, height=96, steps=8, seed=8)
    assert not np.array_equal(one, quality.picture(other, later))


@pytest.mark.parametrize(
    ("width", "height"), [(64, 64), (128, 64), (64, 128), (96, 112), (80, 128)]
)
def test_sizes_and_shapes_of_pictures(load: Load, width: int, height: int) -> None:
    request = GenerateRequest.of(
        "a large green square", width=width, height=height, steps=8, seed=1
    )
    made = quality.picture(load("float32"), request)
    assert made.shape == (height, width, 3)
    assert [(item.colour, item.shape) for item in look(made).items] == [("green", "square")]


# -- what is shipped


def test_every_linear_layer_can_be_quantized(load: Load) -> None:
    """In whatever groups: each takes a multiple of 64 values."""
    widths = {}
    for path in MODEL.rglob("*.safetensors"):
        with path.open("rb") as file:
            for name, info in read_header(file, path.stat().st_size).tensors.items():
                if len(info.shape) == 2 and "pad_token" not in name:
                    widths[f"{path.parent.name}/{name}"] = info.shape[1]
    assert len(widths) > 60
    assert {name: width for name, width in widths.items() if width % 64} == {}


def test_it_is_small_and_stored_as_bfloat16() -> None:
    files = [path for path in MODEL.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    dtypes = set()
    for path in files:
        if path.suffix == ".safetensors":
            with path.open("rb") as file:
                header = read_header(file, path.stat().st_size)
                dtypes |= {info.dtype for info in header.tensors.values()}
    assert dtypes == {"BF16"}


# -- painting in place


@pytest.mark.integration
def test_a_red_circle_becomes_a_blue_square(load: Load) -> None:
    """Paint 6 of the 60 held-out items in place of others; the background stays as it is."""
    pipeline, wanted = load("float32"), quality.repaintings()[::10]
    assert len(wanted) == 6
    made = [one.paint(pipeline, 10 * seed, 1.0) for seed, one in enumerate(wanted)]
    right = [one.is_in_place(pixels) for one, pixels in zip(wanted, made, strict=True)]
    assert sum(right) >= 5  # of 60 95 % are right
    assert not any(one.is_in_place(one.drawing) for one in wanted)
    for one, pixels in zip(wanted, made, strict=True):
        kept = np.abs(pixels.astype(int) - one.drawing)[one.mask < 128]
        assert not kept.size or np.median(kept) <= 6  # the mask may be the whole picture
