"""The log of all daemons: a line for each event, without secrets and texts of strangers."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import resource
import socket
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from clowder_aimage.errors import RegistryError
from clowder_aimage.http.log import CONSOLE, JSON, LogFilter, configure
from tests.process import Aimage

TOKEN = "lighthouse7keeper"
EVIL = f"a\nb\x1b[2J\u2028 Authorization : Bearer {TOKEN} and http://me:{TOKEN}@host/x"


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> logging.Logger:
    """Return the root logger, which is restored afterwards."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    return root


@pytest.mark.parametrize("kind", [CONSOLE, JSON])
def test_every_record_is_one_line_without_secrets(kind: str, root: logging.Logger) -> None:
    file = io.StringIO()
    configure(kind, file=file)
    for name in ("aimage.http", "some.library"):
        log = logging.getLogger(name)
        log.warning("pull failed: %s", EVIL, extra={"reason": EVIL, "all": [EVIL, {EVIL: EVIL}]})
        try:
            raise ValueError(EVIL)
        except ValueError:
            log.exception("failed", stack_info=True)
        log.error("refused", exc_info=RegistryError(EVIL))
        log.error("not HTTP", exc_info=BadHttpMessage(EVIL))
    lines = file.getvalue().splitlines()
    assert len(lines) == 6 and all(line.isprintable() for line in lines), lines
    assert TOKEN not in file.getvalue() and "RegistryError: a" in file.getvalue()
    assert all("2J" not in line for line in lines if "ValueError" in line)
    if kind == JSON:
        assert json.loads(lines[1])["at"][0].endswith("without_secrets")


def test_the_error_of_a_lost_task_is_logged_without_its_text(root: logging.Logger) -> None:
    file = io.StringIO()
    configure(JSON, "debug", file=file)

    async def fail() -> None:
        raise ValueError(TOKEN)

    async def lose() -> None:
        task = asyncio.create_task(fail())
        await asyncio.wait([task])
        del task
        gc.collect()

    asyncio.run(lose())
    assert "never retrieved" in file.getvalue() and TOKEN not in file.getvalue()


def test_a_flood_of_a_library_is_counted() -> None:
    now = [0.0]
    only = LogFilter(lambda: now[0])

    def logs(name: str, text: str) -> int | None:
        record = logging.LogRecord(name, logging.ERROR, "", 0, text, None, None)
        return getattr(record, "suppressed", 0) if only.filter(record) else None

    text = "socket.accept() out of system resource\nsocket: "
    assert [logs("asyncio", f"{text}{number}") for number in range(9)] == [0] + [None] * 8
    assert logs("asyncio", "another") == 0
    assert [logs("aimage.http", "request") for _ in range(9)] == [0] * 9
    now[0] = 10.0
    assert [logs("asyncio", text), logs("asyncio", text)] == [8, None]


HOSTILE = (
    f"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization : Bearer {TOKEN}\r\n\r\n",
    f"GET /%0aforged%1b[2J HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n",
    f"{TOKEN}\r\n\r\n",
    f"POST /v2/a/b/blobs/uploads/ HTTP/1.1\r\nHost: {TOKEN}\r\nContent-Length: x\r\n\r\n",
    f"GET /v2/ HTTP/1.1\r\nHost: 127.0.0.1\r\n{TOKEN}\0: x\r\n\r\n",
)


@pytest.mark.integration
@pytest.mark.parametrize(
    "verb", [("serve", "--addr"), ("node", "--addr"), ("registry", "serve", "--addr")]
)
def test_a_daemon_under_hostile_requests(
    verb: tuple[str, ...], aimage: Callable[..., Aimage]
) -> None:
    """Each line of the log is JSON without the token, also when descriptors run out."""
    limit = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (80, 80))
    options: dict[str, Any] = {"preexec_fn": limit}
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = ("127.0.0.1", free.getsockname()[1])
    address = f"127.0.0.1:{place[1]}"
    with aimage().start(*verb, address, "--log-format", "json", **options) as daemon:
        assert daemon.stdout is not None and daemon.stdout.readline()
        for text in HOSTILE:
            with socket.create_connection(place, timeout=30) as raw:
                raw.sendall(text.encode())
                raw.shutdown(socket.SHUT_WR)
                while raw.recv(65536):
                    pass
        first = []
        with ExitStack() as stack:
            for _ in range(150):
                idle = stack.enter_context(socket.socket())
                idle.setblocking(False)
                idle.connect_ex(place)
            for line in daemon.stderr or ():
                first.append(line)
                if "connections are refused" in line:
                    break
        daemon.terminate()
        _, rest = daemon.communicate(timeout=60)
    errors = "".join(first) + rest
    lines = [json.loads(line) for line in errors.splitlines()]
    assert TOKEN not in errors and "Traceback" not in errors
    assert len(lines) < 40, errors[:5000]
