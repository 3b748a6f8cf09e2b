"""OpenAI's API of files and batches (OpenAI, "Files" and "Batch"), over any store of them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable
from typing import Any

from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError

from clowder_aimage.api.batch import operation
from clowder_aimage.api.batch.operation import (
    ANCHOR,
    MIN_LIFETIME,
    SECONDS,
    BatchBody,
    BatchesQuery,
    FilesQuery,
)
from clowder_aimage.api.batch.run import BatchRunner
from clowder_aimage.api.batch.store import ChangedRecordError, Record
from clowder_aimage.api.batch.stored_file import (
    INPUT,
    LIFETIME,
    MAX_FILES,
    FileWriter,
    delete_file,
    iter_chunk_names,
    list_records,
    read_record,
)
from clowder_aimage.api.request_body import (
    build_field_error,
    check_fields,
    check_ignored,
    check_text,
    is_strict,
    read_object,
    read_query,
)
from clowder_aimage.engine.batch_line import MAX_FILE, OVER
from clowder_aimage.http.access import parse_token
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.body_stream import build_size_error
from clowder_aimage.http.route import INFER, Route, serve

# Seconds for a file to arrive
TIMEOUT = 600.0
_MAX_FIELD, _MAX_PARTS, _CHUNK = 1024, 10, 1 << 16
_MALFORMED = (HttpProcessingError, ValueError, LookupError, AssertionError, RuntimeWarning)
_FIELDS = ("purpose", ANCHOR, SECONDS)


class BatchRoutes:
    """The handlers. ``caller`` returns an opaque name of a client, for fairness among them.

    Files and batches are those of a token; without tokens they are those of all clients.
    """

    def __init__(self, runner: BatchRunner, caller: Callable[[web.Request], str]) -> None:
        self._runner, self._store, self._caller = runner, runner.store, caller

    def build_routes(self) -> list[Route]:
        """Return the routes."""
        return [
            serve(operation.UPLOAD, self._upload),
            serve(operation.LIST_FILES, self._list_files),
            serve(operation.SHOW_FILE, self._show_file),
            serve(operation.DELETE_FILE, self._delete),
            serve(operation.READ_FILE, self._send_content),
            serve(operation.CREATE_BATCH, self._create),
            serve(operation.LIST_BATCHES, self._list_batches),
            serve(operation.SHOW_BATCH, self._show_batch),
            serve(operation.CANCEL_BATCH, self._cancel),
        ]

    # -- files

    async def _upload(self, request: web.Request) -> web.StreamResponse:
        owner = _identify_owner(request)
        if len(await list_records(self._store, "file-", owner)) >= MAX_FILES:
            message = f"there are {MAX_FILES} files; delete some"
            raise ApiError(409, message, code="too_many_files")
        if request.content_type != "multipart/form-data":
            message = "expected multipart/form-data with file and purpose"
            raise ApiError(415, message, code="unsupported_media_type")
        if (request.content_length or 0) > MAX_FILE + _CHUNK:
            raise build_size_error()
        writer = FileWriter(self._store)
        try:
            async with asyncio.timeout(TIMEOUT):
                name, fields = await _read_form(request, writer)
            keep = _parse_expiry(fields)
            if fields.get("purpose") != INPUT:
                raise build_field_error("purpose", f"must be {INPUT}", "unsupported_value")
            file = await writer.end(name, owner, keep=keep)
        except BaseException as error:
            await asyncio.shield(writer.abandon())
            if isinstance(error, TimeoutError):
                raise ApiError(408, "timed out reading the file", code="timeout") from None
            raise
        return web.json_response(file)

    async def _list_files(self, request: web.Request) -> web.StreamResponse:
        stored = await list_records(self._store, "file-", _identify_owner(request))
        query = read_query(request, FilesQuery)
        files = [
            record["object"]
            for record in stored
            if query.purpose in (None, record["object"]["purpose"])
        ]
        if query.order == "asc":
            files.reverse()
        return _paginate(files, query)

    async def _read_record(self, request: web.Request) -> tuple[Record, int]:
        kind = "batch" if request.path.startswith("/v1/batches/") else "file"
        return await read_record(
            self._store, request.match_info["id"], _identify_owner(request), kind
        )

    async def _show_file(self, request: web.Request) -> web.StreamResponse:
        return web.json_response((await self._read_record(request))[0]["object"])

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        record, _ = await self._read_record(request)
        for other_record in await list_records(self._store, "batch_", record["owner"]):
            is_over = other_record["object"]["status"] in OVER
            if other_record["object"]["input_file_id"] == record["object"]["id"] and not is_over:
                message = f"the batch {other_record['object']['id']} needs the file"
                raise ApiError(409, message, code="file_in_use")
        await delete_file(self._store, record)
        answer = {"id": record["object"]["id"], "object": "file", "deleted": True}
        return web.json_response(answer)

    async def _send_content(self, request: web.Request) -> web.StreamResponse:
        record, _ = await self._read_record(request)
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
        fields = read_object(await request.read())
        body = check_ignored(check_fields(fields, BatchBody), strict=is_strict(request))
        owner = _identify_owner(request)
        file, _ = await read_record(self._store, body.input_file_id, owner, param="input_file_id")
        if file["object"]["purpose"] != INPUT:
            raise build_field_error("input_file_id", f"must be a file with the purpose {INPUT}")
        timestamp = int(await self._store.read_clock())
        batch = _new_batch(body, timestamp)
        expiry = body.output_expires_after
        record = {
            "owner": owner,
            "object": batch,
            "scope": request.get("scope") or INFER,
            "caller": self._caller(request),
            "host": request.host,
            "keep": expiry.seconds if expiry else LIFETIME,
            "pieces": file["pieces"],
            "runner": None,
            "outputs": [],
            "errors": [],
            "sizes": {"outputs": 0, "errors": 0},
        }
        await self._store.write(batch["id"], record, 0)
        self._runner.has_news.set()
        return web.json_response(batch, headers=body.headers)

    async def _list_batches(self, request: web.Request) -> web.StreamResponse:
        stored = await list_records(self._store, "batch_", _identify_owner(request))
        return _paginate([record["object"] for record in stored], read_query(request, BatchesQuery))

    async def _show_batch(self, request: web.Request) -> web.StreamResponse:
        return web.json_response((await self._read_record(request))[0]["object"])

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
            return web.json_response(batch)


def _identify_owner(request: web.Request) -> str:
    """Return an opaque name of the token of a request; "" if this server has no tokens."""
    token = parse_token(request.headers.get("Authorization", ""))
    return hashlib.sha256(token.encode()).hexdigest()[:16] if token and _has_tokens(request) else ""


def _has_tokens(request: web.Request) -> bool:
    return bool(request.app.get("has_tokens"))


async def _read_form(request: web.Request, writer: FileWriter) -> tuple[str, dict[str, str]]:
    """Store the file of a form; return its name and the other fields. Raises ApiError."""
    name, fields = "", dict[str, str]()
    try:
        reader = await request.multipart()
        for _ in range(_MAX_PARTS):
            field = await reader.next()
            if field is None:
                break
            if not isinstance(field, BodyPartReader) or not field.name:
                raise ValueError
            if field.name == "file":
                if name:
                    raise build_field_error("file", "is given twice")
                name = check_text((field.filename or "file.jsonl")[:200], "file")
                await _store_file(field, writer)
                continue
            if field.name not in _FIELDS:
                raise build_field_error(field.name[:60], "is not supported", "unknown_parameter")
            fields[field.name] = bytes(await field.read_chunk(_MAX_FIELD)).decode()
    except _MALFORMED:
        raise ApiError(400, "the form is malformed", code="invalid_body") from None
    if not name:
        message = "missing required field: file"
        raise ApiError(400, message, code="missing_required_parameter", param="file")
    return name, fields


async def _store_file(file: BodyPartReader, writer: FileWriter) -> None:
    while chunk := await file.read_chunk(_CHUNK):
        if writer.size + len(chunk) > MAX_FILE:
            raise ApiError(413, "the file is too large", code="too_large", param="file")
        await writer.write(bytes(chunk))


def _parse_expiry(fields: dict[str, str]) -> int:
    """Return the seconds that a file is kept. Raises ApiError."""
    if fields.get(ANCHOR, "created_at") != "created_at":
        raise build_field_error("expires_after", "must have the anchor created_at")
    seconds = fields.get(SECONDS, str(LIFETIME))
    if not seconds.isdecimal() or not MIN_LIFETIME <= int(seconds[:12]) <= LIFETIME:
        raise build_field_error("expires_after", f"must have {MIN_LIFETIME} to {LIFETIME} seconds")
    return int(seconds)


def _paginate(entries: list[dict[str, Any]], query: FilesQuery | BatchesQuery) -> web.Response:
    """Return the page of a list that a query selects. Raises ApiError."""
    if query.after is not None:
        places = [index for index, entry in enumerate(entries) if entry["id"] == query.after]
        if not places:
            raise ApiError(404, "after must be the id of an entry", code="not_found", param="after")
        entries = entries[places[0] + 1 :]
    shown = entries[: query.limit]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {}
    ends = ends or {"first_id": None, "last_id": None}
    body = {"object": "list", "data": shown, **ends, "has_more": len(entries) > len(shown)}
    return web.json_response(body)


def _new_batch(body: BatchBody, timestamp: int) -> dict[str, Any]:
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling")
    return {
        "id": f"batch_{secrets.token_hex(12)}",
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": body.input_file_id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": timestamp,
        **{f"{name}_at": None for name in (*times, "cancelled")},
        "expires_at": timestamp + 86400,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "metadata": body.metadata,
    }
