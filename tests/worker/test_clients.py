"""The settings in docs/clients.md, sent as each client sends them.

Bodies and headers were recorded from Open WebUI's source (2026), and from LiteLLM 1.106.2,
langchain-community with openai 2.54.0, and ai 6.0.326 with @ai-sdk/openai 3.0.141 on Node 20.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import re
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from PIL import Image

from tests.docs.document import ROOT, Document
from tests.process import Aimage
from tests.worker.conftest import LocalWorker, Worker, answer_to, begin

PAGE = Document(ROOT / "docs/clients.md")
DEFAULT = "http://127.0.0.1:11434"  # the worker in the document
PROMPT = "two blue squares"
CHAT = [{"role": "user", "content": PROMPT}]
SDK = {
    "Accept": "application/json",
    "User-Agent": "OpenAI/Python 2.54.0",
    "X-Stainless-Lang": "python",
    "X-Stainless-Async": "false",
    "x-stainless-retry-count": "0",
}
NODE = {
    "accept": "*/*",
    "accept-language": "*",
    "sec-fetch-mode": "cors",
    "user-agent": "ai/6.0.326 ai-sdk/provider-utils/4.0.66 runtime/node.js/v20.20.2",
}
Settings = dict[str, Any]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    """Start a worker as the document does, with the options of its container example."""
    home = tmp_path_factory.mktemp("clients")
    here = Aimage(home, home / "store")
    here("create", "-q", "shapes", ROOT / "examples/shapes/model")
    found = begin(here, *_options("Open WebUI"))
    yield found
    found.end()


def _options(heading: str) -> list[str]:
    (text,) = re.findall(r"aimage serve (.*)", PAGE.section(heading))
    return text.split()


def _block(heading: str, language: str) -> str:
    """Return the first block of a section. Raises IndexError: there is none."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.section(heading), re.DOTALL)[0]


def _arguments(heading: str, function: str) -> Settings:
    """Return the keyword arguments of a call in the Python block of a section."""
    for node in ast.walk(ast.parse(_block(heading, "python"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == function:
            return {str(each.arg): ast.literal_eval(each.value) for each in node.keywords}
    raise LookupError(function)


def _fields(text: str) -> Settings:
    """Return the fields with strings in a block of JavaScript."""
    return dict(re.findall(r'(\w+): "([^"]*)"', text))


def open_webui() -> tuple[str, dict[str, str], Settings]:
    said = dict(line.split("=", 1) for line in _block("Open WebUI", "ini").splitlines())
    assert (said["ENABLE_IMAGE_GENERATION"], said["IMAGE_GENERATION_ENGINE"]) == ("true", "openai")
    body = {
        "model": said["IMAGE_GENERATION_MODEL"],
        "prompt": PROMPT,
        "n": 1,
        "size": said["IMAGE_SIZE"],
        "response_format": "b64_json",
    }
    headers = {"User-Agent": "Python/3.11 aiohttp/3.12.15", "Accept": "*/*"}
    headers["Authorization"] = f"Bearer {said['IMAGES_OPENAI_API_KEY']}"
    return said["IMAGES_OPENAI_API_BASE_URL"], headers, body


def litellm() -> tuple[str, dict[str, str], Settings]:
    said = _arguments("LiteLLM", "litellm.image_generation")
    provider, _, model = said["model"].partition("/")
    assert provider == "openai"
    body = {"prompt": said["prompt"], "model": model, "size": said["size"]}
    headers = SDK | {"X-Stainless-Raw-Response": "true", "x-stainless-read-timeout": "600"}
    return said["api_base"], headers | {"Authorization": f"Bearer {said['api_key']}"}, body


def litellm_proxy() -> tuple[str, dict[str, str], Settings]:
    text = _block("LiteLLM", "yaml")
    said = dict(re.findall(r"(\w+): (\S+)$", text, re.MULTILINE))
    assert said["mode"] == "image_generation"
    body = {"prompt": PROMPT, "model": said["model"].removeprefix("openai/"), "n": 1}
    headers = SDK | {"X-Stainless-Async": "async:asyncio"}
    return said["api_base"], headers | {"Authorization": f"Bearer {said['api_key']}"}, body


def langchain() -> tuple[str, dict[str, str], Settings]:
    said = _arguments("LangChain", "DallEAPIWrapper")
    body = {"prompt": PROMPT, "model": said["model"], "n": 1, "size": said["size"]}
    headers = SDK | {"Authorization": f"Bearer {said['api_key']}"}
    return said["base_url"], headers, body | {"quality": "standard"}


def ai_sdk() -> tuple[str, dict[str, str], Settings]:
    text = _block("AI SDK", "ts")
    said = _fields(text)
    (model,) = re.findall(r'worker\.image\("(.*?)"\)', text)
    body = {"model": model, "prompt": said["prompt"], "n": 1, "size": said["size"]}
    headers = NODE | {"authorization": f"Bearer {said['apiKey']}"}
    return said["baseURL"], headers, body | {"response_format": "b64_json"}


CLIENTS = [open_webui, litellm, litellm_proxy, langchain, ai_sdk]


def _ask(
    url: str, headers: dict[str, str], body: Settings | None, method: str | None = None
) -> tuple[int, Any, bytes]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | headers
    return answer_to(urllib.request.Request(url, data, headers, method=method))


def _picture(item: dict[str, str]) -> Image.Image:
    if "b64_json" in item:
        return Image.open(io.BytesIO(base64.b64decode(item["b64_json"], validate=True)))
    with urllib.request.urlopen(item["url"], timeout=30) as answer:
        return Image.open(io.BytesIO(answer.read()))


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.__name__)
def test_the_settings_give_a_picture(
    client: Callable[[], tuple[str, dict[str, str], Settings]], worker: Worker
) -> None:
    base, headers, body = client()
    assert base == f"{DEFAULT}/v1"
    url = f"{base.replace(DEFAULT, worker.url)}/images/generations"
    status, answered, data = _ask(url, headers, body)
    assert status == 200, data
    assert answered["X-Aimage-Model"] == "shapes:latest"
    assert answered["X-Aimage-Ignored"] is None
    (item,) = json.loads(data)["data"]
    assert ("url" in item) == (client is langchain)  # which joins the links
    assert _picture(item).size == (128, 128)


@pytest.mark.parametrize(("count", "status"), [(1, 200), (2, 422)])
def test_open_webui_edits_a_picture(worker: Worker, count: int, status: int) -> None:
    """The form of its ``image_edits``: one picture is ``image``, several are ``image[]``."""
    text = PAGE.section("Open WebUI")
    said = dict(
        re.findall(r"^(\w+)=(.*)$", text.partition("ENABLE_IMAGE_EDIT=true")[2], re.MULTILINE)
    )
    assert said["IMAGE_EDIT_ENGINE"] == "openai"
    data = io.BytesIO()
    Image.new("RGB", (96, 64), "navy").save(data, "PNG")
    fields = {"model": said["IMAGE_EDIT_MODEL"], "prompt": PROMPT, "response_format": "b64_json"}
    field = "image" if count == 1 else "image[]"
    body = b""
    for name, value in (fields | {"n": "1"}).items():
        body += f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    for number in range(count):
        place = f'Content-Disposition: form-data; name="{field}"; filename="{number}.png"'
        body += f"--b\r\n{place}\r\nContent-Type: image/png\r\n\r\n".encode()
        body += data.getvalue() + b"\r\n"
    headers = {"User-Agent": "python-requests/2.32.5", "Accept": "*/*"}
    headers["Authorization"] = f"Bearer {said['IMAGES_EDIT_OPENAI_API_KEY']}"
    headers["Content-Type"] = "multipart/form-data; boundary=b"
    base = said["IMAGES_EDIT_OPENAI_API_BASE_URL"].replace(DEFAULT, worker.url)
    asked = urllib.request.Request(f"{base}/images/edits", body + b"--b--\r\n", headers)
    found, _, answer = answer_to(asked)
    assert found == status, answer
    if status == 200:
        (item,) = json.loads(answer)["data"]
        assert _picture(item).size == (96, 64)
    else:
        assert json.loads(answer)["error"]["param"] == "image"


def test_open_webui_in_a_container_gives_a_picture(worker: Worker) -> None:
    _, headers, body = open_webui()
    text = PAGE.section("Open WebUI")
    (base,) = re.findall(r"=(http://host\.docker\.internal:11434/v1)$", text, re.MULTILINE)
    host = base.removeprefix("http://").removesuffix("/v1")
    url = f"{worker.url}/v1/images/generations?api-version=2025-04-01-preview"
    status, _, data = _ask(url, headers | {"Host": host, "Authorization": "Bearer "}, body)
    assert status == 200, data


def test_a_page_of_this_machine_gives_a_picture(worker: Worker) -> None:
    text = _block("A web page", "js")
    (url,) = re.findall(r'fetch\("(.*?)"', text)
    (sent,) = re.findall(r"JSON\.stringify\(\{(.*)\}\)", text)
    url, origin = url.replace(DEFAULT, worker.url), {"Origin": "http://localhost:3000"}
    wanted = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    status, answered, _ = _ask(url, origin | wanted, None, "OPTIONS")
    assert (status, answered["Access-Control-Allow-Origin"]) == (204, origin["Origin"])
    assert "content-type" in answered["Access-Control-Allow-Headers"].lower()
    headers = origin | {"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "cors"}
    status, answered, data = _ask(url, headers, _fields(sent))
    assert (status, answered["Access-Control-Allow-Origin"]) == (200, origin["Origin"]), data
    assert _picture(json.loads(data)["data"][0]).size == (128, 128)


def test_the_example_of_the_sdk_writes_a_picture(
    worker: Worker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai", reason="openai is not installed")
    monkeypatch.chdir(tmp_path)
    text = _block("OpenAI's SDK", "python").replace(DEFAULT, worker.url)
    exec(compile(text, "clients.md", "exec"), {})  # noqa: S102
    with Image.open(tmp_path / "squares.png") as picture:
        assert picture.size == (128, 128)


@pytest.mark.parametrize(
    ("path", "headers", "more", "status", "code", "message"),
    [
        ("", {"Host": "box:11434"}, {}, 403, "host_not_allowed", "--allow-host box"),
        ("", {"Origin": "https://a.example"}, {}, 403, "origin_not_allowed", "https://a.example"),
        ("", {}, {"model": "nope/foo"}, 404, "model_not_found", "shapes"),
        ("", {}, {"size": "100x100"}, 400, "invalid_value", "multiple"),
        ("/v1/images/edits", {}, {}, 400, "missing_required_parameter", "image"),
        ("/v1/chat/completions", {}, {"messages": CHAT}, 422, "model_not_supported", "/v1/images"),
        ("/v1/responses", {}, {}, 404, "unknown_url", "not supported"),
        ("/images/generations", {}, {}, 404, "unknown_url", "/images/generations"),
    ],
    ids=["host", "origin", "model", "size", "edits", "chat", "responses", "base"],
)
def test_a_failure_says_what_to_change(
    path: str,
    headers: dict[str, str],
    more: Settings,
    status: int,
    code: str,
    message: str,
    worker: Worker,
) -> None:
    url = worker.url + (path or "/v1/images/generations")
    body = {"model": "shapes", "prompt": PROMPT, "size": "128x128"}
    found, _, data = _ask(url, headers, body | more)
    error = json.loads(data)["error"]
    assert (found, error["code"]) == (status, code), error
    assert message in error["message"], error
    table = PAGE.section("If a client fails")
    assert f"`{code}`" in table or f"| {status} " in table


def test_a_wrong_token_is_not_a_missing_one(worker: Worker, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("infer infer-0123456789abcdef0123456789\n")
    tokens.chmod(0o600)
    guarded = LocalWorker(worker.aimage, "--token-file", tokens)
    said = []
    for headers in ({}, {"Authorization": "Bearer none"}):
        status, _, data = _ask(f"{guarded.url}/v1/models", headers, None)
        error = json.loads(data)["error"]
        assert (status, error["code"]) == (401, "invalid_api_key")
        said.append(error["message"])
    guarded.end()
    assert said[0] != said[1]
    assert "`invalid_api_key`" in PAGE.section("If a client fails")
