"""Adapters in the requests of a worker, with the tiny model."""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")

import numpy as np
import safetensors.numpy
from PIL import Image

from clowder_aimage.engine.queued_request import ModelSlot
from clowder_aimage.model.picture_metadata import read_metadata
from tests.lora_file import write_lora
from tests.process import Aimage
from tests.store import copy_store
from tests.worker.conftest import LocalWorker, answer_to

GENERATIONS = "/v1/images/generations"
SMALL = {"model": "tiny", "prompt": "a fox", "size": "32x32", "steps": 1, "seed": 1}


@pytest.fixture(scope="module")
def adapted(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    """Return a worker with the model ``tiny``, its adapter ``style`` and a directory of files."""
    home = tmp_path_factory.mktemp("adapted")
    copy_store(stocked, home / "store")
    here = Aimage(home, home / "store")
    file = write_lora(home / "a.safetensors", trigger_words="ink wash", recommended_weight="0.8")
    here("create", "style", file, "--base", "tiny", "-q")
    here("create", "other", write_lora(home / "b.safetensors", 2), "-q")
    here("create", "foreign", write_lora(home / "c.safetensors", width=64), "-q")
    write_lora(home / "loras" / "styles" / "My Ink.safetensors", trigger_words="ink wash")
    (home / "loras" / "bad.safetensors").write_bytes(b"\xff" * 64)
    safetensors.numpy.save_file({"a": np.ones(2)}, home / "loras" / "model.safetensors")
    (home / "loras" / "link.safetensors").symlink_to(file)
    found = LocalWorker(here, "--lora-dir", home / "loras")
    yield found
    found.end()


def ask(worker: LocalWorker, path: str = GENERATIONS, /, **fields: Any) -> tuple[int, Any]:
    body = json.dumps(SMALL | fields).encode()
    headers = {"Content-Type": "application/json"}
    status, _, data = answer_to(urllib.request.Request(worker.url + path, body, headers))
    return status, json.loads(data)


def drawn(worker: LocalWorker, /, **fields: Any) -> tuple[bytes, dict[str, Any]]:
    """Return the pixels and the facts of a picture."""
    status, answer = ask(worker, **fields)
    assert status == 200, answer
    data = base64.b64decode(answer["data"][0]["b64_json"])
    facts = read_metadata(data)
    assert facts.get("loras") == answer.get("loras")
    return Image.open(io.BytesIO(data)).tobytes(), facts


def slot(worker: LocalWorker) -> ModelSlot:
    (found,) = worker.service.engine.list_loaded()
    return found


def use(model: str, strength: float | None = None) -> dict[str, object]:
    return {"model": model} | ({} if strength is None else {"strength": strength})


def test_requests_with_different_adapters_share_one_loaded_model(adapted: LocalWorker) -> None:
    plain, _ = drawn(adapted)
    pid = slot(adapted).runner.pid  # type: ignore[union-attr]
    style, facts = drawn(adapted, loras=[use("style")])
    other, _ = drawn(adapted, loras=[use("other", -0.5)])
    assert len({plain, style, other}) == 3
    assert facts["loras"][0]["strength"] == 0.8 and facts["loras"][0]["model"] == "style:latest"
    assert drawn(adapted, loras=[use("style", 0.8)])[0] == style
    assert drawn(adapted, loras=[use("other", -0.5)])[0] == other
    assert drawn(adapted)[0] == plain
    assert drawn(adapted, loras=[use("style", 0)])[0] == plain
    both, _ = drawn(adapted, loras=[use("style", 0.8), use("other", -0.5)])
    assert both not in (plain, style, other)
    assert slot(adapted).runner.pid == pid  # type: ignore[union-attr]


def test_tags_and_files_of_the_directory_are_used(adapted: LocalWorker) -> None:
    expected, _ = drawn(adapted, loras=[use("style", 0.5)])
    tagged, facts = drawn(adapted, prompt="a fox <lora:style:0.5>")
    assert tagged == expected and facts["prompt"] == "a fox"
    file, facts = drawn(adapted, loras=[use("styles/My Ink", 0.5)])
    assert file == expected and facts["loras"][0]["model"] == "styles/My Ink"
    assert drawn(adapted, prompt="<lora:styles/My Ink:0.5> a fox")[0] == expected


def test_trigger_words_are_added_on_request(adapted: LocalWorker) -> None:
    assert drawn(adapted, loras=[use("style")])[1]["prompt"] == "a fox"
    assert drawn(adapted, loras=[use("style")], trigger=True)[1]["prompt"] == "a fox, ink wash"


def test_ollama_requests_have_adapters(adapted: LocalWorker) -> None:
    fields = {"width": 32, "height": 32, "stream": False, "loras": [use("style", 0.5)]}
    status, answer = ask(adapted, "/api/generate", **fields)
    assert status == 200 and answer["loras"][0]["strength"] == 0.5
    expected, _ = drawn(adapted, loras=[use("style", 0.5)])
    picture = Image.open(io.BytesIO(base64.b64decode(answer["image"])))
    assert picture.tobytes() == expected
    status, answer = ask(adapted, "/api/generate", **fields | {"loras": [use("none")]})
    assert status == 404 and answer["error"].startswith("loras[0].model: ")


def test_a_stream_says_which_adapters_were_used(adapted: LocalWorker) -> None:
    fields = {"stream": True, "loras": [use("style", 0.5)]}
    for form in ("ollama", "openai"):
        body = json.dumps(SMALL | fields | {"stream_format": form}).encode()
        request = urllib.request.Request(
            adapted.url + GENERATIONS, body, {"Content-Type": "application/json"}
        )
        status, _, data = answer_to(request)
        last = json.loads(data.decode().rpartition("data: ")[2])
        assert status == 200 and last["loras"][0]["model"] == "style:latest"


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"loras": [use("none")]}, 404, "loras[0].model", "not found"),
        ({"loras": [use("style"), use("none:v1")]}, 404, "loras[1].model", "not found"),
        ({"prompt": "a <lora:none>"}, 404, "prompt", "not found"),
        ({"loras": [use("tiny")]}, 400, "loras[0].model", "not an adapter"),
        ({"loras": [use("foreign")]}, 422, "loras[0].model", "foreign"),
        ({"loras": [use("bad")]}, 422, "loras[0].model", "bad"),
        ({"loras": [use("model")]}, 422, "loras[0].model", "model"),
        ({"loras": [use("style", 101)]}, 400, "loras[0].strength", "100"),
        ({"loras": [{"model": "style", "strength": "1"}]}, 400, "loras[0].strength", "number"),
        ({"loras": [{"model": "style", "weight": 1}]}, 400, "loras[0].weight", ""),
        ({"loras": [{"strength": 1}]}, 400, "loras[0].model", "missing"),
        ({"loras": ["style"]}, 400, "loras[0]", ""),
        ({"loras": "style"}, 400, "loras", "list"),
        ({"loras": [use("")]}, 400, "loras[0].model", ""),
        ({"loras": [use("style")] * 17}, 400, "loras", "16"),
        ({"prompt": "a " + "<lora:style>" * 17}, 400, "loras", "16"),
        ({"prompt": "a <lora::1>"}, 400, "prompt", "tag"),
        ({"prompt": "a <lora:style:1000>"}, 400, "prompt", "100"),
        ({"trigger": "yes"}, 400, "trigger", "bool"),
        *(
            ({"loras": [use(name)]}, 404, "loras[0].model", "not found")
            for name in (
                "/etc/passwd",
                "../a",
                "./a.safetensors",
                "a.safetensors",
                "styles/../../a",
                "link",
                "~/a",
                "file:///etc/passwd",
                "a\0b",
                "adapters/none",
                "\u202eevil",
            )
        ),
    ],
)
def test_mistakes_with_adapters_name_their_field(
    adapted: LocalWorker, fields: dict[str, Any], status: int, param: str, message: str
) -> None:
    answered, answer = ask(adapted, **fields)
    error = answer["error"]
    assert (answered, error["param"]) == (status, param), error
    assert message in error["message"] and str(adapted.aimage.home) not in error["message"]
    assert drawn(adapted)[1].get("loras") is None  # it keeps serving


def test_models_list_adapters_with_their_base(adapted: LocalWorker) -> None:
    listed = {one["id"]: one for one in adapted.get("/v1/models")["data"]}
    assert listed["style:latest"]["parent"] == "tiny:latest"
    assert listed["style:latest"]["adapter"]["triggerWords"] == ["ink wash"]
    assert listed["other:latest"]["parent"] is None
    assert listed["styles/My Ink"]["adapter"]["triggerWords"] == ["ink wash"]
    assert "adapter" not in listed["tiny:latest"] and not {"bad", "link", "model"} & listed.keys()
    assert adapted.get("/v1/models/style") == listed["style:latest"] | {"id": "style"}
    assert adapted.get("/v1/models/styles/My%20Ink") == listed["styles/My Ink"]
    status, answer = ask(adapted, model="none")
    assert status == 404 and "style" not in answer["error"]["message"]


def test_the_name_of_an_adapter_means_its_base_with_it(adapted: LocalWorker) -> None:
    expected, _ = drawn(adapted, loras=[use("style")])
    pixels, facts = drawn(adapted, model="style")
    assert pixels == expected and facts["reference"] == "tiny:latest"
    both, _ = drawn(adapted, model="style", loras=[use("other")])
    assert both == drawn(adapted, loras=[use("style"), use("other")])[0]
    status, answer = ask(adapted, model="other")
    assert (status, answer["error"]["param"]) == (422, "model")
    assert "base model is not here" in answer["error"]["message"]


def test_ps_shows_the_adapters_of_loaded_models(adapted: LocalWorker) -> None:
    drawn(adapted, loras=[use("style", 0.5)])
    (loaded,) = adapted.get("/api/ps")["models"]
    assert loaded["loras"][0]["model"] == "style:latest"
    here = Aimage(adapted.aimage.home, adapted.store, {"AIMAGE_HOST": adapted.host})
    assert here("ps").out.split()[-1] == "style:latest:0.5"
    assert ask(adapted, loras=[use("foreign")])[0] == 422
    assert here("ps").out.split()[-1] == "style:latest:0.5"
    drawn(adapted)
    assert "loras" not in adapted.get("/api/ps")["models"][0]


def test_run_sends_adapters_to_the_worker(adapted: LocalWorker) -> None:
    here = Aimage(adapted.aimage.home, adapted.store, {"AIMAGE_HOST": adapted.host})
    words = ("--size", "32x32", "--steps", 1, "--seed", 1, "-o", "made.png")
    offered = here("run", "tiny", "a fox", *words, "--lora", "style:0.5").err
    assert "trigger words of the adapters: ink wash" in offered
    expected, _ = drawn(adapted, loras=[use("style", 0.5)])
    assert Image.open(here.home / "made.png").tobytes() == expected
    assert here("replay", "made.png").out == "equal\n"
    assert "loras[0].model" in here("run", "tiny", "a", *words, "--lora", "none", code=3).err


def test_adapters_are_pulled_for_a_request(adapted: LocalWorker, repository: str) -> None:
    name = f"{repository}:v1"
    elsewhere = adapted.aimage.home / "elsewhere"
    here = adapted.aimage
    here("create", name, here.home / "a.safetensors", "-q", "--store", elsewhere)
    here("push", name, "-q", "--store", elsewhere)
    status, answer = ask(adapted, loras=[use(name)], pull="never")
    assert (status, answer["error"]["param"]) == (404, "loras[0].model")
    expected, _ = drawn(adapted, loras=[use("style", 0.5)])
    pulled, facts = drawn(adapted, loras=[use(name, 0.5)])
    assert pulled == expected and facts["loras"][0]["model"] == name
    missing = f"{repository}-none:v1"
    status, answer = ask(adapted, loras=[use(missing)])
    assert (status, answer["error"]["param"]) == (404, "loras[0].model"), answer


def test_concurrent_requests_do_not_affect_each_other(adapted: LocalWorker) -> None:
    kinds: list[list[dict[str, object]]] = [
        [],
        [use("style")],
        [use("other", -0.5)],
        [use("styles/My Ink", 0.3)],
    ]
    expected = [drawn(adapted, loras=loras)[0] for loras in kinds]
    order = [0, 1, 2, 3, 2, 1, 0, 3]
    with ThreadPoolExecutor(4) as pool:
        made = [pool.submit(drawn, adapted, loras=kinds[kind]) for kind in order]
        assert [one.result()[0] for one in made] == [expected[kind] for kind in order]


def test_a_model_and_its_adapters_are_pulled_for_one_request(
    empty: LocalWorker, adapted: LocalWorker, repository: str
) -> None:
    base, style = f"{repository}:base", f"{repository}:style"
    for name, new in (("tiny", base), ("style", style)):
        adapted.aimage("tag", name, new)
        adapted.aimage("push", new, "-q")
    expected, _ = drawn(adapted, loras=[use("style", 0.5)])
    assert drawn(empty, model=base, loras=[use(style, 0.5)])[0] == expected
    assert drawn(empty, model=style)[0] == drawn(adapted, model="style")[0]
    adapted.aimage("rm", base, style)
