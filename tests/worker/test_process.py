"""The process of a loaded model: what it reports, and when it ends."""

from __future__ import annotations

import io
import logging
import resource
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.engine import frame, machine, process
from clowder_aimage.engine.process import ModelProcess
from clowder_aimage.engine.runner import Runner
from clowder_aimage.errors import ModelError, StuckError
from clowder_aimage.layout.layered_store import LayeredStore
from clowder_aimage.model.batch_table import BatchTable
from tests.process import PROGRAM, run

COMMAND = frame.encode({"do": "generate", "id": 1}) + frame.encode({"do": "generate", "id": 2})


def replies(error: Exception, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return the replies to two requests that raise ``error``."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(ModelProcess, "_generate", fail)
    target = io.BytesIO()
    ModelProcess(io.BytesIO(COMMAND), target).run()
    target.seek(0)
    found = []
    while (one := frame.read(target)) is not None:
        found.append(one[0])
    return found


def test_a_process_with_a_thread_that_does_not_end_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    (reply,) = replies(StuckError("it takes longer"), monkeypatch)
    assert (reply["kind"], reply["message"]) == ("StuckError", "it takes longer")
    assert len(replies(ModelError("no"), monkeypatch)) == 2


@pytest.mark.parametrize("is_due", [True, False, ValueError("no")])
def test_a_process_measures_batches_between_requests_and_tells_its_worker(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_due: Any
) -> None:
    """An error leaves pictures to be computed alone."""
    monkeypatch.setattr(logging.getLogger("aimage.worker"), "propagate", True)
    target = io.BytesIO()
    served = ModelProcess(io.BytesIO(), target)

    def measure() -> bool:
        if isinstance(is_due, Exception):
            raise is_due
        return bool(is_due)

    pipeline = SimpleNamespace(measure_batches=measure)
    served._model = SimpleNamespace(pipeline=pipeline, batches=BatchTable({1024: 2}))
    served._defaults = object()
    monkeypatch.setattr(served._commands, "get", lambda: None)
    assert served._take_command() is None
    target.seek(0)
    received = frame.read(target)
    assert (received is not None) == (is_due is True)
    assert ("batches cannot be measured" in caplog.text) == isinstance(is_due, Exception)
    if received is not None:
        runner = Runner.__new__(Runner)
        assert runner._track(received[0])
        assert runner.batches.limits == {1024: 2} and runner.parallel == 2


def test_an_error_is_logged_without_its_text(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "aimage.worker")
    monkeypatch.setattr(logging.getLogger("aimage.worker"), "propagate", True)
    assert "lighthouse" not in str(replies(ValueError("lighthouse"), monkeypatch))
    assert "ValueError at" in caplog.text and "lighthouse" not in caplog.text


def test_errors_that_end_the_process_are_one_line_without_their_text() -> None:
    program = (
        "import logging, sys, threading\n"
        "from clowder_aimage.engine import process\n"
        "def fail(*_): raise ValueError('light' 'house')\n"
        "process.ModelProcess.run = lambda _: (threading.Thread(target=fail).start(), fail())\n"
        "process.main()\n"
    )
    done = run([PROGRAM[0], "-c", program], text=True, timeout=60, input="")
    assert "lighthouse" not in done.stderr and "Traceback" not in done.stderr
    events = sorted(line.partition(":")[0] for line in done.stderr.splitlines())
    assert events == ["a thread failed", "the process failed"]


@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts memory on Linux only")
def test_memory_is_limited_to_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5, resource.RLIM_INFINITY))
    machine.limit_memory(800)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (5, 900))
    machine.limit_memory(800)
    machine.limit_memory(None)
    assert limits == [(1000, resource.RLIM_INFINITY), (900, 900)]


@pytest.mark.parametrize(("device", "count"), [("cpu (openblas), mlx-lm", 1), ("gpu, mlx-lm", 0)])
def test_a_language_model_on_a_cpu_is_limited_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, count: int
) -> None:
    limits: list[int | None] = []
    model = SimpleNamespace(device=device, dtype="float32", parallel=2, context=64, warnings=())
    monkeypatch.setattr(process, "load_language_model", lambda *_, **__: model)
    monkeypatch.setattr(machine, "limit_memory", limits.append)
    target = io.BytesIO()
    stored: Any = SimpleNamespace(aimage=None)
    ModelProcess(io.BytesIO(), target)._load_text(LayeredStore([tmp_path]), stored, {})
    assert limits == [machine.read_memory_limit()] * count
    target.seek(0)
    loaded = frame.read(target)
    assert loaded is not None and (loaded[0]["is"], loaded[0]["parallel"]) == ("loaded", 2)
