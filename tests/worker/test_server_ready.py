"""The time at which a server says that it is ready."""

from __future__ import annotations

import asyncio
import logging

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from clowder_aimage.http import server, systemd
from clowder_aimage.http.route import Role


class ScriptedRole(Role):
    """A role that becomes ready after some looks."""

    def __init__(self, looks: int) -> None:
        self.left, self.is_signalled = looks, False

    async def list_reasons(self) -> list[dict[str, str]]:
        self.left -= 1
        return [{"reason": "model missing", "model": "tiny"}] if self.left >= 0 else []

    async def signal_ready(self) -> None:
        self.is_signalled = True


@pytest.mark.parametrize(
    ("looks", "lines"), [(0, ["ready"]), (1, ["ready"]), (4, ["not ready yet", "ready"])]
)
def test_ready_is_said_once_it_is_true(
    looks: int,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sent: list[str] = []
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(systemd, "notify", sent.append)
    monkeypatch.setattr(asyncio, "sleep", pause)
    caplog.set_level(logging.INFO, "aimage.http")
    role = ScriptedRole(looks)
    asyncio.run(server._announce_ready((Role(), role), {"urls": ["http://a"]}))
    assert [record.getMessage() for record in caplog.records] == lines
    assert role.is_signalled
    assert sent.count("READY=1") == 1
    assert all(text != "READY=1" for text in sent[: 2 * looks])
    assert ("STATUS=not ready: model missing" in sent) == (looks > 0)
    assert pauses == [0.25, 0.5, 1.0, 2.0][:looks]
