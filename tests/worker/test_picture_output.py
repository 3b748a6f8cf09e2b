"""Pictures that a worker pushes, and those that it begins with by URL or artifact."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")

from clowder_aimage.api.service import make_service
from clowder_aimage.engine.settings import Settings
from clowder_aimage.layout import ImageLayout
from clowder_aimage.model.picture_metadata import read_metadata
from clowder_aimage.oci import Descriptor, Digest, mediatype
from clowder_aimage.registry import ClientOptions
from clowder_aimage.registry.host_settings import HostSettings
from tests.process import Aimage
from tests.scripted import Answer, ScriptedRegistry, serving
from tests.store import copy_store
from tests.worker.conftest import LocalWorker, answer_to

GENERATIONS = "/v1/images/generations"
SMALL = {"model": "tiny", "prompt": "a fox", "size": "32x32", "steps": 2, "seed": 1}
ADMIN, INFER = "admin-0123456789abcdef", "infer-0123456789abcdef"


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the host of an ``aimage registry serve``."""
    home = tmp_path_factory.mktemp("served")
    words = ("registry", "serve", "--addr", "127.0.0.1:0", "--log-level", "error")
    process = Aimage(home, home / "served").start(*words, is_shared=True)
    assert process.stdout is not None
    yield process.stdout.readline().strip().removeprefix("http://")
    process.terminate()
    process.communicate(timeout=20)


@pytest.fixture(scope="module")
def site() -> Iterator[ScriptedRegistry]:
    with ScriptedRegistry(lambda _: Answer(404)).running() as found:
        yield found


@pytest.fixture(scope="module")
def worker(
    stocked: Path, tmp_path_factory: pytest.TempPathFactory, site: ScriptedRegistry
) -> Iterator[LocalWorker]:
    """Return a worker with two tokens that fetches pictures from one site."""
    home = tmp_path_factory.mktemp("pushing")
    copy_store(stocked, home / "store")
    tokens = home / "tokens"
    tokens.write_text(f"admin {ADMIN}\ninfer {INFER}\n")
    tokens.chmod(0o600)
    here = Aimage(home, home / "store")
    found = LocalWorker(here, "--token-file", tokens, "--allow-input", site.host)
    yield found
    found.end()


def ask(worker: LocalWorker, token: str = ADMIN, /, **fields: Any) -> tuple[int, Any]:
    body = json.dumps(SMALL | fields).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    status, _, data = answer_to(urllib.request.Request(worker.url + GENERATIONS, body, headers))
    return status, json.loads(data)


def first(answer: Any) -> bytes:
    return base64.b64decode(answer["data"][0]["b64_json"])


def test_pictures_are_pushed_and_replayed(worker: LocalWorker, host: str, tmp_path: Path) -> None:
    target = f"{host}/team/made:v1"
    output = {"push": target}
    status, answer = ask(worker, output=output, n=2, output_format="png", png_facts=False)
    assert status == 200, answer
    assert answer["output"]["push"] == target
    there = Aimage(tmp_path, tmp_path / "store")
    manifest = json.loads(there("manifest", "fetch", target).out)
    assert answer["output"]["digest"] == there("resolve", target).line
    assert manifest["artifactType"] == mediatype.AIMAGE_PICTURE
    assert manifest["layers"][0]["digest"] == str(Digest.of(first(answer)))
    replaying = Aimage(worker.aimage.home, worker.aimage.store)
    assert replaying("replay", f"oci://{target}#2.png").line == "equal"


def test_the_quality_of_a_pushed_picture_is_recorded(worker: LocalWorker, host: str) -> None:
    """It is in the settings of the artifact, also if the file has no facts."""
    target = f"{host}/team/made:small"
    fields = {"output_format": "webp", "output_compression": 20, "png_facts": False}
    status, answer = ask(worker, output={"push": target}, **fields)
    assert status == 200, answer
    assert read_metadata(first(answer)) == {}
    replaying = Aimage(worker.aimage.home, worker.aimage.store)
    assert replaying("replay", f"oci://{target}").line == "equal"


def test_run_pushes_the_pictures_of_a_worker(worker: LocalWorker, host: str) -> None:
    here = Aimage(worker.aimage.home, worker.aimage.store)
    here.environment.update(AIMAGE_HOST=worker.url, AIMAGE_TOKEN=INFER)
    words = ("run", "tiny", "a fox", "--size", "32x32", "--steps", 1, "--seed", 3)
    pushed = here(*words, "-o", "made.png", "--push", f"{host}/team/made:remote", "-q")
    path, name = pushed.out.split()
    assert path == "made.png"
    there = Aimage(worker.aimage.home, worker.aimage.store)
    assert there("replay", f"oci://{name}").line == "equal"
    name = here(*words, "-o", "made.jpg", "--push", f"{host}/team/made:lossy", "-q").out.split()[1]
    assert there("replay", f"oci://{name}").line == "equal"


@pytest.mark.parametrize(
    ("token", "fields", "status", "message"),
    [
        (INFER, {}, 403, "scope admin"),
        (ADMIN, {"output": {"push": "made:v1"}}, 400, "no registry host"),
        (ADMIN, {"output": {"push": "h.example/x@sha256:" + "0" * 64}}, 400, "by tag"),
        (ADMIN, {"output": {"push": ""}}, 400, "invalid reference"),
        (ADMIN, {"output": {}}, 400, "missing required field: output.push"),
        (ADMIN, {"stream": True}, 400, "stream"),
        (ADMIN, {"output": {"push": "127.0.0.1:1/team/x:v1"}}, 502, "127.0.0.1:1"),
    ],
)
def test_a_push_that_cannot_be_done_is_refused(
    worker: LocalWorker, host: str, token: str, fields: dict[str, Any], status: int, message: str
) -> None:
    target = {"push": f"{host}/team/refused:v1"}
    found, answer = ask(worker, token, **{"output": target} | fields)
    assert (found, message in answer["error"]["message"]) == (status, True), answer


def test_a_picture_begins_with_one_of_a_url(worker: LocalWorker, site: ScriptedRegistry) -> None:
    """It is that of the same bytes in a data URL."""
    data = first(ask(worker)[1])
    site.script = lambda _: Answer(200, {}, data)
    _, fetched = ask(worker, INFER, image=f"http://{site.host}/a.png", strength=0.5)
    encoded = base64.b64encode(data).decode()
    _, given = ask(worker, INFER, image=f"data:image/png;base64,{encoded}", strength=0.5)
    assert first(fetched) == first(given)


@pytest.mark.parametrize(
    ("image", "answer", "status"),
    [
        ("http://SITE/a.png", Answer(302, {"Location": "http://169.254.169.254/a"}), 403),
        ("http://SITE/a.png", Answer(302, {"Location": "https://example.com/a"}), 403),
        ("http://SITE/a.png", Answer(200, {}, b"text"), 400),
        ("http://SITE/a.png", Answer(200, {"Content-Length": str(1 << 40)}), 413),
        ("https://example.com/a.png", Answer(), 403),
        ("http://127.0.0.1:1/a.png", Answer(), 403),
        ("oci://127.0.0.1:1/team/x:v1", Answer(), 403),
        ("oci://169.254.169.254/team/x:v1", Answer(), 403),
        ("/etc/passwd", Answer(), 400),
        ("file:///etc/passwd", Answer(), 400),
        ("-", Answer(), 400),
    ],
)
def test_a_picture_that_must_not_be_read_is_refused(
    worker: LocalWorker, site: ScriptedRegistry, image: str, answer: Answer, status: int
) -> None:
    site.script = lambda _: answer
    for token in (INFER, ADMIN):
        found, error = ask(worker, token, image=image.replace("SITE", site.host))
        assert found == status, error
        assert error["error"]["param"] == "image"


def test_pictures_of_artifacts_leave_nothing_in_the_store(
    worker: LocalWorker, site: ScriptedRegistry
) -> None:
    def blobs() -> set[str]:
        return {path.name for path in (worker.aimage.store / "blobs" / "sha256").iterdir()}

    before, data = blobs(), first(ask(worker)[1])
    name = f"oci://{site.host}/team/made:v1"
    for content, status in ((data, 200), (b"text", 400)):
        layers = [Descriptor.of("image/png", content).to_json()]
        config = Descriptor.of(mediatype.AIMAGE_PICTURE_CONFIG, b"{}").to_json()
        manifest = {"schemaVersion": 2, "config": config, "layers": layers}
        served = {str(Digest.of(each)): each for each in (content, b"{}")}
        site.script = serving(json.dumps(manifest).encode(), served)
        found, answer = ask(worker, INFER, image=name, strength=0.5)
        assert found == status, answer
    assert blobs() == before


def test_pictures_come_from_the_registries_of_the_models(tmp_path: Path) -> None:
    """Those are of the configuration, and for clients that may pull."""
    connection = ClientOptions(registries={"a.example": HostSettings()}, default_registry="b.io/x")
    settings = Settings(default_model="x:v1", aliases={"y": "[::1]:5000/y:v1"}, wanted=("d.io/x",))
    service = make_service(settings, ImageLayout(tmp_path), connection)
    found = service.build_input_source(may_pull=True).registries
    assert found == {"a.example", "b.io", "[::1]:5000", "d.io"}
    assert not service.build_input_source(may_pull=False).registries


def test_a_model_is_neither_a_picture_nor_replaced_by_one(worker: LocalWorker, host: str) -> None:
    here = worker.aimage
    here("tag", "tiny", f"{host}/team/tiny:v1")
    here("push", f"{host}/team/tiny:v1")
    status, answer = ask(worker, image=f"oci://{host}/team/tiny:v1")
    assert (status, answer["error"]["param"]) == (422, "image"), answer
    status, answer = ask(worker, output={"push": f"{host}/team/tiny:v1"}, model="absent")
    assert (status, answer["error"]["param"]) == (400, "output"), answer  # before all else
    assert "is not an artifact of pictures" in answer["error"]["message"]
