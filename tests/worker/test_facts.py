"""Generation facts in PNG files, and equal results of the CLI and the worker's APIs."""

from __future__ import annotations

import base64
import json
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")

from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.model.picture import encode_picture, read_picture
from clowder_aimage.model.picture_mark import COMPOSITE, GENERATED, PictureMark
from clowder_aimage.model.picture_metadata import read_metadata
from clowder_aimage.oci import Reference
from clowder_aimage.pictures.provenance.marking import read_mark
from tests.model.model_oracle import CASES
from tests.picture_file import load_picture
from tests.process import Aimage
from tests.store import copy_store
from tests.worker.conftest import LocalWorker, answer_to

MODEL = Path(__file__).parents[1] / "model"
ORACLE = MODEL / "oracle"

# One case with guidance, one without
GUIDED_AND_NOT = {bool(request.guidance.scale): case for case, request in CASES.items()}.values()
GENERATIONS = "/v1/images/generations"
CHUNKS = (b"iTXt", b"tEXt", b"zTXt", b"eXIf")


def ask(url: str, path: str = GENERATIONS, **fields: Any) -> tuple[int, Any, bytes]:
    """Return the status, headers and body of a response."""
    body = {"model": "tiny", "prompt": "a dog", "steps": 2, "seed": 7} | fields
    asked = urllib.request.Request(url + path, json.dumps(body).encode())
    return answer_to(asked)


def drawn(url: str, path: str = GENERATIONS, **fields: Any) -> bytes:
    """Return the picture of a response."""
    status, _, body = ask(url, path, **fields)
    assert status == 200, body
    answer = json.loads(body)
    return base64.b64decode(answer["image"] if "image" in answer else answer["data"][0]["b64_json"])


def refusal(url: str, **fields: Any) -> dict[str, Any]:
    status, _, body = ask(url, **fields)
    assert status == 400, body
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def run(worker: Any, *options: object, **environment: str) -> bytes:
    """Return the picture made by 'aimage run', locally or (with AIMAGE_HOST) by a worker."""
    here = worker.aimage
    before = dict(here.environment)
    here.environment |= environment
    try:
        line = here("run", "-q", "tiny", "a dog", "--seed", 7, *options).line
    finally:
        here.environment.clear()
        here.environment.update(before)
    return (here.home / line).read_bytes()


def pixels_of(data: bytes) -> bytes:
    start, end = data.index(b"IDAT"), data.index(b"IEND")
    return data[start:end]


def pixels(data: bytes, directory: Any) -> np.ndarray:
    (directory / "picture.png").write_bytes(data)
    return load_picture(directory / "picture.png")[0]


def ollama(url: str, **fields: Any) -> bytes:
    return drawn(url, "/api/generate", stream=False, **fields)


def test_all_interfaces_make_identical_files(worker: LocalWorker) -> None:
    """Both the pixels and the facts are the same."""
    alone = run(worker, "--steps", 2)
    assert drawn(worker.url) == alone
    assert ollama(worker.url) == alone
    assert run(worker, "--steps", 2, AIMAGE_HOST=worker.url) == alone
    facts = read_metadata(alone)
    assert (facts["seed"], facts["steps"], facts["prompt"]) == (7, 2, "a dog")
    assert re.fullmatch("sha256:[0-9a-f]{64}", facts["digest"])
    assert facts["digest"] in worker.aimage("show", "tiny").out


def test_all_interfaces_say_that_a_prompt_is_cut(worker: LocalWorker) -> None:
    fields: dict[str, Any] = {"prompt": "x" * 600, "negative_prompt": "x" * 700, "guidance": 2}
    same = drawn(worker.url, **{**fields, "prompt": "x" * 550})
    said = set[str]()
    for path, more in (
        (GENERATIONS, {}),
        (GENERATIONS, {"stream": True, "stream_format": "ollama"}),
        (GENERATIONS, {"stream": True, "stream_format": "openai"}),
        ("/api/generate", {"stream": False}),
        ("/api/generate", {"stream": True}),
    ):
        status, headers, body = ask(worker.url, path, **fields, **more)
        assert status == 200, body
        last = body.decode().strip().splitlines()[-1].removeprefix("data: ")
        answer = json.loads(last)
        said.add(json.dumps(answer["warnings"]))
        if not more.get("stream") or path != GENERATIONS:
            assert ", ".join(headers.get_all("X-Aimage-Warning")) == ", ".join(answer["warnings"])
        picture = answer.get("image") or answer.get("b64_json") or answer["data"][0]["b64_json"]
        data = base64.b64decode(picture)
        assert read_metadata(data)["warnings"] == answer["warnings"]
        assert pixels_of(data) == pixels_of(same)
    (sentences,) = map(json.loads, said)
    cut = "of which the model reads the first 512: the rest has no effect"
    assert [text.partition(" tokens, ")[2] for text in sentences] == [cut, cut]
    assert [text.split()[1] for text in sentences] == ["prompt", "negative"]
    assert "warnings" not in read_metadata(drawn(worker.url))


def test_png_facts_can_be_omitted(worker: LocalWorker) -> None:
    said, silent = drawn(worker.url), drawn(worker.url, png_facts=False)
    assert read_metadata(said)["seed"] == 7
    assert [kind for kind in CHUNKS if kind in silent] == [b"iTXt"]  # the mark
    assert read_mark(silent, "it") == read_mark(said, "it") == PictureMark(GENERATED)
    assert b"a dog" in said and b"a dog" not in silent
    assert ollama(worker.url, png_facts=False) == silent
    assert pixels_of(silent) == pixels_of(said)


def test_png_facts_that_are_not_boolean_are_refused(worker: LocalWorker) -> None:
    assert refusal(worker.url, png_facts="no")["param"] == "png_facts"
    status, _, body = ask(worker.url, "/api/generate", png_facts="no")
    assert (status, "png_facts" in json.loads(body)["error"]) == (400, True)


def test_the_operator_turns_the_mark_off_and_the_facts_say_so(worker: LocalWorker) -> None:
    unmarked = worker.start("--no-mark")
    said, marked = drawn(unmarked.url), drawn(worker.url)
    assert read_mark(said, "it") is None and read_mark(marked, "it") is not None
    assert read_metadata(said) == read_metadata(marked) | {"mark": False}
    assert pixels_of(said) == pixels_of(marked)
    assert not [kind for kind in CHUNKS if kind in drawn(unmarked.url, png_facts=False)]
    assert run(worker, "--steps", 2, "--no-mark") == said


def test_an_edit_of_a_picture_from_outside_is_a_composite(worker: LocalWorker) -> None:
    made = drawn(worker.url)
    outside = encode_picture(read_picture(made, "it").pixels, None)
    for data, source_type in ((made, GENERATED), (outside, COMPOSITE)):
        image = f"data:;base64,{base64.b64encode(data).decode()}"
        edited = drawn(worker.url, image=image, strength=0.5, output_format="webp")
        assert read_mark(edited, "it") == PictureMark(source_type)


# -- sizes and shifts


def test_a_worker_supports_all_options_of_run(worker: LocalWorker, tmp_path: Path) -> None:
    options = ("--steps", 3, "--width", 48, "--shift", 1.5, "--guidance", 2, "--negative", "a cat")
    more = ("--guidance-end", 0.5, "--cache-threshold", 10.0)
    alone = run(worker, *options, *more)
    assert run(worker, *options, *more, AIMAGE_HOST=worker.url) == alone
    made = pixels(alone, tmp_path).tobytes()
    assert pixels(alone, tmp_path).shape == (64, 48, 3)
    said = {"shift": 1.5, "guidance_end": 0.5, "cache_threshold": 10}
    assert said.items() <= read_metadata(alone).items()
    wishes: dict[str, Any] = {"width": 48, "guidance": 2, "negative_prompt": "a cat", "steps": 3}
    assert drawn(worker.url, **wishes | said, strict=True) == alone
    for name, other in {"shift": 3, "guidance_end": 1, "cache_threshold": 0}.items():
        changed = drawn(worker.url, **wishes | said | {name: other})
        assert pixels(changed, tmp_path).tobytes() != made
    usual = run(worker, "--steps", 2, "--height", 32, AIMAGE_HOST=worker.url)
    assert pixels(usual, tmp_path).shape == (32, 64, 3)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"width": 100}, "width"),
        ({"width": 16384}, "width"),  # larger than this model allows
        ({"size": "16384x16"}, "size"),
        ({"size": "64x64", "height": 48}, "height"),
        ({"shift": 0}, "shift"),
        ({"cache_threshold": 10.1}, "cache_threshold"),
    ],
)
def test_a_refusal_names_the_field_of_the_request(
    worker: LocalWorker, fields: dict[str, Any], param: str
) -> None:
    assert refusal(worker.url, **fields)["param"] == param


def ollama_refusal(url: str, **fields: Any) -> str:
    status, _, body = ask(url, "/api/generate", **fields)
    assert status == 400, body
    answer: dict[str, str] = json.loads(body)
    assert answer["code"] == "invalid_value"
    return answer["error"]


def test_too_large_sizes_are_refused_by_all_interfaces(worker: LocalWorker) -> None:
    said = ollama_refusal(worker.url, width=8192, height=8192)
    assert said.startswith("width exceeds the maximum of 16777216 pixels")
    assert refusal(worker.url, width=8192, height=8192)["param"] in ("width", "size")
    assert refusal(worker.url, size="8192x8192")["param"] == "size"
    assert ask(worker.url)[0] == 200
    assert deaths(worker.url) == 0


def deaths(url: str) -> int:
    """Return how many model processes have died."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.search(r'^aimage_model_evictions_total\{reason="died"\} (\S+)$', text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def test_the_parameter_that_exceeds_the_limit_is_refused(worker: LocalWorker) -> None:
    assert refusal(worker.url, height=8192, width=2064, size="2064x8192")["param"] == "size"
    assert refusal(worker.url, height=8192, width=2064)["param"] == "height"


def test_all_interfaces_have_the_same_prompt_limit(worker: LocalWorker) -> None:
    text = "x" * 32_001
    assert refusal(worker.url, prompt=text)["param"] == "prompt"
    assert "32000 characters" in ollama_refusal(worker.url, prompt=text)


# -- diffusers


@pytest.mark.parametrize("case", GUIDED_AND_NOT)
def test_pictures_of_a_worker_match_diffusers(
    worker: LocalWorker, tmp_path: Path, case: str
) -> None:
    """Compare with the pictures in tests/model/oracle; values may differ by at most one."""
    request = CASES[case]
    with np.load(ORACLE / f"{case.replace(' ', '-')}.npz") as recorded:
        expected = recorded["picture"].astype(int)
    wishes: dict[str, Any] = {
        "width": request.sampling.width,
        "height": request.sampling.height,
        "steps": request.sampling.steps,
    }
    wishes |= {"prompt": request.prompt, "seed": request.sampling.seed}
    guided: dict[str, Any] = {
        "guidance": request.guidance.scale,
        "guidance_end": request.guidance.end,
        "negative_prompt": request.guidance.negative or "",
    }
    found = pixels(drawn(worker.url, **wishes, **guided), tmp_path).astype(int)
    assert np.abs(found - expected).max() <= 1
    if not request.guidance.scale:
        found = pixels(ollama(worker.url, **wishes), tmp_path).astype(int)
        assert np.abs(found - expected).max() <= 1


# -- settings of the worker


def test_settings_of_the_worker_apply_to_requests_without_fields(worker: LocalWorker) -> None:
    silent = worker.start("--no-png-facts", "--stream-format", "openai", "--pull", "never")
    assert read_metadata(drawn(silent.url)) == {}
    assert read_metadata(drawn(silent.url, png_facts=True))["seed"] == 7
    assert read_metadata(ollama(silent.url)) == {}
    assert read_metadata(run(worker, AIMAGE_HOST=silent.url))["seed"] == 7  # it can be replayed
    for said, name in ({}, b"image_generation.completed"), ({"stream_format": "auto"}, b"done"):
        events = ask(silent.url, stream=True, **said)[2]
        assert re.findall(rb"^event: (.*)$", events, re.MULTILINE)[-1] == name
    absent = {"model": "localhost:1/absent"}
    assert ask(silent.url, **absent)[0] == 404  # it is not pulled
    if not worker.has_gateway:  # whose workers take no jobs that they would have to pull
        assert ask(silent.url, **absent, pull="if-missing")[0] == 502  # there is no such registry
    assert ask(silent.url, "/api/generate", **absent, stream=False)[0] == 404


@pytest.fixture
def own(stocked: Path, tmp_path: Path) -> Aimage:
    """Return a command line with its own store."""
    copy_store(stocked, tmp_path / "store")
    return Aimage(tmp_path, tmp_path / "store")


def spoil_text_encoder(store: Path) -> None:
    """Overwrite the text encoder's weights with zeros."""
    stored = read_aimage(LayeredStore([store]), Reference.parse("tiny"))
    for layer in stored.aimage.list_layers("text_encoder"):
        digest = layer.descriptor.digest
        blob = store / "blobs" / digest.algorithm / digest.encoded
        blob.unlink(missing_ok=True)
        blob.write_bytes(bytes(layer.descriptor.size))


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        *(((), True), (("--text-encoder", "release"), False)),
        # A single model has all of the memory
        (("--memory", "1GB", "--max-models", "20"), True),
    ],
)
@pytest.mark.integration
def test_the_text_encoder_is_released_according_to_the_settings(
    own: Aimage, options: tuple[str, ...], stays: bool
) -> None:
    """A released text encoder is loaded again for new prompts only."""
    worker = LocalWorker(own, *options)
    try:
        first = drawn(worker.url)
        spoil_text_encoder(own.store)
        assert drawn(worker.url) == first
        assert (ask(worker.url, prompt="a cat")[0] == 200) == stays
        assert drawn(worker.url) == first
    finally:
        worker.end()
