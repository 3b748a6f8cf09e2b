"""OpenAI's API of a live worker, used through curl and OpenAI's unmodified SDK."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import json
import os
import re
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.process import Aimage
from tests.real_registry import RealRegistry

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")
pytest.importorskip("openai")

import openai
from PIL import Image as Pillow

from clowder_aimage.content.store import build_bytes_body
from clowder_aimage.dialect import AImage
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.layout.stored_aimage import read_aimage
from clowder_aimage.oci import Descriptor, Reference, mediatype
from clowder_aimage.oci.manifest import encode
from tests.picture_file import load_picture
from tests.process import run
from tests.program import find_program
from tests.wait import until

if TYPE_CHECKING:
    from tests.worker.conftest import LocalWorker


PORT = "11434"  # in the commands below
PLAIN = """\
curl http://localhost:11434/v1/images/generations \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "z-image",
    "prompt": "a white cat",
    "size": "1024x1024"
  }'"""
TO_FILE = """\
curl -s http://localhost:11434/v1/images/generations \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "z-image",
    "prompt": "a white cat",
    "size": "1024x1024"
  }' | jq -r '.data[0].b64_json' | base64 -d > image.png"""
STREAM = """\
curl http://localhost:11434/v1/images/generations \\
  -H "Content-Type: application/json" \\
  -d '{"model": "z-image", "prompt": "a sunset", "stream": true}'"""
STEPS = 30  # default of the model in those commands
INFER, ADMIN = "infer-0123456789abcdef0123456789", "admin-0123456789abcdef0123456789"


def named(store: LayeredStore, name: str, **changes: Any) -> None:
    """Tag the embedded model with a changed config as ``name``."""
    stored = read_aimage(store, Reference.parse("tiny"))
    config = encode({**stored.aimage.properties, **changes})
    manifest, config = stored.dialect.write(AImage(config, stored.aimage.layers))
    store.push(manifest.config, build_bytes_body(config))
    descriptor = Descriptor.of(manifest.media_type, manifest.raw)
    store.push(descriptor, build_bytes_body(manifest.raw), Reference.parse(name))


@pytest.fixture(scope="module")
def live(worker: LocalWorker) -> LocalWorker:
    """Return a worker with several models and aliases."""
    store = LayeredStore([worker.store])
    size = {"width": 64, "height": 64}
    named(store, "local/long:v1", defaults=size | {"steps": STEPS})
    named(store, "short", defaults=size | {"steps": 1})
    named(store, "localhost:5000/team/made", created="2024-01-02T03:04:05Z", defaults=size)
    named(store, "another", family="another")
    index = encode({"schemaVersion": 2, "mediaType": mediatype.OCI_INDEX, "manifests": []})
    described = Descriptor.of(mediatype.OCI_INDEX, index)
    store.push(described, build_bytes_body(index), Reference.parse("nothing"))
    aliases = ("--alias", "z-image=local/long:v1", "--alias", "gpt-image-1=tiny")
    return worker.start(*aliases, "--alias", "GPT 4=absent", "--queue", "0", "--max-wait", "0")


@pytest.fixture
def client(live: LocalWorker) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def post(url: str, body: Any, path: str = "/v1/images/generations", **headers: str) -> Any:
    """Return the status, headers and JSON of a response."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url + path, data, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(asked, timeout=100) as answer:
            return answer.status, answer.headers, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, json.load(error)


def events(url: str, **fields: Any) -> list[tuple[str | None, Any]]:
    """Return the events of a stream; comments have the name None."""
    body = {"prompt": "a dog", "model": "tiny", "stream": True, "steps": 2} | fields
    asked = urllib.request.Request(f"{url}/v1/images/generations", json.dumps(body).encode())
    with urllib.request.urlopen(asked, timeout=100) as answer:
        assert answer.headers.get_content_type() == "text/event-stream"
        blocks = answer.read().decode().split("\n\n")
    assert blocks.pop() == ""
    return [event(block) for block in blocks]


def event(block: str) -> tuple[str | None, Any]:
    if block.startswith(": "):
        return None, block[2:]
    found = re.fullmatch(r"event: (\S+)\ndata: (.*)", block)
    assert found is not None, block
    return found[1], json.loads(found[2])


def pixels(data: bytes) -> np.ndarray:
    with Pillow.open(io.BytesIO(data)) as picture:
        return np.asarray(picture.convert("RGB"))


def expected(live: Any, **wishes: Any) -> np.ndarray:
    """Return the picture that 'aimage run' makes on this machine."""
    options = [word for key, value in wishes.items() for word in (f"--{key}", value)]
    done = live.aimage("run", "-q", "tiny", "a dog", *options)
    shown, _ = load_picture(live.aimage.home / done.line)
    return shown


# -- commands of the documentation


def shell(command: str, url: str, directory: Path) -> str:
    """Return the output of a shell command with localhost:11434 redirected to the worker."""
    find_program("curl")
    place = url.removeprefix("http://")
    (directory / ".curlrc").write_text(f'connect-to = "localhost:{PORT}:{place}"\nsilent\n')
    environment = {"PATH": os.environ["PATH"], "HOME": str(directory), "CURL_HOME": str(directory)}
    done = run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=directory,
        env=environment,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def quick(live: LocalWorker, worker: LocalWorker) -> LocalWorker:
    """Return a worker whose z-image takes one step, because 1024x1024 pictures are slow."""
    return worker.start("--alias", "z-image=short")


@pytest.mark.integration
def test_the_documented_command_returns_a_picture(quick: LocalWorker, tmp_path: Path) -> None:
    answer = json.loads(shell(PLAIN.replace("1024x1024", "64x48"), quick.url, tmp_path))
    assert pixels(base64.b64decode(answer["data"][0]["b64_json"])).shape == (48, 64, 3)
    assert list(answer)[:2] == ["created", "data"]
    assert list(answer["data"][0]) == ["b64_json"]
    assert isinstance(answer["created"], int)


@pytest.mark.integration
def test_the_documented_command_saves_a_file(quick: LocalWorker, tmp_path: Path) -> None:
    assert shell(TO_FILE, quick.url, tmp_path) == ""
    shown, facts = load_picture(tmp_path / "image.png")
    assert shown.shape == (1024, 1024, 3)
    assert facts["prompt"] == "a white cat"


@pytest.mark.integration
def test_the_documented_command_streams_exact_events(live: LocalWorker, tmp_path: Path) -> None:
    text = shell(STREAM, live.url, tmp_path)
    steps = "".join(
        f'event: progress\ndata: {{"step": {step}, "total": 30}}\n\n' for step in range(1, 31)
    )
    head, done = text[: len(steps)], text[len(steps) :]
    assert head == steps
    found = re.fullmatch(
        r'event: done\ndata: {"created": [0-9]{10}, "data": \[{"b64_json": "(iVBORw0KGgo[^"]*)"}],'
        r' "digest": "sha256:[0-9a-f]{64}"}'
        r"\n\n",
        done,
    )
    assert found is not None, done[:100]
    assert pixels(base64.b64decode(found[1])).shape == (64, 64, 3)


# -- OpenAI's SDK


def test_a_picture_equals_that_of_aimage_run(client: Any, live: LocalWorker) -> None:
    answer = client.images.generate(
        model="tiny", prompt="a dog", size="64x64", extra_body={"seed": 7, "steps": 3}
    )
    assert answer.size == "64x64"
    assert (answer.quality, answer.background, answer.output_format) == ("medium", "opaque", "png")
    assert answer.usage.total_tokens == answer.usage.input_tokens_details.text_tokens == 0
    assert answer.usage.output_tokens_details.image_tokens == 0
    shown = pixels(base64.b64decode(answer.data[0].b64_json))
    np.testing.assert_array_equal(shown, expected(live, seed=7, steps=3))


def test_several_pictures_have_consecutive_seeds(client: Any, live: LocalWorker) -> None:
    body = {"seed": 7, "steps": 1}
    answer = client.images.generate(model="tiny", prompt="a dog", n=3, extra_body=body)
    assert len(answer.data) == 3
    last = pixels(base64.b64decode(answer.data[2].b64_json))
    np.testing.assert_array_equal(last, expected(live, seed=9, steps=1))


def test_guidance_and_a_negative_prompt_are_applied(client: Any, live: LocalWorker) -> None:
    wishes = {"seed": 7, "steps": 2, "guidance": 4.0}
    answer = client.images.generate(
        model="tiny", prompt="a dog", extra_body={**wishes, "negative_prompt": "a cat"}
    )
    shown = pixels(base64.b64decode(answer.data[0].b64_json))
    np.testing.assert_array_equal(shown, expected(live, negative="a cat", **wishes))


def test_a_random_seed_is_returned_in_a_header(client: Any) -> None:
    raw = client.images.with_raw_response.generate(
        model="tiny", prompt="a dog", extra_body={"steps": 1}
    )
    seed = int(raw.headers["x-aimage-seed"])
    assert raw.headers["x-aimage-model"] == "tiny:latest"
    again = client.images.generate(
        model="tiny", prompt="a dog", extra_body={"seed": seed, "steps": 1}
    )
    first = base64.b64decode(raw.parse().data[0].b64_json)
    assert (pixels(first) == pixels(base64.b64decode(again.data[0].b64_json))).all()


@pytest.mark.parametrize("kind", ["jpeg", "webp"])
def test_output_formats_and_compression_are_applied(client: Any, kind: str) -> None:
    def made(compression: int) -> bytes:
        answer = client.images.generate(
            model="tiny",
            prompt="a dog",
            output_format=kind,
            output_compression=compression,
            extra_body={"seed": 1, "steps": 1},
        )
        assert answer.output_format == kind
        return base64.b64decode(answer.data[0].b64_json)

    small, large = made(5), made(100)
    assert len(small) < len(large)
    with Pillow.open(io.BytesIO(small)) as picture:
        assert picture.format == kind.upper()


def test_parameters_of_other_clients_are_accepted(client: Any) -> None:
    """LibreChat and others send these fields and the name of an OpenAI model."""
    answer = client.images.generate(
        model="gpt-image-1",
        prompt="a dog",
        background="auto",
        quality="low",
        size="auto",
        moderation="auto",
        style="vivid",
        user="somebody",
    )
    assert (answer.size, answer.quality) == ("64x64", "low")


def test_a_stream_has_partial_images(client: Any, live: LocalWorker) -> None:
    stream = client.images.generate(
        model="tiny",
        prompt="a dog",
        stream=True,
        partial_images=2,
        extra_body={"seed": 7, "steps": 4},
    )
    *partial, completed = list(stream)
    assert [one.type for one in partial] == ["image_generation.partial_image"] * 2
    assert [one.partial_image_index for one in partial] == [0, 1]
    assert all(pixels(base64.b64decode(one.b64_json)).size for one in partial)
    assert completed.type == "image_generation.completed"
    assert (completed.size, completed.background) == ("64x64", "opaque")
    assert (completed.output_format, completed.quality) == ("png", "medium")
    assert {(one.size, one.quality) for one in partial} == {("64x64", "medium")}
    assert completed.usage.input_tokens_details.image_tokens == 0
    shown = pixels(base64.b64decode(completed.b64_json))
    np.testing.assert_array_equal(shown, expected(live, seed=7, steps=4))


def test_a_stream_has_an_event_for_each_picture(client: Any) -> None:
    stream = client.images.generate(
        model="tiny", prompt="a dog", stream=True, n=2, extra_body={"steps": 2}
    )
    assert [one.type for one in stream] == ["image_generation.completed"] * 2


def test_the_asynchronous_client_streams(live: LocalWorker) -> None:
    async def play() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as client:
            stream = await client.images.generate(
                model="tiny", prompt="a dog", stream=True, extra_body={"steps": 1}
            )
            return [one.type async for one in stream]

    assert asyncio.run(play()) == ["image_generation.completed"]


def test_models_and_aliases_are_listed(client: Any) -> None:
    listed = {model.id: model for model in client.models.list()}
    assert list(listed) == [
        "local/long:v1",
        "localhost:5000/team/made:latest",
        "short:latest",
        "tiny:latest",
        "gpt-image-1",
        "z-image",
    ]
    assert {model.object for model in listed.values()} == {"model"}
    made = listed["localhost:5000/team/made:latest"]
    assert (made.created, made.owned_by) == (1704164645, "localhost:5000")
    assert listed["tiny:latest"].owned_by == "local"
    assert listed["tiny:latest"].created > 1704164645


@pytest.mark.parametrize(
    "name",
    ["tiny", "z-image", "localhost:5000/team/made:latest"],
)
def test_a_model_is_retrieved_by_name_or_alias(client: Any, name: str) -> None:
    assert client.models.retrieve(name).id == name


def test_a_model_is_retrieved_by_a_path_with_slashes(live: LocalWorker) -> None:
    assert live.get("/v1/models/local/long:v1")["id"] == "local/long:v1"


@pytest.mark.parametrize("name", ["absent", "another", "nothing", "GPT 4", "No Name"])
def test_a_model_that_cannot_be_run_is_not_found(client: Any, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve(name)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("name", ["absent", "GPT 4", f"tiny@sha256:{'0' * 64}"])
def test_generating_with_a_missing_model_is_not_found(client: Any, name: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.NotFoundError) as caught:
            client.images.generate(model=name, prompt="a dog", stream=stream)
        assert caught.value.code == "model_not_found"
        assert caught.value.type == "invalid_request_error"


NO_NAMES = ["../../etc/passwd", "DALL-E 3", "tiny@sha256:0", "Füchse"]


@pytest.mark.parametrize("name", NO_NAMES)
def test_an_invalid_model_name_is_refused(client: Any, name: str) -> None:
    with pytest.raises(openai.NotFoundError, match="invalid reference") as caught:
        client.images.generate(model=name, prompt="a dog")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


@pytest.mark.parametrize("name", ["another", "nothing"])
def test_a_model_that_is_not_an_image_model_is_refused(client: Any, name: str) -> None:
    with pytest.raises(
        openai.UnprocessableEntityError, match="is not a supported image model"
    ) as caught:
        client.images.generate(model=name, prompt="a dog")
    assert (caught.value.param, caught.value.code) == ("model", "model_not_supported")


def test_an_unreachable_registry_is_502(client: Any) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.images.generate(model="localhost:1/absent", prompt="a dog")
    assert (caught.value.status_code, caught.value.code) == (502, "registry_unreachable")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"size": "100x100"}, "size"),
        ({"n": 1025}, "n"),
        ({"background": "transparent"}, "background"),
        ({"extra_body": {"steps": 0}}, "steps"),
        ({"extra_body": {"negative_prompt": "a cat"}}, "negative_prompt"),
    ],
)
def test_an_invalid_request_names_the_field(
    client: Any, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.images.generate(model="tiny", prompt="a dog", **fields)
    assert caught.value.param == param


def test_an_error_in_the_middle_of_a_stream_is_an_event(live: LocalWorker) -> None:
    """The process of a model refuses a picture that its memory has no room for."""
    small = live.start("--memory", "1GiB")
    client = openai.OpenAI(base_url=f"{small.url}/v1", api_key="none", max_retries=0)
    with client, pytest.raises(openai.APIError) as caught:
        list(client.images.generate(model="tiny", prompt="a dog", stream=True, size="4096x4096"))
    assert not isinstance(caught.value, openai.APIStatusError)
    assert (caught.value.param, caught.value.code) == (None, "invalid_value")
    name, data = events(small.url, size="4096x4096")[-1]
    assert (name, list(data)) == ("error", ["error"])
    assert list(data["error"]) == ["message", "type", "param", "code"]


# -- streams


def test_progress_counts_the_steps_of_all_pictures(live: LocalWorker) -> None:
    found = events(live.url, n=2, steps=3)
    assert found[:-1] == [("progress", {"step": step, "total": 6}) for step in range(1, 7)]
    assert len(found[-1][1]["data"]) == 2


def test_progress_in_openais_format_is_in_comments_or_events(live: LocalWorker) -> None:
    quiet = events(live.url, stream_format="openai")
    assert (None, "step 1 of 2") in quiet
    assert [name for name, _ in quiet if name] == ["image_generation.completed"]
    told = events(live.url, stream_format="openai+progress", n=2)
    progress = [data for name, data in told if name == "image_generation.progress"]
    assert [(one["step"], one["total"]) for one in progress] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert {one["type"] for one in progress} == {"image_generation.progress"}


def test_partial_images_select_openais_stream_format(live: LocalWorker) -> None:
    names = [name for name, _ in events(live.url, partial_images=1, steps=3) if name]
    assert names == ["image_generation.partial_image", "image_generation.completed"]
    found = events(live.url, partial_images=1, stream_format="ollama")
    assert [name for name, _ in found] == ["progress", "progress", "done"]


def test_the_sdk_reads_the_ollama_stream_format(client: Any) -> None:
    stream = client.images.generate(
        model="tiny",
        prompt="a dog",
        stream=True,
        extra_body={"steps": 2, "stream_format": "ollama"},
    )
    assert [one.type for one in stream] == [None, None, None]


def begun(url: str, **fields: Any) -> Any:
    """Start a stream and return the response after its first event."""
    body = {"prompt": "a dog", "model": "tiny", "stream": True, "steps": 1000} | fields
    asked = urllib.request.Request(f"{url}/v1/images/generations", json.dumps(body).encode())
    answer = urllib.request.urlopen(asked, timeout=100)
    assert answer.readline() == b"event: progress\n"
    return answer


SHORT = {"prompt": "a dog", "model": "tiny", "steps": 1}


CANCELLED = "aimage_generation_cancelled_total"
STEPPED = "aimage_generation_step_seconds_count"


def metric(live: Any, name: str) -> int:
    """Return the value of a metric of the worker."""
    text = live.service.metrics.format_text().decode()
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def until_free(live: Any) -> None:
    """Wait until the engine accepts requests again."""
    until(lambda: post(live.url, SHORT)[0] == 200)


def test_events_are_streamed_at_once_and_a_disconnect_cancels(live: LocalWorker) -> None:
    before = metric(live, CANCELLED)
    with begun(live.url) as answer:
        assert json.loads(answer.readline().removeprefix(b"data: "))["step"] == 1
        if not live.has_gateway:
            assert post(live.url, SHORT)[0] == 503  # most of the thousand steps remain
    until_free(live)
    assert metric(live, CANCELLED) == before + 1


def test_a_disconnect_without_a_stream_cancels(live: LocalWorker) -> None:
    before = metric(live, CANCELLED)
    host, _, port = live.host.rpartition(":")
    body = json.dumps({**SHORT, "steps": 1000, "n": 10}).encode()
    head = f"POST /v1/images/generations HTTP/1.1\r\nHost: {live.host}\r\n"
    with socket.create_connection((host, int(port))) as connection:
        stepped = metric(live, STEPPED)
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        until(lambda: metric(live, STEPPED) > stepped)
        if not live.has_gateway:
            assert post(live.url, SHORT)[0] == 503
    until_free(live)
    assert metric(live, CANCELLED) == before + 1


@pytest.mark.worker_only("requests wait in its own queue")
def test_a_full_queue_is_503_with_retry_after(live: LocalWorker, client: Any) -> None:
    with begun(live.url):
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError) as caught:
                client.images.generate(model="tiny", prompt="a dog", stream=stream)
            assert caught.value.status_code == 503
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert (caught.value.code, caught.value.type) == ("overloaded", "server_error")
    until_free(live)


@pytest.mark.worker_only("requests wait in its own queue")
def test_the_sdk_retries_after_a_full_queue(live: LocalWorker) -> None:
    # few steps: after a long estimated wait the SDK does not retry
    with begun(live.url, steps=100) as answer:
        (model,) = live.service.engine.list_loaded()
        assert model.runner is not None
        pid = model.runner.pid
        os.kill(pid, signal.SIGSTOP)  # until the SDK has its first response

        def release(_: object) -> None:
            os.kill(pid, signal.SIGCONT)
            answer.close()

        hooks = {"response": [release]}
        with openai.OpenAI(
            base_url=f"{live.url}/v1",
            api_key="none",
            max_retries=8,
            http_client=openai.DefaultHttpxClient(event_hooks=hooks),
        ) as client:
            made = client.images.with_raw_response.generate(
                model="tiny", prompt="a dog", extra_body={"steps": 1}
            )
    assert made.retries_taken >= 1


def test_a_killed_model_process_is_an_error_event_and_restarts(live: LocalWorker) -> None:
    with begun(live.url, stream_format="ollama") as answer:
        (model,) = live.service.engine.list_loaded()
        assert model.runner is not None
        os.kill(model.runner.pid, signal.SIGKILL)
        *_, name, data, end = answer.read().decode().split("\n")[:-1]
    assert (name, end) == ("event: error", "")
    error = json.loads(data.removeprefix("data: "))["error"]
    assert "killed by signal 9, possibly for lack of memory; try a smaller" in error["message"]
    assert (error["type"], error["code"]) == ("server_error", "internal_error")
    assert post(live.url, SHORT)[0] == 200


# -- links


def test_a_signed_link_returns_the_picture(client: Any, live: LocalWorker) -> None:
    answer = client.images.generate(
        model="tiny",
        prompt="a dog",
        response_format="url",
        output_format="webp",
        extra_body={"seed": 7, "steps": 1},
    )
    url = answer.data[0].url
    assert answer.data[0].b64_json is None
    assert url.startswith(f"{live.url}/v1/files/pictures/")
    with urllib.request.urlopen(url) as got:
        data, headers = got.read(), got.headers
    assert headers["Content-Type"] == "image/webp"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"].startswith("private, max-age=3")
    assert pixels(data).shape == (64, 64, 3)
    for wrong in (url[:-1], url.replace("expires=", "expires=1"), url.partition("?")[0]):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(wrong)
        with caught.value as error:
            assert error.code == 404
            assert json.load(error)["error"]["code"] == "picture_not_found"


def test_links_begin_with_the_public_url(worker: LocalWorker) -> None:
    """Behind a proxy that terminates TLS, requests arrive over plain HTTP."""
    place = "https://pictures.example.com:8443/worker"
    other = worker.start("--public-url", f"{place}/")
    answer = post(other.url, {**SHORT, "response_format": "url"})[2]
    url = answer["data"][0]["url"]
    assert url.startswith(f"{place}/v1/files/pictures/")
    with urllib.request.urlopen(other.url + url.removeprefix(place)) as got:
        assert got.read(4) == b"\x89PNG"
    fields = {"response_format": "url", "stream_format": "openai"}
    assert events(other.url, **fields)[-1][1]["url"].startswith(place)


def test_streams_contain_links_on_request(live: LocalWorker) -> None:
    (url,) = (one["url"] for one in events(live.url, response_format="url")[-1][1]["data"])
    with urllib.request.urlopen(url) as got:
        first = got.read()
    _, data = events(live.url, response_format="url", stream_format="openai", seed=1)[-1]
    with urllib.request.urlopen(data["url"]) as got:
        assert got.read() == base64.b64decode(data["b64_json"])
    assert first.startswith(b"\x89PNG")


# -- requests


def test_unknown_fields_are_ignored_or_refused_with_strict(live: LocalWorker) -> None:
    body = {"prompt": "a dog", "model": "tiny", "steps": 1, "cfg": 2, "a\r\nSet-Cookie: x": 1}
    status, headers, _ = post(live.url, body)
    assert status == 200
    assert headers["X-Aimage-Ignored"] == "a%0D%0ASet-Cookie%3A%20x, cfg"
    assert "Set-Cookie" not in headers
    for path in ("/v1/images/generations?strict=1", "/v1/images/generations"):
        sent = body if "strict" in path else {**body, "strict": True}
        status, _, answer = post(live.url, sent, path)
        assert (status, answer["error"]["code"]) == (400, "unknown_parameter")


def test_a_request_without_a_model_is_refused(live: LocalWorker) -> None:
    status, _, answer = post(live.url, {"prompt": "a dog"})
    assert (status, answer["error"]["param"]) == (400, "model")
    assert answer["error"]["code"] == "missing_required_parameter"


def test_the_default_model_replaces_a_missing_model(live: LocalWorker, worker: LocalWorker) -> None:
    other = worker.start("--default-model", "short")
    for fields in ({}, {"model": "dall-e-3"}, {"model": "dall-e-3:latest"}, {"model": None}):
        status, headers, _ = post(other.url, {"prompt": "a dog"} | fields)
        assert (status, headers["X-Aimage-Model"]) == (200, "short:latest")


def test_the_default_model_replaces_built_in_names_only(
    live: LocalWorker, worker: LocalWorker
) -> None:
    other = worker.start("--default-model", "short", "--default-for", "mine-*")
    status, _, answer = post(other.url, {"prompt": "a dog", "model": "nope/foo"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "short:latest" in answer["error"]["message"]
    assert post(other.url, {"prompt": "a dog", "model": "dall-e-3"})[0] == 404
    assert post(other.url, {"prompt": "a dog", "model": "mine-1"})[0] == 200


def test_the_default_model_does_not_replace_a_digest_or_registry_name(
    live: LocalWorker, worker: LocalWorker
) -> None:
    """A name with a digest or a registry means exactly that model."""
    other = worker.start("--default-model", "short", "--alias", "dall-e-3=localhost:1/absent")
    for name in (f"tiny@sha256:{'0' * 64}", f"absent@sha256:{'0' * 64}", "localhost:1/absent"):
        body = {"prompt": "a dog", "model": name, "pull": "never"}
        status, _, answer = post(other.url, body)
        assert (status, answer["error"]["code"]) == (404, "model_not_found"), name
    for name in NO_NAMES:
        assert post(other.url, {"prompt": "a dog", "model": name})[0] == 404, name
    body = {"prompt": "a dog", "model": "dall-e-3", "pull": "never"}
    assert (
        post(other.url, body)[1]["X-Aimage-Model"] == "short:latest"
    )  # the request named no registry
    digest = LayeredStore([live.store]).resolve(Reference.parse("tiny")).digest
    status, headers, _ = post(other.url, {**SHORT, "model": f"tiny@{digest}"})
    assert (status, headers["X-Aimage-Model"]) == (200, f"tiny@{digest}")
    assert headers["X-Aimage-Digest"] == str(digest)


def test_an_alias_is_accepted_with_the_latest_tag(live: LocalWorker) -> None:
    for name in ("gpt-image-1", "gpt-image-1:latest"):
        status, headers, _ = post(live.url, {**SHORT, "model": name})
        assert status == 200
        assert (headers["X-Aimage-Model"], headers["X-Aimage-Alias"]) == ("tiny:latest", name)
        assert live.get(f"/v1/models/{name}")["id"] == name
    assert post(live.url, SHORT)[1]["X-Aimage-Alias"] is None
    assert post(live.url, {**SHORT, "model": "gpt-image-1:v2"})[0] == 404


def test_run_accepts_an_alias_of_the_worker(live: LocalWorker) -> None:
    here = live.aimage
    here.environment["AIMAGE_HOST"] = live.url
    try:
        line = here("run", "-q", "gpt-image-1", "a dog", "--seed", 7, "--steps", 1).line
        assert here("run", "-q", "absent", "a dog", code=3).out == ""
    finally:
        del here.environment["AIMAGE_HOST"]
    shown, facts = load_picture(here.home / line)
    assert facts["reference"] == "tiny:latest"
    np.testing.assert_array_equal(shown, expected(live, seed=7, steps=1))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b" " * (1 << 20), 400),
        (b" " * ((1 << 20) + 1), 413),
    ],
)
def test_an_invalid_body_is_refused(live: LocalWorker, body: bytes, status: int) -> None:
    found, _, answer = post(live.url, body)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"


def test_a_coded_body_is_refused(live: LocalWorker) -> None:
    body = gzip.compress(b'{"prompt": "a dog", "model": "tiny"}')
    status, headers, answer = post(live.url, body, **{"Content-Encoding": "gzip"})
    assert status == 415
    assert headers["Accept-Encoding"] == "identity"
    assert answer["error"]["code"] == "unsupported_media_type"


def test_an_exceeded_deadline_is_504(live: LocalWorker, worker: LocalWorker) -> None:
    other = worker.start("--deadline", "0.2s")
    body = {"prompt": "a dog", "model": "tiny", "steps": 1000}
    status, _, answer = post(other.url, body)
    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")


def test_an_infer_token_does_not_cause_a_pull(worker: LocalWorker, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"infer {INFER}\nadmin {ADMIN}\n")
    tokens.chmod(0o600)
    other = worker.start("--token-file", tokens)
    for token, status, error in (
        (INFER, 404, openai.NotFoundError),
        (ADMIN, 502, openai.InternalServerError),
        ("none", 401, openai.AuthenticationError),
    ):
        with (
            openai.OpenAI(base_url=f"{other.url}/v1", api_key=token, max_retries=0) as client,
            pytest.raises(error) as caught,
        ):
            client.images.generate(
                model="localhost:1/absent", prompt="a dog", extra_body={"pull": "always"}
            )
        assert caught.value.status_code == status


def test_a_link_needs_no_token(worker: LocalWorker, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"infer {INFER}\n")
    tokens.chmod(0o600)
    other = worker.start("--token-file", tokens)
    with openai.OpenAI(base_url=f"{other.url}/v1", api_key=INFER) as client:
        answer = client.images.generate(
            model="tiny", prompt="a dog", response_format="url", extra_body={"steps": 1}
        )
    assert answer.data and answer.data[0].url
    with urllib.request.urlopen(answer.data[0].url) as got:
        assert got.read(4) == b"\x89PNG"


@pytest.mark.worker_only("jobs name a digest, which is not pulled if a worker has it")
def test_a_missing_model_is_pulled_with_progress_events(
    live: LocalWorker, registry: RealRegistry, repository: str, aimage: Callable[..., Aimage]
) -> None:
    there = Reference.parse(f"{repository}:v1")
    store = LayeredStore([live.store])
    store.tag(store.resolve(Reference.parse("short")), there)
    live.aimage("push", "-q", there)
    other = live.start("--default-model", "short")
    live.aimage("rm", "-q", there)
    assert other.get("/v1/models")["data"]
    never = post(other.url, {"prompt": "a dog", "model": str(there), "pull": "never"})
    assert never[0] == 404  # the default is another model
    fields = {"model": str(there), "quality": "high", "steps": None}
    for pull, is_pulled in (("if-missing", True), ("if-missing", False), ("always", True)):
        found = events(other.url, pull=pull, **fields)
        assert ("pull" in {name for name, _ in found}) == is_pulled
        assert [data["total"] for name, data in found if name == "progress"] == [2, 2]
