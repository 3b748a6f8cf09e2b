"""The reports of workers, and what follows from them."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.errors import NotFoundError, UsageError
from clowder_aimage.fleet.name import FleetNames
from clowder_aimage.fleet.worker_registry import WorkerRegistry, WorkerStatus, WorkerWatch
from tests.fleet.worker_status import A, B, status_of


def test_a_status_is_read_as_it_was_written() -> None:
    one = status_of("w1", loaded=(A,), default_for=("gpt-*",))
    assert WorkerStatus.decode(one.encode(), "w1") == one
    later = json.loads(one.encode()) | {"of_a_later_version": 1}
    assert WorkerStatus.decode(json.dumps(later).encode(), "w1") == one


def test_the_digest_of_a_name_is_that_of_most_workers() -> None:
    workers = WorkerRegistry()
    workers.put(status_of("w1"))
    workers.put(status_of("w2", models={"m:latest": B}))
    workers.put(status_of("w3", models={"m:latest": B}, aliases={"mm": "m"}, default_model="m"))
    found = workers.find("m")
    assert found is not None and (found.name, found.digest, found.kind) == ("m:latest", B, "text")
    for alias in ("mm", "mm:latest", None):
        assert (other := workers.find(alias)) is not None and other.digest == B
    assert workers.find("unknown") is None
    assert workers.find(f"x@{A}") is not None
    with pytest.raises(NotFoundError):
        workers.find("NOT A NAME")
    assert workers.list_names("text") == ["m:latest"]


def test_a_worker_that_does_not_report_is_gone() -> None:
    now = 0.0
    workers = WorkerRegistry(lambda: now)
    workers.put(status_of("w1", loaded=(A,)))
    now = 14.0
    workers.put(status_of("w2", is_draining=True, loaded=(B,)))
    assert [each.id for each in workers.list_others("w9")] == ["w1"]  # the other one drains
    assert workers.on_disk_elsewhere(A, "w9") and not workers.on_disk_elsewhere(A, "w1")
    now = 16.0
    assert [each.id for each in workers.list_statuses()] == ["w2"]
    with pytest.raises(UsageError, match="default"):
        workers.find(None)


def test_a_status_that_arrives_while_the_bucket_is_read_is_the_newer_one() -> None:
    link: Any = SimpleNamespace(names=FleetNames("f"), is_ready=True)
    listeners: dict[str, Any] = {}
    link.listen = listeners.setdefault
    watch = WorkerWatch(link)
    (subject,), (take,) = listeners.keys(), listeners.values()
    (older, newer), other = (status_of("w1", done=done) for done in (1, 2)), status_of("w2")
    subjects = {subject.replace("*", each.id): each for each in (older, other)}

    async def read_info(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(state=SimpleNamespace(subjects=subjects))

    async def read_message(_: str, subject: str, **__: Any) -> Any:
        if subject.endswith("w1"):
            await take(SimpleNamespace(headers=None, subject=subject, data=newer.encode()))
        return SimpleNamespace(headers=None, data=subjects[subject].encode())

    link.streams = SimpleNamespace(stream_info=read_info, get_msg=read_message)
    asyncio.run(watch.run())
    assert watch.workers.list_statuses() == [newer, other]
