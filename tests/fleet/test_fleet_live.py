"""Workers and a gateway as processes, with the embedded model: killed workers, and the verbs."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.fleet.fleet_run import PICTURES, Nats
from tests.process import Aimage
from tests.store import copy_store
from tests.wait import PATIENCE, until
from tests.worker.conftest import Worker, begin

pytestmark = pytest.mark.integration
FLEET = ("--fleet", "live")
STEPS = 250  # of a stream whose worker is killed


class LiveFleet:
    """Two workers and a gateway on the server of the tests."""

    def __init__(self, nats: Nats, here: Aimage) -> None:
        self.nats, self.here = nats, here
        here("fleet", "init", "--nats", nats.url, *FLEET)
        self.gateway = begin(here, "--nats", nats.url, *FLEET, verb="gateway")
        self.workers = {name: self.start(name) for name in ("w1", "w2")}
        self.url = self.gateway.url

    def start(self, name: str) -> Worker:
        return begin(self.here, "--join", self.nats.url, *FLEET, "--worker-name", name)

    def status(self, name: str) -> dict[str, Any]:
        workers: dict[str, Any] = {}

        def is_known() -> bool:
            found = self.here("fleet", "status", "--json", "--nats", self.nats.url, *FLEET)
            workers.update({each["id"]: each for each in json.loads(found.out)["workers"]})
            return name in workers  # a busy worker may be heard late

        until(is_known, name)
        return dict(workers[name])

    def busy(self) -> str:
        """Return the name of a worker with a job, if there is one."""
        workers = self.gateway.get("/v1/fleet")["workers"]
        return next((str(each["id"]) for each in workers if each["running"]), "")

    def know(self, count: int) -> None:
        until(lambda: len(self.gateway.get("/v1/fleet")["workers"]) == count, "the workers")

    def end(self) -> None:
        for each in (*self.workers.values(), self.gateway):
            each.end()


@pytest.fixture(scope="module")
def live(
    nats: Nats, tiny_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveFleet]:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    home = tmp_path_factory.mktemp("live")
    copy_store(tiny_store, home / "store")
    fleet = LiveFleet(nats, Aimage(home, home / "store"))
    fleet.know(2)
    yield fleet
    fleet.end()


def pixels(data: str) -> bytes:
    return Image.open(io.BytesIO(base64.b64decode(data))).tobytes()


def post(url: str, headers: Mapping[str, str] | None = None, **body: Any) -> Any:
    known = {"Content-Type": "application/json", **(headers or {})}
    request = urllib.request.Request(url + PICTURES, json.dumps(body).encode(), known)
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return json.load(answer)


WISH: dict[str, Any] = {"model": "tiny", "prompt": "a cat", "seed": 7, "width": 64, "height": 64}


def test_pictures_are_those_of_a_worker(live: LiveFleet) -> None:
    mine = post(live.url, **WISH)["data"][0]["b64_json"]
    assert pixels(mine) == pixels(post(live.workers["w1"].url, **WISH)["data"][0]["b64_json"])
    found = {each["id"] for each in live.gateway.get("/v1/models")["data"]}
    assert found == {"tiny:latest"}
    with urllib.request.urlopen(f"{live.url}/api/tags", timeout=60) as answer:
        assert json.load(answer)["models"][0]["name"] == "tiny:latest"
    linked = post(live.url, **WISH, response_format="url")["data"][0]["url"]
    assert linked.startswith(live.url)
    with urllib.request.urlopen(linked, timeout=60) as answer:
        assert pixels(base64.b64encode(answer.read()).decode()) == pixels(mine)


def test_a_worker_that_stood_still_does_not_count(live: LiveFleet) -> None:
    """It is slow and not gone: it goes on when another one has finished its job."""
    wanted = post(live.workers["w1"].url, **WISH, steps=150)["data"][0]["b64_json"]
    names = {each.process.pid: name for name, each in live.workers.items()}
    found: list[str] = []
    key = {"Idempotency-Key": "still"}
    asking = threading.Thread(
        target=lambda: found.append(post(live.url, key, **WISH, steps=150)["data"][0]["b64_json"])
    )
    asking.start()
    pid = 0

    def is_running() -> bool:
        nonlocal pid
        workers = live.gateway.get("/v1/fleet")["workers"]
        name = next((each["id"] for each in workers if each["running"]), "")
        pid = next((one for one, known in names.items() if known == name), 0)
        return bool(pid)

    until(is_running)
    os.kill(pid, signal.SIGSTOP)
    try:
        asking.join(PATIENCE)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert not asking.is_alive() and pixels(found[0]) == pixels(wanted)

    def is_idle() -> bool:
        workers = live.gateway.get("/v1/fleet")["workers"]
        return len(workers) == len(names) and not any(each["running"] for each in workers)

    until(is_idle)
    again = post(live.url, key, **WISH, steps=150)["data"][0]["b64_json"]
    assert again == found[0]  # the response of the other one, to the byte
    assert live.gateway.get("/v1/fleet")["given_up"] == 0


def test_a_stream_goes_on_when_its_worker_is_killed(live: LiveFleet) -> None:
    wanted = post(live.workers["w1"].url, **WISH, steps=STEPS)["data"][0]["b64_json"]
    client = openai.OpenAI(
        base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
    )
    steps, killed = list[int](), ""
    previews, found = list[Any](), list[Any]()
    with client.images.generate(
        model="tiny",
        prompt="a cat",
        size="64x64",
        stream=True,
        partial_images=3,
        extra_body={"seed": 7, "steps": STEPS, "stream_format": "openai+progress"},
    ) as events:
        for event in events:
            kind = event.type.rpartition(".")[2]
            if kind == "progress":
                steps.append((event.model_extra or {})["step"])
                if len(steps) == 1:  # the gateway may hear of it later
                    killed = until(live.busy, "a worker to be at work")
                if len(steps) == 60:
                    live.workers[killed].stop(signal.SIGKILL)
            (previews if kind == "partial_image" else found).append(event)
    assert killed and steps == [*range(1, STEPS + 1)]
    assert [each.partial_image_index for each in previews] == [0, 1, 2]
    assert pixels(found[-1].b64_json) == pixels(wanted)
    live.workers[killed].end()
    del live.workers[killed]


def test_the_verbs_show_and_drain_workers(live: LiveFleet) -> None:
    nats = ("--nats", live.nats.url, *FLEET)
    live.workers["w3"] = live.start("w3")  # which ends with this test
    address = live.workers["w3"].url
    until(lambda: address in str(live.gateway.get("/v1/fleet")))
    shown = live.here("fleet", "status", *nats).out
    assert "w3" in shown and "ready" in shown
    said = live.here("fleet", "init", *nats).out
    assert said.startswith("the fleet live is as it should be\n")
    live.here("fleet", "drain", "w3", *nats)
    assert live.status("w3")["is_draining"]
    for _ in range(3):
        post(live.url, **WISH)
    assert live.status("w3")["done"] == 0
    assert not json.loads(live.here("fleet", "drain", "w3", "--undo", "--json", *nats).out)[
        "is_draining"
    ]
    missing = live.here("fleet", "drain", "w9", *nats, code=3)
    assert "no worker 'w9'" in missing.err


def test_errors_of_the_verbs_are_sentences(nats: Nats, tmp_path: Path) -> None:
    here = Aimage(tmp_path, tmp_path / "store")
    other = ("--fleet", "other", "--nats", nats.url)
    missing = here("fleet", "status", *other, code=2)
    assert "aimage fleet init --fleet other" in missing.err
    assert "--fleet" in here("fleet", "status", "--fleet", "a.b", "--nats", nats.url, code=2).err
    assert "AIMAGE_NATS" in here("gateway", code=2).err
    certificate = ("--nats-cert", tmp_path / "none.pem")
    assert "belong together" in here("fleet", "status", *other, *certificate, code=2).err
    assert "file not found" in here("fleet", "status", *other, "--nats-ca", "no.pem", code=2).err
