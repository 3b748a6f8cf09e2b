"""Requests, cancelling, types, and models that do not fit together."""

from __future__ import annotations

import ctypes.util
import os
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from clowder_aimage.dialect.aimage import AImage
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.generate import RunnableModel
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.generation.seed import MAX_SEED
from clowder_aimage.model import backend
from clowder_aimage.model.backend import (
    choose_dtype,
    describe,
    mx,
    resolve_dtype_name,
    tree_flatten,
)
from clowder_aimage.model.flow.denoiser import plan_previews
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.flow.pixels import to_pixels
from clowder_aimage.model.flow.prompt_encoder import PromptEncoder
from clowder_aimage.model.flow.state import CACHED_TEXTS
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image, PictureInput, Preview, Step
from clowder_aimage.model.weights import ModelWeights
from clowder_aimage.tensor import blas
from tests.model.model_blobs import FolderStore, replace
from tests.process import run

Model = tuple[FolderStore, AImage]
FILE = f"sha256:{'0' * 64}"  # of an image; the pipeline is given the picture itself
SMALL = GenerateRequest.of("a fox", width=32, height=32, steps=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 40}, "width must be a multiple of 16 from 16 to 8192, not 40"),
        ({"height": -16}, "height must be a multiple of 16 from 16 to 8192, not -16"),
        ({"width": True}, "width must be"),
        ({"width": 8208}, "width must be a multiple of 16 from 16 to 8192"),
        ({"steps": 1001}, "steps must be a whole number from 1 to 1000"),
        ({"n": 0}, "n must be"),
        ({"seed": MAX_SEED, "n": 2}, "seed must be"),
        ({"guidance": float("nan")}, "guidance must be a number from 0 to 1000"),
        ({"guidance_end": 1.01}, "guidance_end must be a number from 0 to 1, not 1.01"),
        ({"cache_threshold": "0.1"}, "cache_threshold must be a number from 0 to 10"),
        ({"shift": 0.0}, "shift must be a number from 0.001 to 1000, not 0.0"),
        ({"prompt": "\ud800"}, "prompt contains characters"),
        ({"prompt": 7}, "prompt must be text"),
        ({"negative": "\ud800"}, "negative contains characters"),
        ({"previews": 4}, "previews must be a whole number from 0 to 3"),
        ({"references": (FILE,)}, "does not see reference pictures"),
    ],
)
def test_requests_that_are_refused_at_once(
    pipeline: FlowPipeline, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        pipeline.generate(SMALL.change(**changes))


def test_steps_then_the_picture_and_the_next_seed(pipeline: FlowPipeline) -> None:
    request = SMALL.change(n=2, seed=MAX_SEED - 1)
    events = list(pipeline.generate(request))
    images = [event for event in events if isinstance(event, Image)]
    assert [event for event in events if isinstance(event, Step)] == [
        Step(1, 2, 0),
        Step(2, 2, 0),
        Step(1, 2, 1),
        Step(2, 2, 1),
    ]
    assert [image.seed for image in images] == [MAX_SEED - 1, MAX_SEED]
    assert [image.picture for image in images] == [0, 1]
    assert images[0].pixels.dtype == np.uint8
    assert (images[0].width, images[0].height) == (32, 32)
    assert (images[0].pixels != images[1].pixels).any()


def test_width_and_height_are_not_swapped(pipeline: FlowPipeline) -> None:
    *_, image = pipeline.generate(SMALL.change(width=64, steps=1))
    assert isinstance(image, Image)
    assert image.pixels.shape == (32, 64, 3)


def test_closing_cancels(pipeline: FlowPipeline) -> None:
    stream = pipeline.generate(SMALL.change(steps=1000))
    assert next(stream) == Step(1, 1000, 0)
    stream.close()
    assert list(stream) == []


def test_what_changes_the_picture(pipeline: FlowPipeline) -> None:
    def pixels(**changes: Any) -> np.ndarray:
        *_, image = pipeline.generate(SMALL.change(**changes))
        assert isinstance(image, Image)
        return image.pixels

    base = pixels()
    assert (pixels() == base).all()
    changed: list[dict[str, Any]] = [
        {"seed": 1},
        {"prompt": "an owl"},
        {"steps": 3},
        {"shift": 9.0},
        {"guidance": 4.0},
    ]
    for changes in changed:
        assert (pixels(**changes) != base).any(), changes
    assert (pixels(guidance_end=0.5, cache_threshold=1e-9, steps=3) == pixels(steps=3)).all()
    assert (pixels(cache_threshold=10, steps=3) != pixels(steps=3)).any()
    guided = pixels(guidance=4.0)
    assert (pixels(guidance=4.0, guidance_end=0.0) != guided).any()
    assert (pixels(guidance=4.0, negative="") == guided).all()
    assert (pixels(guidance=4.0, negative="an owl") != guided).any()


def test_skipped_tensors_are_named(pipeline: FlowPipeline) -> None:
    assert "text_encoder/norm.weight" in pipeline.networks.skipped
    assert "vae/encoder.conv_in.weight" in pipeline.networks.skipped
    kinds = ("text_encoder/layers.2.", "text_encoder/norm.weight", "vae/encoder.")
    assert all(name.startswith(kinds) for name in pipeline.networks.skipped)


def test_compute_types(tiny: Model, pipeline: FlowPipeline) -> None:
    with pytest.raises(UsageError, match="maximum of 65504"):
        load_pipeline(*tiny, dtype="float16")
    with pytest.raises(UsageError, match="unknown compute type 'int8'"):
        load_pipeline(*tiny, dtype="int8")
    default = load_pipeline(*tiny)
    assert default.library.itemsize == (2 if describe() == "gpu" else 4)


def test_bfloat16_stays_near_float32(tiny: Model, pipeline: FlowPipeline) -> None:
    half = load_pipeline(*tiny, dtype="bfloat16")
    assert half.networks.transformer.get().x_pad_token.dtype == mx.bfloat16
    request = GenerateRequest.of("a red fox", width=64, height=64, steps=4, seed=42)
    *_, exact = pipeline.generate(request)
    *_, near = half.generate(request)
    assert isinstance(exact, Image)
    assert isinstance(near, Image)
    spread = np.abs(exact.pixels.astype(int) - near.pixels.astype(int))
    assert 0 < spread.mean() < 3


def test_dead_weights_need_not_be_there(tiny: Model, pipeline: FlowPipeline) -> None:
    store, aimage = tiny
    layers = tuple(layer for layer in aimage.layers if layer.name not in pipeline.networks.skipped)
    assert len(layers) < len(aimage.layers)
    trimmed = load_pipeline(store, AImage(b"{}", layers), dtype="float32")
    *_, one = trimmed.generate(SMALL)
    *_, other = pipeline.generate(SMALL)
    assert isinstance(one, Image)
    assert isinstance(other, Image)
    assert (one.pixels == other.pixels).all()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "model_index.json",
            {"_class_name": "FluxPipeline"},
            "unsupported pipeline .*'FluxPipeline'",
        ),
        ("model_index.json", {}, r"model_index\.json not found"),
        ("scheduler/scheduler_config.json", {}, r"scheduler_config\.json not found"),
        ("text_encoder/config.json", {"num_hidden_layers": 2}, "unexpected tensors layers.2"),
        ("text_encoder/config.json", {"num_key_value_heads": 4}, "requires shape"),
        ("transformer/config.json", {"n_layers": 3}, r"missing tensors layers\.2"),
        ("vae/config.json", {"use_post_quant_conv": True}, "missing tensors post_quant_conv"),
        ("vae/config.json", {"mid_block_add_attention": False}, "unexpected tensors decoder.mid"),
    ],
)
def test_models_that_do_not_fit(
    tiny: Model, name: str, changes: dict[str, Any], message: str
) -> None:
    store, aimage = tiny
    with pytest.raises(ModelError, match=message):
        load_pipeline(store, replace(store, aimage, name, **changes), dtype="float32")


def test_short_names_of_the_types_to_compute_in() -> None:
    assert [resolve_dtype_name(name) for name in ("f32", "bf16", "float32", "bfloat16")] == [
        *("float32", "bfloat16") * 2
    ]
    assert choose_dtype("bf16") == mx.bfloat16
    for name in ("f16", "float16"):
        with pytest.raises(UsageError, match="pictures turn black"):
            resolve_dtype_name(name)
    for name in ("F32", "f64", ""):
        with pytest.raises(UsageError, match="use float32 or bfloat16"):
            resolve_dtype_name(name)


def test_the_prompt_must_fit_the_positions(tiny: Model) -> None:
    store, aimage = tiny
    changed = replace(store, aimage, "transformer/config.json", axes_lens=[66, 2, 4])
    short = load_pipeline(store, changed, dtype="float32")
    with pytest.raises(UsageError, match="height must be at most 32 pixels"):
        short.generate(GenerateRequest.of("x", width=64, height=48, steps=1))
    *_, image = short.generate(
        GenerateRequest.of("x" * 46, width=64, height=32, steps=1)
    )  # 64 tokens with the template
    assert isinstance(image, Image)
    with pytest.raises(UsageError, match="prompt is too long: 65 tokens"):
        list(short.generate(GenerateRequest.of("x" * 47, width=64, height=32, steps=1)))


def test_decode_refuses_nan(pipeline: FlowPipeline) -> None:
    with pytest.raises(ModelError, match="NaN or infinite"):
        pipeline.networks.decode(np.full((16, 4, 4), np.nan, np.float32))


def test_pixels_round_half_to_even() -> None:
    values = np.array([-1, 0, 0.5 / 255, 1.5 / 255, 2.5 / 255, 1, 2], dtype=np.float32)
    assert to_pixels(values).tolist() == [0, 0, 0, 2, 2, 255, 255]


def test_importing_the_package_does_not_import_mlx() -> None:
    program = (
        "import sys, clowder_aimage.model.pipeline, clowder_aimage.tensor.blas;"
        "sys.exit(any(name.startswith('mlx') for name in sys.modules))"
    )
    assert run([sys.executable, "-c", program]).returncode == 0


def test_blas_that_cannot_be_loaded_is_passed_over(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "libopenblas.so"
    broken.write_bytes(b"not a library")
    other = ctypes.util.find_library("c")
    assert other is not None
    assert blas.Library(str(broken)).load() is None
    assert blas.Library(other).load() is None  # without the functions of a BLAS
    monkeypatch.setattr(blas, "_library", None)
    monkeypatch.setattr(blas, "iter_candidates", lambda: iter([blas.Library(str(broken))]))
    assert blas.preload() is None
    assert not blas.is_fast()


def test_blas_uses_no_more_cores_than_the_environment_allows() -> None:
    if not blas.is_fast():
        pytest.skip("no OpenBLAS")
    program = """if True:
        import ctypes
        from clowder_aimage.tensor import blas
        blas.preload()
        blas.use_cores(4)
        library = next(blas.iter_candidates())
        print(getattr(ctypes.CDLL(library.path), f"{library.prefix}openblas_get_num_threads")())
    """
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = run([sys.executable, "-c", program], env=environment, text=True, check=True)
    assert done.stdout == "1\n"


def test_blas_of_the_package_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("macOS has Accelerate")
    package, system = blas.iter_candidates()
    assert package.prefix == "scipy_"
    assert system.path == "libopenblas.so.0"
    monkeypatch.setattr(blas, "_library", None)
    assert blas.preload() == "openblas"
    assert blas.is_fast()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert blas.preload() is None


def made(pipeline: FlowPipeline, request: GenerateRequest) -> bytes:
    *_, image = pipeline.generate(request)
    assert isinstance(image, Image)
    return image.pixels.tobytes()


def policies(memory: int) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "keep", {"policy": "keep", "memory": None}
    yield "auto", {"policy": "auto", "memory": memory}
    yield "release", {"policy": "release", "memory": None}
    yield "last", {"policy": "auto", "memory": None, "is_last": True}


def loaded(pipeline: FlowPipeline) -> list[str]:
    is_loaded = {
        "text": pipeline.networks.text_encoder.is_loaded,
        "transformer": pipeline.networks.transformer.is_loaded,
        "vae": pipeline.networks.vae.is_loaded,
    }
    return [name for name, is_it in is_loaded.items() if is_it]


def test_pictures_do_not_depend_on_what_stays_in_memory(tiny: Model) -> None:
    request = SMALL.change(n=2, guidance=2.0, negative="a hare", previews=1)
    plain = SMALL.change(n=2, prompt="a fox that goes")
    found = {}
    for name, settings in policies(1):
        held = opened(tiny)
        held.set_memory(**settings)
        assert loaded(held) == []
        found[name] = [pictures(held, one) for one in (request, plain, request, plain)]
        stays = ["text", "transformer", "vae"] if name == "keep" else ["vae"]
        assert loaded(held) == stays, name
    assert found["auto"] == found["release"] == found["last"] == found["keep"]
    first, second, *again = found["keep"]
    assert [first, second] == again and first != second


def test_released_networks_free_their_memory(tiny: Model) -> None:
    before = mx.get_active_memory()
    held = opened(tiny)
    modules = held.networks.budget.modules
    assert mx.get_active_memory() - before < 50_000  # nothing is loaded
    for module in modules:
        network = module.get()
        parameters: Any = tree_flatten(network.parameters())
        assert module.size == sum(value.nbytes for _, value in parameters)
        assert mx.get_active_memory() - before >= module.size
        assert module.size > 100_000
        del network, parameters
        module.release()
    assert mx.get_active_memory() - before < 50_000


def test_networks_are_loaded_once_for_their_use(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    applied = ModelWeights.apply

    def counted(self: ModelWeights, *args: Any, **options: Any) -> Any:
        loads.append(self.component)
        return applied(self, *args, **options)

    monkeypatch.setattr(ModelWeights, "apply", counted)
    held = opened(tiny)
    held.set_memory("release", None)
    assert loads == []
    made(held, SMALL.change(n=3, guidance=2.0, negative="two"))
    assert loads == ["text_encoder", "transformer", "vae"]
    made(held, SMALL)
    assert loads[3:] == ["transformer", "vae"]  # the text is cached
    held.set_memory("auto", None, text_encoder="release")
    for prompt in ("one", "one", "three", "one"):
        made(held, SMALL.change(prompt=prompt))
    assert loads[5:] == ["text_encoder", "transformer", "text_encoder"]


@pytest.mark.parametrize(
    ("wish", "spare", "stays"),
    [
        *(("auto", None, True), ("auto", 1 << 40, True), ("auto", 0, False)),
        *(("keep", 0, True), ("release", None, False)),
    ],
)
def test_networks_are_loaded_at_once_if_they_fit(
    tiny: Model, wish: str, spare: int | None, stays: bool
) -> None:
    held = opened(tiny)
    held.set_memory(wish, spare)
    plan = held.preload(SMALL)
    assert loaded(held) == (["text", "transformer", "vae"] if stays else [])
    assert plan.startswith("all networks stay in memory, about " if stays else "networks that are")
    assert plan.endswith(" MiB")
    made(held, SMALL)
    assert loaded(held) == (["text", "transformer", "vae"] if stays else ["vae"])


def test_a_limit_that_is_too_low_is_refused_with_the_least(tiny: Model) -> None:
    held = opened(tiny)
    held.set_memory("auto", 1 << 20, limit=1 << 20)
    with pytest.raises(UsageError, match=r"^1 MiB of memory are insufficient") as caught:
        held.generate(SMALL)
    assert loaded(held) == []
    found = re.search("([0-9]+) MiB are required", caught.value.message)
    assert found is not None
    held.set_memory("auto", None, limit=int(found[1]) << 20)
    assert made(held, SMALL)


def test_the_encoder_of_pictures_is_counted_for_requests_with_one(tiny: Model) -> None:
    held, request = opened(tiny), SMALL.change(image=FILE)
    held.set_memory("keep", None)
    plain, more = (int(held.preload(one).split()[-2]) for one in (SMALL, request))
    encoder = held.networks.picture_encoder
    assert encoder.is_loaded and more >= plain
    assert held.networks.budget.get_policy(encoder) == "keep"
    modules = sum(module.size for module in held.networks.budget.modules)
    work = max(stage.work for stage in held.list_stages(SMALL))
    held.set_memory("auto", 1)
    budget = held.networks.budget
    budget.memory = int(budget._base_memory + work + modules - encoder.size)
    assert held.networks.budget.keeps(held.list_stages(SMALL))
    assert not held.networks.budget.keeps(held._list_all_stages(request))


def test_a_mask_that_covers_no_cell_is_refused_before_anything_is_loaded(tiny: Model) -> None:
    held, request = opened(tiny), SMALL.change(image=FILE, mask=FILE)
    mask = np.zeros((32, 32), np.uint8)
    mask[1:8, 1:8] = 255  # between the pixels that stand for cells
    given = PictureInput(np.zeros((32, 32, 3), np.uint8), mask)
    with pytest.raises(UsageError, match="covers no cell of 8 x 8 pixels"):
        held.generate(request, given)
    assert loaded(held) == [] and not held.networks.picture_encoder.is_loaded


def test_memory_budget_learns_from_pictures(tiny: Model) -> None:
    held = opened(tiny)
    budget, large = held.networks.budget, SMALL.change(width=128, height=128)
    assert budget.estimate_work("decode", 32 * 32, 7.0) == 7.0  # as was guessed
    made(held, large)
    needed = budget.estimate_work("decode", 128 * 128, 7.0)
    assert needed > 128 * 128 * 3 * 4  # it holds the values of the picture at least
    assert budget.estimate_work("decode", 256 * 256, 7.0) == 4 * needed
    assert (
        budget.estimate_work("decode", 32 * 32, 7.0) == needed
    )  # no less than the next larger picture
    made(held, SMALL)
    assert 0 < budget.estimate_work("decode", 32 * 32, 7.0) < needed


def test_a_network_that_cannot_be_loaded_again_is_an_error(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = opened(tiny)
    held.set_memory("auto", None, text_encoder="release")
    first = made(held, SMALL)
    with monkeypatch.context() as patched:
        patched.setattr(ModelWeights, "apply", _gone)
        with pytest.raises(ModelError, match="gone"):
            made(held, SMALL.change(prompt="new"))
        assert made(held, SMALL) == first
    made(held, SMALL.change(prompt="new"))


def opened(model: Model) -> FlowPipeline:
    return load_pipeline(*model, dtype="float32")


def pictures(pipeline: FlowPipeline, request: GenerateRequest) -> list[tuple[int, bytes]]:
    """Return the seeds and pixels of pictures and previews, pictures last."""
    events = [event for event in pipeline.generate(request) if not isinstance(event, Step)]
    found = [(getattr(event, "seed", -1), event.pixels.tobytes()) for event in events]
    return sorted(found, key=lambda one: one[0])


def _gone(*_: object, **__: object) -> None:
    raise ModelError("gone")


def test_previews_are_half_as_large_and_change_nothing(pipeline: FlowPipeline) -> None:
    request = SMALL.change(steps=4, previews=2, n=2)
    events = list(pipeline.generate(request))
    previews = [event for event in events if isinstance(event, Preview)]
    assert [(one.picture, one.number) for one in previews] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {one.pixels.shape for one in previews} == {(16, 16, 3)}
    plain = request.change(previews=0)
    without = [event for event in pipeline.generate(plain) if isinstance(event, Image)]
    images = [event for event in events if isinstance(event, Image)]
    assert [a.pixels.tobytes() for a in images] == [b.pixels.tobytes() for b in without]


def test_preview_extrapolates_a_straight_line(pipeline: FlowPipeline) -> None:
    """If all steps went the same way, the first one would have shown the picture."""
    schedule = pipeline.schedule(SMALL)
    noise = pipeline.denoiser.draw_noise(SMALL, 0)
    end = np.full_like(noise, 0.1)
    first, second = (float(sigma) for sigma in schedule.sigmas[:2])
    before, after = (end + sigma * (noise - end) for sigma in (first, second))
    shown = pipeline.denoiser.preview(before, after, schedule, 0)
    whole = pipeline.networks.decode(end).astype(np.float64)
    mean = whole.reshape(16, 2, 16, 2, 3).mean(axis=(1, 3))
    assert np.abs(shown - mean).max() <= 1


@pytest.mark.parametrize(
    ("steps", "previews", "after"),
    [(8, 3, {2, 4, 6}), (2, 3, {1}), (8, 0, set())],
)
def test_previews_are_spread_evenly(steps: int, previews: int, after: set[int]) -> None:
    request = SMALL.change(steps=steps, previews=previews)
    assert plan_previews(request.output.previews, request.sampling.steps) == after


def test_convolutions_in_strips_equal_the_whole(
    pipeline: FlowPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blas, "is_fast", lambda: False)  # its products need no strips
    latents = mx.array(pipeline.denoiser.draw_noise(SMALL.change(width=80, height=112), 1))
    whole = np.array(pipeline.networks.vae.get().decode(latents))
    monkeypatch.setattr(backend, "STRIP", 20_000)  # from 1 row of the last layers to all of 14
    strips = np.array(pipeline.networks.vae.get().decode(latents))
    assert whole.shape == (112, 80, 3)
    np.testing.assert_allclose(strips, whole, rtol=0, atol=1e-5)


def test_a_text_is_encoded_once(pipeline: FlowPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    encode = PromptEncoder.encode

    def counted(self: PromptEncoder, prompt: str) -> mx.array:
        texts.append(prompt)
        return encode(self, prompt)

    monkeypatch.setattr(PromptEncoder, "encode", counted)
    for prompt in ("a fox twice", "a fox twice", "a hare once", "a fox twice"):
        list(pipeline.generate(SMALL.change(prompt=prompt)))
    assert texts == ["a fox twice", "a hare once"]
    for number in range(CACHED_TEXTS):
        pipeline.build_conditioning(SMALL.change(prompt=f"another {number}"))
    pipeline.build_conditioning(SMALL.change(prompt="a fox twice"))
    assert texts.count("a fox twice") == 2
    guided = SMALL.change(guidance=1.0, prompt="new", negative="another 1")
    assert next(iter(pipeline.state.captions))[0] == "another 1"  # it is dropped for the new one
    assert pipeline.build_conditioning(guided).negative is not None
    assert texts.count("another 1") == 1


@pytest.mark.parametrize("error", [OverflowError, ValueError, ZeroDivisionError])
def test_an_error_of_arithmetic_is_a_model_error_without_its_text(error: type[Exception]) -> None:
    def failing(_: GenerateRequest) -> Iterator[object]:
        yield Step(1, 2, 0)
        raise error("a secret prompt")

    model = RunnableModel(cast(Any, None), cast(Any, SimpleNamespace(open=failing, complete=iter)))
    events = model.generate(GenerateRequest.of("a secret prompt"))
    assert next(events) == Step(1, 2, 0)
    with pytest.raises(ModelError, match=error.__name__) as caught:
        next(events)
    assert "secret" not in str(caught.value)
