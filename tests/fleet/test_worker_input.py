"""Messages of workers are input: their readers, against one table of hostile ones."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest

from clowder_aimage.cli.verbs.fleet import format_status
from clowder_aimage.errors import FormatError
from clowder_aimage.fleet.field import is_id
from clowder_aimage.fleet.frame import ADMITTED, BEGIN, DEAD, END, Frame
from clowder_aimage.fleet.gateway.continuation import NDJSON, SSE, Continuation
from clowder_aimage.fleet.gateway.status import FleetFacts
from clowder_aimage.fleet.job.envelope import StoredBody
from clowder_aimage.fleet.job.job import FleetJob
from clowder_aimage.fleet.job.mark import MarkChain
from clowder_aimage.fleet.name import GATEWAY, FleetNames, make_worker_name
from clowder_aimage.fleet.ticket import Admission, JobTicket
from clowder_aimage.fleet.worker_registry import (
    MAX_MODELS,
    WorkerRegistry,
    WorkerStatus,
    parse_order,
)
from tests.fleet.hostile_message import HTML, TEXTS, VALUES, list_hostile_messages

DIGEST = "sha256:" + "3" * 64
STATUS = WorkerStatus(
    "zz",
    version="0.1.0",
    address="http://127.0.0.1:11434",
    loaded=(DIGEST,),
    at_work=(DIGEST,),
    models={"tiny:latest": DIGEST},
    kinds={DIGEST: "image"},
    aliases={"gpt-image-1": "tiny"},
    default_model="tiny",
    default_for=("gpt-*",),
)


def change(**fields: Any) -> bytes:
    return json.dumps({**asdict(STATUS), **fields}).encode()


def test_a_status_is_valid_or_refused() -> None:
    accepted = []
    for name, raw in list_hostile_messages(asdict(STATUS)):
        with contextlib.suppress(FormatError):
            status = WorkerStatus.decode(raw, "zz")
            assert status == WorkerStatus.decode(status.encode(), "zz"), name
            accepted.append(name)
    assert "unknown='x'" in accepted
    assert not [name for name in accepted if name.startswith("id")]


@pytest.mark.parametrize(
    "fields",
    [
        {"id": "other"},
        {"id": "a" * 65},
        {"slots": True},
        {"slots": 0},
        {"slots": 10**9},
        {"running": -1},
        {"rate": True},
        {"models": {"../../etc": DIGEST}},
        {"models": {"tiny:latest": DIGEST[:-1]}},
        {"models": {f"m{number}": DIGEST for number in range(MAX_MODELS + 1)}},
        {"kinds": {"x": "image"}},
        {"version": "\u202e1.0"},
        {"address": "\x1b[2J"},
        {"default_for": ["*a" * 200]},
        {"default_model": "Not A Model"},
        {"aliases": {"a\nb": "tiny"}},
    ],
    ids=str,
)
def test_a_field_out_of_bounds_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(FormatError, match="the status of a worker"):
        WorkerStatus.decode(change(**fields), "zz")


def test_a_status_that_is_refused_is_left_out_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, counted = [0.0], []
    workers = WorkerRegistry(lambda: now[0], lambda: counted.append(1))
    with caplog.at_level(logging.WARNING, "aimage.fleet"):
        for _ in range(3):
            workers.read("zz", change(models=5, version=HTML))
            workers.read("\u202e" * 5000, change())
    assert workers.list_statuses() == [] and len(counted) == 6
    rejected = {entry.worker: entry.reason for entry in workers.list_rejected()}
    assert "models" in rejected["zz"] and len(rejected) == 2
    shown = [*rejected, *rejected.values(), *(str(vars(record)) for record in caplog.records)]
    assert all(text.isprintable() and len(text) < 3000 and HTML not in text for text in shown)
    assert len(caplog.records) == 2
    workers.read("zz", change())
    assert [status.id for status in workers.list_statuses()] == ["zz"]
    assert "zz" not in {entry.worker for entry in workers.list_rejected()}
    now[0] = 60.0
    assert workers.list_rejected() == []


def test_the_status_of_a_fleet_shows_workers_that_are_left_out() -> None:
    workers = WorkerRegistry()
    workers.read("\u202ezz", change())
    workers.read("a", change(id="a", models="\x1b[2J" + HTML))
    facts = FleetFacts("f", [], workers.list_rejected(), [], 0, 0, 0, 1, 0)
    lines = format_status(asdict(facts))
    assert any("a " in line and "models" in line for line in lines)
    assert any("\\u202ezz" in line for line in lines)
    assert all(line.isprintable() for line in lines)


def test_a_registry_has_a_bounded_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clowder_aimage.fleet.worker_registry.MAX_WORKERS", 2)
    workers = WorkerRegistry()
    for name in ("a", "b", "c", "a"):
        workers.read(name, change(id=name))
    assert [status.id for status in workers.list_statuses()] == ["a", "b"]
    assert [entry.worker for entry in workers.list_rejected()] == ["c"]


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        ("gpu-3", "gpu-3-80"),
        ("gpu-1.rack-2.example.com", "gpu-1-rack-2-example-com-80"),
        ("", "worker-80"),
        ("...", "worker-80"),
        ("máquina", "m-quina-80"),
    ],
)
def test_a_worker_is_named_after_its_machine(machine: str, name: str) -> None:
    assert make_worker_name(machine, "80") == name


def test_machines_with_long_names_have_workers_with_different_names() -> None:
    names = {make_worker_name(f"{'long' * 20}.{end}", "65535") for end in "abc"}
    assert len(names) == 3 and all(map(is_id, names))


@pytest.mark.parametrize(
    "job",
    [
        FleetJob("j", "/v1/x", "infer", "me", "", "m", DIGEST, fields={"a": 1}, timeout=1.0),
        FleetJob("j", "/v1/x", "infer", "me", "", "m", "", fields={"a": b"x"}, is_form=True),
    ],
    ids=["fields", "form"],
)
def test_a_job_is_valid_or_refused(job: FleetJob) -> None:
    valid = json.loads(job.encode())
    accepted = []
    for name, raw in list_hostile_messages(valid):
        with contextlib.suppress(FormatError):
            accepted.append((name, FleetJob.decode(raw)))
    assert all(is_id(job.id) and job.path.startswith("/") for _, job in accepted)
    assert not {"timeout='True'", "timeout='x'", "priority='x'"} & {name for name, _ in accepted}


@pytest.mark.parametrize("kind", [SSE, NDJSON])
def test_the_events_of_a_stream_are_joined_or_refused(kind: str) -> None:
    """Those of a second attempt, whose events are read."""
    event = {
        "type": "image_generation.completed",
        "step": 1,
        "completed": 1,
        "choices": [{"index": 0, "delta": {"content": "a", "role": "x"}, "finish_reason": "stop"}],
        "message": {"content": "a"},
        "done": False,
        "response": "a",
    }
    end, begin = (b"\n\n", b"data: ") if kind == SSE else (b"\n", b"")
    messages = [raw for _, raw in list_hostile_messages(event)]
    for name in event:
        messages += [raw for _, raw in list_hostile_messages({name: event[name]})]
    for name in ("index", "delta", "finish_reason"):
        for value in VALUES:
            messages.append(json.dumps({"choices": [{"index": 0, name: value}]}).encode())
    messages += [b": step %s of 5" % (b"9" * 5000), b": step 1 of 2"]
    continuation = Continuation(kind)
    for _ in range(2):
        for raw in messages:
            with contextlib.suppress(FormatError):
                continuation.deduplicate(begin + raw + end)
        continuation.begin()


def test_an_event_costs_what_its_bytes_cost() -> None:
    """A large event in small parts is not copied with each part."""
    continuation, sizes = Continuation(NDJSON), []
    for _ in range(2000):
        assert continuation.deduplicate(b"x" * 1000) == b""
        sizes.append(id(continuation._buffer))
    assert len(set(sizes)) == 1 and len(continuation._buffer) == 2_000_000


def test_a_subject_is_built_of_valid_parts() -> None:
    names = FleetNames()
    builders: tuple[Callable[[str], str], ...] = (
        names.build_call_subject,
        names.build_cancel_subject,
        names.build_control_subject,
        names.build_file_subject,
        partial(names.build_mark_subject, "w"),
        partial(names.build_log_subject, "w"),
        partial(names.build_dead_letter_subject, "w"),
        partial(names.build_job_subject, "batch", "ab" * 32),
        partial(names.build_body_subject, "ab"),
    )
    wrong = [text for text in TEXTS if not is_id(text) and text != "*"]
    for build, text in itertools.product(builders, wrong):
        with pytest.raises(FormatError):
            build(text)


@pytest.mark.parametrize(
    "read",
    [
        StoredBody.parse,
        partial(JobTicket.parse, "j"),
        lambda text: Admission.decode(text.encode("utf-8", "replace")),
        lambda text: parse_order(text.encode("utf-8", "replace")),
    ],
    ids=["body", "ticket", "admission", "order"],
)
def test_a_text_is_valid_or_refused(read: Callable[[str], object]) -> None:
    texts = [raw.decode("utf-8", "replace") for _, raw in list_hostile_messages({"order": "drain"})]
    for text in (*texts, *TEXTS, *map(str, VALUES)):
        with contextlib.suppress(FormatError):
            read(text)


def test_marks_of_a_job_that_are_not_valid_do_not_count() -> None:
    texts = [str(value) for value in VALUES]
    for worker, kind in itertools.product((GATEWAY, "w"), (ADMITTED, BEGIN, END, DEAD)):
        chain = MarkChain(JobTicket.generate("j"))
        for text in texts:
            data = text.encode("utf-8", "replace")
            assert not chain.add(Frame(kind, 1, 0, data, worker, (), text)), (worker, kind, text)
