"""OpenAI's API of files and batches (OpenAI, "Files" and "Batch"), over any store of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakValueDictionary

from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from clowder_aimage.api.batch import operation
from clowder_aimage.api.batch.account import Account, compute_account
from clowder_aimage.api.batch.operation import BatchBody, BatchesQuery, FileForm, FilesQuery
from clowder_aimage.api.batch.run import BatchRunner
from clowder_aimage.api.batch.store import ChangedRecordError, Record, make_id
from clowder_aimage.api.batch.stored_file import (
    INPUT,
    LIFETIME,
    FileWriter,
    delete_file,
    iter_chunk_names,
    iter_records,
    read_record,
    remove_unreadable,
)
from clowder_aimage.api.request_body import (
    build_field_error,
    check_fields,
    check_text,
    read_body,
    read_query,
)
from clowder_aimage.engine.batch_line import MAX_FILE, OVER
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.body_stream import build_size_error
from clowder_aimage.http.caller import identify_caller, identify_owner
from clowder_aimage.http.caller_ledger import Hold
from clowder_aimage.http.route import ADMIN, INFER, Route, serve

# Seconds for a file to arrive
TIMEOUT = 600.0
_MAX_FIELD, _MAX_PARTS, _CHUNK = 1024, 10, 1 << 16
_MALFORMED = (HttpProcessingError, ValueError, LookupError, AssertionError, RuntimeWarning)
# Entries of a page
_MAX_PAGE = 1000
# Batches of an owner: of more, the first ones that have ended are removed
_MAX_BATCHES = 1000


class BatchRoutes:
    """The handlers.

    Files and batches are those of a token; without tokens they are those of all clients. An
    administrator sees those of others, and may cancel and delete them.
    """

    def __init__(self, runner: BatchRunner) -> None:
        self._runner, self._store = runner, runner.store
        self._ledger, self._bounds = runner.ledger, runner.ledger.bounds
        # One admission or list of an owner at a time: all of its records are read
        self._locks = WeakValueDictionary[str, asyncio.Lock]()

    def build_routes(self) -> list[Route]:
        """Return the routes."""
        return [
            serve(operation.UPLOAD, self._upload),
            serve(operation.LIST_FILES, self._list_files),
            serve(operation.SHOW_FILE, self._show_record),
            serve(operation.DELETE_FILE, self._delete),
            serve(operation.READ_FILE, self._send_content),
            serve(operation.CREATE_BATCH, self._create),
            serve(operation.LIST_BATCHES, self._list_batches),
            serve(operation.SHOW_BATCH, self._show_record),
            serve(operation.CANCEL_BATCH, self._cancel),
        ]

    def _lock(self, owner: str) -> asyncio.Lock:
        return self._locks.setdefault(owner, asyncio.Lock())

    async def _read_account(self, owner: str) -> Account:
        records = await self._store.list_records(owner)
        return compute_account(records, await self._store.read_clock())

    # -- files

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        owner = identify_owner(request)
        await self._store.check_space()
        async with self._lock(owner):
            account = await self._read_account(owner)
        with (
            self._ledger.hold(self._bounds.files, owner, account.files) as files,
            self._ledger.hold(self._bounds.stored_bytes, owner, account.bytes) as stored_bytes,
        ):
            files.add(1)
            return await self._store_upload(request, owner, stored_bytes)

    async def _store_upload(
        self, request: web.Request, owner: str, stored_bytes: Hold
    ) -> web.StreamResponse:
        if request.content_type != "multipart/form-data":
            message = "expected multipart/form-data with file and purpose"
            raise ApiError(415, message, code="unsupported_media_type")
        if (request.content_length or 0) > MAX_FILE + _CHUNK:
            raise build_size_error()
        writer = FileWriter(self._store)
        try:
            async with asyncio.timeout(TIMEOUT):
                name, form = await _read_form(request, writer, stored_bytes)
            async with self._lock(owner):
                # Other uploads may have ended since this one began.
                account = await self._read_account(owner)
                self._bounds.files.check(account.files + 1)
                self._bounds.stored_bytes.check(account.bytes + stored_bytes.amount)
                file = await writer.end(name, owner, keep=form.seconds)
        except BaseException as error:
            await asyncio.shield(writer.abandon())
            if isinstance(error, TimeoutError):
                raise ApiError(408, "timed out reading the file", code="timeout") from None
            raise
        return web.json_response(file)

    async def _list_files(self, request: web.Request) -> web.StreamResponse:
        query = read_query(request, FilesQuery)
        return await self._list(request, "file-", query)

    async def _list_batches(self, request: web.Request) -> web.StreamResponse:
        return await self._list(request, "batch_", read_query(request, BatchesQuery))

    async def _list(
        self, request: web.Request, prefix: str, query: FilesQuery | BatchesQuery
    ) -> web.StreamResponse:
        owner, is_reversed = identify_owner(request), True
        purposes: tuple[str, ...] = ()
        if isinstance(query, FilesQuery):
            is_reversed = query.order == "desc"
            purposes = (query.purpose,) if query.purpose else ()
        async with self._lock(owner):
            records = iter_records(
                self._store, prefix, None if _is_admin(request) else owner, is_reversed=is_reversed
            )
            entries, has_more = await _read_page(records, query.after, query.limit, purposes)
        shown = [_show(record, owner) for record in entries]
        ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
        ends = ends or {"first_id": None, "last_id": None}
        return web.json_response({"object": "list", "data": shown, **ends, "has_more": has_more})

    async def _read_record(
        self, request: web.Request, *, may_be_admin: bool = True
    ) -> tuple[Record, int]:
        kind = "batch" if request.path.startswith("/v1/batches/") else "file"
        return await read_record(
            self._store,
            request.match_info["id"],
            identify_owner(request),
            kind,
            is_admin=may_be_admin and _is_admin(request),
        )

    async def _show_record(self, request: web.Request) -> web.StreamResponse:
        record, _ = await self._read_record(request)
        return web.json_response(_show(record, identify_owner(request)))

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        name, owner = request.match_info["id"], identify_owner(request)
        answer = {"id": name, "object": "file", "deleted": True}
        try:
            record, _ = await self._read_record(request)
        except ApiError:
            if await remove_unreadable(self._store, name, None if _is_admin(request) else owner):
                return web.json_response(answer)
            raise
        for other_record in await self._store.list_records(record["owner"]):
            entry = other_record["object"]
            is_open = entry["object"] == "batch" and entry["status"] not in OVER
            if is_open and entry["input_file_id"] == record["object"]["id"]:
                message = f"the batch {entry['id']} needs the file"
                raise ApiError(409, message, code="file_in_use")
        await delete_file(self._store, record)
        return web.json_response(answer)

    async def _send_content(self, request: web.Request) -> web.StreamResponse:
        record, _ = await self._read_record(request, may_be_admin=False)
        answer = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        answer.content_length = record["object"]["bytes"]
        chunk_names = [*iter_chunk_names(record["pieces"])]
        # Read before the status is sent, so that a missing chunk is an error
        first_chunk = await self._store.get(chunk_names[0]) if chunk_names else b""
        await answer.prepare(request)
        await answer.write(first_chunk)
        for name in chunk_names[1:]:
            await answer.write(await self._store.get(name))
        await answer.write_eof()
        return answer

    # -- batches

    async def _create(self, request: web.Request) -> web.StreamResponse:
        body = await read_body(request, BatchBody)
        owner = identify_owner(request)
        async with self._lock(owner):
            # A refusal because of the bounds costs least
            await self._admit(owner)
            batch = await self._begin(request, body, owner)
        self._runner.has_news.set()
        return web.json_response(batch)

    async def _begin(self, request: web.Request, body: BatchBody, owner: str) -> dict[str, Any]:
        """Store a new batch. Raises ApiError."""
        file, _ = await read_record(self._store, body.input_file_id, owner, param="input_file_id")
        if file["object"]["purpose"] != INPUT:
            raise build_field_error("input_file_id", f"must be a file with the purpose {INPUT}")
        await self._store.check_space()
        batch = _new_batch(body, await self._store.read_clock())
        expiry = body.output_expires_after
        record = {
            "owner": owner,
            "object": batch,
            "scope": request.get("scope") or INFER,
            "caller": identify_caller(request),
            "host": request.host,
            "keep": expiry.seconds if expiry else LIFETIME,
            "pieces": file["pieces"],
            "runner": None,
            "outputs": [],
            "errors": [],
            "sizes": {"outputs": 0, "errors": 0},
        }
        await self._store.write(batch["id"], record, 0)
        return batch

    async def _admit(self, owner: str) -> None:
        """Make room for a batch of an owner. Raises ApiError (413, 429)."""
        account = await self._read_account(owner)
        self._bounds.batches.check(account.batches + 1)
        self._bounds.stored_bytes.check(account.bytes)
        ended = [
            record["object"]["id"]
            for record in await self._store.list_records(owner)
            if record["object"]["object"] == "batch" and record["object"]["status"] in OVER
        ]
        for name in ended[: max(0, len(ended) - _MAX_BATCHES + 1)]:
            await self._store.remove(owner, name)

    async def _cancel(self, request: web.Request) -> web.StreamResponse:
        while True:
            record, revision = await self._read_record(request)
            batch = record["object"]
            if batch["status"] in (*OVER, "finalizing"):
                message = f"the batch is {batch['status']} and cannot be cancelled"
                raise ApiError(409, message, code="batch_is_over")
            if batch["status"] != "cancelling":
                batch |= {
                    "status": "cancelling",
                    "cancelling_at": int(await self._store.read_clock()),
                }
                try:
                    await self._store.write(batch["id"], record, revision)
                except ChangedRecordError:
                    continue
            return web.json_response(_show(record, identify_owner(request)))


def _is_admin(request: web.Request) -> bool:
    return bool(request.get("scope") == ADMIN)


def _show(record: Record, owner: str) -> dict[str, Any]:
    """Return the object of a record, with its owner if that is another one."""
    entry: dict[str, Any] = record["object"]
    return entry if record["owner"] == owner else {**entry, "owner": record["owner"]}


async def _read_page(
    records: AsyncIterator[Record], after: str | None, limit: int, purposes: tuple[str, ...]
) -> tuple[list[Record], bool]:
    """Return the records of a page, and True if there are more. Raises ApiError."""
    page, is_begun = list[Record](), after is None
    async for record in records:
        entry = record["object"]
        if not is_begun:
            is_begun = entry["id"] == after
        elif not purposes or entry["purpose"] in purposes:
            if len(page) >= min(limit, _MAX_PAGE):
                return page, True
            page.append(record)
    if not is_begun:
        raise ApiError(404, "after must be the id of an entry", code="not_found", param="after")
    return page, False


async def _read_form(
    request: web.Request, writer: FileWriter, stored_bytes: Hold
) -> tuple[str, FileForm]:
    """Store the file of a form; return its name and the fields. Raises ApiError."""
    name, fields = "", dict[str, str | bytes]()
    try:
        reader = await request.multipart()
        for _ in range(_MAX_PARTS):
            field = await reader.next()
            if field is None:
                break
            if not isinstance(field, BodyPartReader) or not field.name:
                raise ValueError
            if field.name in fields:
                raise build_field_error(field.name[:60], "is given twice")
            if field.name == "file":
                name = check_text((field.filename or "file.jsonl")[:200], "file")
                await _store_file(field, writer, stored_bytes)
                # Its bytes are in the store
                fields["file"] = b""
            else:
                fields[field.name] = await _read_text(field, field.name[:60])
    except _MALFORMED:
        raise ApiError(400, "the form is malformed", code="invalid_body") from None
    return name, check_fields(fields, FileForm, is_form=True)


async def _read_text(field: BodyPartReader, name: str) -> str:
    raw = b""
    while piece := await field.read_chunk(_MAX_FIELD):
        raw += piece
        if len(raw) > _MAX_FIELD:
            raise build_field_error(name, f"has more than {_MAX_FIELD} bytes")
    return raw.decode()


async def _store_file(file: BodyPartReader, writer: FileWriter, stored_bytes: Hold) -> None:
    while chunk := await file.read_chunk(_CHUNK):
        if writer.size + len(chunk) > MAX_FILE:
            raise ApiError(413, "the file is too large", code="too_large", param="file")
        stored_bytes.add(len(chunk))
        await writer.write(bytes(chunk))


def _new_batch(body: BatchBody, timestamp: float) -> dict[str, Any]:
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
    return {
        "id": make_id("batch_", timestamp),
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": int(timestamp),
        **{f"{name}_at": None for name in (*times, "cancelled")},
        "expires_at": int(timestamp) + 86400,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
    }
