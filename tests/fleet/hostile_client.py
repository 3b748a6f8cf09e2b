"""A hostile client of a gateway, with a token of the scope ``infer``.

``python -m tests.fleet.hostile_client URL TOKEN SECONDS`` sends floods of batches, large bodies,
schemas that are slow to prepare, and requests that it leaves. It prints the statuses of answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable

import aiohttp

PARALLEL = 8
_MODEL = "tiny"
_LARGE = 8 << 20
_SCHEMAS: tuple[object, ...] = (
    {"type": "integer", "multipleOf": 9999991, "minimum": 0},
    {"type": "array", "items": {"$ref": "#"}, "minItems": 100000},
    {"anyOf": [{"type": "string", "pattern": "(a|a)*" * 20}] * 200},
)


class HostileClient:
    """Sends each kind of request again and again; ``statuses`` counts the answers."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self._file = ""
        self.statuses: Counter[str] = Counter()

    async def run(self) -> None:
        """Send requests of all kinds at once, for ever."""
        kinds: list[Callable[[], Awaitable[None]]] = [
            *(self._flood_batches, self._send_large, self._send_schema),
            *(self._leave, self._store_file),
        ]
        await asyncio.gather(*(self._repeat(kind) for kind in kinds * (PARALLEL // 4)))

    async def _repeat(self, kind: Callable[[], Awaitable[None]]) -> None:
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
                await kind()
            await asyncio.sleep(0.01)

    async def _post(self, path: str, **options: object) -> dict[str, object]:
        timeout = aiohttp.ClientTimeout(total=30)
        async with self._session.post(self._url + path, timeout=timeout, **options) as answer:  # type: ignore[arg-type]
            value: object = None
            with contextlib.suppress(ValueError, aiohttp.ClientError):
                value = await answer.json()
            fields = value if isinstance(value, dict) else {}
            reason = fields["error"]["message"] if answer.status == 503 and fields else ""
            self.statuses[f"{path} {answer.status} {reason}".rstrip()] += 1
        return fields

    async def _store_file(self) -> None:
        line = {"custom_id": "\ud800", "method": "POST", "url": "/v1/images/generations"}
        form = aiohttp.FormData({"purpose": "batch"})
        lines = f"{json.dumps({**line, 'body': {'model': _MODEL, 'prompt': 'evil'}})}\n" * 50
        form.add_field("file", lines.encode(), filename="a.jsonl")
        stored = await self._post("/v1/files", data=form)
        self._file = str(stored.get("id", self._file))

    async def _flood_batches(self) -> None:
        endpoint = {"endpoint": "/v1/images/generations", "completion_window": "24h"}
        await self._post("/v1/batches", json={"input_file_id": self._file, **endpoint})

    async def _send_large(self) -> None:
        form = aiohttp.FormData({"model": _MODEL, "prompt": "evil"})
        form.add_field("image", b"\x89PNG\r\n\x1a\n" + bytes(_LARGE), filename="a.png")
        await self._post("/v1/images/edits", data=form)

    async def _send_schema(self) -> None:
        for schema in _SCHEMAS:
            shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
            messages = [{"role": "user", "content": "evil"}]
            body = {"model": _MODEL, "messages": messages, "response_format": shape}
            await self._post("/v1/chat/completions", json=body)

    async def _leave(self) -> None:
        body = {"model": _MODEL, "prompt": "evil"}
        timeout = aiohttp.ClientTimeout(total=0.05)
        url = f"{self._url}/v1/images/generations"
        async with self._session.post(url, json=body, timeout=timeout):
            pass


async def main(url: str, token: str, seconds: str) -> None:
    """Send requests for some seconds."""
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as session:
        client = HostileClient(url, session)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(float(seconds)):
                await client.run()
    sys.stdout.write(json.dumps(client.statuses) + "\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
