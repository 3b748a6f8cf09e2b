"""Run batches: a server calls its own routes, for a few requests at the same time.

A batch belongs to the server that wrote its record last. Another server continues it if the record
has not changed for ``STALE`` seconds by its own clock. Responses so far are in the stored pieces.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import tenacity
from aiohttp import web

from clowder_aimage.api.batch.account import compute_account
from clowder_aimage.api.batch.line_check import LineCheck, read_custom_ids
from clowder_aimage.api.batch.store import BatchStore, ChangedRecordError, Record, make_id
from clowder_aimage.api.batch.stored_file import (
    OUTPUT,
    add_chunk,
    add_file,
    iter_chunk_names,
    iter_groups,
    iter_lines,
    remove_expired,
)
from clowder_aimage.api.request_body import IGNORED
from clowder_aimage.engine.batch_line import MAX_LINE, OVER, BatchRequest, read_line
from clowder_aimage.engine.executor import run_io
from clowder_aimage.errors import (
    AImageError,
    FormatError,
    NetworkError,
    NoSpaceError,
    StoreError,
)
from clowder_aimage.http.api_error import ApiError
from clowder_aimage.http.background import end_tasks
from clowder_aimage.http.caller import find_owner_scope
from clowder_aimage.http.caller_ledger import CallerLedger
from clowder_aimage.http.local_call import LocalCalls, get_body
from clowder_aimage.http.local_request import LocalRequest
from clowder_aimage.http.log import list_frames
from clowder_aimage.oci import read_json

MAX_ANSWER = 1 << 30  # bytes of a response
# Seconds between two records of a running batch
FLUSH_INTERVAL = 2.0
# Seconds without a new record after which another server continues
STALE = 15.0
# Seconds between two removals of expired files
SWEEP = 600.0
# Batches of an owner that run at the same time
_AT_ONCE = 4
# Seconds before a request is repeated because the server was busy
PAUSE = 1.0
_BUSY = (429, 503)
# The members of a batch that name the files of its answers
_MEMBERS = {"outputs": "output_file_id", "errors": "error_file_id"}
_INTERNAL = "the server failed; see its log"
_log = logging.getLogger("aimage.batch")


class _StoppedBatchError(Exception):
    """The batch belongs to another server now."""


class _RevokedTokenError(AImageError):
    """The token of a batch is not valid any more."""


class _LostRequestError(Exception):
    """A request has no response, because of the exception that is the cause."""


class BatchRunner:
    """Runs the batches in ``store`` by ``calls``; ``parallel`` returns their number at once.

    ``tokens`` are those that are valid, ``ledger`` has the bounds of their batches. Set
    ``has_news`` to begin new batches at once.
    """

    def __init__(
        self,
        store: BatchStore,
        calls: LocalCalls,
        parallel: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        *,
        tokens: Mapping[str, str] | None = None,
        ledger: CallerLedger | None = None,
    ) -> None:
        self.store, self.calls, self.parallel = store, calls, parallel
        self.tokens, self.ledger = {} if tokens is None else tokens, ledger or CallerLedger()
        self.id = secrets.token_hex(8)
        self.has_news = asyncio.Event()
        self._clock = clock
        # Revisions of the batches of other servers, and the time of the last change
        self._foreign: dict[str, tuple[int, float]] = {}
        self._ended: set[str] = set()
        self._runs: dict[str, BatchRun] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Begin the batches that no server runs, until it is cancelled."""
        swept = self._clock()
        try:
            while True:
                try:
                    await self._begin_free()
                    if self._clock() - swept > SWEEP:
                        swept = self._clock()
                        await remove_expired(self.store)
                except (AImageError, OSError, TimeoutError) as error:
                    _log.debug("batches cannot be read", extra={"reason": str(error)})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FLUSH_INTERVAL):
                        await self.has_news.wait()
                self.has_news.clear()
        finally:
            tasks = list(self._tasks.values())
            await end_tasks(*tasks)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _begin_free(self) -> None:
        keys = [key for key in await self.store.list_keys() if key[1].startswith("batch_")]
        self._ended &= {name for _, name in keys}
        for owner, name in keys:
            if name in self._ended or name in self._tasks or self._count(owner) >= _AT_ONCE:
                continue
            if (stored := await self.store.read(owner, name)) is None:
                continue
            record, revision = stored
            if record["object"]["status"] in OVER:
                self._ended.add(name)
            elif self._is_free(name, record, revision):
                self._begin(name, record, revision)

    def _count(self, owner: str) -> int:
        return sum(run.record["owner"] == owner for run in self._runs.values())

    def share(self) -> int:
        """Return the number of requests of a batch at once, so that all batches have their turn."""
        return max(1, self.parallel() // max(1, len(self._runs)))

    def _is_free(self, name: str, record: Record, revision: int) -> bool:
        if record["runner"] is None:
            return True
        previous = self._foreign.get(name)
        if previous is None or previous[0] != revision:
            self._foreign[name] = revision, self._clock()
            return False
        return self._clock() - previous[1] >= STALE

    def _begin(self, name: str, record: Record, revision: int) -> None:
        run = BatchRun(self, record, revision)
        self._runs[name] = run
        task = self._tasks[name] = asyncio.create_task(run.serve())

        def forget(_: object) -> None:
            del self._tasks[name], self._runs[name]
            self.has_news.set()

        task.add_done_callback(forget)


@dataclass(slots=True)
class BatchRun:
    """The work on one batch, whose record had ``revision``."""

    runner: BatchRunner
    record: Record
    revision: int
    done: set[str] = field(default_factory=set)
    # Bytes of its owner in the store
    stored: int = 0
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    unsaved: dict[str, bytearray] = field(
        default_factory=lambda: {"outputs": bytearray(), "errors": bytearray()}
    )

    @property
    def batch(self) -> dict[str, Any]:
        """The batch object of the API."""
        batch_object: dict[str, Any] = self.record["object"]
        return batch_object

    async def serve(self) -> None:
        """Run the batch to its end. It is continued later if the store cannot be used."""
        try:
            self.record["runner"] = self.runner.id
            await self._save()
            try:
                await self._run()
            except Exception as error:
                if isinstance(error, _StoppedBatchError) or _is_passing(error):
                    raise
                await self._fail(error)
        except _StoppedBatchError:
            pass
        except (AImageError, OSError) as error:
            _log.warning("a batch waits", extra={"batch": self.batch["id"], "reason": str(error)})
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                # Another server may begin at once
                self.record["runner"] = None
                await asyncio.wait_for(self._flush(), 2)
            raise

    async def _run(self) -> None:
        if not (reason := await self._find_reason()):
            await self.runner.store.check_space()
            if self.batch["status"] == "validating" and not await self._validate():
                return
        await self._restore_progress()
        await self._finish(await self._answer_all(reason))

    async def _find_reason(self) -> str:
        """Return the reason if the batch must end now, or ""."""
        if self.batch["status"] == "cancelling":
            return "cancelled"
        is_late = await self.runner.store.read_clock() >= self.batch["expires_at"]
        return "expired" if is_late else ""

    async def _fail(self, error: Exception) -> None:
        """End the batch because of an error; its answers until then are kept if possible."""
        message = error.message if isinstance(error, AImageError) else _INTERNAL
        cause = error.__cause__ or error
        facts = {"batch": self.batch["id"], "kind": type(cause).__name__, "at": list_frames(cause)}
        _log.error("a batch failed", extra=facts)
        entry = {"code": "batch_failed", "line": None, "message": message, "param": None}
        self.batch["errors"] = {"object": "list", "data": [entry]}
        reason = "cancelled" if self.batch["status"] == "cancelling" else "failed"
        try:
            await self._finish(reason)
        except Exception as again:
            if isinstance(again, _StoppedBatchError) or _is_passing(again):
                raise
            await self._end(reason)
            await self._drop_answers()

    async def _drop_answers(self) -> None:
        """Remove the stored answers that have not become a file."""
        for kind, member in _MEMBERS.items():
            if self.batch[member] is None:
                for name in iter_chunk_names(self.record[kind]):
                    await self.runner.store.drop(name)

    @tenacity.retry(retry=tenacity.retry_if_exception_type(ChangedRecordError))
    async def _save(self) -> None:
        """Write the record. Raises _StoppedBatchError if another server has the batch."""
        store, name = self.runner.store, self.batch["id"]
        try:
            self.revision = await store.write(name, self.record, self.revision)
        except ChangedRecordError:
            await self._merge()
            raise

    async def _merge(self) -> None:
        """Merge the changes of other servers. Raises _StoppedBatchError."""
        stored = await self.runner.store.read(self.record["owner"], self.batch["id"])
        if stored is None or stored[0]["runner"] not in (None, self.runner.id):
            raise _StoppedBatchError from None
        record, self.revision = stored
        if record["object"]["status"] == "cancelling":
            self.batch["status"] = "cancelling"
            self.batch["cancelling_at"] = record["object"]["cancelling_at"]

    # -- the input

    async def _validate(self) -> bool:
        """Check all lines before any is sent; return False if the batch has failed."""
        check = LineCheck(self.batch["endpoint"])
        async for lines in iter_groups(self.runner.store, self.record["pieces"], MAX_LINE):
            await run_io(check.check, lines)
            if check.is_over:
                break
        if not check.number:
            check.add("empty_file", "the file has no requests")
        timestamp = int(await self.runner.store.read_clock())
        if check.faults:
            self.batch.update({"status": "failed", "failed_at": timestamp})
            self.batch["errors"] = {"object": "list", "data": check.faults}
        elif self.batch["status"] == "validating":
            self.batch.update({"status": "in_progress", "in_progress_at": timestamp})
        self.batch["request_counts"]["total"] = check.number
        await self._save()
        return not check.faults

    async def _restore_progress(self) -> None:
        """Read the responses that another server stored, and count them."""
        counts = self.batch["request_counts"]
        for kind, count in ("outputs", "completed"), ("errors", "failed"):
            counts[count] = 0
            async for lines in iter_groups(self.runner.store, self.record[kind], MAX_ANSWER):
                self.done.update(await run_io(read_custom_ids, lines))
                counts[count] += len(lines)

    # -- requests

    async def _answer_all(self, reason: str) -> str:
        """Send the requests without an answer, unless there is a reason not to.

        Return the reason if some are not sent, or "".
        """
        if not reason:
            reason = await self._send_all()
        if reason:
            async for request in self._read_unanswered():
                message = f"the batch was {reason} before this request was answered"
                error = {"code": f"batch_{reason}", "message": message}
                self._add(request, _format_line(request, None, error), is_good=False)
        return reason

    async def _send_all(self) -> str:
        tasks, reason = set[asyncio.Task[None]](), ""
        await self._count_bytes()
        flush = asyncio.create_task(self._flush_periodically())
        try:
            async for request in self._read_unanswered():
                reason = await _wait_until_fewer(tasks, flush, self.runner.share())
                if reason:
                    break
                tasks.add(asyncio.create_task(self._answer(request)))
            reason = reason or await _wait_until_fewer(tasks, flush, 1)
        finally:
            await end_tasks(*tasks, flush)
            # asyncio logs errors that nobody reads
            await asyncio.gather(*tasks, flush, return_exceptions=True)
        return reason

    async def _read_unanswered(self) -> AsyncIterator[BatchRequest]:
        async for line in iter_lines(self.runner.store, self.record["pieces"], MAX_LINE):
            request = await run_io(read_line, line)
            if request.custom_id not in self.done:
                yield request

    async def _flush_periodically(self) -> str:
        """Store answers and the record periodically; return the reason if the batch must end."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL)
            await self._flush()
            if reason := await self._find_reason():
                return reason
            # What was answered is stored now, in the reserve
            await self.runner.store.check_space()
            await self._count_bytes()

    async def _count_bytes(self) -> None:
        """Count the bytes that the owner of the batch has stored."""
        records = await self.runner.store.list_records(self.record["owner"])
        self.stored = compute_account(records, 0).bytes

    def _check_bytes(self) -> None:
        """Raise ApiError (413) if the owner has too many bytes with the answers until now."""
        unsaved = sum(map(len, self.unsaved.values()))
        self.runner.ledger.bounds.stored_bytes.check(self.stored + unsaved)

    def _find_scope(self) -> str:
        """Return the scope of the token of the batch. Raises _RevokedTokenError."""
        scope = find_owner_scope(self.runner.tokens, self.record["owner"], self.record["scope"])
        if scope is None:
            raise _RevokedTokenError("the token of this batch is not valid any more")
        return scope

    async def _answer(self, request: BatchRequest) -> None:
        self._check_bytes()
        retryer = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_result(lambda sent: sent[1].status in _BUSY),
            wait=tenacity.wait_fixed(PAUSE),
        )
        try:
            sent: tuple[str, web.StreamResponse] = await retryer(self._send, request)
        except _RevokedTokenError:
            raise
        except Exception as error:
            raise _LostRequestError from error
        name, response = sent
        line = await run_io(_format_answer, request, name, response)
        self._add(request, line, is_good=response.status == 200)

    async def _send(self, request: BatchRequest) -> tuple[str, web.StreamResponse]:
        """Return the id of a request and the response."""
        # A token may be revoked while its batch runs
        scope, name = self._find_scope(), f"{self.batch['id']} {request.custom_id}"
        headers = {
            "Aimage-Priority": "batch",
            "Host": self.record["host"],
            "Idempotency-Key": hashlib.sha256(name.encode()).hexdigest()[:40],
        }
        local_request = LocalRequest(
            "POST",
            request.url,
            scope=scope,
            caller=self.record["caller"],
            headers=headers,
            fields=request.body,
            size=request.size,
        )
        response = await self.runner.calls.send(local_request)
        return local_request["id"], response

    def _add(self, request: BatchRequest, line: bytes, *, is_good: bool) -> None:
        self.unsaved["outputs" if is_good else "errors"] += line
        self.batch["request_counts"]["completed" if is_good else "failed"] += 1
        self.done.add(request.custom_id)

    # -- the output

    async def _flush(self) -> None:
        """Store the answers that are new, then the record that names them."""
        for kind, data in self.unsaved.items():
            if data:
                raw, mark, self.mark = bytes(data), self.mark, secrets.token_hex(16)
                await add_chunk(self.runner.store, self.record[kind], f"{mark}-{kind}", raw)
                # A new mark after a failure: the name could be that of a partial chunk
                self.mark = mark
                del data[: len(raw)]
                self.record["sizes"][kind] += len(raw)
        await self._save()

    async def _finish(self, reason: str) -> None:
        if not reason:
            timestamp = int(await self.runner.store.read_clock())
            self.batch.update({"status": "finalizing", "finalizing_at": timestamp})
        if "files" not in self.record:
            # Stored before the files: a server that continues makes no second ones
            now = await self.runner.store.read_clock()
            self.record["files"] = {kind: make_id("file-", now) for kind in self.unsaved}
        await self._flush()
        for kind, member in _MEMBERS.items():
            if self.record["sizes"][kind]:
                file = await add_file(
                    self.runner.store,
                    self.record[kind],
                    self.record["sizes"][kind],
                    name=f"{self.batch['id']}_{kind.removesuffix('s')}.jsonl",
                    owner=self.record["owner"],
                    purpose=OUTPUT,
                    keep=self.record["keep"],
                    id=self.record["files"][kind],
                )
                self.batch[member] = file["id"]
        await self._end(reason or "completed")

    async def _end(self, status: str) -> None:
        timestamp = int(await self.runner.store.read_clock())
        self.batch.update({"status": status, f"{status}_at": timestamp})
        await self._save()


def _format_answer(request: BatchRequest, name: str, response: web.StreamResponse) -> bytes:
    """Return the line of a request whose id is ``name``. Large answers take a while."""
    value: Any = (body := get_body(response)).decode("utf-8", "replace")
    with contextlib.suppress(FormatError):
        value = read_json(body, "an answer", MAX_ANSWER)
    answer = {"status_code": response.status, "request_id": name, "body": value}
    if listed := response.headers.get(next(iter(IGNORED))):
        answer["ignored"] = [unquote(path) for path in listed.split(", ")]
    return _format_line(request, answer, None)


def _format_line(
    request: BatchRequest, answer: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    line = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": request.custom_id,
        "response": answer,
        "error": error,
    }
    return json.dumps(line).encode() + b"\n"


def _is_passing(error: Exception) -> bool:
    """Return True if the batch can go on later: the store or the fleet cannot be used now."""
    is_refusal = isinstance(error, ApiError) and error.status >= 500
    return is_refusal or isinstance(error, NetworkError | StoreError | NoSpaceError | OSError)


async def _wait_until_fewer(
    tasks: set[asyncio.Task[None]], flush: asyncio.Task[str], limit: int
) -> str:
    """Wait until fewer than ``limit`` tasks run; return the reason if the batch ends, or ""."""
    while len(tasks) >= limit:
        await asyncio.wait({*tasks, flush}, return_when=asyncio.FIRST_COMPLETED)
        if flush.done():
            return flush.result()
        for task in [task for task in tasks if task.done()]:
            tasks.remove(task)
            task.result()
    return ""
