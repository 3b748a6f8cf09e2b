"""Control pictures, expanded and enlarged ones in requests to a worker, with the tiny model."""

from __future__ import annotations

import io
import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")

import numpy as np
from PIL import Image

from tests.conftest import TINY
from tests.controlnet_file import tensors, write_directory, write_file
from tests.picture_file import load_picture
from tests.process import Aimage
from tests.store import copy_store
from tests.wait import until
from tests.worker.conftest import LocalWorker, answer_to
from tests.worker.test_picture_upload import (
    EDITS,
    GENERATIONS,
    VARIATIONS,
    edit,
    file,
    form,
    left,
    pictures,
    pixels,
    send,
    url_of,
)

SMALL = {"model": "tiny", "prompt": "a fox", "steps": 2, "seed": 1}


@pytest.fixture(scope="module")
def worker(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    """Return a worker with control networks: ``union``, ``wide`` of another model, and ``own``."""
    home = tmp_path_factory.mktemp("control")
    copy_store(stocked, home / "store")
    here = Aimage(home, home / "store")
    here("create", "union", write_file(home / "union.safetensors", tensors()), "-q")
    here("create", "wide", write_file(home / "wide.safetensors", tensors(dim=96)), "-q")
    shutil.copytree(TINY, home / "model")
    write_directory(home / "model" / "controlnet")
    here("create", "own", home / "model", "-q")
    found = LocalWorker(here, "--alias", "lines=union")
    before = left(here.store)
    yield found

    def is_clean() -> bool:
        kept = left(here.store) - before - {".aimage/gc.lock"}
        return not {name for name in kept if "lease" not in name}

    until(is_clean)
    found.end()


def drawn(worker: LocalWorker, path: str = GENERATIONS, /, **fields: Any) -> bytes:
    status, answer = send(worker, path, SMALL | fields)
    assert status == 200, answer
    return pictures(answer)[0]


def refused(worker: LocalWorker, path: str = GENERATIONS, /, **fields: Any) -> tuple[int, Any]:
    status, answer = send(worker, path, SMALL | fields)
    error = answer["error"]
    return status, (error["param"], error["code"]) if isinstance(error, dict) else error


def test_a_control_picture_guides_as_run_does(worker: LocalWorker, tmp_path: Path) -> None:
    """Of a form, of JSON and of ollama's API; the network is named by its digest in the facts."""
    guide = {"control": url_of(file()), "controlnet": "lines", "control_strength": 0.6}
    data = drawn(worker, **guide)
    assert pixels(data) != pixels(drawn(worker, size="64x48"))
    (tmp_path / "edges.png").write_bytes(file())
    options = ("--control", tmp_path / "edges.png", "--controlnet", "union", "--steps", 2)
    made = ("--control-strength", 0.6, "--seed", 1, "-o", tmp_path / "made.png", "--local", "-q")
    worker.aimage("run", "tiny", "a fox", *options, *made)
    (tmp_path / "served.png").write_bytes(data)
    (_, facts), (_, own) = (load_picture(tmp_path / f"{name}.png") for name in ("served", "made"))
    assert facts == own and facts["controlnet"].startswith("union@sha256:")
    assert pixels(data) == pixels((tmp_path / "made.png").read_bytes())
    bare = url_of(file()).partition(",")[2]
    status, answer = send(
        worker, "/api/generate", SMALL | guide | {"control": bare, "stream": False}
    )
    assert status == 200 and url_of(data).partition(",")[2] == answer["image"]
    worker.aimage("gc", "--grace", 0)


def test_a_control_picture_guides_edits_and_variations(worker: LocalWorker) -> None:
    guide = {"control": url_of(file(kind="JPEG"), "image/jpeg"), "controlnet": "union"}
    fields = {"image": url_of(file()), "mask": url_of(file(mode="L")), **guide}
    parts: list[Any] = [("image", file(), "image/png"), ("mask", file(mode="L"), "image/png")]
    parts += [("control", file(kind="JPEG"), "image/jpeg"), ("controlnet", "union", "")]
    status, answer = edit(worker, *parts, ("prompt", "a fox", ""), ("seed", "1", ""))
    assert status == 200, answer
    masked = drawn(worker, EDITS, **fields)
    assert pixels(pictures(answer)[0]) == pixels(masked)
    varied = {
        key: value for key, value in (SMALL | fields).items() if key not in ("prompt", "mask")
    }
    status, answer = send(worker, VARIATIONS, varied)
    assert status == 200 and pixels(pictures(answer)[0]) != pixels(masked)


@pytest.mark.integration
def test_a_model_uses_its_own_control_network(worker: LocalWorker) -> None:
    guide = {"control": url_of(file())}
    own = drawn(worker, model="own", **guide)
    assert pixels(own) == pixels(drawn(worker, controlnet="union", **guide))


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("none", 404, "controlnet_not_found"),
        ("registry.example.com/union:v1", 404, "controlnet_not_found"),
        ("tiny", 400, "invalid_controlnet"),
        ("wide", 400, "invalid_controlnet"),
        ("A B", 404, "controlnet_not_found"),
    ],
)
def test_other_control_networks_are_refused(
    worker: LocalWorker, name: str, status: int, code: str
) -> None:
    guide = {"control": url_of(file()), "controlnet": name}
    assert refused(worker, **guide) == (status, ("controlnet", code))
    bare = guide | {"control": guide["control"].partition(",")[2]}
    found, message = refused(worker, "/api/generate", **bare)
    assert "registry to the name" not in str(message)  # requests do not pull it
    assert (found == status and "ControlNet" in message) or "controlnet" in message
    if name != "wide":  # whose shapes the model's process compares, behind the first event
        assert refused(worker, **guide, stream=True) == (status, ("controlnet", code))


def test_pictures_are_expanded_and_enlarged(worker: LocalWorker) -> None:
    image = {"image": url_of(file())}
    expanded = drawn(worker, EDITS, expand="16,0,8,4", **image)
    assert pixels(expanded) == pixels(drawn(worker, expand=[16, 0, 8, 4], **image))
    status, answer = edit(
        worker, ("image", file(), "image/png"), ("expand", "16,0,8,4", ""), ("prompt", "a fox", ""),
        ("seed", "1", ""),
    )  # fmt: skip
    assert status == 200 and pixels(pictures(answer)[0]) == pixels(expanded)
    with Image.open(io.BytesIO(expanded)) as picture:
        assert picture.size == (88, 52)
        inside = np.asarray(picture)[:8, 56:60]  # outside of the seam
    assert (inside == np.asarray(Image.open(io.BytesIO(file())))[:8, 40:44]).all()
    guide = {"control": url_of(file()), "controlnet": "union"}
    assert pixels(drawn(worker, EDITS, expand="16,0,8,4", **image, **guide)) != pixels(expanded)
    enlarged = drawn(worker, EDITS, upscale=1.5, strength=0.5, size="64x64", **image)
    with Image.open(io.BytesIO(enlarged)) as picture:
        assert picture.size == (96, 72)


@pytest.mark.parametrize(
    ("fields", "size"),
    [({"expand": "0,0,5,0"}, "69x48"), ({"crop": True, "mask": url_of(file(mode="L"))}, "64x48")],
)
def test_previews_state_the_size_of_the_finished_picture(
    worker: LocalWorker, fields: dict[str, Any], size: str
) -> None:
    more = {"image": url_of(file()), "stream": True, "partial_images": 1, "stream_format": "openai"}
    body = json.dumps(SMALL | more | fields | ({"size": "32x32"} if "mask" in fields else {}))
    asked = urllib.request.Request(worker.url + EDITS, body.encode())
    status, _, answer = answer_to(asked)
    sizes = re.findall(r'"size": "([0-9x]+)"', answer.decode())
    assert (status, sizes) == (200, [size] * 2), answer[:500]


@pytest.mark.parametrize(
    ("fields", "expected", "param"),
    [
        ({"expand": "1,2,3"}, 400, "expand"),
        ({"expand": [0, 0, 5000, 0]}, 400, "expand"),
        ({"expand": "4096,4096,4096,4096"}, 400, "expand"),
        ({"expand": "0,0,16,0", "size": "64x48"}, 400, "expand"),
        ({"expand": "0,0,16,0", "mask": "alpha"}, 400, "expand"),
        ({"upscale": 5}, 400, "upscale"),
        ({"upscale": 2, "mask": "alpha"}, 400, "upscale"),
        ({"upscale": 4, "image": url_of(file((1600, 1600)))}, 400, "upscale"),
        ({"strength": 1e-17}, 400, "strength"),
        ({"feather": 4, "mask": url_of(file(mode="L"))}, 400, "feather"),
        ({"images": [url_of(file())] * 2, "image": None}, 422, "images"),
        ({"images": [{"file_id": "file-1"}], "image": None}, 400, "images"),
        ({"images": [url_of(file())]}, 400, "images"),
        ({"control": [url_of(file())] * 2}, 400, "control"),
        ({"control": "text"}, 400, "control"),
        ({"control": url_of(file())}, 422, "controlnet"),  # of which the model has none
    ],
)
def test_fields_that_cannot_be_served_are_refused_by_name(
    worker: LocalWorker, fields: dict[str, Any], expected: int, param: str
) -> None:
    status, (found, _) = refused(worker, EDITS, **{"image": url_of(file())} | fields)
    assert (status, found) == (expected, param)


def test_a_variation_has_no_prompt(worker: LocalWorker) -> None:
    """Unmodified SDKs send none."""
    status, (param, _) = refused(worker, VARIATIONS, image=url_of(file()))
    assert (status, param) == (400, "prompt")
    body, headers = form(("image", file(), "image/png"), ("model", "tiny", ""), ("prompt", "", ""))
    assert send(worker, VARIATIONS, body, **headers)[0] == 200


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"image": url_of(file()), "strength": 1}, ["strength 1 with steps 2 begins"]),
        ({"guidance_end": 0.5}, ["guidance_end has no effect without guidance"]),
        (
            {"control": url_of(file()), "controlnet": "union", "control_strength": 0,
             "cfg_normalization": 1},
            ["cfg_normalization has no effect", "control_strength 0 ignores the control picture"],
        ),
        ({"image": url_of(file()), "strength": 0.5}, []),
    ],
)  # fmt: skip
def test_a_header_names_what_has_no_effect(
    worker: LocalWorker, fields: dict[str, Any], words: list[str]
) -> None:
    for more in {"stream": False}, {"stream": True}, {"stream": True, "partial_images": 1}:
        body = json.dumps(SMALL | {"size": "32x32"} | fields | more).encode()
        asked = urllib.request.Request(worker.url + GENERATIONS, body)
        status, headers, answer = answer_to(asked)
        assert status == 200, answer
        said = headers.get_all("X-Aimage-Warning", [])
        assert len(said) == len(words) and all(map(str.__contains__, said, words))
        assert (f'"warnings": {json.dumps(said)}'.encode() in answer) == bool(words)


def test_a_header_of_ollamas_api_names_what_has_no_effect(worker: LocalWorker) -> None:
    bare = url_of(file()).partition(",")[2]
    for stream in (False, True):
        fields = SMALL | {"images": [bare], "strength": 1, "stream": stream}
        asked = urllib.request.Request(f"{worker.url}/api/generate", json.dumps(fields).encode())
        status, headers, _ = answer_to(asked)
        assert status == 200 and "the image is ignored" in headers["X-Aimage-Warning"]
    fields = SMALL | {"options": {"guidance_end": 0.5}, "stream": False}
    asked = urllib.request.Request(f"{worker.url}/api/generate", json.dumps(fields).encode())
    assert "guidance_end has no effect" in answer_to(asked)[1]["X-Aimage-Warning"]
