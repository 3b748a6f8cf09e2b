"""Notes about processes that are waited for."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from clowder_aimage.layout import ImageLayout, lock
from tests.content.artifact import put_artifact
from tests.process import Aimage


@pytest.mark.parametrize("form", ["text", "json", "quiet"])
def test_a_verb_names_the_process_that_locks_the_store(
    form: str, aimage: Callable[..., Aimage], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is released once the wait for it was reported."""
    here, reported, held = aimage(), threading.Event(), threading.Event()
    put_artifact(ImageLayout(here.store), "a:v1", b"a")
    report = lock.report_wait

    def report_once(what: str, file: int | str | Path) -> None:
        report(what, file)
        reported.set()

    def hold() -> None:
        with lock.hold_lock(here.store, "lock"):
            held.set()
            reported.wait(60)

    monkeypatch.setattr(lock, "_NOTICE", 0.0)
    monkeypatch.setattr(lock, "report_wait", report_once)
    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    options = {"text": (), "json": ("--json",), "quiet": ("-q",)}[form]
    done = here("tag", "a:v1", "b:v1", *options)
    holder.join()
    name = f"process {os.getpid()}" if Path("/proc/locks").exists() else "another process"
    message = f"waiting for {name}, which is using the store {here.store}"
    if form == "json":
        event = json.loads(done.err.splitlines()[0])
        assert (event["event"], event["level"], event["message"]) == ("wait", "warning", message)
    else:
        assert (message in done.err) == (form == "text")
