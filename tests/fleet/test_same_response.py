"""A request has the same response by HTTP, as a job of a fleet, and as a line of a batch."""

from __future__ import annotations

import contextlib
import io
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest

from clowder_aimage.api.batch import run as batch_run
from clowder_aimage.api.service import Service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.engine.batch_line import OVER
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.request import request_of
from clowder_aimage.http.app import build_app
from clowder_aimage.http.listening_socket import listen
from clowder_aimage.http.local_call import LocalCalls, get_body
from clowder_aimage.http.route import Role
from clowder_aimage.http.server import accepting
from tests.fleet.fleet_run import FleetRun
from tests.wait import until_async

pytestmark = pytest.mark.integration
TOKEN, JSON = "t" * 32, {"Content-Type": "application/json"}
PICTURES, EDITS, CHAT = "/v1/images/generations", "/v1/images/edits", "/v1/chat/completions"
GOOD = {"model": "tiny", "prompt": "a cat", "size": "64x64", "steps": 1, "seed": 7}
SAY = {"messages": [{"role": "user", "content": "hi"}]}
# A path, the fields of a body, and the status and the param of the response
TABLE: dict[str, tuple[str, dict[str, Any], int, str | None]] = {
    "good": (PICTURES, GOOD, 200, None),
    "default": (PICTURES, {**GOOD, "n": None, "guidance": None, "user": "me"}, 200, None),
    "ignored": (PICTURES, {**GOOD, "unknown": 1}, 200, None),
    "strict": (PICTURES, {**GOOD, "unknown": 1, "strict": True}, 400, "unknown"),
    "bound": (PICTURES, {**GOOD, "n": 0}, 400, "n"),
    "type": (PICTURES, {**GOOD, "steps": "one"}, 400, "steps"),
    "missing": (PICTURES, {"model": "tiny"}, 400, "prompt"),
    "model": (PICTURES, {**GOOD, "model": "other"}, 404, "model"),
    "name": (PICTURES, {**GOOD, "model": "no name"}, 404, "model"),
    "large": (PICTURES, {**GOOD, "prompt": "x" * (2 << 20)}, 413, None),
    "scope": (PICTURES, {**GOOD, "output": {"push": "localhost:1/a:b"}}, 403, "output"),
    "picture": (EDITS, {**GOOD, "image": "data:image/png;base64,AAAA"}, 400, "image"),
    "no picture": (EDITS, GOOD, 400, "image"),
    "kind": (CHAT, {**SAY, "model": "tiny"}, 422, "model"),
    "message": (CHAT, {"model": "tiny", "messages": []}, 400, "messages"),
    "large chat": (CHAT, {**SAY, "model": "m" * (5 << 20)}, 413, None),
}
Responses = dict[str, tuple[int, Any]]


class Body:
    """Collects a stream."""

    def __init__(self) -> None:
        self.data = b""

    async def begin(self, _: Any) -> None:
        pass

    async def write(self, data: bytes) -> None:
        self.data += data


def shown(status: int, body: Any) -> tuple[int, Any]:
    return status, {key: each for key, each in body.items() if key != "created"}


async def by_http(session: aiohttp.ClientSession, url: str) -> Responses:
    found = {}
    for name, (path, fields, *_) in TABLE.items():
        data = io.BytesIO(json.dumps(fields).encode())
        async with session.post(url + path, data=data, headers=JSON) as answer:
            found[name] = shown(answer.status, await answer.json())
    return found


async def by_job(calls: LocalCalls) -> Responses:
    """Serve jobs that no gateway has validated."""
    found = {}
    for name, (path, fields, *_) in TABLE.items():
        job = FleetJob("1", path, "infer", "me", "", "tiny", "", fields=fields)
        response = await calls.send(request_of(FleetJob.decode(job.encode()), Body()))
        found[name] = shown(response.status, json.loads(get_body(response)))
    return found


async def by_batch(session: aiohttp.ClientSession, url: str) -> Responses:
    found = {}
    for path in (PICTURES, EDITS, CHAT):
        lines = [
            json.dumps({"custom_id": name, "url": each[0], "body": each[1]})
            for name, each in TABLE.items()
            if each[0] == path
        ]
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", io.BytesIO("\n".join(lines).encode()), filename="in.jsonl")
        async with session.post(f"{url}/v1/files", data=form) as answer:
            file = await answer.json()
        body = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
        async with session.post(f"{url}/v1/batches", json=body) as answer:
            batch = await answer.json()

        async def over(name: str = batch["id"]) -> Any:
            async with session.get(f"{url}/v1/batches/{name}") as answer:
                known = await answer.json()
            return known if known["status"] in OVER else None

        ended = await until_async(over)
        assert ended["status"] == "completed", ended
        for file in filter(None, (ended["output_file_id"], ended["error_file_id"])):
            async with session.get(f"{url}/v1/files/{file}/content") as answer:
                for line in map(json.loads, (await answer.text()).splitlines()):
                    response = line["response"]
                    found[line["custom_id"]] = shown(response["status_code"], response["body"])
    return found


@contextlib.asynccontextmanager
async def served(role: Role) -> AsyncIterator[str]:
    listening = listen("127.0.0.1:0", has_tokens=True)
    try:
        async with accepting(build_app(role, tokens={TOKEN: "infer"}), listening):
            yield listening.urls[0]
    finally:
        listening.close()


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, str]]:
    """Return route, status and model of the generations in the log since the last call."""
    lines = [vars(record) for record in caplog.records if record.message == "request"]
    caplog.clear()
    routes = [line for line in lines if line["route"] in (PICTURES, EDITS, CHAT)]
    return sorted((line["route"], line["status"], line.get("model", "")) for line in routes)


def counted(service: Service) -> dict[str, float]:
    """Return the number of generations by route and status."""
    lines = [
        line for line in service.metrics.format_text().decode().splitlines() if line[:1] != "#"
    ]
    pairs = [line.rpartition(" ") for line in lines if "_requests_total{" in line]
    paths = (PICTURES, EDITS, CHAT)
    return {
        name: float(text) for name, _, text in pairs if any(f'"{one}"' in name for one in paths)
    }


def test_a_request_has_the_same_response_by_all_ways(
    play: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    monkeypatch.setattr(batch_run, "FLUSH_INTERVAL", 0.05)
    caplog.set_level(logging.INFO, "aimage.http")

    async def scene(fleet: FleetRun) -> None:
        roles = list[WorkerRole]()

        def worker(service: Service) -> Role:
            roles.append(WorkerRole(service))
            return roles[0]

        async with (
            fleet.gateway(tokens={TOKEN: "infer"}) as gateway,
            fleet.worker("w", worker) as joined,
            served(roles[0]) as direct,
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
        ):
            fleet.session.headers["Authorization"] = f"Bearer {TOKEN}"
            await fleet.know(gateway, 1)
            known = await by_http(session, direct)
            assert {name: status for name, (status, _) in known.items()} == {
                name: each[2] for name, each in TABLE.items()
            }
            params = {name: body.get("error", {}).get("param") for name, (_, body) in known.items()}
            assert params == {name: each[3] for name, each in TABLE.items()}
            lines, counts = logged(caplog), counted(joined._service)
            assert len(lines) == sum(counts.values()) == len(TABLE)
            assert await by_job(joined._calls) == known
            assert logged(caplog) == lines
            assert await by_batch(session, direct) == known
            assert logged(caplog) == lines
            assert counted(joined._service) == {name: 3 * each for name, each in counts.items()}
            assert await by_http(session, gateway) == known
            assert await by_batch(session, gateway) == known

    play(scene)
