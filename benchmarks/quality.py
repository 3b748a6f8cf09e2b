"""Measure the prompt fidelity of the shapes model by precision: ``python -m benchmarks.quality``.

Pictures of the 300 held-out scenes of examples/shapes, each with its own seed, 8 steps and no
guidance, are judged from their pixels alone. There is a row for each precision: computed in
float32, in bfloat16, in float32 from an AImage with a quantized transformer, and with PyTorch from
that of fp8 with products of fp8 (``--compute fp8``). "Mean" and "largest" are of the differences of
all values from those in float32, of 255. ``--diffusers`` adds the figures of diffusers with the
same model, and the largest difference between the two.

``--cache`` measures the step cache instead: a row for each number of steps and threshold, in
float32. "Skipped" is the share of the main blocks' evaluations; "time" is the median, over the
scenes, of the time of a picture, in parts of that without the cache. The pictures of a scene are
made one after another, in an order that changes from scene to scene.

``--inpaint`` measures painting in place: a row for each strength, in float32. Each scene of one
item is drawn with another one, such as a red circle, whose box and a margin of two latent cells are
the mask; the prompt is the scene's caption, such as "a blue square". "In place" is the share of
pictures with nothing but the right item, whose centre is within the circle around the drawn one.
``--pictures`` writes the drawings, and the pictures of each strength.

``--enhancer DIR`` measures a language model that writes prompts, in float32: rows of 100 terse
wishes such as "red ball, top", as they are, as the language model writes them, and of the scenes'
own captions, wish i with seed i. "Right" is the share of pictures with all that the wish states.

``--lora FILE[:STRENGTH]`` measures an adapter instead, in float32: rows without and with it, of
scenes with the ninth colour (examples/shapes/composing.py) and of the held-out scenes. The judge
knows nine colours then, except in the last two rows.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt

from clowder_aimage.adapter.loaded_adapter import LoadedAdapter, Use
from clowder_aimage.adapter.reader import read_adapter
from clowder_aimage.create import create
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.importer import Recipe
from clowder_aimage.layout import ImageLayout
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.flow.pipeline import FlowPipeline
from clowder_aimage.model.library_choice import TORCH, TorchTuning
from clowder_aimage.model.loader import load_pipeline
from clowder_aimage.model.lora_text import parse_use
from clowder_aimage.model.pipeline import Image, PictureInput
from clowder_aimage.model.text.enhancement import build_enhancement_request, collect_prompt
from clowder_aimage.model.text.runtime import load_language_model
from clowder_aimage.model.zimage.transformer import Block
from clowder_aimage.oci import Digest, Reference
from clowder_aimage.tensor.quantization import FP8

SHAPES = Path(__file__).parents[1] / "examples" / "shapes"
sys.path.insert(0, str(SHAPES))

from composing import held_out_scenes, ninth_scenes  # noqa: E402
from judge import look  # noqa: E402
from scene import COLOURS, NINTH, RGB, Item, Scene, render  # noqa: E402
from score import figures, score  # noqa: E402
from terse import terse_scenes  # noqa: E402

STEPS = 8
CACHED_STEPS = (28, 8)
THRESHOLDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
INPAINTED = 60  # scenes
STRENGTHS = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
MARGIN = 16  # pixels around an item that is painted over: two latent cells
QUANTIZED = ("int8", "fp8", "mxfp8", "int4", "nvfp4")
# From the AImage of fp8, with products of fp8
COMPUTED = "fp8 computed"
PRECISIONS = ("float32", "bfloat16", *QUANTIZED, COMPUTED)
COLUMNS: tuple[str, ...] = (
    "colour",
    "shape",
    "both",
    "both_trained",
    "both_left_out",
    "count",
    "left_right",
)
COLUMNS += ("above_below", "position", "size", "background")
Pixels = npt.NDArray[np.uint8]


def load(directory: Path, precision: str, store: ImageLayout) -> tuple[FlowPipeline, int]:
    """Load a model in one of PRECISIONS; return it and its number of quantized tensors."""
    name = Reference.parse(f"shapes:{precision.replace(' ', '-')}")
    is_computed = precision == COMPUTED
    quantize = FP8 if is_computed else precision if precision in QUANTIZED else None
    recipe = Recipe.parse(quantize=quantize)
    create(store, name, directory, recipe=recipe)
    aimage = read_aimage(store, name).aimage
    dtype = precision if precision == "bfloat16" else "float32"
    options: dict[str, Any] = {}
    if is_computed:
        options = {"backend": TORCH, "tuning": TorchTuning(device="cpu", compute=FP8)}
    pipeline = load_pipeline(store, aimage, dtype=dtype, **options)
    count = sum(layer.dtype == recipe.precision for layer in aimage.layers) if quantize else 0
    return pipeline, count


def request(scene: Scene, seed: int) -> GenerateRequest:
    """Return the request for a scene."""
    return GenerateRequest.of(
        scene.caption, width=scene.width, height=scene.height, steps=STEPS, seed=seed
    )


def picture(pipeline: FlowPipeline, asked: GenerateRequest) -> Pixels:
    """Return one picture."""
    *_, image = pipeline.generate(asked)
    assert isinstance(image, Image)
    return image.pixels


def reference(directory: Path) -> Callable[[GenerateRequest], Pixels]:
    """Return a function that makes the same picture with diffusers, in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from diffusers import ZImagePipeline as Reference
    pipeline = Reference.from_pretrained(directory, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)

    def make(asked: GenerateRequest) -> Pixels:
        made = pipeline(
            asked.prompt,
            height=asked.sampling.height,
            width=asked.sampling.width,
            num_inference_steps=asked.sampling.steps,
            guidance_scale=0.0,
            generator=torch.Generator().manual_seed(asked.sampling.seed),
        )
        return np.asarray(made.images[0])

    return make


def judged(
    scenes: Sequence[Scene], pictures: Sequence[Pixels], colours: Mapping[str, RGB] = COLOURS
) -> dict[str, Any]:
    """Return the figures of a judge who knows these colours."""
    pairs = zip(scenes, pictures, strict=True)
    return figures((scene, score(scene, look(pixels, colours))) for scene, pixels in pairs)


def percent(share: float | None) -> str:
    """Format a share, or a dash for None."""
    return "-" if share is None else f"{100 * share:.1f}"


def correlations(pictures: Sequence[Pixels], others: Sequence[Pixels]) -> list[float]:
    """Return the correlation of each picture with the other of the same scene, over all values."""
    return [
        float(np.corrcoef(one.ravel().astype(float), other.ravel().astype(float))[0, 1])
        for one, other in zip(pictures, others, strict=True)
    ]


def differences(pictures: Sequence[Pixels], others: Sequence[Pixels]) -> list[npt.NDArray[Any]]:
    """Return the absolute differences of all values of each picture from the other one's."""
    pairs = zip(pictures, others, strict=True)
    return [np.abs(one.astype(int) - other) for one, other in pairs]


@dataclasses.dataclass
class CachedPictures:
    """The pictures with a threshold, their times, and the evaluated main blocks."""

    pictures: list[Pixels] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    blocks: int = 0


def with_cache(
    pipeline: FlowPipeline, scenes: Sequence[Scene], steps: int
) -> dict[float, CachedPictures]:
    """Return the pictures of all scenes with each threshold."""
    layers = {id(block) for block in pipeline.networks.transformer.get().layers}
    call = Block.__call__
    made = {threshold: CachedPictures() for threshold in THRESHOLDS}
    for seed, scene in enumerate(scenes):
        asked = request(scene, seed).change(steps=steps)
        pipeline.build_conditioning(asked)  # encoded once for all
        for index in range(len(THRESHOLDS)):
            threshold = THRESHOLDS[(index + seed) % len(THRESHOLDS)]
            one = made[threshold]

            def counted(self: Block, *given: Any, to: CachedPictures = one) -> Any:
                to.blocks += id(self) in layers
                return call(self, *given)

            begun = time.perf_counter()
            with mock.patch.object(Block, "__call__", counted):
                pixels = picture(pipeline, asked.change(cache_threshold=threshold))
            one.seconds.append(time.perf_counter() - begun)
            one.pictures.append(pixels)
    return made


def print_cached(pipeline: FlowPipeline, scenes: Sequence[Scene]) -> None:
    """Print the table of the step cache."""
    titles = [column.replace("_", " ") for column in COLUMNS]
    print("| steps | threshold | skipped | time |", " | ".join(titles), end=" ")
    print("| correlation, mean | least |")
    print("|---" * (len(COLUMNS) + 6) + "|")
    for steps in CACHED_STEPS:
        made = with_cache(pipeline, scenes, steps)
        exact = made[0.0]
        for threshold, one in made.items():
            pairs = zip(one.seconds, exact.seconds, strict=True)
            ratio = statistics.median(seconds / whole for seconds, whole in pairs)
            found = judged(scenes, one.pictures)
            shares = [percent(found[column]["share"]) for column in COLUMNS]
            with_exact = correlations(one.pictures, exact.pictures)
            print(
                f"| {steps} | {threshold or 'off'} | {percent(1 - one.blocks / exact.blocks)}",
                f"| {ratio:.2f} |",
                " | ".join(shares),
                f"| {np.mean(with_exact):.4f} | {min(with_exact):.4f} |",
                flush=True,
            )


@dataclasses.dataclass(frozen=True)
class Repainting:
    """A scene of one item, drawn with another one; the mask covers that one."""

    scene: Scene
    drawing: Pixels
    mask: Pixels

    @classmethod
    def of(cls, scene: Scene) -> Repainting:
        """Return the scene with a red circle, or a blue square, in place of its item."""
        (item,) = scene.items
        colour = "blue" if item.colour == "red" else "red"
        shape = "square" if item.shape == "circle" else "circle"
        other = Item(colour, shape, item.x, item.y, item.radius)
        mask = np.zeros((scene.height, scene.width), np.uint8)
        reach = item.radius + MARGIN
        rows, columns = (slice(max(0, int(at - reach)), int(at + reach)) for at in (item.y, item.x))
        mask[rows, columns] = 255
        return cls(scene, render(dataclasses.replace(scene, items=(other,))), mask)

    def paint(self, pipeline: FlowPipeline, seed: int, strength: float) -> Pixels:
        """Return the picture after painting by the scene's caption."""
        file = str(Digest.of(b""))  # of the picture; the pipeline does not read it
        asked = request(self.scene, seed).change(image=file, mask=file, strength=strength)
        *_, image = pipeline.generate(asked, PictureInput(self.drawing, self.mask))
        assert isinstance(image, Image)
        return image.pixels

    def is_in_place(self, made: Pixels) -> bool:
        """Return whether the picture has only the scene's item, where the other one was."""
        (item,), seen = self.scene.items, look(made)
        away = [float(np.hypot(one.x - item.x, one.y - item.y)) for one in seen.items]
        return score(self.scene, seen).both and max(away) <= item.radius


def repaintings(count: int = INPAINTED) -> list[Repainting]:
    """Return the first held-out scenes of one item, to be painted in place of others."""
    alone = [scene for scene in held_out_scenes() if len(scene.items) == 1]
    return [Repainting.of(scene) for scene in alone[:count]]


def print_inpainted(pipeline: FlowPipeline, count: int, place: Path | None) -> None:
    """Print the table of inpainting by strength."""
    from PIL import Image as Picture

    wanted, columns = repaintings(count), ("colour", "shape", "both", "position", "size")
    print("| strength |", " | ".join(columns), "| background | in place |")
    print("|---" * (len(columns) + 3) + "|")
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
        for seed, one in enumerate(wanted):
            Picture.fromarray(one.drawing).save(place / f"{seed:02}-drawn.png")
    for strength in STRENGTHS:
        made = [one.paint(pipeline, seed, strength) for seed, one in enumerate(wanted)]
        found = judged([one.scene for one in wanted], made)
        shares = [percent(found[column]["share"]) for column in (*columns, "background")]
        right = [one.is_in_place(pixels) for one, pixels in zip(wanted, made, strict=True)]
        print(f"| {strength} |", " | ".join(shares), f"| {percent(float(np.mean(right)))} |")
        for seed, pixels in enumerate(made if place is not None else ()):
            assert place is not None
            Picture.fromarray(pixels).save(place / f"{seed:02}-{strength}.png")


def print_enhanced(pipeline: FlowPipeline, directory: Path, store: ImageLayout) -> None:
    """Print the table of terse wishes, without and with a language model."""
    name, wishes = Reference.parse("enhancer"), terse_scenes()
    create(store, name, directory)
    model = load_language_model(store, read_aimage(store, name).aimage)
    written = [
        collect_prompt(model.generate(build_enhancement_request(wish, seed)))
        for seed, (wish, _) in enumerate(wishes)
    ]
    scenes = [scene for _, scene in wishes]
    prompts = {
        "as typed": [wish for wish, _ in wishes],
        "enhanced": written,
        "caption of the scene": [scene.caption for scene in scenes],
    }
    titles = [column.replace("_", " ") for column in COLUMNS]
    print("| prompt | right |", " | ".join(titles), "|")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for title, texts in prompts.items():
        asked = [
            request(scene, seed).change(prompt=text)
            for seed, (scene, text) in enumerate(zip(scenes, texts, strict=True))
        ]
        made = [picture(pipeline, one) for one in asked]
        verdicts = [score(scene, look(one)) for scene, one in zip(scenes, made, strict=True)]
        right = np.mean([False not in dataclasses.astuple(verdict) for verdict in verdicts])
        found = judged(scenes, made)
        shares = [percent(found[column]["share"]) for column in COLUMNS]
        print(f"| {title} | {percent(float(right))} |", " | ".join(shares), "|", flush=True)


def open_adapter(pipeline: FlowPipeline, text: str) -> Use:
    """Return the adapter of ``FILE[:STRENGTH]`` for a model."""
    named = parse_use(text, lambda name: Path(name).is_file())
    adapter = read_adapter(Path(named.model), pipeline.shapes, label=named.model, base="shapes")
    strength = 1.0 if named.strength is None else named.strength
    return LoadedAdapter(named.model, adapter), strength


def print_adapter(pipeline: FlowPipeline, use: Use, scenes: Sequence[Scene]) -> None:
    """Print the table of an adapter."""
    titles = [column.replace("_", " ") for column in COLUMNS]
    print("| scenes | adapter |", " | ".join(titles), "|")
    print("|---" * (len(COLUMNS) + 2) + "|")
    ninth, nine = ninth_scenes(), {**COLOURS, **NINTH}
    both: dict[str, tuple[Sequence[Scene], Mapping[str, RGB]]] = {
        "ninth colour": (ninth[: len(scenes)], nine),
        "held out, nine colours": (scenes, nine),
        "held out": (scenes, COLOURS),
    }
    made: dict[tuple[int, bool], list[Pixels]] = {}
    for title, (asked, colours) in both.items():
        for uses in ([], [use]):
            key = id(asked), bool(uses)
            if key not in made:
                pipeline.use_adapters(uses)
                made[key] = [
                    picture(pipeline, request(scene, seed)) for seed, scene in enumerate(asked)
                ]
            found = judged(asked, made[key], colours)
            shares = [percent(found[column]["share"]) for column in COLUMNS]
            about = f"strength {use[1]:g}" if uses else "-"
            print(f"| {title} | {about} |", " | ".join(shares), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=SHAPES / "model")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--scenes", type=int, default=None, help="only the first so many")
    parser.add_argument("--diffusers", action="store_true")
    parser.add_argument("--cache", action="store_true", help="measure the step cache")
    parser.add_argument("--inpaint", action="store_true", help="measure painting in place")
    parser.add_argument("--pictures", type=Path, help="with --inpaint: write pictures here")
    parser.add_argument("--enhancer", type=Path, metavar="DIR", help="measure a language model")
    parser.add_argument("--lora", metavar="FILE[:STRENGTH]", help="measure an adapter")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        measure(options, ImageLayout(Path(place)))


def measure(options: argparse.Namespace, store: ImageLayout) -> None:
    """Print the table that the options choose."""
    scenes = held_out_scenes()[: options.scenes]
    if not (options.inpaint or options.enhancer or options.cache or options.lora):
        print_precisions(options, scenes, store)
        return
    pipeline, _ = load(options.directory, "float32", store)
    if options.inpaint:
        print_inpainted(pipeline, options.scenes or INPAINTED, options.pictures)
    elif options.enhancer:
        print_enhanced(pipeline, options.enhancer, store)
    elif options.cache:
        print_cached(pipeline, scenes)
    else:
        print_adapter(pipeline, open_adapter(pipeline, options.lora), scenes)


def print_precisions(
    options: argparse.Namespace, scenes: Sequence[Scene], store: ImageLayout
) -> None:
    """Print the table of the precisions."""
    asked = [request(scene, seed) for seed, scene in enumerate(scenes)]
    titles = [column.replace("_", " ") for column in COLUMNS]
    print("| precision | quantized |", " | ".join(titles), end=" ")
    print("| correlation, mean | least | difference, mean | largest |")
    print("|---" * (len(COLUMNS) + 6) + "|")
    exact: list[Pixels] = []

    def row(title: str, count: int, pictures: list[Pixels]) -> None:
        found = judged(scenes, pictures)
        shares = [percent(found[column]["share"]) for column in COLUMNS]
        with_exact = correlations(pictures, exact)
        away = differences(pictures, exact)
        print(
            f"| {title} | {count} |",
            " | ".join(shares),
            f"| {np.mean(with_exact):.4f} | {min(with_exact):.4f}",
            f"| {np.mean([one.mean() for one in away]):.2f} | {max(one.max() for one in away)} |",
            flush=True,
        )

    for precision in options.precisions.split(","):
        pipeline, count = load(options.directory, precision, store)
        pictures = [picture(pipeline, one) for one in asked]
        exact = exact or pictures
        row(precision, count, pictures)
    if options.diffusers:
        make = reference(options.directory)
        pictures = [make(one) for one in asked]
        row("diffusers, float32", 0, pictures)
        largest = max(one.max() for one in differences(pictures, exact))
        print(f"\nLargest difference between float32 and diffusers: {largest} of 255")


if __name__ == "__main__":
    main()
