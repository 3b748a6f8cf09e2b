"""The client of a batch at a worker or a gateway (OpenAI, "Files" and "Batch").

A batch is identified by the digest of its requests in its metadata, until its files are removed
from the server.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import tenacity

from clowder_aimage.engine.batch_line import OVER
from clowder_aimage.engine.worker_client import WorkerClient
from clowder_aimage.errors import AccessError, AImageError, FormatError, NetworkError, NotFoundError

# Seconds between two requests to a busy server, and until giving up
PAUSE, PATIENCE = 1.0, 600.0
# The key in the metadata of a batch
_MARK = "aimage_batch"
_T = TypeVar("_T")


@dataclass(slots=True)
class RemoteBatch:
    """A batch of the server of ``client``, in the state of the last response."""

    client: WorkerClient
    value: dict[str, Any]

    @property
    def is_over(self) -> bool:
        """Return True if it has ended."""
        return self.value["status"] in OVER

    @property
    def files(self) -> list[str]:
        """The ids of its results: the responses, then the errors."""
        names = (self.value.get("output_file_id"), self.value.get("error_file_id"))
        return [str(name) for name in names if name]

    def wait(self, show: Callable[[int], object]) -> None:
        """Wait until it has ended; ``show`` takes the number of requests that have."""
        while not self.is_over:
            counts = self.value["request_counts"]
            show(counts["completed"] + counts["failed"])
            time.sleep(PAUSE)
            self.value = retry_while_busy(
                lambda: self._ask("GET", f"/v1/batches/{self.value['id']}")
            )

    def cancel(self) -> None:
        """Cancel the batch; finished requests keep their results. An error is ignored."""
        with suppress(AImageError):
            self._ask("POST", f"/v1/batches/{self.value['id']}/cancel")

    def iter_results(self) -> Iterator[bytes]:
        """Yield the lines of the results."""
        for name in self.files:
            yield from self.client.read_lines(f"/v1/files/{name}/content")

    def remove_files(self) -> None:
        """Remove its requests and results from the server. An error is ignored."""
        for name in (*self.files, self.value["input_file_id"]):
            with suppress(AImageError):
                self._ask("DELETE", f"/v1/files/{name}")

    def has_results(self) -> bool:
        """Return True if the results are still at the server."""
        with suppress(NotFoundError):
            return bool([self._ask("GET", f"/v1/files/{name}") for name in self.files])
        return False

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        return _check_object(self.client, self.client.ask(method, path))


@dataclass(slots=True)
class BatchClient:
    """Finds and begins batches. ``name`` distinguishes those with the same requests."""

    client: WorkerClient
    name: str
    # Batches that were returned
    _returned: set[str] = field(default_factory=set)

    def open(self, lines: bytes, url: str) -> RemoteBatch:
        """Return the batch of these lines: one that was begun before, or a new one."""
        mark = hashlib.sha256(self.name.encode() + b"\n" + lines).hexdigest()
        batch = retry_while_busy(lambda: self._find(mark) or self._begin(mark, lines, url))
        self._returned.add(batch.value["id"])
        return batch

    def _find(self, mark: str) -> RemoteBatch | None:
        for value in self._list():
            metadata = value.get("metadata") or {}
            # An administrator sees the batches of others too, but not their results
            is_foreign = "owner" in value
            if metadata.get(_MARK) != mark or value["id"] in self._returned or is_foreign:
                continue
            batch = RemoteBatch(self.client, value)
            if not batch.is_over or batch.has_results():
                return batch
        return None

    def _list(self) -> Iterator[dict[str, Any]]:
        after = ""
        while True:
            path = f"/v1/batches?limit=100{after}"
            try:
                page = _check_object(self.client, self.client.ask("GET", path))
            except NotFoundError:
                message = f"the server at {self.client.endpoint} has no batches"
                hint = "use a worker or a gateway of this version of aimage"
                raise AccessError(message, hint=hint) from None
            yield from page["data"]
            if not page["has_more"]:
                return
            after = f"&after={page['last_id']}"

    def _begin(self, mark: str, lines: bytes, url: str) -> RemoteBatch:
        file = self.client.upload("/v1/files", {"purpose": "batch"}, "requests.jsonl", lines)
        body = {
            "input_file_id": _check_object(self.client, file)["id"],
            "endpoint": url,
            "completion_window": "24h",
            "metadata": {_MARK: mark},
        }
        value = self.client.ask("POST", "/v1/batches", body)
        return RemoteBatch(self.client, _check_object(self.client, value))


def retry_while_busy(call: Callable[[], _T]) -> _T:
    """Call ``call`` until the server is neither busy nor unreachable; return its result."""
    retryer = tenacity.Retrying(
        retry=tenacity.retry_if_exception(_is_busy),
        wait=tenacity.wait_fixed(PAUSE),
        stop=tenacity.stop_after_delay(PATIENCE),
        reraise=True,
    )
    return retryer(call)


def _is_busy(error: BaseException) -> bool:
    is_refused = isinstance(error, AImageError) and "try again" in (error.hint or "")
    return is_refused or isinstance(error, NetworkError)


def _check_object(client: WorkerClient, value: Any) -> dict[str, Any]:
    """Return an object of the API. Raises FormatError for anything else."""
    if not isinstance(value, dict) or not isinstance(value.get("object"), str):
        raise FormatError(f"invalid response from {client.endpoint}: expected an object")
    return value
