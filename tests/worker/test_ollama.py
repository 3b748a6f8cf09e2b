"""ollama's API, used through ollama's unmodified Python client and plain HTTP."""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

pytest.importorskip("mlx.core")
pytest.importorskip("aiohttp")

from tests.worker.conftest import LocalWorker

ollama = pytest.importorskip("ollama")
Image = pytest.importorskip("PIL.Image")

DRAW = {"model": "tiny", "prompt": "a dog", "width": 32, "height": 32, "steps": 3}


@pytest.fixture(scope="module")
def client(worker: LocalWorker) -> Iterator[Any]:
    with ollama.Client(worker.url) as found:
        yield found


@pytest.fixture(scope="module")
def ask(worker: LocalWorker) -> Callable[..., tuple[int, Any]]:
    """Return ``ask(path, body)``, which returns the status and the JSON, JSON lines or text."""

    def asked(path: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
        with closing(http.client.HTTPConnection(worker.host, timeout=60)) as connection:
            sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            kind = method or ("GET" if sent is None else "POST")
            connection.request(kind, path, sent)
            answer = connection.getresponse()
            text = answer.read()
            if "ndjson" in (answer.getheader("Content-Type") or ""):
                return answer.status, [json.loads(line) for line in text.splitlines()]
            if "json" in (answer.getheader("Content-Type") or ""):
                return answer.status, json.loads(text) if text else None
            return answer.status, text.decode()

    return asked


def size_of(image: str) -> tuple[int, int]:
    with Image.open(io.BytesIO(base64.b64decode(image))) as picture:
        picture.load()
        return picture.size


# -- version and models


def test_the_root_names_the_server(ask: Callable[..., tuple[int, Any]]) -> None:
    assert ask("/") == (200, "aimage is running")
    assert ask("/", method="HEAD") == (200, "")


def test_the_version_is_digits_and_dots(ask: Callable[..., tuple[int, Any]]) -> None:
    status, answer = ask("/api/version")
    assert status == 200 and [int(part) for part in answer["version"].split(".")]


def test_the_model_list_has_the_fields_that_clients_read(
    client: Any, ask: Callable[..., tuple[int, Any]]
) -> None:
    (model,) = client.list().models
    assert model.model == "tiny:latest"
    assert model.size > 1_000_000 and re.fullmatch("[0-9a-f]{64}", model.digest)
    assert abs(datetime.now(UTC) - model.modified_at) < timedelta(hours=1)
    assert model.details.family and model.details.parameter_size
    (raw,) = ask("/api/tags")[1]["models"]
    assert raw["name"] == raw["model"] == "tiny:latest"
    assert raw["capabilities"] == ["image"]
    assert datetime.fromisoformat(raw["modified_at"]).tzinfo is not None


def test_show_lists_the_image_capability(client: Any, worker: LocalWorker) -> None:
    shown = client.show("tiny")
    known = worker.aimage("show", "--json", "tiny").value
    assert shown.capabilities == ["image"]
    assert shown.details.family == known["config"]["family"]
    assert shown.modelinfo["general.parameter_count"] == known["config"]["parameters"]
    assert shown.modelinfo["aimage.digest"] == known["digest"]
    assert "height 64" in shown.parameters


def test_show_of_a_missing_model_is_404(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="not found") as caught:
        client.show("nothing")
    assert caught.value.status_code == 404


# -- pictures


def test_a_stream_has_progress_and_the_picture(client: Any) -> None:
    parts = list(client.generate(**DRAW, options={"seed": 7}, stream=True))
    steps = [(part.completed, part.total) for part in parts if part.completed]
    assert steps == [(1, 3), (2, 3), (3, 3)]
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].done_reason == "stop" and size_of(parts[-1].image) == (32, 32)
    assert all(datetime.fromisoformat(part.created_at) for part in parts)
    assert {part.model for part in parts} == {"tiny"}


def test_a_response_without_a_stream_has_the_same_picture(client: Any) -> None:
    (*_, streamed) = client.generate(**DRAW, options={"seed": 7}, stream=True)
    plain = client.generate(**DRAW, options={"seed": 7})
    assert plain.done and plain.image == streamed.image
    assert plain.image != client.generate(**DRAW, options={"seed": 8}).image


def test_guidance_is_that_of_the_command_line(
    ask: Callable[..., tuple[int, Any]], worker: LocalWorker
) -> None:
    guided = {"guidance": 3.0, "cfg_normalization": 0.5, "shift": 5.0, "negative_prompt": "a cat"}
    body = DRAW | {"seed": 7, "stream": False}
    sets: Any = {}, guided, {"options": guided}, {"guidance": 0, "options": {"guidance": 3}}
    plain, here, inside, off = (ask("/api/generate", body | more)[1]["image"] for more in sets)
    assert here == inside != plain == off
    path = worker.aimage.home / "guided.png"
    size = ("--size", "32x32", "--steps", 3, "--seed", 7)
    options = ("--guidance", 3, "--shift", 5, "--cfg-normalization", 0.5, "--negative", "a cat")
    worker.aimage("run", "-q", "tiny", "a dog", *size, *options, "-o", path)
    with Image.open(path) as ours, Image.open(io.BytesIO(base64.b64decode(here))) as theirs:
        assert ours.tobytes() == theirs.tobytes()


def test_a_picture_equals_that_of_the_command_line(client: Any, worker: LocalWorker) -> None:
    path = worker.aimage.home / "picture.png"
    sizes = ("--width", 32, "--height", 32, "--steps", 3, "--seed", 7)
    worker.aimage("run", "-q", "tiny", "a dog", *sizes, "-o", path)
    made = client.generate(**DRAW, options={"seed": 7}).image
    with Image.open(path) as ours, Image.open(io.BytesIO(base64.b64decode(made))) as theirs:
        assert ours.tobytes() == theirs.tobytes()


def test_sizes_in_options_and_a_top_level_seed_are_accepted(
    ask: Callable[..., tuple[int, Any]],
) -> None:
    options = {"width": 48, "height": 32.0, "steps": 1, "seed": 1}
    body = {"model": "tiny", "prompt": "a dog", "options": options, "seed": 5, "stream": False}
    status, answer = ask("/api/generate", body)
    assert status == 200
    assert size_of(answer["image"]) == (48, 32) == (answer["width"], answer["height"])
    assert answer["seed"] == 5


def test_a_random_seed_is_drawn_without_one(ask: Callable[..., tuple[int, Any]]) -> None:
    body = DRAW | {"stream": False, "options": {"seed": -1}}
    assert ask("/api/generate", body)[1]["seed"] != ask("/api/generate", body)[1]["seed"]


def test_the_form_content_type_of_curl_is_accepted(worker: LocalWorker) -> None:
    with closing(http.client.HTTPConnection(worker.host, timeout=60)) as connection:
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        connection.request("POST", "/api/generate", json.dumps(DRAW), headers)
        answer = connection.getresponse()
        assert answer.status == 200
        assert answer.getheader("Content-Type") == "application/x-ndjson"
        assert json.loads(answer.read().splitlines()[-1])["done"]


# -- keep_alive


def test_ps_lists_loaded_models_with_their_expiry(
    client: Any, ask: Callable[..., tuple[int, Any]]
) -> None:
    client.generate(**DRAW, keep_alive="10m")
    (model,) = client.ps().models
    assert (model.name, model.model) == ("tiny:latest", "tiny:latest") and model.size > 0
    left = model.expires_at - datetime.now(UTC)
    assert timedelta(minutes=9) < left <= timedelta(minutes=10)
    (raw,) = ask("/api/ps")[1]["models"]
    assert datetime.fromisoformat(raw["expires_at"]).tzinfo is not None


def test_an_infinite_keep_alive_has_a_distant_expiry(client: Any) -> None:
    client.generate(**DRAW, keep_alive=-1)
    (model,) = client.ps().models
    assert model.expires_at > datetime.now(UTC) + timedelta(days=365 * 50)
    assert model.expires_at.astimezone().year < 9000  # time zones still fit


@pytest.fixture(scope="module")
def other(worker: LocalWorker) -> LocalWorker:
    """Return a worker with other settings on the same store."""
    options = (
        "--keep-alive",
        "99999999h",
        "--grace",
        "99999999999h",
        "--queue",
        0,
        "--max-wait",
        0,
    )
    return worker.start(*options, "--alias", "gpt-image-1=tiny")


def test_a_huge_keep_alive_setting_has_a_distant_expiry(other: LocalWorker) -> None:
    with ollama.Client(other.url) as client:
        assert client.generate(**DRAW).image
        (model,) = client.ps().models
    assert model.expires_at > datetime.now(UTC) + timedelta(days=365 * 50)


def test_an_empty_prompt_loads_or_unloads_the_model(
    client: Any, ask: Callable[..., tuple[int, Any]]
) -> None:
    assert client.generate("tiny", "", keep_alive=0).done_reason == "unload"
    assert client.ps().models == []
    loaded = client.generate("tiny", keep_alive="1h30m")
    assert loaded.done and loaded.done_reason == "load" and loaded.image is None
    (model,) = client.ps().models
    assert model.expires_at - datetime.now(UTC) > timedelta(minutes=85)
    status, answer = ask("/api/generate", {"model": "tiny", "keep_alive": 0, "prompt": ""})
    assert status == 200 and answer["done"] and answer["done_reason"] == "unload"
    assert client.ps().models == []


def test_keep_alive_0_unloads_after_the_picture(client: Any) -> None:
    assert client.generate(**DRAW, keep_alive="0s").image
    assert client.ps().models == []


def test_unloading_a_model_that_is_not_loaded_succeeds(ask: Callable[..., tuple[int, Any]]) -> None:
    ask("/api/generate", {"model": "tiny", "keep_alive": 0})
    status, answer = ask("/api/generate", {"model": "tiny", "keep_alive": 0})
    assert (status, answer["done_reason"]) == (200, "unload")
    assert ask("/api/generate", {"model": "nothing", "keep_alive": 0})[0] == 404


@pytest.mark.parametrize("said", ["soon", True, []])
def test_an_invalid_keep_alive_is_refused(
    said: str | bool | list[Any], ask: Callable[..., tuple[int, Any]]
) -> None:
    status, answer = ask("/api/generate", DRAW | {"keep_alive": said})
    assert status == 400 and "keep_alive" in answer["error"]


def test_unloading_does_not_interrupt_running_requests(client: Any) -> None:
    parts = client.generate(**DRAW | {"steps": 30}, keep_alive=-1, stream=True)
    assert not next(parts).done
    assert client.generate("tiny", "", keep_alive=0).done_reason == "unload"
    client.generate("tiny", keep_alive=0)
    (*_, last) = parts
    assert last.done_reason == "stop" and last.image


@pytest.mark.worker_only("requests wait in its own queue")
def test_a_full_queue_is_503_with_retry_after(other: LocalWorker) -> None:
    with ollama.Client(other.url) as busy:
        busy.generate("tiny")
        parts = busy.generate(**DRAW | {"steps": 1000}, stream=True)
        assert not next(parts).done
        with closing(http.client.HTTPConnection(other.host, timeout=60)) as connection:
            connection.request("POST", "/api/generate", json.dumps(DRAW))
            answer = connection.getresponse()
            assert answer.status == 503 and int(answer.getheader("Retry-After") or 0) > 0
            assert "wait" in json.loads(answer.read())["error"]
        parts.close()  # a client that leaves frees the engine
        while True:
            try:
                assert busy.generate(**DRAW).image
                break
            except ollama.ResponseError as error:
                assert error.status_code == 503


# -- copies and deletion


def test_a_copy_is_listed_and_can_be_deleted(client: Any) -> None:
    assert client.copy("tiny", "another:v1").status == "success"
    digests = {model.model: model.digest for model in client.list().models}
    assert digests["another:v1"] == digests["tiny:latest"]
    assert client.delete("another:v1").status == "success"
    assert [model.model for model in client.list().models] == ["tiny:latest"]
    assert client.generate(**DRAW).image  # shared blobs are kept


def test_a_model_can_be_copied_by_digest(
    client: Any, ask: Callable[..., tuple[int, Any]], worker: LocalWorker
) -> None:
    """The name beside the digest is ignored, as for generation."""
    digest = worker.aimage("show", "--json", "tiny").value["digest"]
    for name in (f"tiny@{digest}", f"tiny:v7@{digest}", f"other@{digest}"):
        assert client.generate(**DRAW | {"model": name}).image
        assert client.copy(name, "again:v1").status == "success"
        assert {model.digest for model in client.list().models} == {digest.removeprefix("sha256:")}
        assert client.delete("again:v1").status == "success"
    body = {"source": f"tiny@sha256:{'0' * 64}", "destination": "again"}
    assert ask("/api/copy", body)[0] == 404


def test_copying_or_deleting_a_missing_model_is_404(client: Any) -> None:
    with pytest.raises(ollama.ResponseError, match="nothing:latest not found") as caught:
        client.copy("nothing", "another")
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as caught:
        client.delete("nothing")
    assert caught.value.status_code == 404


def test_a_pinned_name_is_not_deleted(client: Any, worker: LocalWorker) -> None:
    worker.aimage("pin", "tiny")
    try:
        with pytest.raises(ollama.ResponseError, match="pinned") as caught:
            client.delete("tiny")
        assert caught.value.status_code == 409
    finally:
        worker.aimage("unpin", "tiny")
    assert client.list().models


def test_a_deleted_model_is_unloaded(client: Any, worker: LocalWorker) -> None:
    worker.aimage("convert", "-q", "tiny", "gone", "--quantize", "int8")
    worker.notice()
    client.generate("gone", keep_alive=-1)
    # Those of other tests may be loaded too.
    assert "gone:latest" in [model.name for model in client.ps().models]
    client.delete("gone")
    assert "gone:latest" not in [model.name for model in client.ps().models]


# -- invalid requests


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"width": True}, "width"),
        ({"height": 32.5}, "height"),
        ({"options": []}, "options"),
        ({"options": {"seed": "x"}}, "seed"),
        ({"options": {"guidance_end": 2}}, "guidance_end"),
        ({"negative_prompt": "a cat"}, "negative_prompt requires guidance"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"stream": "yes"}, "stream"),
        ({"images": ["aGk="]}, "images"),
        ({"model": ""}, "model"),
        ({"width": 33}, "width"),
        ({"height": 1 << 40}, "height"),
        ({"steps": -1}, "steps"),
        ({"options": {"seed": 1 << 64}}, "seed"),
    ],
)
def test_an_invalid_field_is_400_with_its_name(
    ask: Callable[..., tuple[int, Any]], change: dict[str, Any], word: str
) -> None:
    status, answer = ask("/api/generate", DRAW | {"stream": False} | change)
    assert status == 400 and word in answer["error"]


def test_a_refusal_by_the_model_is_reported_in_a_stream(
    ask: Callable[..., tuple[int, Any]],
) -> None:
    status, answer = ask("/api/generate", DRAW | {"width": 33})
    told = answer[-1] if isinstance(answer, list) else {"status": status, **answer}
    assert told["status"] == 400 and "width" in told["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(("generate", body) for body in (b"", b"[]", b'{"a":1,"a":2}', b"{}")),
        *((path, b"{") for path in ("show", "pull", "push", "copy")),
    ],
)
def test_an_invalid_body_is_400(
    ask: Callable[..., tuple[int, Any]], path: str, body: bytes
) -> None:
    status, answer = ask(f"/api/{path}", body)
    assert status == 400 and isinstance(answer["error"], str) and answer["error"]


def test_a_body_that_is_too_large_is_413(ask: Callable[..., tuple[int, Any]]) -> None:
    status, answer = ask("/api/generate", DRAW | {"prompt": "x" * (1 << 21)})
    assert status == 413 and "large" in answer["error"]


def test_a_missing_model_is_404_before_the_stream(ask: Callable[..., tuple[int, Any]]) -> None:
    status, answer = ask("/api/generate", DRAW | {"model": "nothing"})
    assert status == 404 and "nothing:latest" in answer["error"]


@pytest.mark.parametrize(("path", "body"), [("copy", {"source": "tiny"}), ("pull", {"model": 1})])
def test_copy_and_pull_refuse_invalid_fields(
    ask: Callable[..., tuple[int, Any]], path: str, body: dict[str, Any]
) -> None:
    assert ask(f"/api/{path}", body)[0] == 400


def test_a_copy_needs_a_tag(ask: Callable[..., tuple[int, Any]]) -> None:
    body = {"source": "tiny", "destination": f"other@sha256:{'0' * 64}"}
    status, answer = ask("/api/copy", body)
    assert status == 400 and "digest" in answer["error"]


def test_responses_do_not_contain_the_store_path(
    ask: Callable[..., tuple[int, Any]], worker: LocalWorker
) -> None:
    for path in ("show", "generate", "push"):
        body = DRAW | {"model": "127.0.0.1:1/nothing" if path == "push" else "nothing"}
        status, answer = ask(f"/api/{path}", body)
        assert status == 404 and str(worker.store) not in answer["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/generate", DRAW | {"images": ["x"]}),
        ("/api/generate", DRAW | {"keep_alive": "soon"}),
        ("/api/generate", DRAW | {"width": 8192, "height": 8192}),
        ("/content/", {"url": "oci://h.example/x", "credentials": "two words"}),
    ],
)
def test_refusals_have_an_error_code(
    ask: Callable[..., tuple[int, Any]], path: str, body: dict[str, Any]
) -> None:
    status, answer = ask(path, body)
    said = answer if path.startswith("/api/") else answer["error"]
    assert (status, said["code"] in ("invalid_value", "unsupported_value")) == (400, True)


def test_an_alias_is_accepted_with_the_latest_tag(other: LocalWorker) -> None:
    with ollama.Client(other.url) as client:
        for name in ("gpt-image-1", "gpt-image-1:latest"):
            assert client.show(name).capabilities == ["image"]
            assert client.generate(**DRAW | {"model": name}).image
        with pytest.raises(ollama.ResponseError):
            client.show("gpt-image-1:v1")


# -- scopes


@pytest.fixture(scope="module")
def guarded(worker: LocalWorker) -> LocalWorker:
    path = worker.aimage.home / "tokens"
    path.write_text(f"admin {'a' * 32}\ninfer {'i' * 32}\n")
    return worker.start("--token-file", path)


def test_an_infer_token_may_list_and_generate_only(guarded: LocalWorker) -> None:
    with ollama.Client(guarded.url, headers={"Authorization": f"Bearer {'i' * 32}"}) as infer:
        assert infer.list().models and infer.generate(**DRAW).image
        refused: list[Callable[[], Any]] = [
            lambda: infer.generate("tiny", "", keep_alive=0),
            lambda: infer.pull("127.0.0.1:1/x"),
            lambda: infer.push("tiny"),
            lambda: infer.copy("tiny", "other"),
            lambda: infer.delete("tiny"),
        ]
        for call in refused:
            with pytest.raises(ollama.ResponseError) as caught:
                call()
            assert caught.value.status_code == 403
        with pytest.raises(ollama.ResponseError) as caught:  # a missing model is not pulled
            infer.generate("127.0.0.1:1/x", "a dog")
        assert caught.value.status_code == 404
    with ollama.Client(guarded.url) as stranger, pytest.raises(ollama.ResponseError) as caught:
        stranger.list()
    assert caught.value.status_code == 401


def test_an_infer_token_may_not_set_keep_alive_or_unload(guarded: LocalWorker) -> None:
    def ask(token: str, **body: Any) -> Any:
        data = json.dumps({"model": "tiny", "stream": False, **body}).encode()
        headers = {"Authorization": f"Bearer {token * 32}", "Content-Type": "application/json"}
        asked = urllib.request.Request(guarded.url + "/api/generate", data, headers)
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    assert ask("i", prompt="a dog", steps=1, keep_alive=0) == 200
    assert guarded.get("/api/ps", Authorization=f"Bearer {'i' * 32}")["models"]
    assert ask("i", prompt="", keep_alive=0) == 403
    assert ask("i", prompt="", stop=True) == 403
    assert ask("a", prompt="", stop=True) == 200
    assert not guarded.get("/api/ps", Authorization=f"Bearer {'i' * 32}")["models"]
