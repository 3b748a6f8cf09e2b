"""Traces: the spans of a picture and of a pull, their parents, and that they are off by default."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process import Aimage
from tests.real_registry import RealRegistry

pytest.importorskip("aiohttp", reason="aiohttp is not installed")
pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed")

from aiohttp.test_utils import TestClient, TestServer
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from clowder_aimage.api.service import make_service
from clowder_aimage.api.worker_role import WorkerRole
from clowder_aimage.content import telemetry
from clowder_aimage.engine.settings import Settings
from clowder_aimage.http.app import build_app
from clowder_aimage.layout import ImageLayout
from clowder_aimage.oci import Reference
from clowder_aimage.pull import pull
from clowder_aimage.registry import ClientOptions
from tests.process import run
from tests.scripted import Answer, ScriptedRegistry, artifact, serving
from tests.scripted_worker import ScriptedWorker, says

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PROMPT = "a lighthouse that nobody may know of"


@pytest.fixture
def spans() -> Iterator[Any]:
    exporter = InMemorySpanExporter()
    telemetry.start(SimpleSpanProcessor(exporter))
    yield exporter
    telemetry.stop()


def tree(spans: Any) -> dict[Any, Any]:
    """Return the names of the spans with those of their parents, and check their trace."""
    found = spans.get_finished_spans()
    names = {one.context.span_id: one.name for one in found}
    return {one.name: names.get(one.parent.span_id if one.parent else 0) for one in found}


def test_a_picture_is_a_trace_that_continues_that_of_the_client(spans: Any, stocked: Path) -> None:
    pytest.importorskip("mlx.core", reason="mlx is not installed")
    service = make_service(Settings(), ImageLayout(stocked), ClientOptions())
    body = {"model": "tiny", "prompt": PROMPT, "size": "16x16", "steps": 1}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}

    async def ask() -> None:
        async with TestClient(TestServer(build_app(WorkerRole(service)))) as client:
            answer = await client.post("/v1/images/generations", json=body, headers=headers)
            assert answer.status == 200
        await service.engine.close(5)

    asyncio.run(ask())
    root = "POST /v1/images/generations"
    parents = dict.fromkeys(("queue", "load", "generate"), root) | {"decode": "generate"}
    assert tree(spans) == {root: None} | parents
    every = {one.name: one for one in spans.get_finished_spans()}
    assert {f"{one.context.trace_id:032x}" for one in every.values()} == {TRACE}
    assert f"{every[root].parent.span_id:016x}" == PARENT
    assert every[root].attributes["http.response.status_code"] == 200
    assert every["decode"].start_time < every["decode"].end_time <= every["generate"].end_time
    assert PROMPT not in "".join(one.to_json() for one in every.values())


def test_a_pull_is_a_trace_that_the_registry_can_continue(spans: Any, tmp_path: Path) -> None:
    manifest, blobs = artifact(b'{"schemaVersion":1,"components":{}}', b"x" * 1000)
    with ScriptedRegistry(serving(manifest, blobs)).running() as registry:
        reference = Reference.parse(f"{registry.host}/team/x:v1")
        pull(reference, ImageLayout(tmp_path), ClientOptions(docker_config=tmp_path))
        sent = {seen.headers.get("traceparent", "").split("-")[1] for seen in registry.seen}
    assert tree(spans) == {"pull": None, "resolve": "pull", "manifest": "pull", "blobs": "pull"}
    assert sent == {f"{one.context.trace_id:032x}" for one in spans.get_finished_spans()}


def test_a_failed_pull_has_the_type_of_its_error_only(spans: Any, tmp_path: Path) -> None:
    with ScriptedRegistry(lambda _: Answer(404)).running() as registry:
        reference = Reference.parse(f"{registry.host}/team/x:v1")
        with pytest.raises(Exception, match="not found"):
            pull(reference, ImageLayout(tmp_path), ClientOptions(docker_config=tmp_path))
    for one in spans.get_finished_spans():
        assert (one.status.status_code.name, one.status.description) == ("ERROR", "NotFoundError")
        assert not one.events


def test_every_verb_that_makes_requests_is_a_trace(
    spans: Any, aimage: Callable[..., Aimage], repository: str, tiny: Path
) -> None:
    here, name = aimage(), f"{repository}:v1"
    here("create", "-q", name, tiny, "--whole-files")
    assert not spans.get_finished_spans()
    here("push", "-q", name)
    here("tag", "--remote", name, "v2")
    here("copy", "-q", name, f"{repository}-copy:v1")
    here("resolve", f"{repository}:nothing", code=3)
    parents = {"push": "aimage push", "copy": "aimage copy"}
    roots = dict.fromkeys([f"aimage {verb}" for verb in ("push", "tag", "copy", "resolve")])
    assert tree(spans) == roots | parents
    every = {one.name: one.status for one in spans.get_finished_spans()}
    assert every["aimage push"].is_ok and every["aimage resolve"].description == "NotFoundError"


def test_a_worker_can_continue_the_trace_of_its_client(
    spans: Any, aimage: Callable[..., Aimage]
) -> None:
    with ScriptedWorker(lambda _: says({"models": []})).running() as worker:
        here = aimage()
        here.environment["AIMAGE_HOST"] = worker.host
        here("ls", "--remote", "-q")
        sent = worker.asked[-1].headers["traceparent"]
    (span,) = spans.get_finished_spans()
    assert span.name == "aimage ls" and f"{span.context.trace_id:032x}" == sent.split("-")[1]


@pytest.mark.parametrize(("given", "seconds"), [("", 2.0), ("7", None)])
def test_a_collector_delays_a_verb_for_a_short_time(
    aimage: Callable[..., Aimage], monkeypatch: pytest.MonkeyPatch, given: str, seconds: float
) -> None:
    used: list[Any] = []
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setattr(f"{module}.OTLPSpanExporter", lambda timeout: used.append(timeout))
    monkeypatch.setattr("opentelemetry.sdk.trace.export.BatchSpanProcessor", lambda _: None)
    monkeypatch.setattr("opentelemetry.sdk.trace.TracerProvider.add_span_processor", print)
    here = aimage()
    here.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://localhost:1"
    here.environment["OTEL_EXPORTER_OTLP_TIMEOUT"] = given
    here("resolve", "localhost:1/x", code=1)
    telemetry.stop()
    assert used == [seconds]


def test_nothing_is_imported_without_a_collector() -> None:
    program = (
        "import sys, clowder_aimage.pull, clowder_aimage.http.app\n"
        "from clowder_aimage.content import telemetry\n"
        "with telemetry.start_span('x') as span: assert span is None\n"
        "telemetry.record('x', 1); headers = {}; telemetry.inject(headers); telemetry.stop()\n"
        "assert not headers and telemetry.bind_context(print) is print\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    assert run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize(
    ("environment", "is_wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_traces_are_on_if_the_environment_names_a_collector(
    environment: dict[str, str], is_wanted: bool
) -> None:
    assert telemetry.is_enabled(environment) is is_wanted


def test_the_command_line_sends_its_spans_before_it_ends(
    aimage: Callable[..., Aimage], registry: RealRegistry, tiny: Path
) -> None:
    here, name = aimage(), f"{registry.host}/team/tiny:v1"
    here("create", "-q", name, tiny, "--whole-files")
    here("push", "-q", name)
    with ScriptedRegistry(lambda _: Answer(200)).running() as collector:
        other = aimage("other")
        other.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://{collector.host}"
        process = other.start("pull", "-q", name, stderr=subprocess.PIPE)
        out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, ""), errors
    assert [seen.path for seen in collector.seen] == ["/v1/traces"]
    assert b"resolve" in collector.seen[0].body and out.startswith("sha256:")


def test_an_unreachable_collector_costs_no_result(
    aimage: Callable[..., Aimage], registry: RealRegistry, tiny: Path
) -> None:
    here, name = aimage(), f"{registry.host}/team/again:v1"
    here("create", "-q", name, tiny, "--whole-files")
    here("push", "-q", name)
    other = aimage("other")
    other.environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = "http://127.0.0.1:9"
    other.environment["OTEL_EXPORTER_OTLP_TIMEOUT"] = "1"
    process = other.start("pull", "--json", name)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in errors) == (0, False)
    assert json.loads(out)["digest"].startswith("sha256:")


def test_a_missing_extra_is_a_warning(
    aimage: Callable[..., Aimage],
    registry: RealRegistry,
    tiny: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, name = aimage(), f"{registry.host}/team/warned:v1"
    here("create", "-q", name, tiny, "--whole-files")
    here("push", "-q", name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    done = aimage("other")("pull", name)
    assert "warning: OpenTelemetry needs the extra [otel]; no traces are sent" in done.err
    assert "[otel]" in done.err.splitlines()[1]
