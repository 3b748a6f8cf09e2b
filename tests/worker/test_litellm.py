"""A live worker as seen by the unmodified litellm library.

``AIMAGE_LITELLM_PYTHON`` is a Python interpreter with litellm installed.
"""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.worker.conftest import LocalWorker

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from PIL import Image

from clowder_aimage.engine.worker_client import WorkerClient
from tests.process import spawn
from tests.program import lack
from tests.scripted_worker import Says, ScriptedWorker, says
from tests.worker.conftest import Worker

pytestmark = pytest.mark.integration  # importing litellm takes five seconds

SCRIPT = Path(__file__).with_name("litellm_client.py")
INFER = "infer-0123456789abcdef0123456789"


@dataclass
class Litellm:
    """litellm in a separate process that sends requests to ``url``."""

    process: subprocess.Popen[str]
    url: str

    def __call__(self, function: str = "image_generation", **arguments: Any) -> dict[str, Any]:
        """Return the result or error of a call, without retries unless ``arguments`` set them."""
        said = {
            "model": "openai/tiny",
            "prompt": "a dog",
            "api_base": f"{self.url}/v1",
            "api_key": "none",
            "max_retries": 0,
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        call = {"function": function, "arguments": said | arguments}
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def made(self, **arguments: Any) -> dict[str, Any]:
        """Return the result of a call that must succeed."""
        found = self(**arguments)
        assert "made" in found, found
        made: dict[str, Any] = found["made"]
        return made


@pytest.fixture(scope="module")
def named(worker: Worker) -> Worker:
    """Return a worker with aliases for OpenAI's model names."""
    return worker.start(
        "--alias", "gpt-image-1=tiny", "--alias", "dall-e-3=tiny", "--queue", "0", "--max-wait", "0"
    )


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Start one litellm process for all tests, because its import takes seconds."""
    python = os.environ.get("AIMAGE_LITELLM_PYTHON")
    if not python:
        lack("AIMAGE_LITELLM_PYTHON names no Python that has litellm")
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path_factory.mktemp("litellm")),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else its import sends a request to the internet
        "NO_PROXY": "127.0.0.1",
    }
    with spawn(
        [python, SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,  # its logs
        text=True,
        env=environment,
    ) as found:
        yield found
        found.communicate(timeout=30)
    assert found.returncode == 0


@pytest.fixture
def litellm(process: subprocess.Popen[str], named: Worker) -> Litellm:
    return Litellm(process, named.url)


def opened(data: bytes) -> Image.Image:
    picture = Image.open(io.BytesIO(data))
    picture.load()
    return picture


def pictures(made: dict[str, Any]) -> list[Image.Image]:
    return [opened(base64.b64decode(each["b64_json"])) for each in made["data"]]


def kind(found: dict[str, Any]) -> str:
    """Return the class name of the raised exception."""
    assert "kinds" in found, found
    first: str = found["kinds"][0]
    return first


def counted(worker: Worker) -> float:
    """Return the number of generation requests that the worker has received."""
    with urllib.request.urlopen(f"{worker.url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    counts = [line for line in lines if "images/generations" in line and "_created" not in line]
    return sum(float(line.split()[-1]) for line in counts)


def test_a_picture_equals_that_of_aimage_run(litellm: Litellm, named: Worker) -> None:
    made = litellm.made(seed=7, steps=2, size="48x64")
    wishes = ("--seed", 7, "--steps", 2, "--width", 48, "--height", 64)
    own = named.aimage.home / named.aimage("run", "-q", "tiny", "a dog", *wishes).line
    (picture,) = pictures(made)
    assert picture.size == (48, 64)
    assert picture.tobytes() == opened(own.read_bytes()).tobytes()
    assert made["created"] > 1_700_000_000
    assert (made["size"], made["output_format"]) == ("48x64", "png")


def test_several_pictures_are_returned_for_n(litellm: Litellm) -> None:
    made = litellm.made(n=2, size="32x32", quality="low", user="somebody")
    first, second = pictures(made)
    assert first.size == second.size == (32, 32)
    assert first.tobytes() != second.tobytes()
    assert made["usage"]["total_tokens"] == 0


def test_the_asynchronous_call_returns_a_picture(litellm: Litellm) -> None:
    made = litellm.made(function="aimage_generation", steps=1, size="32x32")
    assert [picture.size for picture in pictures(made)] == [(32, 32)]


def test_parameters_of_gpt_image_are_supported(litellm: Litellm) -> None:
    made = litellm.made(
        model="openai/gpt-image-1",
        output_format="jpeg",
        output_compression=50,
        background="opaque",
        moderation="low",
    )
    (picture,) = pictures(made)
    assert picture.format == "JPEG"
    assert (made["output_format"], made["background"]) == ("jpeg", "opaque")


def test_the_url_response_format_returns_a_link(litellm: Litellm) -> None:
    """litellm sends ``response_format`` only to models named like DALL-E."""
    (item,) = litellm.made(model="openai/dall-e-3", response_format="url")["data"]
    assert item["b64_json"] is None
    with urllib.request.urlopen(item["url"], timeout=30) as answer:
        assert opened(answer.read()).size == (64, 64)


@pytest.mark.parametrize("fields", [{"response_format": "b64_json"}, {"style": "vivid"}], ids=str)
def test_parameters_refused_by_litellm_are_not_sent(
    litellm: Litellm, named: Worker, fields: dict[str, str]
) -> None:
    before = counted(named)
    found = litellm(**fields)
    assert kind(found) == "litellm.exceptions.UnsupportedParamsError"
    assert next(iter(fields)) in found["message"]
    assert counted(named) == before
    assert pictures(litellm.made(drop_params=True, **fields))  # the field is not required
    assert counted(named) == before + 1


@pytest.mark.parametrize(
    ("fields", "status", "name", "text"),
    [
        ({"model": "openai/absent"}, 404, "NotFoundError", "'code': 'model_not_found'"),
        ({"size": "7x7"}, 400, "BadRequestError", "a multiple of 16"),
        (
            {"background": "transparent"},
            400,
            "BadRequestError",
            "background transparent is not supported",
        ),
        ({"prompt": ""}, 400, "BadRequestError", "prompt"),
    ],
    ids=["absent", "size", "transparent", "empty"],
)
def test_refusals_raise_the_matching_exception(
    litellm: Litellm, fields: dict[str, str], status: int, name: str, text: str
) -> None:
    found = litellm(**fields)
    assert kind(found) == f"litellm.exceptions.{name}"
    assert f"openai.{name}" in found["kinds"]
    assert found["status"] == status
    assert text in found["message"]


def test_the_api_key_is_the_token(litellm: Litellm, worker: LocalWorker, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"infer {INFER}\n")
    tokens.chmod(0o600)
    litellm.url = worker.start("--token-file", tokens).url
    found = litellm(api_key="wrong")
    assert kind(found) == "litellm.exceptions.AuthenticationError"
    assert found["status"] == 401
    assert pictures(litellm.made(api_key=INFER, steps=1))


def test_a_full_queue_raises_service_unavailable_until_a_client_leaves(
    litellm: Litellm, named: Worker
) -> None:
    litellm.made(steps=1)  # waits until litellm is imported
    # of minutes: litellm waits for a Retry-After of up to one minute
    body = {"model": "tiny", "prompt": "a cat", "stream": True, "steps": 1000, "n": 10}
    body |= {"size": "1024x1024"}
    drawing = WorkerClient(named.host).iter_events("/v1/images/generations", body)
    while next(drawing)[0] != "progress":
        pass
    found = litellm()
    assert kind(found) == "litellm.exceptions.ServiceUnavailableError"
    assert (found["status"], "overloaded" in found["message"]) == (503, True)
    drawing.close()
    while "made" not in litellm(steps=1):
        pass


def test_litellm_retries_after_a_503_response(litellm: Litellm) -> None:
    picture = {"created": 1, "data": [{"b64_json": "AAAA"}]}
    busy = {"error": {"message": "2 wait", "type": "server_error", "code": "overloaded"}}
    answers = [says(busy, 503, Retry_After="1"), says(picture)]
    named: dict[str, str] = {"Content-Type": "application/json"}

    def script(_: object) -> Says:
        answer = answers.pop(0)
        answer.headers |= named
        return answer

    with ScriptedWorker(script).running() as scripted:
        litellm.url = f"http://{scripted.host}"
        assert litellm.made(max_retries=2)["data"][0]["b64_json"] == "AAAA"
    assert [asked.path for asked in scripted.asked] == ["/v1/images/generations"] * 2


def test_an_exceeded_deadline_raises_a_litellm_exception(
    litellm: Litellm, worker: LocalWorker
) -> None:
    litellm.url = worker.start("--deadline", "0.2s").url
    found = litellm(steps=1000)
    assert kind(found).startswith("litellm.exceptions.")
    assert found["status"] in (408, 504)
    assert "exceeded the deadline" in found["message"]
