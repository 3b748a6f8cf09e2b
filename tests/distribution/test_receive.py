"""Bodies of uploads, by a server in this process."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from clowder_aimage.distribution import upload_session
from clowder_aimage.distribution.role import RegistryRole
from clowder_aimage.http.api_error import OCI
from clowder_aimage.http.app import build_app
from clowder_aimage.http.body_receiver import DIRECT_SIZE
from clowder_aimage.layout import ImageLayout
from tests.distribution.served import digest_of

SIZES = (0, 1, 1024 * 1024, 1024 * 1024 + 1, DIRECT_SIZE - 1, DIRECT_SIZE, 2 * DIRECT_SIZE + 12_345)
Client = TestClient[web.Request, web.Application]


def serve(root: Path, test: Callable[[Client], Awaitable[None]], *, several: bool = False) -> None:
    async def run() -> None:
        role = RegistryRole(ImageLayout(root), several=several)
        app = build_app(role, hosts=None, interface=OCI)
        async with role.running(), TestClient(TestServer(app)) as client:
            await test(client)

    asyncio.run(run())


async def begin(client: Client) -> str:
    async with client.post("/v2/a/b/blobs/uploads/") as answer:
        assert answer.status == 202
        return answer.headers["Location"]


async def check(client: Client, data: bytes) -> None:
    async with client.get(f"/v2/a/b/blobs/{digest_of(data)}") as answer:
        assert answer.status == 200
        assert await answer.read() == data


@pytest.mark.parametrize("several", [False, True])
def test_bodies_of_all_sizes_are_stored(tmp_path: Path, several: bool) -> None:
    async def push(client: Client) -> None:
        for size in SIZES:
            data = os.urandom(size)
            location = await begin(client)
            async with client.patch(location, data=io.BytesIO(data)) as answer:
                assert answer.status == 202
                assert (answer.headers.get("Connection") == "close") == (size >= DIRECT_SIZE)
            async with client.put(f"{location}?digest={digest_of(data)}") as answer:
                assert answer.status == 201
            await check(client, data)
            whole = os.urandom(size)
            path = f"/v2/a/b/blobs/uploads/?digest={digest_of(whole)}"
            async with client.post(path, data=io.BytesIO(whole)) as answer:
                assert answer.status == 201

    serve(tmp_path, push, several=several)


def test_a_body_without_a_size_is_stored(tmp_path: Path) -> None:
    data = os.urandom(3_000_000)

    async def send() -> AsyncIterator[bytes]:
        for start in range(0, len(data), 70_001):
            yield data[start : start + 70_001]

    async def push(client: Client) -> None:
        location = await begin(client)
        async with client.put(f"{location}?digest={digest_of(data)}", data=send()) as answer:
            assert answer.status == 201
        await check(client, data)

    serve(tmp_path, push)


def test_more_large_bodies_than_sockets_pass_the_parser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload_session, "MAX_DIRECT", 0)
    data = os.urandom(DIRECT_SIZE + 1)

    async def push(client: Client) -> None:
        location = await begin(client)
        async with client.put(
            f"{location}?digest={digest_of(data)}", data=io.BytesIO(data)
        ) as answer:
            assert answer.status == 201
            assert "Connection" not in answer.headers
        await check(client, data)

    serve(tmp_path, push)


@pytest.mark.parametrize("several", [False, True])
def test_a_large_body_with_a_wrong_digest_leaves_nothing(tmp_path: Path, several: bool) -> None:
    async def push(client: Client) -> None:
        location = await begin(client)
        url = f"{location}?digest={digest_of(b'other')}"
        async with client.put(url, data=io.BytesIO(bytes(DIRECT_SIZE))) as answer:
            assert answer.status == 400
        async with client.get(location) as answer:
            assert answer.status == 404

    serve(tmp_path, push, several=several)
    assert list((tmp_path / ".aimage" / "ingest").iterdir()) == []
