"""Requests with reference pictures to a live worker, with a small FLUX.2."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")
pytest.importorskip("openai")

import openai
from PIL import Image

from clowder_aimage.oci import Digest
from tests.picture_file import load_picture
from tests.process import Aimage
from tests.store import copy_store
from tests.worker.conftest import LocalWorker, answer_to

EDITS = "/v1/images/edits"
FEW = {"model": "flux", "prompt": "both", "seed": 7, "steps": 1, "size": "32x32"}


def file(colour: str, size: tuple[int, int] = (64, 80)) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", size, colour).save(data, "PNG")
    return data.getvalue()


ONE, OTHER = file("navy"), file("orange")
URLS = [f"data:image/png;base64,{base64.b64encode(one).decode()}" for one in (ONE, OTHER)]


@pytest.fixture(scope="module")
def worker(flux2_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    """Return a worker with a model that edits pictures."""
    home = tmp_path_factory.mktemp("worker")
    copy_store(flux2_store, home / "store")
    found = LocalWorker(Aimage(home, home / "store"))
    yield found
    found.end()


def send(worker: LocalWorker, path: str, **body: Any) -> tuple[int, Any]:
    """Return the status and JSON of a response."""
    headers = {"Content-Type": "application/json"}
    data = json.dumps(FEW | body).encode()
    status, _, answer = answer_to(urllib.request.Request(worker.url + path, data, headers))
    return status, json.loads(answer)


def made(answer: Any, path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the pixels and the facts of the picture in a response."""
    path.write_bytes(base64.b64decode(answer["data"][0]["b64_json"]))
    pixels, facts = load_picture(path)
    return pixels.tobytes(), facts


def test_the_sdk_edits_several_pictures(worker: LocalWorker, tmp_path: Path) -> None:
    for name, data in (("a.png", ONE), ("b.png", OTHER)):
        (worker.aimage.home / name).write_bytes(data)
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        images = [(name, worker.aimage.home / name) for name in ("a.png", "b.png")]
        answer = client.images.edit(
            model="flux",
            image=[path for _, path in images],
            prompt="both",
            extra_body={"seed": 7, "steps": 1},
        )
    assert answer.size == "64x80"  # that of the first
    pixels, facts = made(answer.model_dump(), tmp_path / "sdk.png")
    assert facts["references"] == [str(Digest.of(one)) for one in (ONE, OTHER)]
    run = ("run", "flux", "both", "--image", "a.png", "--image", "b.png", "--seed", 7, "--steps", 1)
    worker.aimage(*run, "--local", "-o", "here.png", "-q")
    assert load_picture(worker.aimage.home / "here.png")[0].tobytes() == pixels


def test_run_sends_several_pictures(worker: LocalWorker) -> None:
    (worker.aimage.home / "a.png").write_bytes(ONE)
    (worker.aimage.home / "b.png").write_bytes(OTHER)
    there = Aimage(worker.aimage.home, worker.store, {"AIMAGE_HOST": worker.url})
    run = ("run", "flux", "both", "--seed", 7, "--steps", 1)
    both = ("--image", "a.png", "--image", "b.png")
    there(*run, *both, "-o", "there.png")
    worker.aimage(*run, *both, "--local", "-o", "here.png", "-q")
    pixels, facts = load_picture(worker.aimage.home / "there.png")
    assert len(facts["references"]) == 2 and pixels.shape == (80, 64, 3)
    assert (load_picture(worker.aimage.home / "here.png")[0] == pixels).all()
    said = there(*run, "--image", "a.png", "--strength", 0.5, code=2).err
    assert "strength cannot be used: Flux2KleinPipeline only edits pictures" in said


def test_lists_of_all_kinds_give_the_same_picture(worker: LocalWorker, tmp_path: Path) -> None:
    objects = [{"image_url": url} for url in URLS]
    bodies = ({"image": URLS}, {"images": objects}, {"images": URLS[::-1]})
    answers = [send(worker, EDITS, **body)[1] for body in bodies]
    first, same, other = (made(one, tmp_path / "a.png")[0] for one in answers)
    assert first == same != other
    bare = [base64.b64encode(one).decode() for one in (ONE, OTHER)]
    sides = {"images": bare, "width": 32, "height": 32, "stream": False, "size": None}
    status, answer = send(worker, "/api/generate", **sides)
    assert status == 200
    (tmp_path / "b.png").write_bytes(base64.b64decode(answer["image"]))
    assert load_picture(tmp_path / "b.png")[0].tobytes() == first


def test_edits_are_streamed_with_previews(worker: LocalWorker) -> None:
    with openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as client:
        stream = client.images.edit(
            model="flux",
            image=[("a.png", ONE, "image/png"), ("b.png", OTHER, "image/png")],
            prompt="both",
            stream=True,
            partial_images=1,
            extra_body={"steps": 2, "size": "32x32"},
        )
        kinds = [event.type for event in stream]
    assert kinds == ["image_edit.partial_image", "image_edit.completed"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"image": URLS, "strength": 0.5}, "strength", "cannot be used: Flux2KleinPipeline"),
        ({"image": URLS[:1], "mask": URLS[0]}, "mask", "cannot be used: Flux2KleinPipeline"),
        ({"control": URLS[0]}, "control", "cannot be used: Flux2KleinPipeline"),
        ({"images": URLS * 3}, "images", "must be at most 4 pictures, not 6"),
    ],
)
def test_fields_that_do_not_fit_are_refused(
    worker: LocalWorker, body: dict[str, Any], param: str, message: str
) -> None:
    status, answer = send(worker, "/v1/images/generations", **body)
    assert status in (400, 422) and answer["error"]["param"] == param
    assert message in answer["error"]["message"]


def test_a_list_of_models_says_how_many_pictures_they_take(worker: LocalWorker) -> None:
    _, _, answer = answer_to(urllib.request.Request(f"{worker.url}/v1/models/flux"))
    assert json.loads(answer)["max_images"] == 4
