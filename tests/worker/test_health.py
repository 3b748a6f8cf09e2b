"""Health, readiness, metrics and events."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import http.client
import json
import os
import re
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from clowder_aimage.api.service import Service

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from aiohttp.test_utils import TestClient, TestServer

from clowder_aimage.api.service import Readiness, make_service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.engine.settings import Settings
from clowder_aimage.http.app import build_app
from clowder_aimage.layout import ImageLayout, fingerprint
from clowder_aimage.registry import ClientOptions
from tests.layout.test_record_names import break_calls
from tests.process import run
from tests.program import find_program
from tests.store import copy_store

if TYPE_CHECKING:
    from tests.worker.conftest import LocalWorker


# Metrics that dashboards and alerts depend on
NAMES = """
aimage_build_info aimage_generation_queue_depth aimage_generation_refused_total
aimage_generation_cancelled_total aimage_generation_step_seconds_bucket
aimage_model_load_duration_seconds_bucket aimage_pull_bytes_total aimage_http_requests_total
""".split()
PROCESS = "cpu_seconds_total resident_memory_bytes open_fds max_fds start_time_seconds".split()


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return make_service(Settings(), ImageLayout(tmp_path / "store"), ClientOptions())


def spoken(
    service: Service,
    talk: Callable[[Any, Any], Coroutine[Any, Any, Any]],
    *,
    wanted: tuple[Any, ...] = (),
    tokens: Any = None,
) -> Any:
    """Return the result of ``talk(client, app)`` for a client of the whole application."""
    app = build_app(WorkerRole(service), tokens=tokens)
    service.wanted = wanted

    async def run() -> Any:
        async with asyncio.timeout(60), TestClient(TestServer(app)) as client:
            return await talk(client, app)

    return asyncio.run(run())


def ready(service: Service, **options: Any) -> Any:
    async def talk(client: Any, _: Any) -> tuple[Any, Any, Any]:
        answer = await client.get("/readyz")
        return answer.status, await answer.json(), answer.headers.get("Retry-After")

    return spoken(service, talk, **options)


def test_a_worker_with_an_empty_store_is_ready(service: Service) -> None:
    assert ready(service) == (200, {"status": "ok", "reasons": []}, None)
    assert not service.store.root.exists()


def test_a_store_that_is_not_writable_makes_the_worker_not_ready(service: Service) -> None:
    service.store.root.write_text("no directory")
    status, body, retry_after = ready(service)
    assert (status, body["status"], retry_after) == (503, "unavailable", "5")
    assert body["reasons"] == [{"reason": "store not writable"}]


def test_a_missing_wanted_model_makes_the_worker_not_ready(service: Service) -> None:
    reasons = [{"reason": "model missing", "model": "team/absent:v1"}]
    assert ready(service, wanted=("team/absent:v1",))[:2] == (
        503,
        {"status": "unavailable", "reasons": reasons},
    )


def test_readiness_without_a_token_names_no_models(service: Service) -> None:
    status, body, _ = ready(service, wanted=("team/absent:v1",), tokens={"x" * 16: "admin"})
    assert (status, body["reasons"]) == (503, [{"reason": "model missing"}])


def test_an_incomplete_pinned_model_is_missing(stocked: Path, tmp_path: Path) -> None:
    copy_store(stocked, tmp_path / "store")
    store = ImageLayout(tmp_path / "store")
    store.pins.put("tiny:latest", {}, durable=False)
    readiness = Readiness(store)
    assert readiness.list_reasons(["tiny"]) == []
    smallest = min(
        (path for path in (store.root / "blobs" / "sha256").iterdir()),
        key=lambda p: p.stat().st_size,
    )
    smallest.unlink()
    missing = {"reason": "model missing", "model": "tiny:latest"}
    assert readiness.list_reasons() == [missing]
    assert readiness.list_reasons(["tiny:latest", "Not A Name"]) == [
        missing,
        {"reason": "model missing", "model": "Not A Name"},
    ]


def test_a_probe_checks_blobs_again_only_after_a_change(
    stocked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_store(stocked, tmp_path / "store")
    store, seen = ImageLayout(tmp_path / "store"), list[object]()
    store.pins.put("tiny:latest", {}, durable=False)
    exists = store.exists
    # all changes are old
    monkeypatch.setattr(fingerprint, "_SETTLED", -(10**11))

    def looked(blob: Any) -> bool:
        seen.append(blob)
        return exists(blob)

    monkeypatch.setattr(store, "exists", looked)
    blobs = tmp_path / "store" / "blobs" / "sha256"
    os.utime(blobs, (1, 1))  # a later change has another time, whatever the file system's clock
    readiness = Readiness(store)
    assert readiness.list_reasons() == [] and seen
    seen.clear()
    assert readiness.list_reasons() == [] and not seen
    assert readiness.list_reasons(["absent"]) == [{"reason": "model missing", "model": "absent"}]
    assert not seen
    (blob, *_) = blobs.iterdir()
    blob.unlink()
    assert readiness.list_reasons() == [{"reason": "model missing", "model": "tiny:latest"}]


def test_a_model_is_missing_only_while_the_index_is_unreadable(
    stocked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ImageLayout(stocked)
    monkeypatch.setattr(fingerprint, "_SETTLED", -(10**11))
    readiness = Readiness(store)
    with monkeypatch.context() as broken:
        break_calls(broken, "open", store.root / "index.json")
        missing = {"reason": "model missing", "model": "tiny"}
        assert readiness.list_reasons(["tiny"]) == [{"reason": "store not readable"}, missing]
    assert readiness.list_reasons(["tiny"]) == []


def test_a_model_known_to_be_missing_is_not_resolved(
    stocked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ImageLayout(stocked)
    monkeypatch.setattr(store, "resolve", None)
    missing = {"reason": "model missing", "model": "tiny:latest"}
    assert Readiness(store).list_reasons(missing=["tiny:latest"]) == [missing]


def _garbage(root: Path) -> None:
    (root / "index.json").write_text("garbage")


def _pipe(root: Path) -> None:
    (root / "index.json").unlink()
    os.mkfifo(root / "index.json")


def _gone(root: Path) -> None:
    root.rename(root.with_name("away"))


@pytest.mark.parametrize("fault", [_garbage, _pipe, _gone])
def test_a_store_that_cannot_be_read_is_said_as_that(
    stocked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], None]
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)  # no other tool is writing
    root = tmp_path / "store"
    copy_store(stocked, root)
    service = make_service(Settings(default_model="tiny"), ImageLayout(root), ClientOptions())
    picture = {"model": "tiny", "prompt": "x", "size": "32x32"}
    calls: list[tuple[str, str, Any]] = [
        ("POST", "/v1/images/generations", picture),
        ("POST", "/api/generate", picture),
        ("POST", "/api/show", {"model": "tiny"}),
        ("POST", "/api/copy", {"source": "tiny", "destination": "other"}),
        ("DELETE", "/api/delete", {"model": "tiny"}),
        ("GET", "/api/tags", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/tiny", None),
    ]

    async def talk(client: Any, _: Any) -> None:
        assert (await client.get("/readyz")).status == 200
        fault(root)
        for method, path, body in calls:
            async with client.request(method, path, json=body) as answer:
                text = await answer.text()
                assert (answer.status, answer.headers.get("Retry-After")) == (503, "5"), text
                assert "cannot access the store" in text and str(tmp_path) not in text
        async with client.get("/readyz") as answer:
            assert answer.status == 503
            reasons = [reason["reason"] for reason in (await answer.json())["reasons"]]
            assert reasons == ["store not readable", "model missing"]
        assert (await client.get("/healthz")).status == 200

    spoken(service, talk)
    assert root.exists() == (fault is not _gone)


def test_a_default_model_that_no_request_pulls_is_required() -> None:
    def required(**settings: Any) -> tuple[str, ...]:
        store = ImageLayout(Path("absent"))
        made = make_service(Settings.model_validate(settings), store, ClientOptions())
        return tuple(made.required)

    assert required(default_model="tiny", wanted=["a"]) == ("tiny", "a")
    assert required(default_model="h.example/tiny:v1") == ()
    assert required(default_model="h.example/tiny:v1", pull="never") == ("h.example/tiny:v1",)


def test_a_draining_worker_is_not_ready_but_healthy(service: Service) -> None:
    service.engine.is_draining = True
    status, body, _ = ready(service)
    assert (status, body["reasons"]) == (503, [{"reason": "draining"}])

    async def talk(client: Any, _: Any) -> Any:
        return (await client.get("/healthz")).status

    assert spoken(service, talk) == 200


# -- metrics


async def measured(client: Any) -> Any:
    answer = await client.get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    return await answer.text()


def test_the_metrics_have_the_documented_names(service: Service) -> None:
    async def talk(client: Any, _: Any) -> Any:
        await client.get("/healthz")
        return await measured(client)

    text = spoken(service, talk)
    assert [name for name in NAMES if f"\n{name}" not in f"\n{text}"] == []
    assert 'aimage_http_requests_total{code="200",route="/healthz"} 1.0' in text


def test_the_metrics_include_those_of_the_process(service: Service) -> None:
    async def talk(client: Any, _: Any) -> Any:
        return await measured(client)

    text = spoken(service, talk)
    assert "python_info{" in text
    if sys.platform == "linux":
        assert [name for name in PROCESS if f"\nprocess_{name} " not in text] == []


def test_the_page_of_the_description_shows_every_operation_and_loads_nothing(
    service: Service,
) -> None:
    async def talk(client: Any, _: Any) -> tuple[Any, Any, Any]:
        answer = await client.get("/docs")
        described = await (await client.get("/openapi.json")).json()
        return answer.headers, await answer.text(), described["paths"]

    headers, text, paths = spoken(service, talk)
    assert headers["Content-Type"].startswith("text/html")
    policy = headers["Content-Security-Policy"]
    style = text.partition("<style>")[2].partition("</style>")[0].encode()
    digest = base64.b64encode(hashlib.sha256(style).digest()).decode()
    assert policy.startswith("default-src 'none'; style-src 'sha256-" + digest)
    for path in paths:
        assert f"<code>{path}</code>" in text
    assert "negative_prompt" in text and "color-scheme: light dark" in text
    assert not re.search(r"<script|<img|<link|src=|url\(|https?://", text)


def test_unknown_paths_models_and_methods_become_no_label(service: Service) -> None:
    async def talk(client: Any, _: Any) -> Any:
        for number in range(20):
            await client.get(f"/made-up/{number}")
            await client.get(f"/v1/models/made-up-{number}")
            await client.request(f"M{number}", "/healthz")
        return await measured(client)

    text = spoken(service, talk)
    assert 'aimage_http_requests_total{code="404",route="unknown"} 20.0' in text
    assert "made-up" not in text and "M7" not in text


@pytest.mark.integration
def test_promtool_accepts_the_metrics(worker: LocalWorker) -> None:
    promtool = find_program("promtool")
    line = http.client.HTTPConnection(worker.host, timeout=30)
    line.request("GET", "/metrics")
    text = line.getresponse().read()
    line.close()
    done = run([promtool, "check", "metrics"], input=text, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


# -- events


async def heard(answer: Any, count: int) -> list[tuple[str, str, Any]]:
    """Read ``count`` events of a stream, each as id, kind and facts."""
    found: list[Any] = []
    fields: dict[str, str] = {}
    while len(found) < count:
        line = (await answer.content.readline()).decode()
        assert line, "the stream ended"
        if line == "\n" and "event" in fields:
            found.append((fields["id"], fields["event"], json.loads(fields["data"])))
            fields = {}
        elif not line.startswith(":"):
            name, _, value = line.rstrip("\n").partition(": ")
            fields[name] = value
    return found


def test_events_are_streamed_and_replayed_after_last_event_id(service: Service) -> None:
    async def talk(client: Any, _: Any) -> tuple[Any, Any]:
        service.events.record("load", model="a")
        answer = await client.get("/v1/events")
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        (first,) = await heard(answer, 1)
        service.events.record("evict", model="a", reason="idle")
        (second,) = await heard(answer, 1)
        again = await client.get("/v1/events", headers={"Last-Event-ID": first[0]})
        assert await heard(again, 1) == [second]
        restarted = await client.get("/v1/events", headers={"Last-Event-ID": "0000.000-99"})
        assert await heard(restarted, 2) == [first, second]
        for each in (answer, again, restarted):
            each.close()
        return first, second

    first, second = spoken(service, talk)
    assert (first[1], first[2]["model"]) == ("load", "a")
    assert second[2].items() >= {"model": "a", "reason": "idle"}.items()


def test_an_invalid_last_event_id_is_refused(service: Service) -> None:
    async def talk(client: Any, _: Any) -> list[Any]:
        mark = f"{service.started:.3f}-"
        headers = [{"Last-Event-ID": mark + wrong} for wrong in ("", "-1", "x", "9" * 30)]
        return [(await client.get("/v1/events", headers=each)).status for each in headers]

    assert spoken(service, talk) == [400] * 4


def test_an_event_stream_ends_with_the_worker(service: Service) -> None:
    async def talk(client: Any, app: Any) -> Any:
        answer = await client.get("/v1/events")
        service.events.close()
        return await answer.content.read()

    assert spoken(service, talk) == b"retry: 2000\n\n"


def test_head_responses_have_no_body(service: Service) -> None:
    async def talk(client: Any, _: Any) -> list[tuple[Any, Any]]:
        found = []
        for path in ("/healthz", "/readyz", "/metrics", "/v1/events"):
            answer = await client.head(path)
            found.append((answer.status, await answer.read()))
        return found

    assert spoken(service, talk) == [(200, b"")] * 4
