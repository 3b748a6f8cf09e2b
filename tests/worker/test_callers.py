"""The bounds of each caller: what it keeps and occupies leaves room for others."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import hashlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from clowder_aimage.api.batch import routes as batch_routes
from clowder_aimage.api.batch import run as batch_run
from clowder_aimage.api.batch import store as batch_store
from clowder_aimage.api.batch.account import Account, compute_account
from clowder_aimage.api.batch.routes import BatchRoutes
from clowder_aimage.api.batch.run import BatchRunner
from clowder_aimage.api.batch.store import DirectoryBatchStore
from clowder_aimage.api.batch.stored_file import remove_expired
from clowder_aimage.content.file_system import Space
from clowder_aimage.engine.admission import CALLER, BusyError, PlaceCounter, compute_share
from clowder_aimage.engine.batch_client import BatchClient
from clowder_aimage.engine.batch_line import OVER
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.app import build_app
from clowder_aimage.http.caller import compute_name
from clowder_aimage.http.caller_ledger import Bound, CallerBounds, CallerLedger
from clowder_aimage.http.local_request import LocalRequest
from clowder_aimage.http.operation import BODY
from clowder_aimage.http.route import INFER, Role, Route
from clowder_aimage.http.token_file import TokenFile
from tests.wait import until_async

TOKENS = {"m" * 20: "infer", "t" * 20: "infer", "r" * 20: "admin"}
MINE, THEIRS, ADMIN = TOKENS
LINE = json.dumps({"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "a"}}).encode()
Answer = Callable[[LocalRequest], Awaitable[web.StreamResponse]]


async def good(request: LocalRequest) -> web.StreamResponse:
    return web.json_response({"scope": request["scope"]})


async def never(_: LocalRequest) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


@dataclass
class BatchRole(Role):
    """A server of files and batches alone, whose requests have the answer ``answer``."""

    root: Path
    bounds: CallerBounds = field(default_factory=CallerBounds)
    answer: Answer = good
    tokens: Any = field(default_factory=lambda: dict(TOKENS))
    answered: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = DirectoryBatchStore(self.root)
        self._ledger = CallerLedger(self.bounds)

    @property
    def ledger(self) -> CallerLedger:
        return self._ledger

    async def send(self, request: LocalRequest) -> web.StreamResponse:
        """Answer a line of a batch."""
        request["id"] = "1"
        self.answered.append(request["scope"])
        return await self.answer(request)

    def build_routes(self) -> list[Route]:
        async def hold(request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(3600)
            raise AssertionError

        return [*BatchRoutes(self.runner).build_routes(), Route("POST", "/hold", hold, INFER)]

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Callable[..., Coroutine[Any, Any, Any]]]:
        """Yield a function that sends a request with a token."""
        calls: Any = self
        self.runner = BatchRunner(
            self.store, calls, lambda: 4, tokens=self.tokens, ledger=self._ledger
        )
        app = build_app(self, tokens=self.tokens)
        async with TestClient(TestServer(app)) as client:
            running = asyncio.create_task(self.runner.run())

            async def ask(token: str, method: str, path: str, **options: Any) -> Any:
                headers = {"Authorization": f"Bearer {token}", "Host": "localhost"}
                headers |= {"Content-Type": "application/json"} if "data" not in options else {}
                headers |= options.pop("headers", {})
                answer = await client.request(method, path, headers=headers, **options)
                body = await answer.read()
                value = json.loads(body) if answer.content_type == "application/json" else body
                return answer.status, value, answer.headers

            try:
                yield ask
            finally:
                running.cancel()
                await asyncio.wait([running])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "FLUSH_INTERVAL", 0.01)
    monkeypatch.setattr(batch_run, "PAUSE", 0.001)


def play(scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(run())


async def upload(ask: Any, token: str, raw: bytes = LINE) -> tuple[int, Any, Any]:
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", raw, filename="a.jsonl")
    answer: tuple[int, Any, Any] = await ask(token, "POST", "/v1/files", data=form)
    return answer


async def begin(ask: Any, token: str, file: str) -> tuple[int, Any, Any]:
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    answer: tuple[int, Any, Any] = await ask(token, "POST", "/v1/batches", json=body)
    return answer


async def wait_until_over(ask: Any, token: str, name: str) -> dict[str, Any]:
    async def read() -> Any:
        _, batch, _ = await ask(token, "GET", f"/v1/batches/{name}")
        return batch if batch["status"] in OVER else None

    batch: dict[str, Any] = await until_async(read)
    return batch


def check_refusal(answer: tuple[int, Any, Any], status: int, word: str, *, waits: bool) -> None:
    assert answer[0] == status, answer
    assert word in answer[1]["error"]["message"] and answer[1]["error"]["code"]
    assert ("Retry-After" in answer[2]) is waits


def test_the_bytes_and_the_files_of_a_token_are_bounded(tmp_path: Path) -> None:
    async def scene() -> None:
        role = BatchRole(tmp_path, CallerBounds(max_bytes=1000, max_files=3))
        async with role.serving() as ask:
            first = await upload(ask, MINE, b"x" * 600)
            check_refusal(await upload(ask, MINE, b"x" * 600), 413, "bytes", waits=False)
            assert len(list(tmp_path.rglob("*.piece"))) == 1
            assert (await upload(ask, THEIRS, b"x" * 600))[0] == 200
            await ask(MINE, "DELETE", f"/v1/files/{first[1]['id']}", json={})
            for _ in range(3):
                assert (await upload(ask, MINE))[0] == 200
            check_refusal(await upload(ask, MINE), 429, "files", waits=False)
            assert not role.ledger._amounts

    play(scene)


def test_uploads_at_the_same_time_share_the_bound(tmp_path: Path) -> None:
    async def scene() -> None:
        role = BatchRole(tmp_path, CallerBounds(max_bytes=1000, max_files=100))
        async with role.serving() as ask:
            found = await asyncio.gather(*(upload(ask, MINE, b"x" * 300) for _ in range(20)))
        assert [status for status, _, _ in found].count(200) <= 3
        assert {status for status, _, _ in found} == {200, 413}

    play(scene)


def test_the_open_batches_of_a_token_are_bounded(tmp_path: Path) -> None:
    async def scene() -> None:
        role = BatchRole(tmp_path, CallerBounds(max_batches=3), answer=never)
        async with role.serving() as ask:
            name = (await upload(ask, MINE))[1]["id"]
            found = await asyncio.gather(*(begin(ask, MINE, name) for _ in range(9)))
            assert [status for status, _, _ in found].count(200) == 3
            check_refusal(await begin(ask, MINE, name), 429, "open batches", waits=True)
            other = (await upload(ask, THEIRS))[1]["id"]
            assert (await begin(ask, THEIRS, other))[0] == 200

    play(scene)


def test_batches_that_fail_at_once_count_for_a_minute(tmp_path: Path) -> None:
    async def scene() -> None:
        role = BatchRole(tmp_path, CallerBounds(max_batches=3))
        async with role.serving() as ask:
            name = (await upload(ask, MINE, b"x\n"))[1]["id"]
            for _ in range(3):
                batch = (await begin(ask, MINE, name))[1]
                assert (await wait_until_over(ask, MINE, batch["id"]))["status"] == "failed"
            check_refusal(await begin(ask, MINE, name), 429, "open batches", waits=True)

    play(scene)


def test_of_too_many_batches_the_first_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_routes, "_MAX_BATCHES", 2)

    async def scene() -> None:
        async with BatchRole(tmp_path).serving() as ask:
            file, names = (await upload(ask, MINE, b"x\n"))[1]["id"], list[str]()
            for _ in range(4):
                names.append((await begin(ask, MINE, file))[1]["id"])
                await wait_until_over(ask, MINE, names[-1])
            listed = (await ask(MINE, "GET", "/v1/batches"))[1]["data"]
            assert [entry["id"] for entry in listed] == names[:1:-1]

    play(scene)


def test_answers_of_a_batch_count_for_its_token(tmp_path: Path) -> None:
    async def large(_: LocalRequest) -> web.StreamResponse:
        return web.json_response({"text": "x" * 600})

    async def scene() -> None:
        role = BatchRole(tmp_path, CallerBounds(max_bytes=3000), answer=large)
        lines = b"\n".join(LINE.replace(b'"a"', b'"%d"' % number, 1) for number in range(20))
        async with role.serving() as ask:
            name = (await upload(ask, MINE, lines))[1]["id"]
            batch = await wait_until_over(ask, MINE, (await begin(ask, MINE, name))[1]["id"])
        assert batch["status"] == "failed" and batch["output_file_id"]
        assert "bytes in files" in batch["errors"]["data"][0]["message"]
        assert len(role.answered) < 20

    play(scene)


def test_a_list_reads_the_records_of_its_owner_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        role = BatchRole(tmp_path)
        async with role.serving() as ask:
            for token in (MINE, THEIRS):
                for _ in range(3):
                    batch = (await begin(ask, token, (await upload(ask, token))[1]["id"]))[1]
                    await wait_until_over(ask, token, batch["id"])
            opened = list[str]()
            read = DirectoryBatchStore._read_again

            def record(self: DirectoryBatchStore, key: tuple[str, str]) -> Any:
                opened.append(key[0])
                return read(self, key)

            monkeypatch.setattr(DirectoryBatchStore, "_read_again", record)
            for path in ("/v1/batches", "/v1/files", "/v1/batches?limit=1"):
                _, found, _ = await ask(MINE, "GET", path)
                assert found["data"] and "owner" not in found["data"][0]
            assert set(opened) <= {compute_name(MINE)}

    play(scene)


def test_pages_follow_each_other(tmp_path: Path) -> None:
    async def scene() -> None:
        async with BatchRole(tmp_path).serving() as ask:
            names = [(await upload(ask, MINE))[1]["id"] for _ in range(5)]
            for order in ("asc", "desc"):
                found, after = list[str](), ""
                while True:
                    path = f"/v1/files?limit=2&order={order}{after}"
                    _, page, _ = await ask(MINE, "GET", path)
                    found += [entry["id"] for entry in page["data"]]
                    after = f"&after={page['last_id']}"
                    if not page["has_more"]:
                        break
                assert found == (names if order == "asc" else names[::-1])

    play(scene)


def test_an_administrator_sees_and_ends_the_work_of_others(tmp_path: Path) -> None:
    async def scene() -> None:
        async with BatchRole(tmp_path, answer=never).serving() as ask:
            name = (await upload(ask, MINE))[1]["id"]
            batch = (await begin(ask, MINE, name))[1]["id"]
            owner = compute_name(MINE)
            assert owner not in MINE and MINE not in owner
            for path in ("/v1/batches", "/v1/files"):
                entry = (await ask(ADMIN, "GET", path))[1]["data"][0]
                assert entry["owner"] == owner and entry["id"] in (name, batch)
            assert (await ask(THEIRS, "GET", f"/v1/batches/{batch}"))[0] == 404
            assert (await ask(THEIRS, "POST", f"/v1/batches/{batch}/cancel", json={}))[0] == 404
            assert (await ask(ADMIN, "GET", f"/v1/files/{name}/content"))[0] == 404
            assert (await ask(ADMIN, "POST", f"/v1/batches/{batch}/cancel", json={}))[0] == 200
            assert (await wait_until_over(ask, ADMIN, batch))["status"] == "cancelled"
            assert (await ask(ADMIN, "DELETE", f"/v1/files/{name}", json={}))[0] == 200
            assert (await ask(MINE, "GET", f"/v1/files/{name}"))[0] == 404

    play(scene)


def test_a_client_of_batches_takes_none_of_another_token() -> None:
    batch = {"object": "batch", "id": "batch_1", "status": "completed", "input_file_id": "file-1"}
    begun = list[str]()

    class Client:
        endpoint = "x"

        def ask(self, method: str, path: str, body: Any = None) -> Any:
            if method == "POST":
                begun.append(body["metadata"]["aimage_batch"])
                return {**batch, "id": "batch_2"}
            digest = hashlib.sha256(b"name\nline").hexdigest()
            foreign = {**batch, "metadata": {"aimage_batch": digest}, "owner": compute_name(MINE)}
            return {"object": "list", "data": [foreign], "has_more": False}

        def upload(self, *_: object) -> Any:
            return {"object": "file", "id": "file-2"}

    client: Any = Client()
    opened = BatchClient(client, "name").open(b"line", "/v1/completions")
    assert opened.value["id"] == "batch_2" and begun


def test_the_work_of_a_revoked_token_stops_at_the_next_line(tmp_path: Path) -> None:
    async def scene() -> None:
        now, path = [0.0], tmp_path / "tokens"
        path.write_text("".join(f"{scope} {token}\n" for token, scope in TOKENS.items()))
        path.chmod(0o600)
        role = BatchRole(tmp_path / "store", tokens=TokenFile(path, lambda: now[0]))

        async def revoke(request: LocalRequest) -> web.StreamResponse:
            if len(role.answered) == 5:
                path.write_text(f"infer {THEIRS}\nadmin {ADMIN}\n")
                now[0] += 2
            return await good(request)

        role.answer = revoke
        lines = b"\n".join(LINE.replace(b'"a"', b'"%d"' % number, 1) for number in range(100))
        async with role.serving() as ask:
            name = (await upload(ask, MINE, lines))[1]["id"]
            batch = (await begin(ask, MINE, name))[1]["id"]
            over = await wait_until_over(ask, ADMIN, batch)
            assert (await ask(MINE, "GET", "/v1/batches"))[0] == 401
        assert over["status"] == "failed" and len(role.answered) < 10
        assert "token" in over["errors"]["data"][0]["message"]
        stored = "".join(each.read_text() for each in (tmp_path / "store").rglob("*.json"))
        assert MINE not in stored

    play(scene)


def test_below_the_reserve_there_are_no_new_files_and_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scene() -> None:
        async with BatchRole(tmp_path).serving() as ask:
            name = (await upload(ask, MINE))[1]["id"]
            monkeypatch.setattr(batch_store, "measure_space", lambda _: Space(100 << 30, 0, 1))
            for answer in (await upload(ask, MINE), await begin(ask, MINE, name)):
                check_refusal(answer, 507, "almost full", waits=True)
            assert (await ask(MINE, "DELETE", f"/v1/files/{name}", json={}))[0] == 200

    play(scene)


def test_the_bodies_in_progress_of_a_token_are_bounded(tmp_path: Path) -> None:
    async def scene() -> None:
        role = BatchRole(tmp_path, CallerBounds(max_body_bytes=1000))
        async with role.serving() as ask:
            body = {"a": "x" * 500}
            held = asyncio.create_task(ask(MINE, "POST", "/hold", json=body))
            await until_async(lambda: bool(role.ledger._amounts))
            check_refusal(await ask(MINE, "POST", "/hold", json=body), 429, "progress", waits=True)
            other = asyncio.create_task(ask(THEIRS, "POST", "/hold", json=body))
            await until_async(lambda: len(role.ledger._amounts) == 2)
            for task in (held, other):
                task.cancel()
            await asyncio.wait([held, other])
            await until_async(lambda: not role.ledger._amounts)

    play(scene)


@pytest.mark.parametrize(
    ("pieces", "status", "word"),
    [
        ([400, 700], 429, "progress"),
        ([700], 429, "progress"),
        ([100] * 9, 429, "progress"),
        ([BODY, 1], 413, "large"),
    ],
)
def test_a_body_without_an_announced_size_counts_while_it_arrives(
    tmp_path: Path, pieces: list[int], status: int, word: str
) -> None:
    async def arrive(sizes: list[int]) -> AsyncIterator[bytes]:
        for size in sizes:
            yield b" " * size
        await asyncio.sleep(3600)

    async def scene() -> None:
        limit = 1000 if status == 429 else 2 * BODY
        role = BatchRole(tmp_path, CallerBounds(max_body_bytes=limit))
        async with role.serving() as ask:
            held = asyncio.create_task(ask(MINE, "POST", "/hold", data=arrive([500])))
            await until_async(lambda: bool(role.ledger._amounts))
            check_refusal(
                await ask(MINE, "POST", "/hold", data=arrive(pieces)),
                status,
                word,
                waits=status == 429,
            )
            held.cancel()
            await asyncio.wait([held])
            await until_async(lambda: not role.ledger._amounts)

    play(scene)


def test_a_bound_is_for_each_caller() -> None:
    ledger, bound = CallerLedger(), Bound("files", 3, 429)
    with ledger.hold(bound, "a", 1) as first, ledger.hold(bound, "a") as second:
        first.add(1)
        second.add(1)
        with pytest.raises(ApiError, match="3 files at most"):
            first.add(1)
        with ledger.hold(bound, "b") as other:
            other.add(3)
    assert not ledger._amounts


@pytest.mark.parametrize(
    ("status", "age", "expected"),
    [
        ("in_progress", 1000, Account(0, 7, 1)),
        ("cancelling", 1000, Account(0, 7, 1)),
        ("completed", 1000, Account(0, 0, 0)),
        ("failed", 1, Account(0, 0, 1)),
    ],
)
def test_an_account_has_open_and_recent_batches(status: str, age: int, expected: Account) -> None:
    batch = {"object": "batch", "status": status, "created_at": 0}
    record = {"object": batch, "sizes": {"outputs": 3, "errors": 4}}
    assert compute_account([record], age) == expected


@pytest.mark.parametrize(("places", "share"), [(0, 0), (1, 1), (2, 1), (3, 2), (8, 6), (1000, 750)])
def test_others_have_places_in_a_queue(places: int, share: int) -> None:
    assert compute_share(places) == share


def test_places_are_left_to_other_callers() -> None:
    places = PlaceCounter()

    def enter(caller: str) -> str:
        CALLER.set(caller)
        try:
            places.enter(4, lambda count: BusyError(count, 5))
        except BusyError as error:
            return type(error).__name__
        return ""

    assert [contextvars.copy_context().run(enter, caller) for caller in "aaaabc"] == [
        *("", "", "", "CallerBusyError"),
        *("", "BusyError"),
    ]

    def leave(caller: str) -> None:
        CALLER.set(caller)
        places.leave()

    contextvars.copy_context().run(leave, "a")
    assert contextvars.copy_context().run(enter, "c") == ""
    # Without tokens all are one caller, who has all places
    alone = PlaceCounter()
    for _ in range(4):
        alone.enter(4, lambda count: BusyError(count, 5))


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (f"infer {THEIRS}\n", [THEIRS]),
        ("", []),
        ("# none\n", []),
        ("wrong line of words\n", [MINE]),
        (None, [MINE]),
    ],
)
def test_tokens_are_read_again(tmp_path: Path, text: str | None, valid: list[str]) -> None:
    now, path = [0.0], tmp_path / "tokens"
    path.write_text(f"infer {MINE}\n")
    path.chmod(0o600)
    tokens = TokenFile(path, lambda: now[0])
    path.unlink() if text is None else path.write_text(text + "# longer\n" if text else "")
    assert list(tokens) == [MINE]
    now[0] = 1.0
    assert list(tokens) == valid and tokens


POISONED = json.dumps({"revision": 1, "value": {"owner": "", "object": None}}).encode()


@pytest.mark.parametrize(
    "change",
    [
        lambda _: b"",
        lambda _: b"no JSON, but SECRET",
        lambda _: b'{"SECRET": 1, "SECRET": 2}',
        lambda _: POISONED,
        lambda raw: re.sub(rb'("expires_at": )\d+', rb"\g<1>" + b"9" * 900, raw),
        lambda raw: re.sub(rb'("expires_at": )\d+', rb"\g<1>" + b"9" * 200, raw),
        lambda raw: raw.replace(b'"bytes"', b'"SECRET"'),
        lambda raw: raw.replace(b'"revision": 1', b'"revision": "1"'),
        lambda raw: re.sub(rb'("pieces": ).*?\]\]', rb"\1[5]", raw),
        lambda raw: raw.replace(b"file-", b"file-f"),
    ],
)
def test_a_record_that_cannot_be_read_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Callable[[bytes], bytes]
) -> None:
    async def scene() -> None:
        role = BatchRole(tmp_path)
        async with role.serving() as ask:
            ids = [(await upload(ask, MINE))[1]["id"] for _ in range(4)]
            for name in ids[1:3]:
                (path,) = tmp_path.rglob(f"{name}.json")
                path.write_bytes(change(path.read_bytes()))
            for token in (MINE, ADMIN, MINE):
                _, answer, _ = await ask(token, "GET", "/v1/files?order=asc")
                assert [one["id"] for one in answer["data"]] == [ids[0], ids[3]]
            assert (await upload(ask, MINE))[0] == 200
            assert (await ask(MINE, "GET", f"/v1/files/{ids[1]}"))[0] == 404
            (path,) = tmp_path.rglob(f"{ids[3]}.json")
            path.write_bytes(re.sub(rb'("expires_at": )\d+', rb"\1 1", path.read_bytes()))
            await remove_expired(role.store)
            assert not path.exists()
            for token, name, status in (
                (THEIRS, ids[1], 404),
                (MINE, ids[1], 200),
                (MINE, ids[1], 404),
                (ADMIN, ids[2], 200),
            ):
                assert (await ask(token, "DELETE", f"/v1/files/{name}"))[0] == status
            lines = [entry for entry in caplog.records if entry.msg == "a record is left out"]
            assert sorted(vars(entry)["id"] for entry in lines) == sorted(ids[1:3])
            assert "SECRET" not in str([vars(entry) for entry in caplog.records])

    play(scene)


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/v1/files", {"X-Request-Id": "SECRET"}),
        ("GET", "/v1/files", {"X-Request-Id": "0123456789abcdef"}),
        ("GET", "/v1/files?after=SECRET", {"User-Agent": "SECRET"}),
        ("GET", "/nope/SECRET", {}),
        ("GET", "/v2/SECRET", {}),
        ("GET", "/api/SECRET", {}),
        ("GET", "/v1/files/SECRET", {"Aimage-Node": "SECRET"}),
    ],
)
def test_the_log_has_no_text_of_a_request(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    method: str,
    path: str,
    headers: dict[str, str],
) -> None:
    async def scene() -> None:
        async with BatchRole(tmp_path).serving() as ask:
            _, _, answer_headers = await ask(MINE, method, path, headers=headers)
        stated_id = headers.get("X-Request-Id")
        assert stated_id in (None, answer_headers["X-Request-Id"])
        (line,) = [vars(entry) for entry in caplog.records if entry.msg == "request"]
        assert line["id"] != stated_id
        assert "SECRET" not in str([vars(entry) for entry in caplog.records])

    caplog.set_level(logging.DEBUG, "aimage")
    play(scene)
