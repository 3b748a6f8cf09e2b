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
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import tenacity
from aiohttp import web

from clowder_aimage.api.batch.store import BatchStore, ChangedRecordError, Record
from clowder_aimage.api.batch.stored_file import (
    OUTPUT,
    add_file,
    add_piece,
    lines,
    remove_expired,
)
from clowder_aimage.engine.batch_line import MAX_LINES, OVER, BatchRequest, read_line
from clowder_aimage.errors import AImageError, FormatError
from clowder_aimage.http.local_call import LocalCalls, body_of
from clowder_aimage.http.local_request import LocalRequest
from clowder_aimage.oci import read_json

MAX_ANSWER = 1 << 30  # bytes of a response
MAX_ERRORS = 20  # malformed lines that are named
BEAT = 2.0  # seconds between two records of a batch that is being run
STALE = 15.0  # seconds without a record after which another server goes on
SWEEP = 600.0  # seconds between two looks for what has expired
PAUSE = 1.0  # seconds before a request is repeated because the server was busy
_BUSY = (429, 503)
_log = logging.getLogger("aimage.batch")


class _StoppedBatchError(Exception):
    """The batch was cancelled, has expired, or belongs to another server now."""


class BatchRunner:
    """Runs the batches in ``store`` by ``calls``; ``parallel`` returns how many at once.

    ``look`` ends the wait for new batches.
    """

    def __init__(
        self,
        store: BatchStore,
        calls: LocalCalls,
        parallel: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store, self.calls, self.parallel = store, calls, parallel
        self.id = secrets.token_hex(8)
        self.news = asyncio.Event()
        self._clock = clock
        self._seen: dict[str, tuple[int, float]] = {}  # revisions of others' batches, since when
        self._over: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Begin the batches that nobody runs, for ever."""
        swept = self._clock()
        try:
            while True:
                try:
                    await self._look()
                    if self._clock() - swept > SWEEP:
                        swept = self._clock()
                        await remove_expired(self.store)
                except (AImageError, OSError, TimeoutError) as error:
                    _log.debug("batches cannot be read", extra={"reason": str(error)})
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(BEAT):
                        await self.news.wait()
                self.news.clear()
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        for each in await self.store.ids():
            if not each.startswith("batch_") or each in self._over or each in self._tasks:
                continue
            if (found := await self.store.read(each)) is None:
                continue
            record, revision = found
            if record["object"]["status"] in OVER:
                self._over.add(each)
            elif self._is_free(each, record, revision):
                self._begin(each, record, revision)

    def _is_free(self, name: str, record: Record, revision: int) -> bool:
        if record["runner"] is None:
            return True
        known = self._seen.get(name)
        if known is None or known[0] != revision:
            self._seen[name] = revision, self._clock()
            return False
        return self._clock() - known[1] >= STALE

    def _begin(self, name: str, record: Record, revision: int) -> None:
        run = BatchRun(self, record, revision)
        task = self._tasks[name] = asyncio.create_task(run.serve())

        def ended(_: object) -> None:
            del self._tasks[name]
            self.news.set()

        task.add_done_callback(ended)


@dataclass(slots=True)
class BatchRun:
    """The work on one batch, whose record had ``revision``."""

    runner: BatchRunner
    record: Record
    revision: int
    done: set[str] = field(default_factory=set)
    mark: str = field(default_factory=lambda: secrets.token_hex(16))
    fresh: dict[str, bytearray] = field(
        default_factory=lambda: {"outputs": bytearray(), "errors": bytearray()}
    )

    @property
    def batch(self) -> dict[str, Any]:
        """The batch object of the API."""
        found: dict[str, Any] = self.record["object"]
        return found

    async def serve(self) -> None:
        """Run the batch to its end; it is begun again by another server if this one fails."""
        try:
            self.record["runner"] = self.runner.id
            await self._save()
            if self.batch["status"] == "validating" and not await self._validate():
                return
            await self._remember()
            reason = await self._answer_all()
            await self._finish(reason)
        except _StoppedBatchError:
            pass
        except (AImageError, OSError, TimeoutError) as error:
            _log.warning("a batch waits", extra={"batch": self.batch["id"], "reason": str(error)})
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                self.record["runner"] = None  # another server may begin at once
                await asyncio.wait_for(self._flush(), 2)
            raise

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
        """Read what was written by others. Raises _StoppedBatchError."""
        found = await self.runner.store.read(self.batch["id"])
        if found is None or found[0]["runner"] not in (None, self.runner.id):
            raise _StoppedBatchError from None
        theirs, self.revision = found
        if theirs["object"]["status"] == "cancelling":
            self.batch["status"] = "cancelling"
            self.batch["cancelling_at"] = theirs["object"]["cancelling_at"]

    # -- the input

    async def _validate(self) -> bool:
        """Check all lines before any is sent; return False if the batch has failed."""
        wrong, total = await self._faults()
        now = int(await self.runner.store.now())
        if wrong:
            self.batch.update({"status": "failed", "failed_at": now})
            self.batch["errors"] = {"object": "list", "data": wrong}
        elif self.batch["status"] == "validating":
            self.batch.update({"status": "in_progress", "in_progress_at": now})
        self.batch["request_counts"]["total"] = total
        await self._save()
        return not wrong

    async def _faults(self) -> tuple[list[dict[str, Any]], int]:
        """Return what is wrong with the first lines that are malformed, and the number of lines."""
        known, wrong, number = set[str](), list[dict[str, Any]](), 0

        def fault(code: str, message: str, param: str | None = None) -> None:
            wrong.append({"code": code, "line": number, "message": message, "param": param})

        async for line in lines(self.runner.store, self.record["pieces"]):
            number += 1
            if number > MAX_LINES:
                fault("too_many_requests", f"the file has more than {MAX_LINES} requests")
            if len(wrong) >= MAX_ERRORS or number > MAX_LINES:
                break
            try:
                request = read_line(line)
            except FormatError as error:
                fault("invalid_request", error.message)
                continue
            if request.custom_id in known:
                fault("duplicate_custom_id", "another line has this custom_id", "custom_id")
            if request.url != self.batch["endpoint"]:
                fault("mismatched_endpoint", "url must be that of the batch", "url")
            known.add(request.custom_id)
        if not number:
            fault("empty_file", "the file has no requests")
        return wrong, number

    async def _remember(self) -> None:
        """Read which requests were answered, and how, by a server that has gone."""
        counts = self.batch["request_counts"]
        for kind, count in ("outputs", "completed"), ("errors", "failed"):
            counts[count] = 0
            async for line in lines(self.runner.store, self.record[kind]):
                self.done.add(read_json(line, "an answer", MAX_ANSWER)["custom_id"])
                counts[count] += 1

    # -- requests

    async def _answer_all(self) -> str:
        """Send the requests that have no answer; return why others are not sent, or ""."""
        tasks, reason = set[asyncio.Task[None]](), ""
        beat = asyncio.create_task(self._beat())
        try:
            async for request in self._unanswered():
                reason = await _until_fewer(tasks, beat, max(1, self.runner.parallel()))
                if reason:
                    break
                tasks.add(asyncio.create_task(self._answer(request)))
            reason = reason or await _until_fewer(tasks, beat, 1)
        finally:
            for task in (*tasks, beat):
                task.cancel()
            await asyncio.gather(*tasks, beat, return_exceptions=True)
        if reason:
            async for request in self._unanswered():
                message = f"the batch was {reason} before this request was answered"
                self._add(request, None, {"code": f"batch_{reason}", "message": message})
        return reason

    async def _unanswered(self) -> AsyncIterator[BatchRequest]:
        async for line in lines(self.runner.store, self.record["pieces"]):
            request = read_line(line)
            if request.custom_id not in self.done:
                yield request

    async def _beat(self) -> str:
        """Store answers and the record now and then; return why the batch ends, if it must."""
        while True:
            await asyncio.sleep(BEAT)
            await self._flush()
            if self.batch["status"] == "cancelling":
                return "cancelled"
            if await self.runner.store.now() >= self.batch["expires_at"]:
                return "expired"

    async def _answer(self, request: BatchRequest) -> None:
        retryer = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_result(lambda sent: sent[1].status in _BUSY),
            wait=tenacity.wait_fixed(PAUSE),
        )
        sent: tuple[str, web.StreamResponse] = await retryer(self._send, request)
        name, response = sent
        body, status = body_of(response), response.status
        try:
            value = read_json(body, "an answer", MAX_ANSWER)
        except FormatError:
            value = body.decode("utf-8", "replace")
        self._add(request, {"status_code": status, "request_id": name, "body": value}, None)

    async def _send(self, request: BatchRequest) -> tuple[str, web.StreamResponse]:
        """Return the id of a request and the response."""
        name = f"{self.batch['id']} {request.custom_id}"
        headers = {
            "Aimage-Priority": "batch",
            "Host": self.record["host"],
            "Idempotency-Key": hashlib.sha256(name.encode()).hexdigest()[:40],
        }
        asked = LocalRequest(
            "POST",
            request.url,
            scope=self.record["scope"],
            caller=self.record["caller"],
            headers=headers,
            fields=request.body,
            size=request.size,
        )
        response = await self.runner.calls.send(asked)
        return asked["id"], response

    def _add(
        self, request: BatchRequest, answer: dict[str, Any] | None, error: dict[str, Any] | None
    ) -> None:
        is_good = answer is not None and answer["status_code"] == 200
        line = {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": request.custom_id,
            "response": answer,
            "error": error,
        }
        self.fresh["outputs" if is_good else "errors"] += json.dumps(line).encode() + b"\n"
        self.batch["request_counts"]["completed" if is_good else "failed"] += 1
        self.done.add(request.custom_id)

    # -- the output

    async def _flush(self) -> None:
        """Store the answers that are new, then the record that names them."""
        for kind, data in self.fresh.items():
            if data:
                raw, mark, self.mark = bytes(data), self.mark, secrets.token_hex(16)
                await add_piece(self.runner.store, self.record[kind], f"{mark}-{kind}", raw)
                self.mark = mark  # else a name could be that of a piece that is half stored
                del data[: len(raw)]
                self.record["sizes"][kind] += len(raw)
        await self._save()

    async def _finish(self, reason: str) -> None:
        if not reason:
            now = int(await self.runner.store.now())
            self.batch.update({"status": "finalizing", "finalizing_at": now})
        await self._flush()
        for kind, member in ("outputs", "output_file_id"), ("errors", "error_file_id"):
            if self.record["sizes"][kind]:
                made = await add_file(
                    self.runner.store,
                    self.record[kind],
                    self.record["sizes"][kind],
                    name=f"{self.batch['id']}_{kind.removesuffix('s')}.jsonl",
                    owner=self.record["owner"],
                    purpose=OUTPUT,
                    keep=self.record["keep"],
                )
                self.batch[member] = made["id"]
        status = reason or "completed"
        now = int(await self.runner.store.now())
        self.batch.update({"status": status, f"{status}_at": now})
        await self._save()


async def _until_fewer(tasks: set[asyncio.Task[None]], beat: asyncio.Task[str], most: int) -> str:
    """Wait until fewer than ``most`` tasks run; return why the batch ends before that, or ""."""
    while len(tasks) >= most:
        await asyncio.wait({*tasks, beat}, return_when=asyncio.FIRST_COMPLETED)
        if beat.done():
            return beat.result()
        for task in [each for each in tasks if each.done()]:
            tasks.remove(task)
            task.result()
    return ""
