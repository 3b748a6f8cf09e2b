"""``aimage batch``: many requests from a file, by a worker or a gateway."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from clowder_aimage.cli.console.example import examples
from clowder_aimage.cli.console.option import verb, verbose_option, yes_option
from clowder_aimage.cli.console.output import format_count, note, print_result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.worker_connection import connect_worker, refuse_options
from clowder_aimage.cli.worker.model_argument import obtain_model
from clowder_aimage.content.atomic_file import open_atomic, write_all
from clowder_aimage.content.file_system import sync_file
from clowder_aimage.document.unicode_text import recode_file
from clowder_aimage.engine.batch_line import (
    MAX_FILE,
    MAX_LINES,
    OVER,
    UNSENT,
    BatchRequest,
    read_line,
)
from clowder_aimage.errors import AImageError, FormatError, NotFoundError, UsageError
from clowder_aimage.oci import Reference, read_json

if TYPE_CHECKING:
    from clowder_aimage.config.name_index import NamedModel
    from clowder_aimage.engine.batch_client import RemoteBatch
    from clowder_aimage.engine.worker_client import WorkerClient

# Bytes of a response.
MAX_REPLY = 256 << 20
_FILE = click.Path(dir_okay=False, path_type=Path)


@examples(
    "aimage batch prompts.jsonl",
    "AIMAGE_HOST=gateway:11434 aimage batch prompts.jsonl",
    "aimage batch prompts.jsonl --retry-failed",
)
@verb
@click.argument("file", type=_FILE)
@click.option("-o", "--output", type=_FILE, help="File of results. [default: FILE.results.jsonl]")
@click.option("--retry-failed", is_flag=True, help="Send requests again that failed before.")
@click.option("--push", metavar="REPO", help="Push pictures too, each as REPO:CUSTOM_ID.")
@yes_option
@verbose_option
def batch(file: Path, output: Path | None, retry_failed: bool, push: str | None) -> None:
    """Run the requests in FILE as a batch of a worker or a gateway, and write the results.

    FILE and the results have the JSON lines of OpenAI's batch API. The batch goes on if this
    command ends or loses the connection, and the same command finds it again; Ctrl-C cancels it.
    Requests whose results are there are not sent again. The worker is the one in AIMAGE_HOST, or
    the one at 127.0.0.1:11434.

    A model that the worker lacks may be a short name, which is pulled after a question.
    """
    refuse_options("the models are those of the worker", exclude=("output", "retry_failed", "push"))
    requests = [_add_push(request, push) if push else request for request in read_batch(file)]
    target = output or file.with_suffix(".results.jsonl")
    done = read_results(target, without_failed=retry_failed)
    left = [request for request in requests if request.custom_id not in done]
    if left:
        client = connect_worker()
        _obtain_models(client, left)
        done |= _run(client, left, target)
    failed = [request.custom_id for request in requests if not done[request.custom_id]]
    facts = {"requests": len(requests), "sent": len(left), "failed": failed, "output": str(target)}
    print_result(facts, str(target))
    if failed:
        failed_names = ", ".join(failed[:10]) + (
            f" and {len(failed) - 10} more" if failed[10:] else ""
        )
        message = (
            f"{format_count(len(failed), 'request')} of {len(requests)} failed: {failed_names}"
        )
        raise AImageError(message, hint="send them again with --retry-failed")


def _obtain_models(client: WorkerClient, requests: Iterable[BatchRequest]) -> None:
    """Let the worker pull the short names of requests. Raises UsageError, as ``obtain_model``."""
    first = dict[str, BatchRequest]()
    for request in requests:
        first.setdefault(str(request.body.get("model") or ""), request)
    for name, request in first.items():
        try:
            reference = Reference.parse(name)
        except UsageError:
            # It is the worker that refuses the request.
            continue
        obtain_model(reference, client, check=partial(_check_named, request))


def _check_named(request: BatchRequest, model: NamedModel) -> None:
    """Reject a model of another kind than that of the request. Raises UsageError."""
    makes_pictures = request.url.startswith("/v1/images/")
    if model.kind and (model.kind == "image") != makes_pictures:
        kind = "an image model" if model.kind == "image" else "a language model"
        raise UsageError(
            f"{model.name} is {kind}, and {request.custom_id} a request to {request.url}"
        )


def _add_push(request: BatchRequest, repository: str) -> BatchRequest:
    """Return a request whose pictures are pushed to a repository too. Raises UsageError."""
    reference = Reference.parse(f"{repository}:{request.custom_id}")
    if not request.url.startswith("/v1/images/"):
        raise UsageError(
            f"{request.custom_id} is not a request for pictures, so that --push cannot apply to it"
        )
    body = {"output": {"push": str(reference)}, **request.body}
    return replace(request, body=body)


def read_batch(file: Path) -> Iterator[BatchRequest]:
    """Yield the requests of a file. Raises NotFoundError, UsageError with the malformed line."""
    custom_ids = set[str]()
    try:
        lines = recode_file(file.read_bytes()).splitlines()
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {file}") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"cannot read {file}: not valid UTF-16 text") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = read_line(line)
            if request.custom_id in custom_ids:
                raise FormatError("custom_id must be a text that no other line has")
        except FormatError as error:
            raise UsageError(f"line {number} of {file}: {error.message}") from None
        custom_ids.add(request.custom_id)
        yield request


def read_results(file: Path, *, without_failed: bool = False) -> dict[str, bool]:
    """Return the success of each request in a file of results, by its custom_id.

    An incomplete last line is removed from the file; with ``without_failed``, so are the results
    that are errors. Raises UsageError for another file.
    """
    if not file.exists():
        return {}
    results, dropped = dict[str, bool](), set[int]()
    with file.open("rb") as lines:
        try:
            for number, line in enumerate(lines):
                # A line without an end was interrupted while it was written.
                value = read_json(line, "the result", 1 << 30) if line.endswith(b"\n") else None
                succeeded = value is not None and is_good(value)
                if value is None or (without_failed and not succeeded):
                    dropped.add(number)
                else:
                    results[value["custom_id"]] = succeeded
        except (FormatError, KeyError, TypeError):
            hint = "name another file"
            raise UsageError(f"{file} has no results of a batch", hint=hint) from None
        if dropped:
            lines.seek(0)
            with open_atomic(file) as rewritten:
                for number, line in enumerate(lines):
                    if number not in dropped:
                        write_all(rewritten.fileno(), line)
    return results


def is_good(result: Mapping[str, Any]) -> bool:
    """Return True if a result is a response that is not an error."""
    return result["error"] is None and bool(result["response"]["status_code"] == 200)


def _run(client: WorkerClient, requests: list[BatchRequest], target: Path) -> dict[str, bool]:
    """Let the server run batches of the requests, and append the results to a file."""
    from clowder_aimage.engine.batch_client import BatchClient

    done = dict[str, bool]()
    batches = BatchClient(client, str(target.resolve()))
    with target.open("ab") as file, Progress("batch", unit="requests") as progress:
        for group in split_batches(requests):
            # Requests that the server did not send, as at a shutdown, are in the next batch.
            while left := [request for request in group if request.custom_id not in done]:
                batch = batches.open(_encode_requests(left), left[0].url)
                was_running = batch.value["status"] not in (*OVER, "cancelling")
                _wait(batch, partial(_show, progress, len(done), len(requests)))
                done |= _take(batch, file, {request.custom_id for request in left})
                progress.show(len(done), len(requests))
                batch.remove_files()
                _check_end(batch, was_running=was_running)
    return done


def _show(progress: Progress, before: int, total: int, count: int) -> None:
    progress.show(before + count, total)


def split_batches(requests: Iterable[BatchRequest]) -> Iterator[list[BatchRequest]]:
    """Yield the requests of each batch: with one URL, and as many as a server takes."""
    for _, group in groupby(sorted(requests, key=attrgetter("url")), attrgetter("url")):
        batch_requests, size = list[BatchRequest](), 0
        for request in group:
            length = len(_encode_requests([request]))
            if batch_requests and (len(batch_requests) == MAX_LINES or size + length > MAX_FILE):
                yield batch_requests
                batch_requests, size = [], 0
            batch_requests.append(request)
            size += length
        yield batch_requests


def _encode_requests(requests: Iterable[BatchRequest]) -> bytes:
    """Return requests as the lines of a batch."""
    return b"".join(
        json.dumps(
            {
                "custom_id": request.custom_id,
                "method": "POST",
                "url": request.url,
                "body": request.body,
            }
        ).encode()
        + b"\n"
        for request in requests
    )


def _wait(batch: RemoteBatch, show: Callable[[int], object]) -> None:
    """Wait for the end of a batch; an interruption cancels it."""
    try:
        batch.wait(show)
    except KeyboardInterrupt:
        batch.cancel()
        note("the batch was cancelled; the same command takes its results, and sends the others")
        raise


def _take(batch: RemoteBatch, file: BinaryIO, names: set[str]) -> dict[str, bool]:
    """Append the results of a batch to a file; return the success of each request by its id."""
    done = dict[str, bool]()
    for line in batch.iter_results():
        value = read_json(line, "the result", MAX_REPLY)
        try:
            name, code = value["custom_id"], (value["error"] or {}).get("code")
            succeeded = is_good(value)
        except (AttributeError, KeyError, TypeError):
            raise FormatError("the server sent a line that is not a result of a batch") from None
        if name in names and name not in done and code not in UNSENT:
            file.write(line + b"\n")
            done[name] = succeeded
    file.flush()
    # The results are on the disk before the server removes its files.
    sync_file(file.fileno(), file.name)
    return done


def _check_end(batch: RemoteBatch, *, was_running: bool) -> None:
    """Raise UsageError if a server refused a batch, AImageError if another client cancelled it."""
    if batch.value["status"] == "failed":
        faults = (batch.value.get("errors") or {}).get("data") or [{}]
        raise UsageError(f"the server refused the batch: {faults[0].get('message')}")
    if batch.value["status"] == "cancelled" and was_running:
        message = f"the batch {batch.value['id']} was cancelled by another client"
        raise AImageError(message, hint="send the other requests with the same command")
