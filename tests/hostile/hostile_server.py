"""Registries for the hostile tests: one with given contents, and ours in this process."""

from __future__ import annotations

import asyncio
import http.client
import threading
from pathlib import Path

from aiohttp import web

from clowder_aimage.layout import ImageLayout
from tests.hostile.hostile_world import digest_of
from tests.registry_app import registry_app
from tests.scripted import Answer, Script, Seen
from tests.scripted import serving as serving_blobs


def serving(manifest: bytes, *blobs: bytes) -> Script:
    """Return a script for a registry with one artifact, which accepts all uploads."""
    inner = serving_blobs(manifest, {digest_of(blob): blob for blob in blobs})

    def script(seen: Seen) -> Answer:
        if seen.method in ("POST", "PATCH"):
            return Answer(202, {"Location": "/v2/x/blobs/uploads/1"})
        return Answer(201) if seen.method == "PUT" else inner(seen)

    return script


class Ours:
    """``registry serve`` on a thread, so that its file accesses are recorded."""

    def __init__(self, store: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._store = store
        self._port = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(20)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        runner = web.AppRunner(registry_app(ImageLayout(self._store)))

        async def begin() -> None:
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._port = runner.addresses[0][1]
            self._ready.set()

        self._loop.run_until_complete(begin())
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def ask(self, method: str, path: str, body: bytes = b"", kind: str = "") -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)
        try:
            connection.request(method, path, body, {"Content-Type": kind} if kind else {})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
