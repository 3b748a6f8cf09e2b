"""FLUX.2 [klein] without torch: requests, memory, adapters, codes, previews, reused steps."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from clowder_aimage.adapter.loaded_adapter import LoadedAdapter
from clowder_aimage.adapter.reader import read_adapter
from clowder_aimage.create import create
from clowder_aimage.dialect import AImage
from clowder_aimage.errors import ModelError, UsageError
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.importer.recipe import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.flow.config import TextEncoderConfig
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.flow.scheduler import FlowScheduler
from clowder_aimage.model.flux2.config import TransformerConfig, VaeConfig
from clowder_aimage.model.flux2.family import Flux2
from clowder_aimage.model.flux2.reference_picture import compute_reference_size, fit_reference
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.pipeline import Image, PictureInput, Preview, Step
from clowder_aimage.oci import Reference
from tests.conftest import TINY
from tests.model.random_flux2 import CONFIGS, write_flux2

FILE = f"sha256:{'0' * 64}"
SMALL = GenerateRequest.of("a fox", width=32, height=48, steps=2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("model")
    write_flux2(root)
    return root


@pytest.fixture(scope="module")
def model(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[ImageLayout, AImage]:
    store = ImageLayout(tmp_path_factory.mktemp("store"))
    return store, made(store, directory)


@pytest.fixture(scope="module")
def pipeline(model: tuple[ImageLayout, AImage]) -> FlowPipeline:
    return load(*model)


@pytest.fixture(scope="module")
def base(pipeline: FlowPipeline) -> FlowPipeline:
    """Return the same networks, not distilled."""
    assert isinstance(pipeline.family, Flux2)
    family = dataclasses.replace(pipeline.family, is_distilled=False)
    return FlowPipeline(family, pipeline.networks)


def made(store: ImageLayout, directory: Path, **options: Any) -> AImage:
    """Create the model in the store."""
    name = Reference.parse("flux")
    create(store, name, directory, **options)
    return read_aimage(store, name).aimage


def load(store: ImageLayout, aimage: AImage, dtype: str = "float32") -> FlowPipeline:
    return load_pipeline(store, aimage, dtype=dtype)


def pixels(
    pipeline: FlowPipeline, request: GenerateRequest = SMALL, *references: np.ndarray
) -> np.ndarray:
    *_, image = pipeline.generate(request, PictureInput(references=references))
    assert isinstance(image, Image)
    return image.pixels


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def test_defaults_follow_from_the_model(model: tuple[ImageLayout, AImage], tmp_path: Path) -> None:
    known = model[1].properties
    assert (known["family"], known["pipeline"]) == ("flux2", "Flux2KleinPipeline")
    request = GenerateRequest.draft("a fox").apply_defaults(model[1])
    assert (request.sampling.steps, request.guidance.scale, request.sampling.width) == (4, 0.0, 64)
    write_flux2(tmp_path / "base", is_distilled=False, text_encoder=TINY / "text_encoder")
    other = made(ImageLayout(tmp_path / "store"), tmp_path / "base")
    request = GenerateRequest.draft("a fox").apply_defaults(other)
    assert (request.sampling.steps, request.guidance.scale) == (50, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image": FILE}, "does not begin with a picture"),
        ({"control": FILE}, "has no control networks"),
        ({"guidance": 1.5}, "guidance cannot be used: this model is distilled"),
        ({"references": (FILE,) * 5}, "references must be a list of at most 4"),
        ({"references": ("fox.png",)}, "references must be the digest"),
        ({"references": (FILE,)}, "0 of 1 reference pictures are given"),
        ({"width": 40}, "width must be a multiple of 16 from"),
        ({"shift": 2.0}, "shift cannot be set"),
    ],
)
def test_requests_of_other_families_are_refused(
    pipeline: FlowPipeline, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        pipeline.generate(SMALL.change(**changes))


def test_steps_previews_and_seeds(pipeline: FlowPipeline) -> None:
    request = SMALL.change(n=2, previews=1)
    events = list(pipeline.generate(request))
    assert [type(event) for event in events] == [Step, Preview, Step, Image] * 2
    shown = [event.pixels.shape for event in events if isinstance(event, Preview)]
    assert shown == [(24, 16, 3)] * 2
    first, second = (event for event in events if isinstance(event, Image))
    assert (first.pixels == pixels(pipeline)).all() and (first.pixels != second.pixels).any()
    assert second.seed == 1


def test_the_base_model_has_guidance_above_1(base: FlowPipeline) -> None:
    plain = pixels(base)
    assert (pixels(base, SMALL.change(guidance=1.0)) == plain).all()
    guided = SMALL.change(guidance=4.0)
    strong = pixels(base, guided)
    assert (strong != plain).any()
    assert (pixels(base, guided.change(negative="an owl")) != strong).any()


def test_references_and_their_order_change_the_picture(pipeline: FlowPipeline) -> None:
    one, other = picture(70, 90), picture(130, 64, 1)
    found = [pixels(pipeline, SMALL, *given) for given in ((), (one,), (one, other), (other, one))]
    assert len({each.tobytes() for each in found}) == 4
    assert (pixels(pipeline, SMALL, one[5:85, 3:67]) == found[1]).all()  # cut in the middle


@pytest.mark.parametrize(
    ("size", "fitted"),
    [((70, 90), (64, 80)), ((2000, 1000), (1440, 720)), ((1024, 1024), (1024, 1024))],
)
def test_references_are_scaled_to_a_megapixel_and_cut(
    size: tuple[int, int], fitted: tuple[int, int]
) -> None:
    assert fit_reference(np.zeros((*size[::-1], 3), np.uint8), 16).shape == (*fitted[::-1], 3)


@pytest.mark.parametrize(("size", "message"), [((63, 64), "at least 64"), ((520, 64), "8 times")])
def test_references_that_are_too_small_or_narrow(
    pipeline: FlowPipeline, size: tuple[int, int], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        compute_reference_size(*size)
    with pytest.raises(UsageError, match=message):
        pipeline.generate(SMALL, PictureInput(references=(picture(*size),)))


def test_steps_that_reuse_others(pipeline: FlowPipeline) -> None:
    request = SMALL.change(steps=4)
    exact = pixels(pipeline, request)
    near = pixels(pipeline, request.change(cache_threshold=1e-9))
    assert np.abs(near.astype(int) - exact).max() <= 1
    assert (pixels(pipeline, request.change(cache_threshold=10)) != exact).any()


def test_pictures_do_not_depend_on_what_stays_in_memory(model: tuple[ImageLayout, AImage]) -> None:
    found = []
    for policy in ("keep", "release"):
        held = load(*model)
        held.set_memory(policy, None)
        held.preload(SMALL)
        found.append(pixels(held, SMALL, picture(64, 64)))
        loaded = [module.is_loaded for module in held.networks.budget.modules]
        assert any(loaded) and all(loaded) is (policy == "keep")
    assert (found[0] == found[1]).all()


@pytest.mark.integration  # MLX computes slowly with bfloat16 on a CPU
def test_bfloat16_is_near(model: tuple[ImageLayout, AImage], pipeline: FlowPipeline) -> None:
    assert (
        0
        < np.abs(pixels(load(*model, dtype="bfloat16")) - pixels(pipeline).astype(float)).mean()
        < 4
    )


def test_codes_are_near(
    model: tuple[ImageLayout, AImage], directory: Path, pipeline: FlowPipeline
) -> None:
    codes = made(model[0], directory, recipe=Recipe.parse(quantize="transformer=int8"))
    network = codes.properties["components"]["transformer"]
    assert network["quantization"]["tensors"] == 31
    found = pixels(load(model[0], codes))
    assert 0 < np.abs(found - pixels(pipeline).astype(float)).mean() < 4


LAYERS = {  # of diffusers and peft
    "transformer.transformer_blocks.0.attn.to_q": (64, 64),
    "transformer.transformer_blocks.1.attn.to_out.0": (64, 64),
    "transformer.transformer_blocks.0.ff_context.linear_in": (384, 64),
    "transformer.single_transformer_blocks.1.attn.to_qkv_mlp_proj": (576, 64),
    "transformer.double_stream_modulation_txt.linear": (384, 64),
    "transformer.context_embedder": (64, 192),
}


def test_adapters_change_the_layers_that_diffusers_names(
    pipeline: FlowPipeline, tmp_path: Path
) -> None:
    random, values = np.random.default_rng(3), {}
    for name, (outputs, inputs) in LAYERS.items():
        values[f"{name}.lora_A.weight"] = random.normal(size=(2, inputs)).astype(np.float32)
        values[f"{name}.lora_B.weight"] = random.normal(size=(outputs, 2)).astype(np.float32)
    path = tmp_path / "it.safetensors"
    path.write_bytes(safetensors.numpy.save(values))
    adapter = read_adapter(path, pipeline.shapes, label="it", base="flux")
    assert set(adapter.changes) == {f"{name.replace('.', '/', 1)}.weight" for name in LAYERS}
    plain = pixels(pipeline)
    pipeline.use_adapters([(LoadedAdapter("it", adapter), 0.3)])
    changed = pixels(pipeline)
    pipeline.use_adapters([])
    assert (changed != plain).any() and (pixels(pipeline) == plain).all()


@pytest.mark.parametrize(
    ("parse", "component", "changes", "message"),
    [
        (TransformerConfig.parse, "transformer", {"guidance_embeds": True}, "guidance_embeds"),
        (TransformerConfig.parse, "transformer", {"axes_dims_rope": [16, 16]}, "add up to 32"),
        (TransformerConfig.parse, "transformer", {"patch_size": 2}, "patch_size"),
        (TransformerConfig.parse, "transformer", {"mlp_ratio": 0.001}, "mlp_ratio"),
        (TransformerConfig.parse, "transformer", {"new": 1}, "unknown fields new"),
        (VaeConfig.parse, "vae", {"patch_size": [1, 1]}, "patch_size"),
        (VaeConfig.parse, "vae", {"decoder_block_out_channels": [4] * 4}, "unsupported"),
    ],
)
def test_configurations_that_are_refused(
    parse: Any, component: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        parse("config.json", CONFIGS[component] | changes)


@pytest.mark.parametrize(
    ("component", "key", "message"),
    [
        ("text_encoder", "num_hidden_layers", "27 layers, more than 27 are required"),
        ("transformer", "joint_attention_dim", "the text encoder returns 192 features"),
        ("vae", "latent_channels", "the vae has"),
    ],
)
def test_networks_that_do_not_fit(component: str, key: str, message: str) -> None:
    changed = {name: dict(config) for name, config in CONFIGS.items()}
    changed[component][key] -= 1
    parsed: list[Any] = [
        parse(name, changed[name])
        for name, parse in (
            ("text_encoder", TextEncoderConfig.parse),
            ("transformer", TransformerConfig.parse),
            ("vae", VaeConfig.parse),
        )
    ]
    scheduler = FlowScheduler.parse("scheduler", {"_class_name": "FlowMatchEulerDiscreteScheduler"})
    with pytest.raises(ModelError, match=message):
        Flux2(parsed[0], parsed[1], parsed[2], scheduler, is_distilled=True)
