"""The server and the streams that a connection to a fleet checks."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from clowder_aimage.errors import UsageError
from clowder_aimage.fleet import link as fleet_link
from clowder_aimage.fleet.link import FleetAccess, FleetLink
from clowder_aimage.fleet.name import GATEWAY, FleetNames
from clowder_aimage.fleet.stream import FleetShape
from clowder_aimage.http.api_error import ApiError


def test_a_server_that_cannot_serve_a_fleet_is_named() -> None:
    """It is too old, or its messages are too short for a piece of a response."""

    async def check() -> None:
        link = FleetLink(FleetAccess(("nats://127.0.0.1:1",)), GATEWAY)
        for minor, most, reason in (
            (8, 1 << 20, r"2\.9 is needed"),
            (10, 1 << 16, r"messages of 65536 bytes; set max_payload .* to 1048576 or more"),
        ):
            version = SimpleNamespace(major=2, minor=minor)
            link._client = SimpleNamespace(  # type: ignore[assignment]
                is_connected=True, connected_server_version=version, max_payload=most
            )
            await link._verify()
            with pytest.raises(ApiError, match=reason) as caught:
                link.check()
            assert caught.value.status == 503 and caught.value.headers["Retry-After"]
            with pytest.raises(UsageError, match=reason):
                await link.make(FleetShape(), 1)

    asyncio.run(check())


@pytest.mark.parametrize(
    ("stream", "stored", "is_refused"),
    [
        ("aimage-jobs", 800, False),
        ("aimage-jobs", 900, True),
        ("aimage-logs", 950, True),
        ("aimage-bodies", 950, True),
        ("aimage-marks", 950, True),
        # Their own routes refuse what is stored there
        ("aimage-files", 1000, False),
        ("aimage-dead", 1000, False),
    ],
)
def test_new_work_leaves_a_reserve_of_each_stream(
    stream: str, stored: int, is_refused: bool
) -> None:
    async def check() -> None:
        names = FleetNames()
        configs = {config.name: config for config in FleetShape().build_streams(names)}

        async def describe(name: str) -> Any:
            state = SimpleNamespace(bytes=stored if name == stream else 0)
            bucket = SimpleNamespace(name=name, max_bytes=-1, max_age=1, allow_direct=True)
            config: Any = configs.get(name) or bucket
            config.max_bytes = 1000 if name in configs else -1
            return SimpleNamespace(config=config, state=state)

        link = FleetLink(FleetAccess(("nats://127.0.0.1:1",)), GATEWAY)
        link._js = SimpleNamespace(stream_info=describe)  # type: ignore[assignment]
        link._space = await fleet_link.check_streams(link._js, names)
        assert link.is_almost_full(stream) is (stored >= 900)
        if is_refused:
            with pytest.raises(ApiError, match=stream) as caught:
                link.check_space()
            assert caught.value.status == 503 and caught.value.headers["Retry-After"]
            return
        link.check_space()
        # Bodies count until their jobs end, and no longer
        with link.hold_space(90):
            with pytest.raises(ApiError, match="aimage-bodies"), link.hold_space(900):
                pass
            link.check_space()
        for _ in range(20):
            with pytest.raises(KeyError), link.hold_space(90):
                raise KeyError

    asyncio.run(check())


def test_streams_that_are_there_are_looked_at_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def find_all(*_: object, **options: object) -> dict[str, int]:
        assert options == {"is_worker": False}
        return {}

    async def do_nothing(*_: object) -> None:
        pass

    async def check() -> float:
        link = FleetLink(FleetAccess(("nats://127.0.0.1:1",)), GATEWAY)
        version = SimpleNamespace(major=2, minor=10)
        link._client = SimpleNamespace(  # type: ignore[assignment]
            is_connected=True, connected_server_version=version, max_payload=1 << 20
        )
        begun = asyncio.get_running_loop().time()
        await link._verify()
        link.check()
        return link._due - begun

    monkeypatch.setattr(fleet_link, "check_streams", find_all)
    for name in "_read_clock", "_read_key_set":
        monkeypatch.setattr(FleetLink, name, do_nothing)
    monkeypatch.setattr(FleetLink, "_take_key_set", lambda *_: None)
    assert asyncio.run(check()) >= fleet_link.CHECK
