"""Requests to a worker: its address, its pictures, its lists."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import struct
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from clowder_aimage.cli.console.option import given_options, settings
from clowder_aimage.cli.console.output import META, note, plural
from clowder_aimage.cli.console.progress import Progress
from clowder_aimage.errors import (
    AccessError,
    AImageError,
    FormatError,
    NetworkError,
    NotFoundError,
    UsageError,
)
from clowder_aimage.oci import Reference, read_json
from clowder_aimage.oci.descriptor import MAX_SIZE

if TYPE_CHECKING:
    from clowder_aimage.engine.worker_client import WorkerClient

_PNG = b"\x89PNG\r\n\x1a\n"
_MAGIC = {"png": _PNG, "jpeg": b"\xff\xd8\xff", "webp": b"RIFF"}
_PROBE = 0.3  # seconds for a worker that nobody asked for
_FIELDS = {"negative": "negative_prompt"}  # the names in OpenAI's API


def worker() -> WorkerClient:
    """Return a client of the worker in AIMAGE_HOST, else of the default worker.

    Raises:
        NetworkError: no worker answers.
        AccessError: the server is another program.
    """
    from clowder_aimage.engine.worker_client import program_at

    client = worker_client(worker_host())
    if not client.is_worker():
        name = program_at(client.endpoint)
        message = f"the server at {client.endpoint} is not an aimage worker"
        message += f"; {name} answers there" if name else ""
        raise AccessError(message, remedy="worker_address")
    return client


def default_worker(
    reference: Reference, adapters: Iterable[Reference] = ()
) -> tuple[WorkerClient, bool] | None:
    """Return a client of the default worker, and whether it has the AImages that this store has.

    These are ``reference`` and the adapters. None if no worker answers there, it cannot have the
    AImage or reports an error, or AIMAGE_HOST is set to an empty text.
    """
    if "AIMAGE_HOST" in os.environ:
        return None
    with contextlib.suppress(AImageError):
        client = worker_client(None)
        if not client.is_worker(_PROBE):
            return None
        listed = models(client, "/api/tags")
        is_meant = _matches(listed, reference)
        is_listed = bool(is_meant) and reference.digest is None
        if any(is_meant) or is_listed or reference.registry is not None:
            return client, any(is_meant) and all(any(_matches(listed, one)) for one in adapters)
    return None


def _matches(listed: Iterable[Mapping[str, Any]], reference: Reference) -> list[bool]:
    """Return for each listed model of a name whether this store has no other one."""
    wanted = reference.digest
    with contextlib.suppress(NotFoundError):
        wanted = wanted or settings().layout.resolve(reference).digest
    return [
        wanted is None or model["digest"] == str(wanted)
        for model in listed
        if reference.digest or model["name"] == str(reference)
    ]


def prefers_worker() -> bool:
    """Return whether the configuration prefers the default worker. Raises UsageError."""
    from clowder_aimage.schema import read_configuration
    from clowder_aimage.user_directory import config_file

    return bool(read_configuration(config_file(), lambda it: it.get("run", {}).get("remote")))


def worker_client(host: str | None) -> WorkerClient:
    """Return a client of ``host``, else of the default worker, whatever server is there."""
    from clowder_aimage.engine.endpoint import DEFAULT_HOST
    from clowder_aimage.engine.worker_client import WorkerClient

    tracer = None
    if level := settings().verbose:
        from clowder_aimage.cli.console.connection import Tracer

        tracer = Tracer(with_headers=level > 1)
    return WorkerClient(host or DEFAULT_HOST, _variable("AIMAGE_TOKEN"), tracer)


def worker_host() -> str | None:
    """Return the value of AIMAGE_HOST."""
    return _variable("AIMAGE_HOST")


def _variable(name: str) -> str | None:
    return os.environ.get(name, "").strip() or None


def refuse_options(hint: str, *, but: Collection[str] = ()) -> None:
    """Reject options that apply to this process and are not sent to a worker.

    Raises:
        UsageError: one is on the command line; ``hint`` is the error's.
    """
    if given := local_options(*but):
        raise UsageError(f"{given[0]} does not apply to a worker", hint=hint)


def local_options(*but: str) -> list[str]:
    """Return the options on the command line that apply to this process, except ``but``."""
    given = given_options("remote", "as_json", "template", "quiet", "verbose", *but)
    if not given and click.get_current_context().meta.get(f"{META}store"):
        given = ["--store"]
    return given


@dataclass(frozen=True, slots=True, eq=False)
class RemotePicture:
    """A picture from the worker: a file and, in a PNG, its embedded facts."""

    data: bytes
    seed: int
    index: int
    facts: Mapping[str, Any]


class StepBar:
    """Progress from running totals."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._done = self._total = 0

    def show(self, done: Any, total: Any) -> None:
        """Show a total reported by a worker; ignore values that are not counts."""
        if type(done) is not int or type(total) is not int or total < 0:
            return
        if total != self._total:
            self._progress.begin(total)
            self._done, self._total = 0, total
        self._progress.advance(done - self._done)
        self._done = done

    def rename(self, task: str) -> None:
        """Set the task that is shown."""
        self._progress.rename(task)


def pictures(
    client: WorkerClient,
    reference: Reference,
    options: Mapping[str, Any],
    count: int,
    *,
    on_accepted: Callable[[], None],
) -> Generator[RemotePicture, None, None]:
    """Request ``count`` pictures, with rising seeds, and show a bar of the steps.

    Each is a request of its own: a finished picture can be kept, and other clients are served in
    between. Closing the iterator cancels the running request. ``on_accepted`` is called when the
    worker has accepted the first.

    Raises:
        AImageError: as ``WorkerClient``. NotFoundError: the worker has another model only.
        FormatError: the answer is not a picture in ``output_format``.
    """
    with contextlib.ExitStack() as bars:
        run = _Run(client, reference, count, options["output_format"], bars)
        for index in range(count):
            seed = options["seed"] + index
            body = _request(reference, {**options, "seed": seed})
            with contextlib.closing(client.events("/v1/images/generations", body)) as events:
                data = run.finish(events, index, on_accepted)
            yield RemotePicture(data, seed, index, facts_of(data))


class _Run:
    """Requests for pictures of one model; a pull is shown until the first step."""

    def __init__(
        self,
        client: WorkerClient,
        reference: Reference,
        count: int,
        kind: str,
        bars: contextlib.ExitStack,
    ) -> None:
        self._endpoint, self._reference = client.endpoint, reference
        self._count, self._bars, self._task, self._kind = count, bars, "", kind

    def finish(
        self,
        events: Iterable[tuple[str, Mapping[str, Any]]],
        index: int,
        on_accepted: Callable[[], None],
    ) -> bytes:
        """Return picture ``index``; show the events until it is complete."""
        for kind, value in events:
            if kind == "open":
                self._check_model(value)
                if index == 0:
                    on_accepted()
            elif kind == "pull":
                self._bar("pulling", "bytes").show(value.get("completed"), value.get("total"))
            elif kind == "progress":
                self._show_steps(value, index)
            elif kind == "done":
                return _decoded(value, self._kind)
        raise NetworkError(
            f"the worker at {self._endpoint} disconnected before the picture was complete"
        )

    def _check_model(self, answer: Mapping[str, Any]) -> None:
        """Reject a response of the worker's default model; accept an alias of the worker."""
        name, taken = str(self._reference), answer.get("x-aimage-model")
        if taken not in (None, name) and answer.get("x-aimage-alias") != name:
            raise NotFoundError(
                f"{name} not found on the worker at {self._endpoint}, which would use {taken}",
                hint=f"use {taken}, or pull yours: aimage pull --remote {name}",
            )

    def _show_steps(self, value: Mapping[str, Any], index: int) -> None:
        # All pictures have the same number of steps
        step, total = value.get("step"), value.get("total")
        if type(step) is int and type(total) is int:
            bar = self._bar("rendering", "steps")
            bar.show(index * total + step, self._count * total)
            bar.rename("decoding" if step == total else "rendering")

    def _bar(self, task: str, unit: str) -> StepBar:
        if task != self._task:
            self._bars.close()
            subject = self._reference if task == "pulling" else None
            progress = Progress(task, subject, unit=unit)
            self._task, self._now = task, StepBar(self._bars.enter_context(progress))
        return self._now


def _request(reference: Reference, options: Mapping[str, Any]) -> dict[str, Any]:
    given = {_FIELDS.get(key, key): value for key, value in options.items() if value is not None}
    if "width" in given and "height" in given:
        given["size"] = f"{given.pop('width')}x{given.pop('height')}"
    fixed = {"n": 1, "response_format": "b64_json"}
    # strict: the worker refuses unknown fields
    stream = {"stream": True, "stream_format": "ollama", "strict": True}
    return {"model": str(reference), **given, **fixed, **stream}


def _decoded(value: Mapping[str, Any], kind: str) -> bytes:
    try:
        data = base64.b64decode(value["data"][0]["b64_json"], validate=True)
    except (LookupError, TypeError, binascii.Error):
        data = b""
    if not data.startswith(_MAGIC[kind]):
        raise FormatError(f"invalid response from the worker: expected a {kind.upper()} picture")
    return data


def facts_of(png: bytes) -> dict[str, Any]:
    """Return the generation facts in a PNG file; empty if there are none.

    The text chunk ``aimage`` of ``model.picture``, read without Pillow (PNG specification, 5.3
    "Chunk layout" and 11.3.3.4 "iTXt").
    """
    at = len(_PNG) if png.startswith(_PNG) else len(png)
    while at + 8 <= len(png):
        length, kind = struct.unpack_from(">I4s", png, at)
        body = png[at + 8 : at + 8 + length]
        if kind == b"iTXt" and body.startswith(b"aimage\0\0\0"):  # not compressed
            text = body[9:].split(b"\0", 2)[-1]
            try:
                facts = read_json(text, "it")
            except FormatError:
                return {}
            return facts if isinstance(facts, dict) else {}
        at += 12 + length
    return {}


def models(client: WorkerClient, path: str) -> list[dict[str, Any]]:
    """Return the list at ``path``, ``/api/tags`` or ``/api/ps``. Raises FormatError.

    Adds the algorithm to digests, which ollama omits. Leaves out models without a name, a digest or
    a size, and says so.
    """
    answer = client.ask("GET", path)
    found = answer.get("models") if isinstance(answer, dict) else None
    if not isinstance(found, list) or (found and not any(map(_is_model, found))):
        message = f"the server at {client.endpoint} did not return a list of models"
        raise FormatError(message, remedy="worker_address")
    known = [model for model in found if _is_model(model)]
    if len(known) < len(found):
        left = plural(len(found) - len(known), "model")
        note(f"left out {left} that the server at {client.endpoint} does not describe")
    for model in known:
        if ":" not in model["digest"]:
            model["digest"] = f"sha256:{model['digest']}"
    return known


def _is_model(item: Any) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("name"), str)
        and isinstance(item.get("digest"), str)
        and type(item.get("size")) is int
        and 0 <= item["size"] <= MAX_SIZE
    )


def detail_of(model: Mapping[str, Any], key: str) -> str | None:
    """Return a detail of a model, such as its family; None if the worker does not send it."""
    details = model.get("details")
    detail = details.get(key) if isinstance(details, dict) else None
    return detail if isinstance(detail, str) and detail else None
