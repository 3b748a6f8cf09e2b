"""Memory limits: detection on the machine, the text encoder, and the size of pictures."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clowder_aimage.model.pipeline import Pipeline

pytest.importorskip("mlx")

from benchmarks.models import build
from clowder_aimage import generate
from clowder_aimage.create import create
from clowder_aimage.engine import machine
from clowder_aimage.engine.admission import EngineLimits
from clowder_aimage.engine.event import ImageEvent
from clowder_aimage.engine.runner import Runner
from clowder_aimage.errors import AImageError, UsageError
from clowder_aimage.generation.encoding import PictureEncoding
from clowder_aimage.generation.request import GenerateRequest
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.backend import mx
from clowder_aimage.model.flow.stage_plan import estimate_least_memory
from clowder_aimage.model.runnable import open_runnable
from clowder_aimage.oci import Reference
from tests.store import copy_store

PHYSICAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
GIB = 1 << 30
ARRAYS = 2 * 8 * 4  # bytes of a pixel: arrays, channels of the decoder, bytes of a number


def system(root: Path, said: str, **files: str) -> Path:
    """Create a root directory with ``/proc`` and the control group files ``files``."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(said)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name.replace("__", "/").replace("_bytes", "_in_bytes")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name.replace("memory_", "memory.")).write_text(text)
    return root


def test_without_control_groups_the_limit_is_physical_memory(tmp_path: Path) -> None:
    assert machine.read_memory_limit(tmp_path) == int(PHYSICAL * 0.8)
    assert machine.read_memory_limit(system(tmp_path, "0::/\n")) == int(PHYSICAL * 0.8)


def test_limits_of_parent_groups_apply_in_cgroup_v2(tmp_path: Path) -> None:
    files = {
        "a__memory_max": f"{GIB // 4}\n",
        "a__b__memory_max": "max\n",
        "memory_max": f"{GIB}\n",
    }
    assert machine.read_memory_limit(system(tmp_path, "0::/a/b\n", **files)) == int(GIB // 4 * 0.8)


def test_the_limit_of_a_containers_root_cgroup_applies(tmp_path: Path) -> None:
    root = system(tmp_path, "0::/kubepods/pod7\n", memory_max=f"{GIB // 2}")
    assert machine.read_memory_limit(root) == int(GIB // 2 * 0.8)


def test_the_limit_of_cgroup_v1_applies(tmp_path: Path) -> None:
    said = "5:cpu,cpuacct:/x\n4:memory:/x\n0::/\n"
    files = {
        "memory__x__memory_limit_bytes": f"{GIB // 8}",
        "memory__memory_limit_bytes": str(2**63),
    }
    assert machine.read_memory_limit(system(tmp_path, said, **files)) == int(GIB // 8 * 0.8)


@pytest.mark.parametrize("said", ["", "nonsense", "0", "0::", "0::/../../..\n"])
def test_invalid_cgroup_files_are_ignored(tmp_path: Path, said: str) -> None:
    assert machine.read_memory_limit(system(tmp_path, said, memory_max="much")) == int(
        PHYSICAL * 0.8
    )


# -- the process of a model


@pytest.fixture
def tiny_store(stocked: Path, tmp_path: Path) -> LayeredStore:
    return LayeredStore([copy_store(stocked, tmp_path / "store")])


def lose_text_encoder(store: LayeredStore) -> None:
    """Delete the text encoder's weights."""
    for layer in read_aimage(store, Reference.parse("tiny")).aimage.list_layers("text_encoder"):
        digest = layer.descriptor.digest
        (store.roots[0] / "blobs" / digest.algorithm / digest.encoded).unlink(missing_ok=True)


async def picture(runner: Any, prompt: str) -> list[Any]:
    events: list[Any]
    events, request = [], GenerateRequest.of(prompt, width=32, height=32, steps=1, seed=7)
    manifest = runner.manifest
    await runner.generate("tiny", manifest, request, PictureEncoding(), events.append)
    return [event.data for event in events if isinstance(event, ImageEvent)]


def played(
    store: LayeredStore, play: Callable[[Any], Coroutine[Any, Any, Any]], keep: EngineLimits
) -> Any:
    async def run() -> Any:
        manifest = store.resolve(Reference.parse("tiny"))
        limits = dataclasses.replace(keep, dtype="float32")
        runner = await Runner.start(store.roots, "tiny", manifest, limits)
        vars(runner)["manifest"] = manifest
        try:
            async with asyncio.timeout(100):
                return await play(runner)
        finally:
            await runner.stop()

    return asyncio.run(run())


async def two(runner: Any) -> list[Any]:
    return [await picture(runner, prompt) for prompt in ("a dog", "a cat", "a dog")]


@pytest.mark.integration
def test_releasing_the_text_encoder_does_not_change_pictures(tiny_store: LayeredStore) -> None:
    keep = EngineLimits(text_encoder="release")
    stays = played(tiny_store, two, EngineLimits(text_encoder="keep"))
    assert played(tiny_store, two, keep) == stays
    assert stays[0] == stays[2] != stays[1]

    async def without(runner: Any) -> Any:
        first = await picture(runner, "a dog")
        lose_text_encoder(tiny_store)
        with pytest.raises(AImageError):
            await picture(runner, "a cat")
        assert await picture(runner, "a dog") == first  # the text embedding is cached
        return first

    assert played(tiny_store, without, keep) == stays[0]


def test_a_limit_refuses_pictures_that_exceed_it(tiny_store: LayeredStore) -> None:
    with pytest.raises(UsageError, match=r"^2 MiB of memory are insufficient .* are required$"):
        played(tiny_store, two, EngineLimits(memory=2 << 20))


@pytest.mark.integration
def test_the_least_memory_is_sufficient_for_two_prompts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = LayeredStore([tmp_path / "store"])
    create(store, Reference.parse("tiny"), build(tmp_path / "model", "small"))
    with pytest.raises(UsageError) as caught:
        played(store, two, EngineLimits(memory=1 << 20))
    least = re.search("([0-9]+) MiB are required", caught.value.message)
    assert least is not None
    caplog.set_level("DEBUG", "aimage.worker")
    found = played(store, two, EngineLimits(memory=int(least[1]) << 20))
    (plan,) = [record.__dict__["plan"] for record in caplog.records if record.msg == "memory"]
    assert plan.startswith("networks that are not in use are released, about ")
    assert found == played(store, two, EngineLimits())


def test_the_text_encoder_is_kept_with_enough_memory(tiny_store: LayeredStore) -> None:
    async def without(runner: Any) -> Any:
        await picture(runner, "a dog")
        lose_text_encoder(tiny_store)
        return await picture(runner, "a cat")

    assert played(tiny_store, without, EngineLimits())


# -- size limits


@pytest.fixture(scope="module")
def pipeline(stocked: Path) -> Iterator[Pipeline]:
    """Return a pipeline; a test sets its memory."""
    store = LayeredStore([stocked])
    with store.lease() as lease:
        stored = open_runnable(store, Reference.parse("tiny"), lease)
        yield generate.load(store, stored).pipeline


def refused(pipeline: Pipeline, width: int, height: int, **more: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        pipeline.generate(GenerateRequest.of("a dog", width=width, height=height, steps=1, **more))
    return caught.value


@pytest.mark.parametrize("size", [(8192, 2048), (4096, 4096)])
def test_a_picture_beyond_memory_is_refused(pipeline: Pipeline, size: tuple[int, int]) -> None:
    pipeline.set_memory("keep", None, GIB // 4)
    error = refused(pipeline, *size)
    assert error.message.startswith(f"width {size[0]} and height {size[1]} are too large")
    assert "GiB of memory required, 0.2 GiB available" in error.message
    assert error.hint is not None
    assert error.hint.startswith("use a smaller size, such as ")


def test_the_hint_suggests_the_largest_square(pipeline: Any) -> None:
    pipeline.set_memory("keep", None, 1024 * 1024 * ARRAYS)
    assert pipeline.generate(GenerateRequest.of("a dog", width=1024, height=1024)) is not None
    error = refused(pipeline, 2048, 1024)
    assert error.hint is not None
    found = re.search("such as ([0-9]+)x", error.hint)
    assert found is not None
    side = int(found[1])
    assert side == 1024
    assert refused(pipeline, side + pipeline.family.sides.multiple, side).hint == error.hint
    pipeline.set_memory("keep", None, 1)
    assert refused(pipeline, 16, 16).hint == "use a smaller size"


@pytest.mark.parametrize("side", [1024, 2048])
def test_large_pictures_are_accepted(pipeline: Any, side: int) -> None:
    """The decoder's attention has 2^32 scores for 2048 x 2048 pixels, computed in parts."""
    pipeline.set_memory("keep", None, 24 * GIB)
    pipeline.check(GenerateRequest.of("a dog", width=side, height=side))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_of_the_decoder_is_between_its_estimates(stocked: Path, dtype: str) -> None:
    store = LayeredStore([stocked])
    with store.lease() as lease:
        stored = open_runnable(store, Reference.parse("tiny"), lease)
        pipeline: Any = generate.load(store, stored, dtype=dtype).pipeline
    latents = np.zeros((16, 16, 16), np.float32)
    mx.eval(pipeline.networks.vae.get().parameters())
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    pipeline.networks.decode(latents)
    least = estimate_least_memory(pipeline.family, pipeline.networks, 128, 128)
    *_, decode = pipeline.list_stages(GenerateRequest.of("a dog", width=128, height=128))
    assert least == 128 * 128 * ARRAYS * pipeline.library.itemsize // 4
    assert least <= mx.get_peak_memory() - before <= decode.work
