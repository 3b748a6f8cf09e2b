"""Jobs of a worker: AImages quantized, and adapters fused, in a process of their own."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="mlx is not installed")
pytest.importorskip("aiohttp")

from clowder_aimage.engine import frame, job_process, job_queue
from clowder_aimage.engine.admission import BusyError, StoppedError
from clowder_aimage.engine.event import EventLog
from clowder_aimage.engine.job_process import JobReport
from clowder_aimage.engine.job_queue import CANCELLED, FAILED, Job, JobQueue
from clowder_aimage.oci import Reference
from tests.lora_file import write_lora
from tests.process import Aimage, run
from tests.store import copy_store
from tests.wait import until, until_async
from tests.worker.conftest import LocalWorker, answer_to

INT8 = {"kind": "convert", "model": "tiny", "target": "tiny:int8", "quantize": "int8"}


@pytest.fixture(scope="module")
def changing(stocked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalWorker]:
    """Return a worker with the model ``tiny``, its adapter ``style`` and one of another model."""
    home = tmp_path_factory.mktemp("changing")
    copy_store(stocked, home / "store")
    here = Aimage(home, home / "store")
    here("create", "style", write_lora(home / "a.safetensors"), "--base", "tiny", "-q")
    here("create", "foreign", write_lora(home / "c.safetensors", width=64), "-q")
    found = LocalWorker(here)
    yield found
    found.end()


def ask(worker: LocalWorker, method: str, path: str, /, body: object = None) -> tuple[int, Any]:
    raw = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(worker.url + path, raw, headers, method=method)
    status, _, data = answer_to(asked)
    return status, json.loads(data)


def finish(worker: LocalWorker, fields: object) -> dict[str, Any]:
    """Request a job, and return it when it is over."""
    status, job = ask(worker, "POST", "/v1/jobs", fields)
    assert status == 202, job

    def over() -> Any:
        found = worker.get(f"/v1/jobs/{job['id']}")
        return found if found["ended"] is not None else None

    return dict(until(over))


def test_a_job_makes_what_the_verbs_make(changing: LocalWorker) -> None:
    here = changing.aimage
    made = finish(changing, INT8)
    assert made["status"] == "done" and made["completed"] == made["total"] > 0, made
    assert made["stage"] == "writing" and made["result"]["new"] < made["result"]["size"]
    same = here("convert", "tiny", "same:int8", "--quantize", "int8").out.strip()
    assert same == made["result"]["digest"]
    fused = {"kind": "fuse", "model": "tiny", "target": "fused", "loras": [{"model": "style"}]}
    found = finish(changing, fused)
    assert found["status"] == "done", found
    same = here("convert", "tiny", "same:fused", "--lora", "style:latest").out.strip()
    assert same == found["result"]["digest"]
    listed = changing.get("/v1/jobs")["data"]
    assert [job["id"] for job in listed[:2]] == [found["id"], made["id"]]
    status, _ = ask(changing, "DELETE", f"/v1/jobs/{made['id']}")
    assert status == 200 and ask(changing, "GET", f"/v1/jobs/{made['id']}")[0] == 404


def frames(command: dict[str, Any]) -> list[dict[str, Any]]:
    """Perform a job in this process, and return what it reports."""
    target = io.BytesIO()
    job_process.perform(command, JobReport(target))
    target.seek(0)
    found = iter(lambda: frame.read(target), None)
    return [message for message, _ in found]


def command(worker: LocalWorker, **fields: Any) -> dict[str, Any]:
    place = {"roots": [str(worker.store)], "lora_dir": None, "model": "tiny", "target": "here"}
    return place | fields


def test_a_process_reports_stages_and_the_result(changing: LocalWorker) -> None:
    recipe = {"dtype": "f16", "quantize": None, "group_size": None}
    found = frames(command(changing, kind="convert", recipe=recipe, attach=True))
    stages = [one["stage"] for one in found if one["is"] == "progress"]
    assert stages[0] == "reading" and stages[-1] == "writing"
    assert found[-1]["is"] == "done" and found[-1]["size"] > found[-1]["new"] > 0
    found = frames(command(changing, kind="fuse", loras=[{"model": "style", "strength": 0.5}]))
    assert found[-1]["is"] == "done" and found[-1]["remark"] == ""
    assert found[-2]["completed"] == found[-2]["total"]


@pytest.mark.parametrize(
    ("error", "kind"), [(MemoryError(), "NoMemoryError"), (ZeroDivisionError(), "ModelError")]
)
def test_a_process_reports_every_error(
    changing: LocalWorker, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(job_process, "_change", fail)
    (found,) = frames(command(changing, kind="convert"))
    assert (found["is"], found["kind"]) == ("error", kind)


def test_a_process_ends_with_its_worker(changing: LocalWorker) -> None:
    recipe = {"dtype": None, "quantize": "int4", "group_size": None}
    fields = command(changing, kind="convert", recipe=recipe, attach=False, target="orphan")
    program = [sys.executable, "-m", "clowder_aimage.engine.job_process"]
    done = run(program, input=frame.encode(fields))  # standard input ends after the command
    assert done.returncode == 1
    names = changing.aimage("ls", "--json").out
    assert "orphan" not in names


def test_a_failed_job_says_why(changing: LocalWorker) -> None:
    wrong = {"kind": "fuse", "model": "tiny", "target": "no", "loras": [{"model": "foreign"}]}
    found = finish(changing, wrong)
    assert found["status"] == "failed" and "foreign" in found["error"]["message"]
    assert str(changing.store) not in json.dumps(found)
    missing = wrong | {"loras": [{"model": "nothing"}]}
    assert "nothing" in finish(changing, missing)["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"quantize": None}, 400, "quantize"),
        ({"quantize": "int3"}, 400, "quantize"),
        ({"target": "tiny"}, 409, "target"),
        ({"target": "a b"}, 400, "target"),
        ({"target": f"x@sha256:{'0' * 64}"}, 400, "target"),
        ({"model": "absent", "target": "b"}, 404, "model"),
        ({"kind": "fuse"}, 400, "loras"),
        ({"kind": "fuse", "quantize": None}, 400, "loras"),
        ({"loras": [{"model": "style"}]}, 400, "loras"),
        ({"attach": True, "quantize": None, "dtype": "auto"}, 400, "attach"),
        ({"kind": "merge"}, 400, "kind"),
    ],
)
def test_a_malformed_job_is_refused(
    changing: LocalWorker, changes: dict[str, Any], status: int, param: str
) -> None:
    body = INT8 | {"target": "new"} | changes
    found, answer = ask(changing, "POST", "/v1/jobs", body)
    assert (found, answer["error"]["param"]) == (status, param)


def test_an_unknown_job_is_said_to_end_with_its_worker(changing: LocalWorker) -> None:
    status, answer = ask(changing, "DELETE", "/v1/jobs/0123")
    assert status == 404 and "restarts" in answer["error"]["message"]


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the process of a job by one that reports a stage and waits."""
    program = (
        "import sys, time\n"
        "from clowder_aimage.engine import frame\n"
        "from clowder_aimage.engine.job_process import JobReport\n"
        "frame.read(sys.stdin.buffer)\n"
        "JobReport(sys.stdout.buffer).begin('writing', 100)\n"
        "sys.stdin.buffer.read()\n"
    )
    monkeypatch.setattr(job_queue, "_COMMAND", (sys.executable, "-c", program))


def add(queue: JobQueue, name: str) -> Job:
    return queue.add("convert", Reference.parse("tiny"), Reference.parse(name), {})


@pytest.mark.usefixtures("stuck")
def test_jobs_run_one_after_another_and_are_cancelled(tmp_path: Path) -> None:
    async def check() -> None:
        events = EventLog()
        queue = JobQueue([tmp_path], events)
        first, *rest = [add(queue, f"n{i}") for i in range(job_queue.MAX_WAITING)]
        with pytest.raises(BusyError):
            add(queue, "more")
        await until_async(lambda: first.stage)
        assert first.total == 100 and {job.status for job in rest} == {"queued"}
        assert queue.is_target(Reference.parse("n0"))
        await queue.cancel(first)
        assert first.status == CANCELLED and first.is_over
        assert not queue.is_target(Reference.parse("n0"))
        await queue.cancel(rest[-1])
        assert rest[-1].status == CANCELLED and rest[-1].started is None
        await queue.close()
        assert {job.status for job in queue.list_jobs()} == {CANCELLED}
        with pytest.raises(StoppedError):
            add(queue, "late")

    asyncio.run(check())


def test_a_killed_process_is_a_failed_job() -> None:
    for code, text in (-9, "signal 9"), (1, "exit code 1"):
        tiny = Reference.parse("tiny")
        job = Job("0", "convert", tiny, tiny, {}, 0.0, status="running")
        job.record_end(code)
        assert job.status == FAILED and job.error is not None and text in job.error.message


def test_ended_jobs_are_forgotten_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_queue, "_COMMAND", ("/nonexistent",))
    monkeypatch.setattr(job_queue, "MAX_ENDED", 2)

    async def check() -> None:
        queue = JobQueue([tmp_path], EventLog())
        for number in range(5):
            job = add(queue, f"n{number}")
            await until_async(partial(getattr, job, "is_over"))
            assert job.error is not None and "cannot start" in job.error.message
        assert [str(job.target) for job in queue.list_jobs()] == [
            "n4:latest",
            "n3:latest",
            "n2:latest",
        ]

    asyncio.run(check())
