"""``aimage batch``: many requests from a file, by a worker or a gateway."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.option import verb, verbose_option
from clowder_aimage.cli.console.output import plural, result
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.cli.console.remote_worker import refuse_options, worker
from clowder_aimage.content.atomic_file import atomic_file, write_all
from clowder_aimage.engine.batch_line import BatchRequest, batch_key, read_line
from clowder_aimage.errors import AImageError, FormatError, NetworkError, NotFoundError, UsageError
from clowder_aimage.oci import Reference, read_json

if TYPE_CHECKING:
    from clowder_aimage.engine.worker_client import WorkerClient

MAX_REPLY = 256 << 20  # bytes of a response
PAUSE, PATIENCE = 1.0, 600.0  # seconds before a busy worker is asked again, and in all
_FILE = click.Path(dir_okay=False, path_type=Path)
_Result = Future[dict[str, Any]]


@verb
@click.argument("file", type=_FILE)
@click.option("-o", "--output", type=_FILE, help="File of results. [default: FILE.results.jsonl]")
@click.option(
    "--parallel",
    type=click.IntRange(1, 256),
    default=8,
    show_default=True,
    help="Number of requests at the same time.",
)
@click.option("--retry-failed", is_flag=True, help="Send requests again that failed before.")
@click.option("--push", metavar="REPO", help="Push pictures too, each as REPO:CUSTOM_ID.")
@verbose_option
def batch(
    file: Path, output: Path | None, parallel: int, retry_failed: bool, push: str | None
) -> None:
    """Send the requests in FILE to a worker or a gateway, and write the results.

    FILE and the results have the JSON lines of OpenAI's batch API. Requests whose results are there
    are not sent again, so an interrupted batch is continued by the same command. The worker is the
    one in AIMAGE_HOST, or the one at 127.0.0.1:11434.
    """
    refuse_options(
        "the models are those of the worker", but=("output", "parallel", "retry_failed", "push")
    )
    requests = [_pushed(each, push) if push else each for each in read_batch(file)]
    target = output or file.with_suffix(".results.jsonl")
    done = read_results(target, without_failed=retry_failed)
    salt = secrets.token_hex(8) if retry_failed else ""  # not the response that is kept
    left = [
        replace(each, key=batch_key(f"{each.key}{salt}".encode()))
        for each in requests
        if each.custom_id not in done
    ]
    if left:
        done |= _run(worker(), left, target, parallel)
    failed = [each.custom_id for each in requests if not done[each.custom_id]]
    facts = {"requests": len(requests), "sent": len(left), "failed": failed, "output": str(target)}
    result(facts, str(target))
    if failed:
        named = ", ".join(failed[:10]) + (f" and {len(failed) - 10} more" if failed[10:] else "")
        message = f"{plural(len(failed), 'request')} of {len(requests)} failed: {named}"
        raise AImageError(message, hint="send them again with --retry-failed")


def _pushed(request: BatchRequest, repository: str) -> BatchRequest:
    """Return a request whose pictures are pushed to a repository too. Raises UsageError."""
    reference = Reference.parse(f"{repository}:{request.custom_id}")
    if not request.url.startswith("/v1/images/"):
        raise UsageError(f"{request.custom_id} makes no picture that can be pushed")
    body = {"output": {"push": str(reference)}, **request.body}
    return replace(request, body=body, key=batch_key(f"{request.key} {reference}".encode()))


def read_batch(file: Path) -> Iterator[BatchRequest]:
    """Yield the requests of a file. Raises NotFoundError, UsageError with the malformed line."""
    known = set[str]()
    try:
        lines = file.read_bytes().splitlines()
    except FileNotFoundError:
        raise NotFoundError(f"no such file: {file}") from None
    except OSError as error:
        raise UsageError(f"cannot read {file}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            request = read_line(line)
            if request.custom_id in known:
                raise FormatError("custom_id must be a text that no other line has")
        except FormatError as error:
            raise UsageError(f"line {number} of {file}: {error.message}") from None
        known.add(request.custom_id)
        yield request


def read_results(file: Path, *, without_failed: bool = False) -> dict[str, bool]:
    """Return whether each request in a file of results succeeded, by its custom_id.

    A last line that was not written whole is removed from the file, and results that are errors if
    ``without_failed`` is set. Raises UsageError for another file.
    """
    if not file.exists():
        return {}
    found, dropped = dict[str, bool](), set[int]()
    with file.open("rb") as lines:
        try:
            for number, line in enumerate(lines):
                value = read_json(line, "the result", 1 << 30) if line.endswith(b"\n") else None
                is_good = value is not None and value["error"] is None
                if value is None or (without_failed and not is_good):
                    dropped.add(number)
                else:
                    found[value["custom_id"]] = is_good
        except (FormatError, KeyError, TypeError):
            hint = "name another file"
            raise UsageError(f"{file} has no results of a batch", hint=hint) from None
        if dropped:
            lines.seek(0)
            with atomic_file(file) as kept:
                for number, line in enumerate(lines):
                    if number not in dropped:
                        write_all(kept.fileno(), line)
    return found


def _run(
    client: WorkerClient, requests: list[BatchRequest], target: Path, parallel: int
) -> dict[str, bool]:
    """Send requests, and append each result to a file when it is there."""
    done, stopped = dict[str, bool](), threading.Event()
    pool = ThreadPoolExecutor(parallel, thread_name_prefix="aimage-batch")
    try:
        with target.open("ab") as file, Progress("batch", unit="requests") as progress:
            progress.begin(len(requests))
            begin = lambda each: pool.submit(_send, client, each, stopped)  # noqa: E731
            for value in _results(begin, requests, parallel):
                file.write(json.dumps(value).encode() + b"\n")
                file.flush()
                done[value["custom_id"]] = value["error"] is None
                progress.advance(1)
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
    return done


def _results(
    begin: Callable[[BatchRequest], _Result], requests: list[BatchRequest], most: int
) -> Iterator[dict[str, Any]]:
    """Yield results as they come, of which at most ``most`` are in memory."""
    running = set[_Result]()
    for request in requests:
        running.add(begin(request))
        if len(running) >= most:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (each.result() for each in done)
    yield from (each.result() for each in as_completed(running))


def _send(client: WorkerClient, request: BatchRequest, stopped: threading.Event) -> dict[str, Any]:
    """Return the result of a request, or its error, in the form of OpenAI's batch API."""
    headers = {"Idempotency-Key": request.key, "Aimage-Priority": "batch"}
    end = time.monotonic() + PATIENCE
    while True:
        try:
            body = client.ask("POST", request.url, request.body, headers, MAX_REPLY)
            response = {"status_code": 200, "request_id": request.key, "body": body}
            error = None
            break
        except AImageError as failure:
            is_busy = isinstance(failure, NetworkError) or "try again" in (failure.hint or "")
            if is_busy and time.monotonic() < end and not stopped.wait(PAUSE):
                continue
            response, error = None, {"code": type(failure).__name__, "message": failure.message}
            break
    return {
        "id": f"batch_req_{request.key[:24]}",
        "custom_id": request.custom_id,
        "response": response,
        "error": error,
    }
