"""The processes of a server, as children of the test."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest

from clowder_aimage.errors import AccessError
from clowder_aimage.http import process_group
from clowder_aimage.http.process_group import Member, ProcessGroup

# From Python 3.12 on, a fork of a process with threads is warned of
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def serve(member: Member) -> None:
    member.report_ready()
    select.select([member.parent], [], [])


def test_signals_reach_all_processes_and_handlers_are_restored() -> None:
    before, ready = signal.getsignal(signal.SIGTERM), []

    def stop() -> None:
        ready.append(True)
        for number in (signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)

    ProcessGroup(2, serve).run(stop)
    assert ready == [True]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_crashes_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_group, "PAUSE", 0.0)
    parent = os.getpid()

    def crash_once(member: Member) -> None:
        member.report_ready()
        try:
            (tmp_path / "crashed").touch(exist_ok=False)
        except FileExistsError:
            # The one after the crash, which ends the test
            os.kill(parent, signal.SIGTERM)
            select.select([member.parent], [], [])
        os._exit(9)

    ProcessGroup(1, crash_once).run(lambda: None)
    assert (tmp_path / "crashed").exists()


def test_a_process_that_fails_at_its_start_ends_all() -> None:
    def fail(_: Member) -> None:
        raise AccessError("no")

    with pytest.raises(AccessError, match="ended at its start, with status 1"):
        ProcessGroup(2, fail).run(lambda: None)
